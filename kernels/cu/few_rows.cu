// y = x * transpose(w), for up to 128 rows of x. Every weight is read once, and reading weights takes all the
// time.
//
// w is [n][k], as in checkpoints. few_rows.cuh describes how clusters share the work and end the sums. One
// warp of a block lets the copy engine load tiles of w and x through a ring. Two groups of four warps
// multiply them: 64 rows of w each are the first factor (M), the rows of x are the second (N).
//
// The bytes in flight decide the memory speed. A block keeps about 100 KB in flight, and two blocks share a
// multiprocessor. The first loads are issued while the previous kernel ends.
// The order of sums depends on the shape of w and the shares of k, not on the number of rows.

// One thread issues the loads of all tiles. The previous kernel does not write weights, so they are loaded
// while it ends.
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
    bring_steps<STAGES>(ring, steps.count, bring_w, bring_x);
}

// Sums a group's 64 rows of w. With several shares, this is a partial sum.
template <u32 ROWS, u32 STAGES, typename GroupScales>
__device__ __forceinline__ void sum_up(float (&sum)[ROWS / 2], const Ring& ring, u32 count, const GroupScales&) {
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
        few_rows<ROWS, STAGES, TILE_COLUMNS>(ending, pending, RowScales{nullptr}, w, x, shape);                                                \
    }
#define FEW_ROWS_OF(ROWS, STAGES, BLOCKS)                                                                                 \
    FEW_ROWS(few_rows, Sums<bf16>, ROWS, STAGES, BLOCKS)                                                                  \
    FEW_ROWS(few_rows_wide, Sums<float>, ROWS, STAGES, BLOCKS)                                                            \
    FEW_ROWS(few_rows_gated, Gated, ROWS, STAGES, BLOCKS)                                                                 \
    FEW_ROWS(few_rows_added, Added, ROWS, STAGES, BLOCKS)                                                                 \
    FEW_ROWS(few_rows_joined, const __grid_constant__ Joined, ROWS, STAGES, BLOCKS)                                       \
    FEW_ROWS(few_rows_heads, Heads, ROWS, STAGES, BLOCKS)
// The name has the ending and the maximum number of rows of x. A ring of about 100 KB leaves room for a
// second block.
FEW_ROWS_OF(8, 6, 2)
FEW_ROWS_OF(16, 6, 2)
FEW_ROWS_OF(32, 5, 2)
FEW_ROWS_OF(64, 4, 2)
FEW_ROWS_OF(128, 3, 2)
