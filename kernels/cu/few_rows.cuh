// Common code of few_rows.cu, few_rows_fp8.cu and few_rows_blocks.cu: the division of the work, and the way from sums to the
// ending. few_rows_even.cu uses the sizes and the product of bf16 tiles too.
//
// A cluster takes 128 rows of w at a time; each of its blocks takes a share of k. Each block shows its sums
// to the others. Then the blocks end rows of x in turns, one row for each warp at a time. A lane adds up four
// neighbours of the 128, in the order of shares.
constexpr u32 UNIT = 64, W_ROWS = 2 * UNIT, GROUPS_THREADS = 256, ALL_THREADS = GROUPS_THREADS + 32;
constexpr u32 PART_STRIDE = W_ROWS + 4, SHARES_MAX = 8;

// A block's share of k, in steps of COLUMNS.
template <u32 COLUMNS>
struct Steps {
    u32 from, count;
    __device__ __forceinline__ u32 column(u32 nth) const { return (from + nth) * COLUMNS; }
};

// The scales of w's rows, or null. They multiply the sums.
struct RowScales {
    const float* of_rows;
    template <typename Ending>
    __device__ __forceinline__ Nothing of_group(const Ending&, u32, const ProductShape&) const { return {}; }
};

// Each file defines these two functions. In `bring_tiles`, one thread loads all tiles. In `sum_up`, each group of four
// warps computes the sums of 64 rows of w. Only few_rows_blocks.cu uses `scales`: it multiplies the partial sums by them.
template <u32 ROWS, u32 STAGES, u32 COLUMNS>
__device__ __forceinline__ void bring_tiles(const Ring& ring, const TensorMap& of_w, const TensorMap& of_x, const Steps<COLUMNS>& steps, const Halves<UNIT>& rows);
template <u32 ROWS, u32 STAGES, typename GroupScales>
__device__ __forceinline__ void sum_up(float (&sum)[ROWS / 2], const Ring& ring, u32 count, const GroupScales& scales);

