// A layer of experts: which experts compute a row, and the products of few rows with the experts' matrices.
//
// A choice is a row together with one of its experts; its number is row * per_token + slot. The choices of a
// row are in ascending order of the expert. Choices are placed expert by expert, and row by row within one,
// so that an expert's rows are neighbours. A row without numbers (NaN) has no experts: its output is NaN.
//
// Products read only the experts that have rows. Their order of sums depends on the width of the rows, not
// on the number of rows, and a row adds its experts in the order of its choices.
constexpr u32 EXPERTS_MAX = 512, CHOICES_MAX = 32, NOWHERE = 0xffffffffu;

// === The choice ===

// A block scores eight rows, with 16 warps. A warp multiplies 16 rows of the router by them, along all of k
// or a share of it.
constexpr u32 SCORE_WARPS = 16, SCORE_ROWS = 8, SCORE_UNROLL = 8;

// n_groups: the number of groups of neighbouring experts; 0: there are no groups. groups_per_token: the number of groups
// whose experts a row may have. scaling: all weights are multiplied by it.
struct RouterShape { u32 n_rows, k, n_experts, per_token, is_normalized, n_groups, groups_per_token; float scaling; };

// The first call of a block waits for the previous kernel, which does not write the router, after it has
// requested the router's first rows.
__device__ __forceinline__ void score(float (&sum)[4], const bf16* router, const bf16* x, u32 tile, u32 from, u32 to, const RouterShape& shape) {
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, row = blockIdx.x * SCORE_ROWS + g;
    const bf16* rows[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++)  // experts after the last one are not read further
        rows[half] = router + (u64)min(tile * 16 + half * 8 + g, shape.n_experts - 1) * shape.k + t * 8;
    const bf16* of_x = x + (u64)min(row, shape.n_rows - 1) * shape.k + t * 8;
    for (u32 first = from; first < to; first += SCORE_UNROLL * 32) {
        Eight a[SCORE_UNROLL], b[SCORE_UNROLL], v[SCORE_UNROLL];
#pragma unroll
        for (u32 i = 0; i < SCORE_UNROLL; i++) {
            u32 at = first + i * 32;
            bool is_there = at < to && at + t * 8 < shape.k;
            a[i] = is_there ? constant8(rows[0] + at) : Eight{0, 0, 0, 0};
            b[i] = is_there ? constant8(rows[1] + at) : Eight{0, 0, 0, 0};
        }
        wait_for_last();
#pragma unroll
        for (u32 i = 0; i < SCORE_UNROLL; i++) {
            u32 at = first + i * 32;
            v[i] = at < to && at + t * 8 < shape.k ? load8(of_x + at) : Eight{0, 0, 0, 0};
        }
#pragma unroll
        for (u32 i = 0; i < SCORE_UNROLL; i++) {
            mma(sum, a[i].pair[0], b[i].pair[0], a[i].pair[1], b[i].pair[1], v[i].pair[0], v[i].pair[1]);
            mma(sum, a[i].pair[2], b[i].pair[2], a[i].pair[3], b[i].pair[3], v[i].pair[2], v[i].pair[3]);
        }
    }
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
    if (lane >= shape.per_token) return;
    u64 at = (u64)row * shape.per_token + place;
    experts[at] = mine;
    weights[at] = number / (shape.is_normalized ? divisor : total) * shape.scaling;
}

// Adds up a row's scores over the shares of k, and chooses.
template <u32 LANE_EXPERTS>
__device__ __forceinline__ void choose_from(u32* experts, float* weights, const float* part, const float* correction, u32 n_shares, u32 width, u32 row, const RouterShape& shape) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    float scores[LANE_EXPERTS] = {};
#pragma unroll
    for (u32 j = 0; j < LANE_EXPERTS; j++)
        if (lane + 32 * j < shape.n_experts)
            for (u32 share = 0; share < n_shares; share++) scores[j] += part[(share * SCORE_ROWS + warp) * width + lane + 32 * j];
    choose(experts, weights, scores, correction, row, shape);
}

// The router has a row of k numbers for each expert.
extern "C" __global__ void __launch_bounds__(SCORE_WARPS * 32)
choose_experts(u32* experts, float* weights, const bf16* __restrict__ router, const float* correction, const bf16* x, RouterShape shape) {
    __shared__ float part[SCORE_ROWS * EXPERTS_MAX];  // [share of k][row][expert]
    next_may_come();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 n_tiles = (shape.n_experts + 15) / 16, n_shares = max(1u, SCORE_WARPS / n_tiles), width = n_tiles * 16;
    u32 n_steps = (shape.k + 31) / 32;
    for (u32 job = warp; job < n_tiles * n_shares; job += SCORE_WARPS) {
        u32 tile = job / n_shares, share = job % n_shares;
        float sum[4] = {};
        score(sum, router, x, tile, n_steps * share / n_shares * 32, n_steps * (share + 1) / n_shares * 32, shape);
#pragma unroll
        for (u32 i = 0; i < 4; i++) part[(share * SCORE_ROWS + 2 * t + i % 2) * width + tile * 16 + g + i / 2 * 8] = sum[i];
    }
    wait_for_last();
    __syncthreads();
    u32 row = blockIdx.x * SCORE_ROWS + warp;
    if (warp >= SCORE_ROWS || row >= shape.n_rows) return;
    if (shape.n_experts <= 128) choose_from<4>(experts, weights, part, correction, n_shares, width, row, shape);
    else choose_from<EXPERTS_MAX / 32>(experts, weights, part, correction, n_shares, width, row, shape);
}

