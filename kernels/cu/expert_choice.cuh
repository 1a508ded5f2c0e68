// Common code of experts.cu and experts_few.cu: scores of rows, and the choice of experts from them.

// A block scores eight rows for a tile of 16 experts. Each of its 16 warps has a share of k. The last block of the eight
// rows chooses.
constexpr u32 SCORE_SHARES = 16, SCORE_ROWS = 8, SCORE_EXPERTS = 16;

// n_groups: the number of groups of neighbouring experts; 0: there are no groups. groups_per_token: the number of groups
// whose experts a row may have. scaling: all weights are multiplied by it. first_held, every: this rank has every `every`-th
// expert, from first_held on.
struct RouterShape { u32 n_rows, k, n_experts, per_token, n_shared, is_normalized, n_groups, groups_per_token; float scaling; u32 first_held, every; };

// The numbers of 16 rows of the router that a lane multiplies: UNROLL steps of 32 of k at a time.
template <u32 UNROLL>
struct RouterTile {
    const bf16* rows[2];
    Eight of[2][UNROLL];

    __device__ __forceinline__ RouterTile(const bf16* router, u32 tile, const RouterShape& shape) {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 half = 0; half < 2; half++)  // experts after the last one are not read further
            rows[half] = router + (u64)min(tile * SCORE_EXPERTS + half * 8 + lane / 4, shape.n_experts - 1) * shape.k + lane % 4 * 8;
    }
    __device__ __forceinline__ static bool is_there(u32 step, u32 to, const RouterShape& shape) { return step < to && step * 32 + threadIdx.x % 4 * 8 < shape.k; }
    __device__ __forceinline__ void load(u32 first, u32 to, const RouterShape& shape) {
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) of[half][i] = is_there(first + i, to, shape) ? constant8(rows[half] + (first + i) * 32) : Eight{0, 0, 0, 0};
    }
    // Adds the products of the loaded numbers with a row of x. `before(step)` is called before each step.
    template <typename Before>
    __device__ __forceinline__ void multiply(float (&sum)[4], const bf16* row, u32 first, u32 to, const RouterShape& shape, const Before& before) const {
        Eight v[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) v[i] = is_there(first + i, to, shape) ? load8(row + (first + i) * 32 + threadIdx.x % 4 * 8) : Eight{0, 0, 0, 0};
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) {
            before(first + i);
            mma(sum, of[0][i].pair[0], of[1][i].pair[0], of[0][i].pair[1], of[1][i].pair[1], v[i].pair[0], v[i].pair[1]);
            mma(sum, of[0][i].pair[2], of[1][i].pair[2], of[0][i].pair[3], of[1][i].pair[3], v[i].pair[2], v[i].pair[3]);
        }
    }
};

// The first step of a share of k. The sums of all shares are added in order. So a score has the same bits, however many rows
// are scored.
__device__ __forceinline__ u32 share_start(u32 share, const RouterShape& shape) { return (shape.k + 31) / 32 * share / SCORE_SHARES; }

// The sums of a block's warps: [share][row][expert].
typedef float ScoreParts[SCORE_SHARES][SCORE_ROWS][SCORE_EXPERTS];
__device__ __forceinline__ float sum_of_parts(const ScoreParts& part, u32 row, u32 expert) {
    float total = 0.f;
#pragma unroll
    for (u32 i = 0; i < SCORE_SHARES; i++) total += part[i][row][expert];
    return total;
}

// Greater numbers have greater keys. The key 0 means that the expert is taken, or that there is none.
__device__ __forceinline__ u32 key_of(float number) {
    u32 bits = __float_as_uint(number);
    return bits & 0x80000000u ? ~bits : bits | 0x80000000u;
}
__device__ __forceinline__ float number_of(u32 key) { return __uint_as_float(key & 0x80000000u ? key ^ 0x80000000u : ~key); }

// The first lane with the greatest key.
__device__ __forceinline__ u32 lane_of(u32 key, u32 greatest) { return __ffs(__ballot_sync(FULL_WARP, key == greatest)) - 1; }

// Keeps the experts of the groups with the greatest scores, and sets the keys of all others to 0. If scores are equal,
// the first group is kept. A group's score is that of its best expert, or the sum of its two best.
template <u32 LANE_EXPERTS>
__device__ __forceinline__ void keep_groups(u32 (&keys)[LANE_EXPERTS], bool adds_two, const RouterShape& shape) {
    u32 lane = threadIdx.x % 32, size = shape.n_experts / shape.n_groups, of_group = 0, kept = 0;
    for (u32 group = 0; group < shape.n_groups; group++) {
        u32 first = 0, second = 0;  // the two greatest keys among this lane's experts
#pragma unroll
        for (u32 j = 0; j < LANE_EXPERTS; j++) {
            if ((lane + 32 * j) / size != group) continue;
            second = max(second, min(first, keys[j]));
            first = max(first, keys[j]);
        }
        u32 best = __reduce_max_sync(FULL_WARP, first);
        float score = number_of(best);
        if (adds_two) {
            if (lane == lane_of(first, best)) first = second;
            score += number_of(__reduce_max_sync(FULL_WARP, first));
        }
        if (lane == group) of_group = key_of(score);
    }
    for (u32 nth = 0; nth < shape.groups_per_token; nth++) {
        u32 group = lane_of(of_group, __reduce_max_sync(FULL_WARP, of_group));
        kept |= 1u << group;
        if (lane == group) of_group = 0;
    }
#pragma unroll
    for (u32 j = 0; j < LANE_EXPERTS; j++)
        if (lane + 32 * j < shape.n_experts && !(kept >> (lane + 32 * j) / size & 1)) keys[j] = 0;
}

