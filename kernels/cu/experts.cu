// A layer of experts: which experts compute a row, and the products of few rows with the experts' matrices.
//
// A choice is a row together with one of its experts; its number is row * (per_token + n_shared) + slot. The choices of a
// row are in ascending order of the expert. The experts after the first n_experts compute every row, with the weight 1.
// If experts are spread over ranks, each rank has some of the routed experts and all shared experts. The rank numbers its routed
// experts first, then the shared experts. It places only the choices that it computes, and uses its own numbers for them.
// Choices are placed expert by expert, and row by row within one, so that an expert's rows are neighbours. A row without numbers (NaN) has no experts: its output is NaN.
//
// Products read only the experts that have rows. Their order of sums depends on the width of the rows, not
// on the number of rows, and a row adds its experts in the order of its choices.
// === The choice ===

// A block scores eight rows for a tile of 16 experts. Each of its 16 warps has a share of k. The last block of the eight
// rows chooses.
constexpr u32 SCORE_SHARES = 16, SCORE_ROWS = 8, SCORE_EXPERTS = 16, SCORE_UNROLL = 8;

// n_groups: the number of groups of neighbouring experts; 0: there are no groups. groups_per_token: the number of groups
// whose experts a row may have. scaling: all weights are multiplied by it. first_held, every: this rank has every `every`-th
// expert, from first_held on.
struct RouterShape { u32 n_rows, k, n_experts, per_token, n_shared, is_normalized, n_groups, groups_per_token; float scaling; u32 first_held, every; };

// Adds the products of 16 rows of the router with eight rows of x, for the steps of 32 of k in a range. `before(step)` is
// called before each step. The previous kernel does not write the router, so its first numbers are requested before this
// waits for that kernel.
template <typename Before>
__device__ __forceinline__ void score(float (&sum)[4], const bf16* router, const bf16* x, u32 tile, u32 eight, u32 from, u32 to, const RouterShape& shape, const Before& before) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = eight * SCORE_ROWS + g;
    const bf16* rows[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++)  // experts after the last one are not read further
        rows[half] = router + (u64)min(tile * SCORE_EXPERTS + half * 8 + g, shape.n_experts - 1) * shape.k + t * 8;
    const bf16* of_x = x + (u64)min(row, shape.n_rows - 1) * shape.k + t * 8;
    for (u32 first = from; first < to; first += SCORE_UNROLL) {
        Eight a[SCORE_UNROLL], b[SCORE_UNROLL], v[SCORE_UNROLL];
#pragma unroll
        for (u32 i = 0; i < SCORE_UNROLL; i++) {
            u32 at = (first + i) * 32;
            bool is_there = first + i < to && at + t * 8 < shape.k;
            a[i] = is_there ? constant8(rows[0] + at) : Eight{0, 0, 0, 0};
            b[i] = is_there ? constant8(rows[1] + at) : Eight{0, 0, 0, 0};
        }
        wait_for_last();
#pragma unroll
        for (u32 i = 0; i < SCORE_UNROLL; i++) {
            u32 at = (first + i) * 32;
            v[i] = first + i < to && at + t * 8 < shape.k ? load8(of_x + at) : Eight{0, 0, 0, 0};
        }
#pragma unroll
        for (u32 i = 0; i < SCORE_UNROLL; i++) {
            before(first + i);
            mma(sum, a[i].pair[0], b[i].pair[0], a[i].pair[1], b[i].pair[1], v[i].pair[0], v[i].pair[1]);
            mma(sum, a[i].pair[2], b[i].pair[2], a[i].pair[3], b[i].pair[3], v[i].pair[2], v[i].pair[3]);
        }
    }
}

// The first step of a share of k. The sums of all shares are added in order. So a score has the same bits, however many rows
// are scored.
__device__ __forceinline__ u32 share_start(u32 share, const RouterShape& shape) { return (shape.k + 31) / 32 * share / SCORE_SHARES; }

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

