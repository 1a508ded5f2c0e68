// y = x * transpose(w), for up to 128 rows of x: every weight is read once, and reading it is all the time there is.
//
// w is [n][k], as checkpoints have it. A cluster takes 128 rows of w at a time, its blocks of threads a share of k each,
// and adds up through each other's shared memory, in the order of shares. One warp of a block has the copy engine bring
// tiles of w and x through a ring; two groups of four warps multiply them, 64 rows of w each, as the tall side: the rows
// of x are the flat one.
//
// What is asked for at once decides how fast memory is: a block keeps some 100 KB on the way, and two blocks share a
// multiprocessor. The first of them are asked for while the kernel before ends.
// The order of sums depends on the shape of w and the shares of k, not on the number of rows.
constexpr u32 W_ROWS = 128, GROUPS_THREADS = 256, ALL_THREADS = GROUPS_THREADS + 32;
constexpr u32 PART_STRIDE = W_ROWS + 4;

struct FewRowsShape { u32 n, k, n_rows; };

// A block's share of k, by tiles.
struct Steps {
    u32 from, count;
    __device__ __forceinline__ u32 column(u32 nth) const { return (from + nth) * TILE_COLUMNS; }
};

struct Ring { u32 at, full, empty; };

// One thread has all tiles brought. Weights do not come from the kernel before: they are asked for while it ends.
template <u32 ROWS, u32 STAGES>
__device__ __forceinline__ void bring_tiles(const Ring& ring, const TensorMap& of_w, const TensorMap& of_x, const Steps& steps, u32 row) {
    constexpr u32 W_BYTES = W_ROWS * TILE_ROW_BYTES, STAGE_BYTES = W_BYTES + ROWS * TILE_ROW_BYTES;
    auto bring_w = [&](u32 nth, u32 stage) {
        barrier_expect(ring.full + stage * 8, STAGE_BYTES);
        copy_tile(ring.at + stage * STAGE_BYTES, of_w, steps.column(nth), row, ring.full + stage * 8, EVICT_FIRST);
    };
    auto bring_x = [&](u32 nth, u32 stage) {
        copy_tile(ring.at + stage * STAGE_BYTES + W_BYTES, of_x, steps.column(nth), 0, ring.full + stage * 8, EVICT_LAST);
    };
    u32 n_first = min(STAGES, steps.count), stage = 0, parity = 0;
    for (u32 i = 0; i < n_first; i++) bring_w(i, i);
    wait_for_last();
    for (u32 i = 0; i < n_first; i++) bring_x(i, i);
    for (u32 nth = n_first; nth < steps.count; nth++) {
        barrier_wait(ring.empty + stage * 8, parity);
        bring_w(nth, stage);
        bring_x(nth, stage);
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// Sums up a group's 64 rows of w: a part, if there are more shares.
template <u32 ROWS, u32 STAGES>
__device__ __forceinline__ void sum_up(float (&sum)[ROWS / 2], const Ring& ring, u32 count) {
    constexpr u32 W_BYTES = W_ROWS * TILE_ROW_BYTES, STAGE_BYTES = W_BYTES + ROWS * TILE_ROW_BYTES;
    u32 group = threadIdx.x / 128, lane = threadIdx.x % 32, stage = 0, parity = 0, last = 0;
    for (u32 nth = 0; nth < count; nth++) {
        barrier_wait(ring.full + stage * 8, parity);
        u64 a = tile_of(ring.at + stage * STAGE_BYTES + group * 64 * TILE_ROW_BYTES, 16);
        u64 b = tile_of(ring.at + stage * STAGE_BYTES + W_BYTES, 16);
        held(sum);
        products_begin();
#pragma unroll
        for (u32 i = 0; i < TILE_COLUMNS / 16; i++) product(sum, a + 2 * i, b + 2 * i);
        products_committed();
        held(sum);
        products_done_but<1>();
        if (nth > 0 && lane == 0) barrier_arrive(ring.empty + last * 8);
        last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    products_done_but<0>();
    held(sum);
}

// What a group of warps has summed up of its rows of w, to where the cluster sees it: part[row of x][row of w].
template <u32 ROWS>
__device__ __forceinline__ void show_part(float* part, const float (&sum)[ROWS / 2]) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = warp * 16 + lane / 4, row = lane % 4 * 2;
#pragma unroll
    for (u32 i = 0; i < ROWS / 2; i++) part[(row + i / 4 * 8 + i % 2) * PART_STRIDE + column + i % 4 / 2 * 8] = sum[i];
}

// Adds up this block's columns of all parts, four at a time, and writes them.
template <bool WIDE>
__device__ __forceinline__ void add_parts(void* y, u32 part, u32 first, const FewRowsShape& shape) {
    u32 share = blockIdx.x, n_shares = gridDim.x, n = shape.n, per_block = W_ROWS / n_shares / 4;
    for (u32 at = threadIdx.x; at < shape.n_rows * per_block; at += ALL_THREADS) {
        u32 row = at / per_block, column = (share * per_block + at % per_block) * 4;
        u32 place = part + (row * PART_STRIDE + column) * 4;
        float4 total = cluster_load4(place_in(place, 0));
        for (u32 i = 1; i < n_shares; i++) {
            float4 more = cluster_load4(place_in(place, i));
            total.x += more.x, total.y += more.y, total.z += more.z, total.w += more.w;
        }
        u64 to = (u64)row * n + first + column;
        if (n % 4 == 0) {
            if (first + column >= n) continue;
            if (WIDE) reinterpret_cast<float4*>(y)[to / 4] = total;
            else reinterpret_cast<Four*>(y)[to / 4] = {narrow(total.x, total.y), narrow(total.z, total.w)};
            continue;
        }
        float all[4] = {total.x, total.y, total.z, total.w};
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            if (first + column + i >= n) continue;
            if (WIDE) ((float*)y)[to + i] = all[i];
            else ((bf16*)y)[to + i] = narrow(all[i]);
        }
    }
}

template <u32 ROWS, u32 STAGES, bool WIDE>
__device__ __forceinline__ void few_rows(void* y, const TensorMap& of_w, const TensorMap& of_x, const FewRowsShape& shape) {
    extern __shared__ Eight shared[];
    __shared__ u64 barriers[2 * STAGES];
    Ring ring;
    ring.at = (shared_address(shared) + 1023) / 1024 * 1024;
    ring.full = shared_address(barriers), ring.empty = ring.full + STAGES * 8;
    u32 share = blockIdx.x, n_shares = gridDim.x, first = blockIdx.y * W_ROWS, warp = threadIdx.x / 32;
    u32 n_tiles = (shape.k + TILE_COLUMNS - 1) / TILE_COLUMNS;
    Steps steps;
    steps.from = (u64)n_tiles * share / n_shares;
    steps.count = (u64)n_tiles * (share + 1) / n_shares - steps.from;

    if (threadIdx.x == GROUPS_THREADS) {
        fetch_map(of_w);
        fetch_map(of_x);
        for (u32 i = 0; i < STAGES; i++) {
            barrier_start(ring.full + i * 8, 1);
            barrier_start(ring.empty + i * 8, GROUPS_THREADS / 32);
        }
        barriers_started();
    }
    next_may_come();
    __syncthreads();

    float sum[ROWS / 2] = {};
    if (warp < GROUPS_THREADS / 32) sum_up<ROWS, STAGES>(sum, ring, steps.count);
    else if (threadIdx.x == GROUPS_THREADS) bring_tiles<ROWS, STAGES>(ring, of_w, of_x, steps, first);
    __syncthreads();  // the ring is free: parts lie over it
    float* part = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + (ring.at - shared_address(shared)));
    if (warp < GROUPS_THREADS / 32) show_part<ROWS>(part, sum);
    if (n_shares > 1) {
        cluster_arrive();
        cluster_wait();
    } else {
        __syncthreads();
    }
    wait_for_last();
    add_parts<WIDE>(y, ring.at, first, shape);
    if (n_shares > 1) {  // nobody leaves while another reads here
        cluster_arrive();
        cluster_wait();
    }
}

#define FEW_ROWS(ROWS, STAGES, BLOCKS)                                                                                    \
    extern "C" __global__ void __launch_bounds__(ALL_THREADS, BLOCKS)                                                     \
    few_rows_##ROWS(bf16* y, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,                    \
                    FewRowsShape shape) {                                                                                 \
        few_rows<ROWS, STAGES, false>(y, w, x, shape);                                                                    \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(ALL_THREADS, BLOCKS)                                                     \
    few_rows_wide_##ROWS(float* y, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,              \
                         FewRowsShape shape) {                                                                            \
        few_rows<ROWS, STAGES, true>(y, w, x, shape);                                                                     \
    }
// Names: rows of x at most. A ring of some 100 KB leaves room for a second block.
FEW_ROWS(8, 6, 2)
FEW_ROWS(16, 6, 2)
FEW_ROWS(32, 5, 2)
FEW_ROWS(64, 4, 2)
FEW_ROWS(128, 3, 2)