// Returns the rank that computes a shared expert for this row: the one with the fewest of the row's choices so far. `mine` is
// the routed expert of the lane's slot. The result depends on no other row. Lanes without a shared expert get any rank.
__device__ __forceinline__ u32 rank_of_shared_expert(u32 mine, const RouterShape& shape) {
    u32 lane = threadIdx.x % 32, every = shape.every, n_choices = 0, rank = 0;
    // If several ranks have the fewest choices, the row's first expert decides which rank computes the shared expert.
    u32 turn = __reduce_min_sync(FULL_WARP, mine) % every;
    for (u32 slot = 0; slot < shape.per_token; slot++) n_choices += __shfl_sync(FULL_WARP, mine, slot) % every == lane;
    for (u32 slot = shape.per_token; slot < shape.per_token + shape.n_shared; slot++) {
        u32 key = lane < every ? n_choices * 32 + (lane + turn) % every : NOWHERE;
        u32 fewest = (__reduce_min_sync(FULL_WARP, key) % 32 + every - turn) % every;
        if (lane == fewest) n_choices++;
        if (lane == slot) rank = fewest;
    }
    return rank;
}

// A warp chooses the experts of a row: those with the greatest exponentials, the first of equal ones. With a correction:
// those with the greatest sums of their sigmoid and correction. Each lane has the scores of LANE_EXPERTS experts.
template <u32 LANE_EXPERTS>
__device__ __forceinline__ void choose(u32* experts, float* weights, const float (&scores)[LANE_EXPERTS], const float* correction, u32 row, const RouterShape& shape) {
    u32 lane = threadIdx.x % 32, keys[LANE_EXPERTS];
    float numbers[LANE_EXPERTS];
    float greatest = -INF, total = 0.f;
#pragma unroll
    for (u32 j = 0; j < LANE_EXPERTS; j++)
        if (lane + 32 * j < shape.n_experts) greatest = fmaxf(greatest, scores[j]);
#pragma unroll
    for (u32 lanes = 16; lanes > 0; lanes /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(FULL_WARP, greatest, lanes));
#pragma unroll
    for (u32 j = 0; j < LANE_EXPERTS; j++) {
        bool is_there = lane + 32 * j < shape.n_experts;
        float rank = 0.f;
        numbers[j] = 0.f;
        if (is_there && correction == nullptr) rank = numbers[j] = expf(scores[j] - greatest);
        else if (is_there) numbers[j] = 1.f / (1.f + expf(-scores[j])), rank = numbers[j] + correction[lane + 32 * j];
        total += numbers[j];
        keys[j] = is_there ? key_of(rank) : 0;
    }
    total = warp_sum(total);
    bool is_number = total == total;
    if (shape.n_groups > 0 && is_number) keep_groups(keys, correction != nullptr, shape);
    u32 mine = NOWHERE;
    float number = total, divisor = 0.f;
    for (u32 slot = 0; slot < shape.per_token && is_number; slot++) {
        u32 best = 0, expert = NOWHERE;
#pragma unroll
        for (u32 j = 0; j < LANE_EXPERTS; j++)
            if (keys[j] > best) best = keys[j], expert = lane + 32 * j;
        u32 key = __reduce_max_sync(FULL_WARP, best);
        expert = __reduce_min_sync(FULL_WARP, best == key ? expert : NOWHERE);
        float of_expert = 0.f;
#pragma unroll
        for (u32 j = 0; j < LANE_EXPERTS; j++)
            if (lane + 32 * j == expert) keys[j] = 0, of_expert = numbers[j];
        of_expert = __shfl_sync(FULL_WARP, of_expert, expert % 32);
        divisor += of_expert;
        if (lane == slot) mine = expert, number = of_expert;
    }
    // Sigmoids are divided by their sum and 1e-20, or by nothing.
    if (correction != nullptr) divisor += 1e-20f, total = 1.f;
    u32 place = 0;
    for (u32 slot = 0; slot < shape.per_token; slot++) place += __shfl_sync(FULL_WARP, mine, slot) < mine;
    if (!is_number) place = lane;
    u32 n_slots = shape.per_token + shape.n_shared;
    u64 first = (u64)row * n_slots;
    u32 rank_of_shared = shape.every > 1 && shape.n_shared > 0 ? rank_of_shared_expert(mine, shape) : 0;
    if (lane < shape.per_token) {
        bool is_here = mine % shape.every == shape.first_held;
        experts[first + place] = is_number && is_here ? mine / shape.every : NOWHERE;
        weights[first + place] = is_number && !is_here ? 0.f : number / (shape.is_normalized ? divisor : total) * shape.scaling;
    } else if (lane < n_slots) {
        bool is_here = rank_of_shared == shape.first_held;
        experts[first + lane] = is_here ? shape.n_experts / shape.every + lane - shape.per_token : NOWHERE;
        weights[first + lane] = is_here ? 1.f : 0.f;
    }
}