// Chooses from a row's scores, which other blocks have written.
template <u32 LANE_EXPERTS>
__device__ __forceinline__ void choose_from(u32* experts, float* weights, const float* of_row, const float* correction, u32 row, const RouterShape& shape) {
    u32 lane = threadIdx.x % 32;
    float scores[LANE_EXPERTS] = {};
#pragma unroll
    for (u32 j = 0; j < LANE_EXPERTS; j++)
        if (lane + 32 * j < shape.n_experts) scores[j] = __ldcg(of_row + lane + 32 * j);
    choose(experts, weights, scores, correction, row, shape);
}

__device__ __forceinline__ void choose_row(u32* experts, float* weights, const float* scores, const float* correction, u32 row, u32 width, const RouterShape& shape) {
    if (row >= shape.n_rows) return;
    const float* of_row = scores + (u64)row * width;
    if (shape.n_experts <= 128) choose_from<4>(experts, weights, of_row, correction, row, shape);
    else choose_from<EXPERTS_MAX / 32>(experts, weights, of_row, correction, row, shape);
}

// The router has a row of k numbers for each expert. scores: for each row those of all experts, padded to whole tiles of 16.
// n_scored: for each eight rows, the number of blocks that have scored them, or 0 after the last one.
extern "C" __global__ void __launch_bounds__(SCORE_SHARES * 32)
choose_experts(u32* experts, float* weights, float* scores, u32* n_scored, const bf16* __restrict__ router, const float* correction, const bf16* x, RouterShape shape) {
    __shared__ float part[SCORE_SHARES][SCORE_ROWS][SCORE_EXPERTS];
    __shared__ bool is_last;
    next_may_come();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, width = gridDim.x * SCORE_EXPERTS;
    float sum[4] = {};
    score(sum, router, x, blockIdx.x, blockIdx.y, share_start(warp, shape), share_start(warp + 1, shape), shape, [](u32) {});
#pragma unroll
    for (u32 i = 0; i < 4; i++) part[warp][2 * t + i % 2][g + i / 2 * 8] = sum[i];
    wait_for_last();
    __syncthreads();
    if (threadIdx.x < SCORE_ROWS * SCORE_EXPERTS) {
        u32 row = threadIdx.x / SCORE_EXPERTS, expert = threadIdx.x % SCORE_EXPERTS;
        float total = 0.f;
#pragma unroll
        for (u32 i = 0; i < SCORE_SHARES; i++) total += part[i][row][expert];
        scores[(u64)(blockIdx.y * SCORE_ROWS + row) * width + blockIdx.x * SCORE_EXPERTS + expert] = total;
        __threadfence();
    }
    __syncthreads();
    if (threadIdx.x == 0) {
        is_last = atomicAdd(&n_scored[blockIdx.y], 1) == gridDim.x - 1;
        if (is_last) n_scored[blockIdx.y] = 0;
        __threadfence();
    }
    __syncthreads();
    if (is_last && warp < SCORE_ROWS) choose_row(experts, weights, scores, correction, blockIdx.y * SCORE_ROWS + warp, width, shape);
}

// The same for many rows: a block scores 16 of them for all experts, a warp eight of them for a tile along all of k.
extern "C" __global__ void __launch_bounds__(SCORE_SHARES * 32)
choose_experts_of_many(u32* experts, float* weights, float* scores, const bf16* __restrict__ router, const float* correction, const bf16* x, RouterShape shape) {
    next_may_come();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 n_tiles = (shape.n_experts + SCORE_EXPERTS - 1) / SCORE_EXPERTS, width = n_tiles * SCORE_EXPERTS;
    for (u32 job = warp; job < n_tiles * 2; job += SCORE_SHARES) {
        u32 tile = job / 2, eight = blockIdx.x * 2 + job % 2, share = 1, end = share_start(1, shape);
        float sum[4] = {}, total[4] = {};
        auto end_share = [&]() {
#pragma unroll
            for (u32 i = 0; i < 4; i++) total[i] += sum[i], sum[i] = 0.f;
        };
        score(sum, router, x, tile, eight, 0, share_start(SCORE_SHARES, shape), shape, [&](u32 step) {
            while (step == end && share < SCORE_SHARES) end_share(), end = share_start(++share, shape);
        });
        end_share();
#pragma unroll
        for (u32 i = 0; i < 4; i++) scores[(u64)(eight * SCORE_ROWS + 2 * t + i % 2) * width + tile * SCORE_EXPERTS + g + i / 2 * 8] = total[i];
    }
    wait_for_last();
    __syncthreads();
    choose_row(experts, weights, scores, correction, blockIdx.x * 2 * SCORE_ROWS + warp, width, shape);
}

