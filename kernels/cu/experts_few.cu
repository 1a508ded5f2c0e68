// The choice of experts for up to eight rows, on Hopper, with the work before and after it in one kernel.
//
// The rows may first be added to the residual and normed, as in norm.cu. Then experts are chosen and placed as in experts.cu.
// All results have the bits of those kernels. The rows may also be written in FP8.
//
// One cluster of eight blocks runs. Each block has all rows in shared memory, and scores them for every eighth tile of 16
// experts. The first block gets all scores, and chooses. The other blocks write the rows meanwhile, and the residual, which no
// block reads any more.
constexpr u32 FEW_BLOCKS = 8, FEW_THREADS = SCORE_SHARES * 32, FEW_ROWS = SCORE_ROWS, FEW_CHOICES = FEW_ROWS * 32, FEW_UNROLL = 4;
// Rows in shared memory are this many numbers longer, so that the lanes of a load read from different banks.
constexpr u32 ROW_GAP = 32;
constexpr u32 NORM_PARTS = 4;  // groups of eight numbers for each thread: rows of up to 8,192
static_assert(FEW_THREADS == 2 * ROW_THREADS && FEW_THREADS >= EXPERTS_MAX, "two rows are normed at a time, and each expert has a thread");

// x: the normed rows, which the kernel reads if `given` is null, and writes otherwise. given: what is added to the residual.
// quantized: null if no rows are written in FP8.
struct FewRows {
    bf16 *x, *residual;
    const bf16 *given, *weight;
    u32* quantized;
    float *scales, epsilon;
};
static_assert(sizeof(FewRows) == 56, "as in ops/experts_few.rs");

// Rows in shared memory.
struct SharedRows {
    bf16* rows;
    u32 k;
    __device__ __forceinline__ bf16* row(u32 row) const { return rows + row * (k + ROW_GAP); }
    __device__ __forceinline__ Eight of(u64 nth, u32 column) const { return load8(row(nth) + column); }
};

// Copies the rows to shared memory.
__device__ __forceinline__ void copy_rows(const SharedRows& to, const bf16* x, u32 n_rows) {
    u32 of_row = to.k / 8;
    for (u32 at = threadIdx.x; at < n_rows * of_row; at += FEW_THREADS) store8(to.row(at / of_row) + at % of_row * 8, load8(x + (u64)at * 8));
}

// Adds the given rows to the residual, and norms the sums. The sums in the residual are written later. Half of the threads take
// the even rows.
__device__ __forceinline__ void norm_rows(const SharedRows& to, const FewRows& from, const Eight (&by)[NORM_PARTS], u32 n_rows) {
    __shared__ float of_warps[FEW_ROWS][ROW_THREADS / 32];
    constexpr u32 TURNS = FEW_ROWS / 2;
    u32 half = threadIdx.x / ROW_THREADS, thread = threadIdx.x % ROW_THREADS;
    float squares[TURNS] = {};
#pragma unroll
    for (u32 i = 0; i < NORM_PARTS; i++) {
        u32 at = (i * ROW_THREADS + thread) * 8;
        if (at >= to.k) break;
        Eight sums[TURNS], before[TURNS];
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            u32 row = turn * 2 + half;
            if (row < n_rows) sums[turn] = load8(from.given + (u64)row * to.k + at), before[turn] = load8(from.residual + (u64)row * to.k + at);
        }
#pragma unroll
        for (u32 turn = 0; turn < TURNS; turn++) {
            u32 row = turn * 2 + half;
            if (row >= n_rows) continue;
            sums[turn] = added(sums[turn], before[turn]);
            add_squares(squares[turn], sums[turn]);
            store8(to.row(row) + at, sums[turn]);
        }
    }
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        float of_warp = warp_sum(squares[turn]);
        if (threadIdx.x % 32 == 0) of_warps[turn * 2 + half][thread / 32] = of_warp;
    }
    __syncthreads();
#pragma unroll
    for (u32 turn = 0; turn < TURNS; turn++) {
        u32 row = turn * 2 + half;
        if (row >= n_rows) continue;
        float sum = 0.f;
#pragma unroll
        for (u32 warp = 0; warp < ROW_THREADS / 32; warp++) sum += of_warps[row][warp];
        float scale = norm_scale(sum, to.k, from.epsilon);
#pragma unroll
        for (u32 i = 0; i < NORM_PARTS; i++) {
            u32 at = (i * ROW_THREADS + thread) * 8;
            if (at < to.k) store8(to.row(row) + at, normed(to.of(row, at), scale, by[i]));
        }
    }
}

