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

constexpr u32 SCORE_UNROLL = 8;

// Adds the products of 16 rows of the router with eight rows of x, for the steps of 32 of k in a range. `before(step)` is
// called before each step. The previous kernel does not write the router, so its first numbers are requested before this
// waits for that kernel.
template <typename Before>
__device__ __forceinline__ void score(float (&sum)[4], const bf16* router, const bf16* x, u32 tile, u32 eight, u32 from, u32 to, const RouterShape& shape, const Before& before) {
    RouterTile<SCORE_UNROLL> weights(router, tile, shape);
    const bf16* row = x + (u64)min(eight * SCORE_ROWS + threadIdx.x % 32 / 4, shape.n_rows - 1) * shape.k;
    for (u32 first = from; first < to; first += SCORE_UNROLL) {
        weights.load(first, to, shape);
        wait_for_last();
        weights.multiply(sum, row, first, to, shape, before);
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
    __shared__ ScoreParts part;
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
        float total = sum_of_parts(part, row, expert);
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
    sums.begin(row);
    for (u32 at = threadIdx.x * 8; at < width; at += 256 * 8) store8(out + row * width + at, sums.of(row, at, width));
}
