// Samples tokens for rows that do not take just the likeliest token. There is one block of threads for each
// row of logits.
//
// A row is sampled in these steps, as in engine/src/sampler:
//   1. log-probabilities of the unedited logits
//   2. edits: bias, forbidden tokens, penalties
//   3. the mask of the row's grammar
//   4. with temperature 0 the likeliest token; otherwise temperature, min-p, top-k, top-p and a random draw
//
// Nothing is sorted. Tokens are ordered by their distance from the best logit, and equal ones by token
// number. The kept tokens are a prefix of that order, so each rule moves its end (`Bound`), and a draw finds
// a position in it. A position is found digit by digit of the key, with a histogram for each digit. Weights
// are integers in units of 2^-40 of the best token's weight. So sums do not depend on the order in which
// threads add, and a draw does not depend on other rows.
constexpr u32 THREADS = 1024, BINS = 2048, TOP_MAX = 20, LATE = 0xfffffffeu;
constexpr u32 MASK_WORDS = 4096;  // words of a mask that are copied to shared memory at a time
constexpr float NATS_MAX = 64.f, KEYS_PER_NAT = 67108864.f /* 2^26 */, WEIGHT_OF_BEST = 1099511627776.f /* 2^40 */;
constexpr u32 FORBIDDEN = 1, SEEN = 2;

struct DrawRow {
    u32 row;        // the row in the logits and in the sampled tokens
    u32 in_flight;  // index among the step's tokens of the one that belongs to the history; NOWHERE: none
    float temperature;
    u32 top_k;
    float top_p, min_p;
    u32 seed[2], position[2];
    u32 n_top;  // the number of log-probabilities plus one; 0: none are requested
    u32 first_edit, n_edits;
    float repetition, presence, frequency;
    u32 mask;  // index among the step's masks; NOWHERE: every token is allowed
};

// The masks of a step, in host memory. The host writes them after it has launched the step, because they
// depend on the previous step's tokens, and then sets `ready` to the step's number.
struct Masks {
    const volatile u32* ready;
    const volatile u32* rows;  // one bit for each token
    u64 patience;              // nanoseconds
    u32 step, n_rows, n_words; // n_words: words of a row
};

// An edit of one token's logit. `bias` receives the unedited logit for `raw_logit`.
struct Edit { u32 token; float bias; u32 n_said, flags; };

struct Outcome {
    u32 token, n_top;
    float best, chosen;  // the unedited logits
    u64 total;           // the sum of all weights, in units of 2^-40 of the best one's
    u32 tokens[TOP_MAX];
    float logits[TOP_MAX];
};

// The end of the kept tokens: the last key and token.
struct Bound { u32 key, token; };

struct Row {
    float* logits;
    u32 width;
    float best, by;  // the best logit, and the factor for distances from it
    bool by_token;   // tokens are ordered by number, not by distance
    Bound bound;
};

struct Room {
    u64 bins[BINS], of_warp[THREADS / 32], sum;
    u32 mask[MASK_WORDS], bin, token, n;
    float raw;
};

__device__ __forceinline__ u32 distance(const Row& row, float logit) {
    float nats = (row.best - logit) * row.by;
    return nats < NATS_MAX ? (u32)(fmaxf(nats, 0.f) * KEYS_PER_NAT) : NOWHERE;  // NaN counts as far away
}
__device__ __forceinline__ u64 weight(u32 distance) {
    return distance == NOWHERE ? 0 : (u64)(exp2f((float)distance * (-1.4426950408889634f / KEYS_PER_NAT)) * WEIGHT_OF_BEST);
}
__device__ __forceinline__ bool is_kept(const Row& row, u32 key, u32 token) {
    return key < row.bound.key || (key == row.bound.key && token <= row.bound.token);
}

__device__ __forceinline__ u64 warp_sum(u64 x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}

// Returns the sum over all threads to all threads.
__device__ u64 block_sum(u64 x, Room& room) {
    x = warp_sum(x);
    __syncthreads();
    if (threadIdx.x % 32 == 0) room.of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    return warp_sum(room.of_warp[threadIdx.x % 32]);
}

// Calls `what` for every token, in whole warps: with its key, its distance and whether it is kept.
template <typename What>
__device__ __forceinline__ void each_token(const Row& row, What what) {
#pragma unroll 4
    for (u32 base = 0; base < row.width; base += THREADS) {
        u32 token = base + threadIdx.x;
        u32 far = token < row.width ? distance(row, row.logits[token]) : NOWHERE, key = row.by_token ? token : far;
        what(token, key, far, token < row.width && is_kept(row, key, token));
    }
}