// Places the choices: a thread for each, and one for each expert.
__device__ __forceinline__ void place_few(const Places& to, const u32* chosen, u32* rows_of, const PlacesShape& shape, u32 n_slots) {
    __shared__ u32 starts[EXPERTS_MAX], of_warps[FEW_THREADS / 32];
    u32 at = threadIdx.x, row = at / n_slots, lane = at % 32, warp = at / 32;
    bool is_there = at < shape.n_choices;
    u32 mine = is_there ? chosen[at] : NOWHERE;
    if (mine != NOWHERE) atomicOr(&rows_of[mine], 1u << row);
    __syncthreads();
    // The number of choices is in the lower half, that of experts with choices in the upper half.
    u32 rows = rows_of[at], count = __popc(rows), numbers = count | (rows != 0) << 16, up_to = numbers;
#pragma unroll
    for (u32 by = 1; by < 32; by *= 2) {
        u32 earlier = __shfl_up_sync(FULL_WARP, up_to, by);
        if (lane >= by) up_to += earlier;
    }
    if (lane == 31) of_warps[warp] = up_to;
    __syncthreads();
#pragma unroll
    for (u32 i = 0; i < FEW_THREADS / 32; i++)
        if (i < warp) up_to += of_warps[i];
    u32 before = up_to - numbers, start = before & 0xffff;
    starts[at] = start;
    if (count > 0) to.items[before >> 16] = {at, 0, start, count};
    if (at == FEW_THREADS - 1) to.items[shape.n_items_max].count = up_to >> 16;
    __syncthreads();
    u32 place = mine == NOWHERE ? NOWHERE : starts[mine] + __popc(rows_of[mine] & ((1u << row) - 1));
    if (is_there) to.places[at] = place;
    if (mine != NOWHERE) to.choices[place] = at;
}

// scores: for each row those of all experts.
template <u32 LANE_EXPERTS>
__device__ __forceinline__ void choose_few_from(u32* experts, float* weights, const float (*scores)[EXPERTS_MAX], const float* correction, u32 row, const RouterShape& shape) {
    float of_lane[LANE_EXPERTS];
#pragma unroll
    for (u32 j = 0; j < LANE_EXPERTS; j++) of_lane[j] = scores[row][threadIdx.x % 32 + 32 * j];
    choose(experts, weights, of_lane, correction, row, shape);
}

extern "C" __global__ void __launch_bounds__(FEW_THREADS)
choose_few(FewRows rows, float* weights, Places to, PlacesShape places, const bf16* __restrict__ router, const float* correction, RouterShape shape, QuantizedShape quantized) {
    extern __shared__ Eight shared[];
    __shared__ ScoreParts part;
    __shared__ float scores[FEW_ROWS][EXPERTS_MAX];
    __shared__ u32 chosen[FEW_CHOICES], rows_of[EXPERTS_MAX];  // rows_of: for each expert a bit for each row
    next_may_come();
    cluster_arrive_silently();
    u32 block = cluster_rank(), warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 n_tiles = (shape.n_experts + SCORE_EXPERTS - 1) / SCORE_EXPERTS, from = share_start(warp, shape), end = share_start(warp + 1, shape);
    rows_of[threadIdx.x] = 0;
    SharedRows x{reinterpret_cast<bf16*>(shared), shape.k};
    bool are_given = rows.given != nullptr;

    // No kernel writes these weights, so they are requested before the previous kernel has ended.
    RouterTile<FEW_UNROLL> weights_of_tile(router, block, shape);
    weights_of_tile.load(from, end, shape);
    Eight by[NORM_PARTS];
#pragma unroll
    for (u32 i = 0; i < NORM_PARTS; i++) {
        u32 at = (i * ROW_THREADS + threadIdx.x % ROW_THREADS) * 8;
        if (are_given && at < shape.k) by[i] = constant8(rows.weight + at);
    }
    wait_for_last();
    if (are_given) norm_rows(x, rows, by, shape.n_rows);
    else copy_rows(x, rows.x, shape.n_rows);
    __syncthreads();

    cluster_wait();  // the first block runs, so its memory can be written
    const bf16* row = x.row(min(g, shape.n_rows - 1));
    for (u32 tile = block; tile < n_tiles; tile += FEW_BLOCKS) {
        if (tile > block) weights_of_tile = RouterTile<FEW_UNROLL>(router, tile, shape), weights_of_tile.load(from, end, shape);
        float sum[4] = {};
        for (u32 first = from; first < end; first += FEW_UNROLL) {
            if (first > from) weights_of_tile.load(first, end, shape);
            weights_of_tile.multiply(sum, row, first, end, shape, [](u32) {});
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++) part[warp][2 * t + i % 2][g + i / 2 * 8] = sum[i];
        __syncthreads();
        if (threadIdx.x < SCORE_ROWS * SCORE_EXPERTS) {
            u32 of_row = threadIdx.x / SCORE_EXPERTS, expert = threadIdx.x % SCORE_EXPERTS;
            float total = sum_of_parts(part, of_row, expert);
            cluster_store(place_in(shared_address(&scores[of_row][tile * SCORE_EXPERTS + expert]), 0), total);
        }
        __syncthreads();
    }
    cluster_arrive();
    if (block > 0) {
        u32 first = (block - 1) * FEW_THREADS + threadIdx.x, step = (FEW_BLOCKS - 1) * FEW_THREADS, n_chunks = shape.n_rows * (shape.k / 8);
        if (rows.quantized != nullptr) quantize(rows.quantized, rows.scales, x, quantized, block - 1, FEW_BLOCKS - 1);
        cluster_wait();
        for (u32 at = first; are_given && at < n_chunks; at += step) {
            store8(rows.x + at * 8, x.of(at / (shape.k / 8), at % (shape.k / 8) * 8));
            store8(rows.residual + at * 8, added(load8(rows.given + at * 8), load8(rows.residual + at * 8)));
        }
        return;
    }
    cluster_wait();
    if (warp < shape.n_rows) {
        if (shape.n_experts <= 128) choose_few_from<4>(chosen, weights, scores, correction, warp, shape);
        else choose_few_from<EXPERTS_MAX / 32>(chosen, weights, scores, correction, warp, shape);
    }
    __syncthreads();
    place_few(to, chosen, rows_of, places, shape.per_token + shape.n_shared);
}
