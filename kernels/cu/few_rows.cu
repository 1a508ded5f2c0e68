// y = x * transpose(w), for up to 128 rows of x: every weight is read once, and reading it is all the time there is.
//
// w is [n][k], as checkpoints have it. How clusters share the work, and what becomes of the sums: few_rows.cuh. One warp of
// a block has the copy engine bring tiles of w and x through a ring; two groups of four warps multiply them, 64 rows of w
// each, as the tall side: the rows of x are the flat one.
//
// What is asked for at once decides how fast memory is: a block keeps some 100 KB on the way, and two blocks share a
// multiprocessor. The first of them are asked for while the kernel before ends.
// The order of sums depends on the shape of w and the shares of k, not on the number of rows.

// One thread has all tiles brought. Weights do not come from the kernel before: they are asked for while it ends.
template <u32 ROWS, u32 STAGES, u32 COLUMNS>
__device__ __forceinline__ void bring_tiles(const Ring& ring, const TensorMap& of_w, const TensorMap& of_x, const Steps<COLUMNS>& steps, const Halves<UNIT>& rows) {
    constexpr u32 W_BYTES = W_ROWS * TILE_ROW_BYTES, STAGE_BYTES = W_BYTES + ROWS * TILE_ROW_BYTES;
    auto bring_w = [&](u32 nth, u32 stage) {
        u32 to = ring.at + stage * STAGE_BYTES, column = steps.column(nth), full = ring.full + stage * 8;
        barrier_expect(full, STAGE_BYTES);
        copy_tile(to, of_w, column, rows.first, full, EVICT_FIRST);
        copy_tile(to + W_BYTES / 2, of_w, column, rows.second, full, EVICT_FIRST);
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
    u32 lane = threadIdx.x % 32, stage = 0, parity = 0, last = 0;
    for (u32 nth = 0; nth < count; nth++) {
        multiply_tiles<ROWS>(sum, ring, stage, parity);
        if (nth > 0 && lane == 0) barrier_arrive(ring.empty + last * 8);
        last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    products_done_but<0>();
    held(sum);
}

#define FEW_ROWS(NAME, ENDING, ROWS, STAGES, BLOCKS)                                                                                \
    extern "C" __global__ void __launch_bounds__(ALL_THREADS, BLOCKS)                                                               \
    NAME##_##ROWS(ENDING ending, PendingNormArgs pending, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, \
                  ProductShape shape) {                                                                                             \
        few_rows<ROWS, STAGES, TILE_COLUMNS>(ending, pending, nullptr, w, x, shape);                                                \
    }
#define FEW_ROWS_OF(ROWS, STAGES, BLOCKS)                                                                                 \
    FEW_ROWS(few_rows, Sums<bf16>, ROWS, STAGES, BLOCKS)                                                                  \
    FEW_ROWS(few_rows_wide, Sums<float>, ROWS, STAGES, BLOCKS)                                                            \
    FEW_ROWS(few_rows_gated, Gated, ROWS, STAGES, BLOCKS)                                                                 \
    FEW_ROWS(few_rows_added, Added, ROWS, STAGES, BLOCKS)                                                                 \
    FEW_ROWS(few_rows_joined, const __grid_constant__ Joined, ROWS, STAGES, BLOCKS)                                       \
    FEW_ROWS(few_rows_heads, Heads, ROWS, STAGES, BLOCKS)
// Names: what comes after, and rows of x at most. A ring of some 100 KB leaves room for a second block.
FEW_ROWS_OF(8, 6, 2)
FEW_ROWS_OF(16, 6, 2)
FEW_ROWS_OF(32, 5, 2)
FEW_ROWS_OF(64, 4, 2)
FEW_ROWS_OF(128, 3, 2)