// === The places ===

constexpr u32 PLACE_THREADS = 512;

// starts, counts: of each expert. touched: the experts that have rows, in order, and their number at the end.
// tiles: the expert of each tile of places, if there are tiles, and their number at the end. choices: the choice at each
// place, or NOWHERE. places: the place of each choice, or NOWHERE.
struct Places { u32 *starts, *counts, *touched, *tiles, *choices, *places; };
// An expert's places begin at a multiple of tile_rows.
struct PlacesShape { u32 n_choices, n_experts, tile_rows, n_tiles_max; };

__device__ __forceinline__ u32 in_tiles(u32 count, u32 tile_rows) { return (count + tile_rows - 1) / tile_rows * tile_rows; }

// Counts the choices of all experts, and places those of one: a block for each expert.
__device__ __forceinline__ void place_expert(const Places& to, const u32* experts, const PlacesShape& shape) {
    __shared__ u32 counts[EXPERTS_MAX], before[2], of_warp[PLACE_THREADS / 32];
    u32 expert = blockIdx.x, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    for (u32 at = threadIdx.x; at < shape.n_experts; at += PLACE_THREADS) counts[at] = 0;
    if (threadIdx.x < 2) before[threadIdx.x] = 0;
    __syncthreads();
    for (u32 at = threadIdx.x; at < shape.n_choices; at += PLACE_THREADS) {
        u32 chosen = experts[at];
        if (chosen < shape.n_experts) atomicAdd(&counts[chosen], 1);
        else if (expert == 0) to.places[at] = NOWHERE;
    }
    __syncthreads();
    for (u32 at = threadIdx.x; at < expert; at += PLACE_THREADS)
        if (counts[at] > 0) {
            atomicAdd(&before[0], in_tiles(counts[at], shape.tile_rows));
            atomicAdd(&before[1], 1);
        }
    __syncthreads();
    u32 start = before[0], count = counts[expert], end = start + in_tiles(count, shape.tile_rows);
    if (threadIdx.x == 0) {
        to.starts[expert] = start, to.counts[expert] = count;
        if (count > 0) to.touched[before[1]] = expert;
        if (expert == shape.n_experts - 1) {
            to.touched[shape.n_experts] = before[1] + (count > 0);
            to.tiles[shape.n_tiles_max] = end / shape.tile_rows;
        }
    }
    if (shape.tile_rows > 1)
        for (u32 tile = start / shape.tile_rows + threadIdx.x; tile < end / shape.tile_rows; tile += PLACE_THREADS) to.tiles[tile] = expert;
    for (u32 at = start + count + threadIdx.x; at < end; at += PLACE_THREADS) to.choices[at] = NOWHERE;
    if (count == 0) return;
    u32 place = start;
    for (u32 first = 0; first < shape.n_choices; first += PLACE_THREADS) {
        u32 at = first + threadIdx.x;
        bool is_here = at < shape.n_choices && experts[at] == expert;
        u32 here = __ballot_sync(FULL_WARP, is_here), earlier = 0, all = 0;
        if (lane == 0) of_warp[warp] = __popc(here);
        __syncthreads();
#pragma unroll
        for (u32 i = 0; i < PLACE_THREADS / 32; i++) {
            if (i < warp) earlier += of_warp[i];
            all += of_warp[i];
        }
        if (is_here) {
            u32 mine = place + earlier + __popc(here & ((1u << lane) - 1));
            to.choices[mine] = at, to.places[at] = mine;
        }
        place += all;
        __syncthreads();
    }
}

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

// out[row] = the sum of the row's experts, each times its weight, in the order of choices.
extern "C" __global__ void __launch_bounds__(256)
sum_choices(bf16* out, const bf16* y, const u32* places, const float* weights, u32 width, u32 per_token) {
    in_turn();
    __shared__ u32 of_choice[CHOICES_MAX];
    __shared__ float by[CHOICES_MAX];
    u64 row = blockIdx.x;
    if (threadIdx.x < per_token) {
        of_choice[threadIdx.x] = places[row * per_token + threadIdx.x];
        by[threadIdx.x] = weights[row * per_token + threadIdx.x];
    }
    __syncthreads();
    for (u32 at = threadIdx.x * 8; at < width; at += 256 * 8) {
        float sum[8] = {};
#pragma unroll 4
        for (u32 slot = 0; slot < per_token; slot++) {
            u32 place = of_choice[slot];
            Eight nan = {0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u};
            Eight of = place == NOWHERE ? nan : load8(y + (u64)place * width + at);
#pragma unroll
            for (u32 j = 0; j < 4; j++) sum[2 * j] += low(of.pair[j]) * by[slot], sum[2 * j + 1] += high(of.pair[j]) * by[slot];
        }
        Eight narrowed;
#pragma unroll
        for (u32 j = 0; j < 4; j++) narrowed.pair[j] = narrow(sum[2 * j], sum[2 * j + 1]);
        store8(out + row * width + at, narrowed);
    }
}