__device__ u64 kept_weight(const Row& row, Room& room) {
    u64 sum = 0;
    each_token(row, [&](u32, u32, u32 far, bool kept) { sum += kept ? weight(far) : 0; });
    return block_sum(sum, room);
}

// Lanes that add to the same bin combine their additions.
__device__ __forceinline__ void add_to_bin(u64* bins, u32 bin, u64 what) {
    u32 with = __ballot_sync(FULL_WARP, what != 0);
    if (with == 0) return;
    u32 first = __shfl_sync(FULL_WARP, bin, __ffs(with) - 1);
    if (__all_sync(FULL_WARP, what == 0 || bin == first)) {
        what = warp_sum(what);
        if (threadIdx.x % 32 == 0) atomicAdd(&bins[first], what);
    } else if (what != 0) {
        atomicAdd(&bins[bin], what);
    }
}

// Finds the first bin at which the sum of `before` and all bins so far reaches the limit. Returns it in
// room.bin, and the sum before it in room.sum. room.bin is NOWHERE if there is none.
__device__ void find_bin(u64 before, u64 limit, Room& room) {
    constexpr u32 EACH = BINS / THREADS;
    if (threadIdx.x == 0) room.bin = NOWHERE;
    u64 mine = 0, up_to;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) mine += room.bins[threadIdx.x * EACH + i];
    up_to = mine;
#pragma unroll
    for (u32 by = 1; by < 32; by *= 2) {
        u64 other = __shfl_up_sync(FULL_WARP, up_to, by);
        if (threadIdx.x % 32 >= by) up_to += other;
    }
    if (threadIdx.x % 32 == 31) room.of_warp[threadIdx.x / 32] = up_to;
    __syncthreads();
    for (u32 warp = 0; warp < threadIdx.x / 32; warp++) up_to += room.of_warp[warp];
    u64 sum = before + up_to - mine;
#pragma unroll
    for (u32 i = 0; i < EACH; i++) {
        u64 with = sum + room.bins[threadIdx.x * EACH + i];
        if (sum < limit && with >= limit) room.bin = threadIdx.x * EACH + i, room.sum = sum;
        sum = with;
    }
    __syncthreads();
}

// The nth (from 1) kept token with this key, in order of token numbers.
__device__ u32 nth_alike(const Row& row, u32 key, u64 nth, Room& room) {
    u64 seen = 0;
    for (u32 base = 0; base < row.width; base += THREADS) {
        u32 token = base + threadIdx.x;
        bool is_it = token < row.width && distance(row, row.logits[token]) == key && is_kept(row, key, token);
        u32 lanes = __ballot_sync(FULL_WARP, is_it);
        if (threadIdx.x % 32 == 0) room.of_warp[threadIdx.x / 32] = __popc(lanes);
        __syncthreads();
        u64 before = seen, all = seen;
        for (u32 warp = 0; warp < THREADS / 32; warp++) {
            if (warp < threadIdx.x / 32) before += room.of_warp[warp];
            all += room.of_warp[warp];
        }
        if (is_it && before + __popc(lanes & ((1u << threadIdx.x % 32) - 1)) + 1 == nth) room.token = token;
        __syncthreads();
        if (all >= nth) break;
        seen = all;
    }
    return room.token;
}

// Finds the token at which the number or the weight of tokens reaches the limit. `reached` is the amount
// there. If the limit is never reached, everything is kept and nothing changes.
template <bool BY_WEIGHT>
__device__ Bound find(const Row& row, u64 limit, u64& reached, Room& room) {
    u32 key = 0;
    u64 before = 0, found = 0;
#pragma unroll
    for (u32 level = 0; level < 3; level++) {
        u32 bits = level == 2 ? 10 : 11, shift = level == 0 ? 21 : level == 1 ? 10 : 0;
        for (u32 bin = threadIdx.x; bin < BINS; bin += THREADS) room.bins[bin] = 0;
        __syncthreads();
        each_token(row, [&](u32, u32 here, u32 far, bool kept) {
            bool counts = kept && (level == 0 || here >> (shift + bits) == key);
            add_to_bin(room.bins, here >> shift & ((1u << bits) - 1), counts ? (BY_WEIGHT ? weight(far) : 1) : 0);
        });
        __syncthreads();
        find_bin(before, limit, room);
        if (room.bin == NOWHERE) return row.bound;
        key = key << bits | room.bin, before = room.sum, found = room.bins[room.bin];
        __syncthreads();
    }
    if (row.by_token) {
        reached = before + found;
        return {key, key};
    }
    u64 each = BY_WEIGHT ? weight(key) : 1, nth = (limit - before + each - 1) / each;
    reached = before + nth * each;
    if (found > each) return {key, nth_alike(row, key, nth, room)};
    each_token(row, [&](u32 token, u32 here, u32, bool kept) {
        if (kept && here == key) room.token = token;
    });
    __syncthreads();
    u32 token = room.token;
    __syncthreads();
    return {key, token};
}