// Loads the tiles of w and of x for each step. The first tiles of w are loaded while the previous kernel ends, which may
// write x.
template <u32 STAGES, typename BringW, typename BringX>
__device__ __forceinline__ void bring_steps(const Ring& ring, u32 count, const BringW& bring_w, const BringX& bring_x) {
    u32 n_first = min(STAGES, count), stage = 0, parity = 0;
    for (u32 i = 0; i < n_first; i++) bring_w(i, i);
    wait_for_last();
    for (u32 i = 0; i < n_first; i++) bring_x(i, i);
    for (u32 nth = n_first; nth < count; nth++) {
        barrier_wait(ring.empty + stage * 8, parity);
        bring_w(nth, stage);
        bring_x(nth, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// Starts a group's products with the tiles of this stage, 64 rows of w. When it returns, the products of the
// previous stage are done.
template <u32 ROWS>
__device__ __forceinline__ void multiply_tiles(float (&sum)[ROWS / 2], const Ring& ring, u32 stage, u32 parity) {
    constexpr u32 W_BYTES = W_ROWS * TILE_ROW_BYTES, STAGE_BYTES = W_BYTES + ROWS * TILE_ROW_BYTES;
    u32 group = threadIdx.x / 128;
    barrier_wait(ring.full + stage * 8, parity);
    u64 a = tile_of(ring.at + stage * STAGE_BYTES + group * 64 * TILE_ROW_BYTES, 16);
    u64 b = tile_of(ring.at + stage * STAGE_BYTES + W_BYTES, 16);
    add_products(sum, a, b);
}

// Writes a group's sums to shared memory that the cluster reads: part[row of x][row of w].
template <u32 ROWS>
__device__ __forceinline__ void show_part(float* part, const float (&sum)[ROWS / 2]) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = warp * 16 + lane / 4, row = lane % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; i++) part[(row + i / 4 * 8 + i % 2) * PART_STRIDE + column + i % 4 / 2 * 8] = sum[i];
}

// A lane's four numbers of a row, summed over all shares.
__device__ __forceinline__ float4 add_parts(u32 part, u32 row, u32 lane, u32 n_shares) {
    u32 place = part + (row * PART_STRIDE + lane * 4) * 4;
    float4 more[SHARES_MAX];
#pragma unroll
    for (u32 i = 0; i < SHARES_MAX; i++)
        if (i < n_shares) more[i] = cluster_load4(place_in(place, i));
    float4 total = more[0];
#pragma unroll
    for (u32 i = 1; i < SHARES_MAX; i++)
        if (i < n_shares) total.x += more[i].x, total.y += more[i].y, total.z += more[i].z, total.w += more[i].w;
    return total;
}

// From sums in registers to the ending. The ring is free by then, and the parts reuse its memory. `scales`
// are the scales of w's rows, or null.
template <u32 ROWS, typename Ending>
__device__ __forceinline__ void end_rows(const Ending& ending, const PendingNormArgs& pending, const float (&sum)[ROWS / 2], char* ring, u32 ring_at,
                                         const float* scales, const ProductShape& shape) {
    u32 share = blockIdx.x, n_shares = gridDim.x, nth = blockIdx.y, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u32 column = ending.template halves<UNIT>(nth, shape).row_of(lane * 4), row = share + warp * n_shares;
    if (warp < GROUPS_THREADS / 32) show_part<ROWS>(reinterpret_cast<float*>(ring), sum);
    wait_for_last();
    float by[4] = {1.f, 1.f, 1.f, 1.f};
    if (scales != nullptr) {
#pragma unroll
        for (u32 i = 0; i < 4; i++) by[i] = column + i < shape.n ? scales[column + i] : 0.f;
    }
    typename Ending::Before before = {};
    float scale = 1.f;
    if (row < shape.n_rows) before = ending.before(row, column, shape), scale = pending.scale(row);
    if (n_shares > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    auto sum_row = [&](float (&x)[4], u32 at, float of_norm) {
        float4 total = add_parts(ring_at, at, lane, n_shares);
        x[0] = total.x * by[0] * of_norm, x[1] = total.y * by[1] * of_norm, x[2] = total.z * by[2] * of_norm, x[3] = total.w * by[3] * of_norm;
    };
    u32 more = ALL_THREADS / 32 * n_shares;
    float x[4];
    if constexpr (is_joined<Ending>) {
        typename Ending::Before of_row = before;
        for (u32 at = row; at < shape.n_rows; at += more) {
            if (at != row) of_row = ending.before(at, column, shape);
            sum_row(x, at, pending.scale(at));
            ending.give(at, column, x, of_row, shape);
        }
    }
    while (row < shape.n_rows) {
        sum_row(x, row, scale);
        ending.template end<UNIT>(nth, row, column, x, before, shape);
        row += more;
        if (row < shape.n_rows) before = ending.before(row, column, shape), scale = pending.scale(row);
    }
    if (n_shares > 1) {  // no block ends while another reads its memory
        cluster_arrive_silently();
        cluster_wait();
    }
}

// A whole product, with COLUMNS columns in each step.
template <u32 ROWS, u32 STAGES, u32 COLUMNS, typename Ending, typename Scales>
__device__ __forceinline__ void few_rows(const Ending& ending, const PendingNormArgs& pending, const Scales& scales, const TensorMap& of_w,
                                         const TensorMap& of_x, const ProductShape& shape) {
    extern __shared__ Eight shared[];
    __shared__ u64 barriers[2 * STAGES];
    Ring ring;
    ring.at = (shared_address(shared) + 1023) / 1024 * 1024;
    ring.full = shared_address(barriers), ring.empty = ring.full + STAGES * 8;
    u32 share = blockIdx.x, n_shares = gridDim.x, warp = threadIdx.x / 32;
    u32 n_steps = (shape.k + COLUMNS - 1) / COLUMNS;
    Steps<COLUMNS> steps;
    steps.from = (u64)n_steps * share / n_shares;
    steps.count = (u64)n_steps * (share + 1) / n_shares - steps.from;

    if (threadIdx.x == GROUPS_THREADS) {
        fetch_map(of_w);
        fetch_map(of_x);
        ring_started<STAGES>(ring, GROUPS_THREADS / 32);
    }
    next_may_come();
    __syncthreads();

    float sum[ROWS / 2] = {};
    if (warp < GROUPS_THREADS / 32) sum_up<ROWS, STAGES>(sum, ring, steps.count, scales.of_group(ending, steps.from, shape));
    else if (threadIdx.x == GROUPS_THREADS) bring_tiles<ROWS, STAGES>(ring, of_w, of_x, steps, ending.template halves<UNIT>(blockIdx.y, shape));
    __syncthreads();
    char* free = reinterpret_cast<char*>(shared) + (ring.at - shared_address(shared));
    end_rows<ROWS>(ending, pending, sum, free, ring.at, scales.of_rows, shape);
}