// === The places ===

extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
place_choices(Places to, const u32* experts, PlacesShape shape) {
    in_turn();
    place_expert(to, experts, shape);
}

// === Rows for experts in FP8 ===

struct OrderedShape { u32 n_rows, k, are_rounded; };

// Copies rows of bf16, rounded or not, in the order in which experts_fp8.cu reads them: see `place_in_lanes`. Rows are
// padded with zeroes to whole groups of 64.
__device__ __forceinline__ void order_rows(bf16* to, const bf16* x, const OrderedShape& shape, u32 block, u32 n_blocks) {
    u32 width = (shape.k + LANES_GROUP - 1) / LANES_GROUP * LANES_GROUP, of_row = (shape.k + ROUND_GROUP - 1) / ROUND_GROUP * ROUND_LANES;
    u64 n_chunks = (u64)shape.n_rows * of_row, step = (u64)n_blocks * PLACE_THREADS;
    // Whole blocks of threads loop together.
    for (u64 first = (u64)block * PLACE_THREADS; first < n_chunks; first += step) {
        u64 chunk = first + threadIdx.x, row = chunk / of_row;
        u32 column = chunk % of_row * 8;
        bool is_here = chunk < n_chunks;
        Eight eight = is_here && column < shape.k ? load8(x + row * shape.k + column) : Eight{0, 0, 0, 0};
        if (shape.are_rounded) eight = rounded8(eight);
        if (!is_here || column >= width) continue;
#pragma unroll
        for (u32 pair = 0; pair < 4; pair++) *reinterpret_cast<u32*>(to + row * width + place_in_lanes(column / 8, pair)) = eight.pair[pair];
    }
}

// Places choices as `place_choices` does. The blocks after those of experts order the rows.
extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
place_and_order(Places to, const u32* experts, PlacesShape shape, bf16* ordered, const bf16* x, OrderedShape rows) {
    in_turn();
    if (blockIdx.x < shape.n_experts) place_expert(to, experts, shape);
    else order_rows(ordered, x, rows, blockIdx.x - shape.n_experts, gridDim.x - shape.n_experts);
}

// === Products of few rows ===

// The weights of a lane: `at` is its first number along k.
template <u32 UNROLL>
struct UnitWeights {
    typedef const bf16* __restrict__ Matrices;
    template <typename Units>
    struct Scales {
        __device__ __forceinline__ Scales(const bf16*, u32, u32, const ExpertsShape&) {}
        __device__ __forceinline__ float2 times(float2 total, u32) const { return total; }
    };
    Eight of[UNROLL][2];
    const bf16* rows[2];