// Philox 4x32-10: the random number for a seed and a position, an integer in units of 2^-53.
__device__ u64 random(const DrawRow& draw) {
    u32 counter[4] = {draw.position[0], draw.position[1], 0, 0}, key[2] = {draw.seed[0], draw.seed[1]};
#pragma unroll
    for (u32 round = 0; round < 10; round++) {
        u64 left = (u64)0xD2511F53u * counter[0], right = (u64)0xCD9E8D57u * counter[2];
        u32 next[4] = {(u32)(right >> 32) ^ counter[1] ^ key[0], (u32)right, (u32)(left >> 32) ^ counter[3] ^ key[1], (u32)left};
#pragma unroll
        for (u32 i = 0; i < 4; i++) counter[i] = next[i];
        key[0] += 0x9E3779B9u, key[1] += 0xBB67AE85u;
    }
    return ((u64)counter[0] << 32 | counter[1]) >> 11;
}

__device__ float edited(float logit, const Edit& edit, const DrawRow& draw) {
    logit = __fadd_rn(logit, edit.bias);
    if (edit.flags & FORBIDDEN) logit = -INF;
    if (edit.flags & SEEN) logit = logit > 0.f ? __fdiv_rn(logit, draw.repetition) : __fmul_rn(logit, draw.repetition);
    if (edit.n_said > 0) logit = __fsub_rn(logit, __fadd_rn(__fmul_rn(draw.frequency, (float)edit.n_said), draw.presence));
    return logit;
}

// Edits each token once. The count of a token in flight is one more than the host knows.
__device__ void edit_all(const Row& row, const DrawRow& draw, Edit* edits, u32 in_flight, Room& room) {
    if (threadIdx.x == 0) room.n = 0;
    __syncthreads();
    for (u32 nth = threadIdx.x; nth < draw.n_edits; nth += THREADS) {
        Edit edit = edits[nth];
        if (edit.token >= row.width) continue;
        if (edit.token == in_flight) edit.n_said++, edit.flags |= SEEN, room.n = 1;
        edits[nth].bias = row.logits[edit.token];
        row.logits[edit.token] = edited(row.logits[edit.token], edit, draw);
    }
    __syncthreads();
    if (threadIdx.x == 0 && in_flight < row.width && room.n == 0) {
        room.raw = row.logits[in_flight];
        row.logits[in_flight] = edited(room.raw, {in_flight, 0.f, 1, SEEN}, draw);
    }
    __syncthreads();
}

// Waits until the host has written the step's masks. Returns false after the time limit.
__device__ bool masks_are_written(const Masks& masks, Room& room) {
    if (threadIdx.x == 0) {
        u64 since = nanoseconds();
        bool are_written;
        while (!(are_written = (int)(*masks.ready - masks.step) >= 0) && nanoseconds() - since < masks.patience) __nanosleep(500);
        __threadfence_system();
        room.n = are_written;
    }
    __syncthreads();
    bool are_written = room.n;
    __syncthreads();
    return are_written;
}

// Makes the logits of tokens that the mask does not allow negative infinity.
__device__ void apply_mask(const Row& row, const Masks& masks, u32 nth, Room& room) {
    const volatile u32* mask = masks.rows + (u64)nth * masks.n_words;
    for (u32 first = 0; first < masks.n_words; first += MASK_WORDS) {
        u32 n = min(masks.n_words - first, MASK_WORDS), end = min(row.width, (first + n) * 32);
        for (u32 i = threadIdx.x; i < n; i += THREADS) room.mask[i] = mask[first + i];
        __syncthreads();
        for (u32 token = first * 32 + threadIdx.x; token < end; token += THREADS)
            if (!(room.mask[token / 32 - first] >> token % 32 & 1)) row.logits[token] = -INF;
        __syncthreads();
    }
}

// The lowest-numbered token with the greatest logit.
__device__ u32 likeliest(const Row& row, Room& room) {
    u64 greatest = 0;
    for (u32 token = threadIdx.x; token < row.width; token += THREADS) {
        u32 bits = __float_as_uint(row.logits[token] + 0.f);  // -0 equals 0
        u64 key = (u64)(bits & 0x80000000u ? ~bits : bits | 0x80000000u) << 32 | (u32)~token;
        greatest = key > greatest ? key : greatest;
    }
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        u64 other = __shfl_xor_sync(FULL_WARP, greatest, lane);
        greatest = other > greatest ? other : greatest;
    }
    if (threadIdx.x % 32 == 0) room.of_warp[threadIdx.x / 32] = greatest;
    __syncthreads();
    for (u32 warp = 0; warp < THREADS / 32; warp++) greatest = room.of_warp[warp] > greatest ? room.of_warp[warp] : greatest;
    __syncthreads();
    return ~(u32)greatest;
}

// Records log-probabilities before any edit.
__device__ void note_thoughts(Row row, const DrawRow& draw, Outcome& outcome, Room& room) {
    u64 total = kept_weight(row, room), reached;
    u32 n_top = min(draw.n_top - 1, TOP_MAX);
    if (threadIdx.x == 0) outcome.best = row.best, outcome.total = total, room.n = 0;
    if (n_top > 0) {
        row.bound = find<false>(row, n_top, reached, room);
        each_token(row, [&](u32 token, u32, u32, bool kept) {
            u32 nth = kept ? atomicAdd(&room.n, 1) : TOP_MAX;
            if (nth < TOP_MAX) outcome.tokens[nth] = token, outcome.logits[nth] = row.logits[token];
        });
    }
    __syncthreads();
    if (threadIdx.x == 0) outcome.n_top = min(room.n, n_top);
    __syncthreads();
}

__device__ u32 drawn_token(Row row, const DrawRow& draw, Room& room) {
    row.by = fminf(1.f / draw.temperature, 1e30f);
    row.by_token = draw.top_k == 0 && draw.top_p >= 1.f && draw.min_p <= 0.f;
    u64 total, limit;
    if (draw.min_p > 0.f) row.bound.key = (u32)(fminf(fmaxf(-logf(draw.min_p), 0.f), NATS_MAX - 1.f) * KEYS_PER_NAT);
    if (draw.top_k > 0 && draw.top_k < row.width) row.bound = find<false>(row, draw.top_k, total, room);
    total = kept_weight(row, room);
    if (draw.top_p < 1.f) {
        limit = (u64)ceil((double)total * fmaxf(draw.top_p, 0.f));
        row.bound = find<true>(row, min(max(limit, (u64)1), total), total, room);
    }
    limit = __umul64hi(total, random(draw) << 11) + 1;
    u64 reached;
    return find<true>(row, limit, reached, room).token;
}

// The logit of a token before edits.
__device__ float raw_logit(const Row& row, const DrawRow& draw, const Edit* edits, u32 token, u32 in_flight, Room& room) {
    if (threadIdx.x == 0 && token != in_flight) room.raw = row.logits[token];
    __syncthreads();
    for (u32 nth = threadIdx.x; nth < draw.n_edits; nth += THREADS)
        if (edits[nth].token == token) room.raw = edits[nth].bias;
    __syncthreads();
    return room.raw;
}

extern "C" __global__ void __launch_bounds__(THREADS, 1)
sample_tokens(u32* drawn, Outcome* outcomes, float* logits, const u32* best, const u32* tokens, const DrawRow* draws, Edit* edits,
              Masks masks, u32 width, u32 n_rows, u32 n_tokens, u32 n_edits) {
    __shared__ Room room;
    in_turn();
    DrawRow draw = draws[blockIdx.x];
    Outcome& outcome = outcomes[blockIdx.x];
    if (draw.row >= n_rows || draw.first_edit > n_edits || draw.n_edits > n_edits - draw.first_edit) return;
    bool is_masked = draw.mask != NOWHERE, is_late = false;
    if (is_masked && draw.mask >= masks.n_rows) return;
    Row row = {logits + (u64)draw.row * width, width, 0.f, 1.f, false, {NOWHERE, NOWHERE}};
    u32 token = best[draw.row], in_flight = draw.in_flight < n_tokens ? tokens[draw.in_flight] : NOWHERE;
    edits += draw.first_edit;
    row.best = token < width ? row.logits[token] : INF;
    if (fabsf(row.best) < INF) {
        if (draw.n_top > 0) note_thoughts(row, draw, outcome, room);
        bool is_edited = draw.n_edits > 0 || in_flight != NOWHERE;
        if (is_edited) edit_all(row, draw, edits, in_flight, room);
        if (is_masked) {
            is_late = !masks_are_written(masks, room);
            if (!is_late) apply_mask(row, masks, draw.mask, room);
        }
        if (is_edited || is_masked) {
            token = likeliest(row, room);
            row.best = row.logits[token];
        }
    }
    bool is_finite = fabsf(row.best) < INF;
    if (is_finite && draw.temperature > 0.f) token = drawn_token(row, draw, room);
    float chosen = is_finite && draw.n_top > 0 ? raw_logit(row, draw, edits, token, in_flight, room) : 0.f;
    if (threadIdx.x == 0) {
        drawn[draw.row] = outcome.token = is_late ? LATE : is_finite ? token : NOWHERE;
        outcome.chosen = chosen;
    }
}