    template <typename Units>
    __device__ __forceinline__ void start(const bf16* w, u32 expert, u32 unit, const ExpertsShape& shape) {
        u32 lane = threadIdx.x % 32, warp = threadIdx.x / 32;
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            rows[half] = w + ((u64)expert * shape.n + Units::row(unit, half, lane / 4, shape)) * shape.k + lane % 4 * 8;
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) load(i, (warp * UNROLL + i) * 32, shape);
    }
    __device__ __forceinline__ void load(u32 i, u32 at, const ExpertsShape& shape) {
        bool is_there = at + threadIdx.x % 4 * 8 < shape.k;
#pragma unroll
        for (u32 half = 0; half < 2; half++) of[i][half] = is_there ? constant8(rows[half] + at) : Eight{0, 0, 0, 0};
    }

    // Sums a unit's products with GROUPS times eight rows of x, over a warp's share of k. The weights of the first turn
    // are loaded; this loads those of all later ones.
    template <typename Units, u32 GROUPS>
    __device__ __forceinline__ void sum(float* part, const bf16* x, const ExpertRows& rows_of_x, u32 place, u32 n_rows, const ExpertsShape& shape) {
        u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const bf16* of_x[GROUPS];
        float sum[GROUPS][4] = {};
#pragma unroll
        for (u32 j = 0; j < GROUPS; j++)  // rows after the last one repeat it, and are not written
            of_x[j] = x + (u64)Units::row_of_x(rows_of_x, place + min(j * 8 + g, n_rows - 1), shape) * shape.k + t * 8;
        constexpr u32 TURN = UNIT_WARPS * UNROLL * 32;
        for (u32 turn = warp * UNROLL * 32; turn < shape.k; turn += TURN) {
#pragma unroll
            for (u32 i = 0; i < UNROLL; i++) {
                u32 at = turn + i * 32;
                bool is_there = at + t * 8 < shape.k;
                Eight a = of[i][0], b = of[i][1], v[GROUPS];
#pragma unroll
                for (u32 j = 0; j < GROUPS; j++) v[j] = is_there ? load8(of_x[j] + at) : Eight{0, 0, 0, 0};
                if (turn + TURN < shape.k) load(i, at + TURN, shape);
#pragma unroll
                for (u32 j = 0; j < GROUPS; j++) {
                    mma(sum[j], a.pair[0], b.pair[0], a.pair[1], b.pair[1], v[j].pair[0], v[j].pair[1]);
                    mma(sum[j], a.pair[2], b.pair[2], a.pair[3], b.pair[3], v[j].pair[2], v[j].pair[3]);
                }
            }
        }
#pragma unroll
        for (u32 j = 0; j < GROUPS; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) part[(j * 8 + 2 * t + i % 2) * PART_STRIDE + g + i / 2 * 8] = sum[j][i];
    }
};

// The name has the number of rows of an expert that are computed at a time.
EXPERTS(experts_gated, GatedUnits, UnitWeights<4>, 8, 3)
EXPERTS(experts_gated, GatedUnits, UnitWeights<4>, 32, 2)
EXPERTS(experts_summed, SummedUnits<1>, UnitWeights<3>, 8, 3)
EXPERTS(experts_summed, SummedUnits<1>, UnitWeights<3>, 32, 2)

// === Before and after products ===

// Copies the row of each choice to its place; places without a choice get zeroes. A block takes whole rows.
extern "C" __global__ void __launch_bounds__(256)
gather_choices(bf16* to, const bf16* x, const u32* choices, const u32* n_tiles, u32 tile_rows, u32 width, u32 per_token) {
    in_turn();
    u32 n_places = *n_tiles * tile_rows;
    for (u32 place = blockIdx.x; place < n_places; place += gridDim.x) {
        u32 choice = choices[place];
        for (u32 at = threadIdx.x * 8; at < width; at += 256 * 8)
            store8(to + (u64)place * width + at, choice == NOWHERE ? Eight{0, 0, 0, 0} : load8(x + (u64)(choice / per_token) * width + at));
    }
}

// out[row] = the sum of the row's experts.
extern "C" __global__ void __launch_bounds__(256)
sum_choices(bf16* out, ChoiceSums sums, u32 width) {
    in_turn();
    u64 row = blockIdx.x;
    for (u32 at = threadIdx.x * 8; at < width; at += 256 * 8) store8(out + row * width + at, sums.of(row, at, width));
}
