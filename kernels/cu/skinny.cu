// y = x * transpose(w), for 1 to 8 rows of x: every weight is read once, and reading it is all the time there is.
//
// w is [n][k], as checkpoints have it. A warp takes 16 rows of w and a share of k; the warps of a block share k and add
// up at the end. Weights go from memory straight into the registers that the tensor core wants: a lane loads 16 bytes
// of a row, whose order along k is its own, and loads x in the same order. x is small and stays in the caches.
// A block does TILES groups of 16 rows of w, so that x is read once for all of them.
template <u32 WARPS, u32 TILES, u32 UNROLL, bool WIDE>
__device__ __forceinline__ void skinny(void* y, const bf16* w, const bf16* x, u32 n, u32 k, u32 n_rows) {
    __shared__ float part[WARPS][TILES * 16 * 8];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 first = blockIdx.x * TILES * 16;

    const bf16* rows[TILES][2];
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++)
#pragma unroll
        for (u32 half = 0; half < 2; half++)  // rows past the end are read as the last, and not written
            rows[tile][half] = w + (u64)min(first + tile * 16 + half * 8 + g, n - 1) * k + t * 8;
    const bf16* of_x = x + (u64)min(g, n_rows - 1) * k + t * 8;

    float sum[TILES][4] = {};
    Eight weights[UNROLL][TILES][2];
    auto load = [&](u32 turn) {
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) {
            u32 at = turn + i * 32;
            bool here = at + t * 8 < k;
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++)
#pragma unroll
                for (u32 half = 0; half < 2; half++)
                    weights[i][tile][half] = here ? constant8(rows[tile][half] + at) : Eight{0, 0, 0, 0};
        }
    };
    // Weights do not come from the kernel before, so the first ones are on their way while it ends.
    next_may_come();
    load(warp * UNROLL * 32);
    wait_for_last();
    // Warps take turns of UNROLL * 32 numbers along k, so that together they read rows in long runs.
    for (u32 turn = warp * UNROLL * 32; turn < k; turn += WARPS * UNROLL * 32) {
        Eight numbers[UNROLL];
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) {
            u32 at = turn + i * 32;
            bool here = at + t * 8 < k && g < n_rows;
            numbers[i] = here ? load8(of_x + at) : Eight{0, 0, 0, 0};
        }
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) {
            u32 next = turn + WARPS * UNROLL * 32 + i * 32;
            bool here = next + t * 8 < k;
#pragma unroll
            for (u32 tile = 0; tile < TILES; tile++) {
                Eight &a = weights[i][tile][0], &b = weights[i][tile][1], &v = numbers[i];
                mma(sum[tile], a.pair[0], b.pair[0], a.pair[1], b.pair[1], v.pair[0], v.pair[1]);
                mma(sum[tile], a.pair[2], b.pair[2], a.pair[3], b.pair[3], v.pair[2], v.pair[3]);
                // As soon as these are used, the ones of the next turn take their place.
                if (here) {
                    a = constant8(rows[tile][0] + next);
                    b = constant8(rows[tile][1] + next);
                } else {
                    a = b = Eight{0, 0, 0, 0};
                }
            }
        }
    }
    // part[warp][row of x][row of w]
#pragma unroll
    for (u32 tile = 0; tile < TILES; tile++)
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            part[warp][(2 * t + i % 2) * TILES * 16 + tile * 16 + g + i / 2 * 8] = sum[tile][i];
    __syncthreads();
    for (u32 at = threadIdx.x; at < n_rows * TILES * 16; at += WARPS * 32) {
        u32 row = at / (TILES * 16), column = first + at % (TILES * 16);
        float total = 0.f;
#pragma unroll
        for (u32 i = 0; i < WARPS; i++) total += part[i][at];
        if (column >= n) continue;
        if (WIDE) ((float*)y)[(u64)row * n + column] = total;
        else ((bf16*)y)[(u64)row * n + column] = narrow(total);
    }
}

#define SKINNY(NAME, WARPS, TILES, UNROLL, BLOCKS)                                                                        \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                      \
    skinny_##NAME(bf16* y, const bf16* __restrict__ w, const bf16* x, u32 n, u32 k, u32 n_rows) {            \
        skinny<WARPS, TILES, UNROLL, false>(y, w, x, n, k, n_rows);                                                       \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                      \
    skinny_wide_##NAME(float* y, const bf16* __restrict__ w, const bf16* x, u32 n, u32 k, u32 n_rows) {      \
        skinny<WARPS, TILES, UNROLL, true>(y, w, x, n, k, n_rows);                                                        \
    }
// Names: warps, groups of 16 rows, loads of 32 numbers in flight.
SKINNY(8x1x4, 8, 1, 4, 3)
SKINNY(4x1x4, 4, 1, 4, 6)
SKINNY(16x1x2, 16, 1, 2, 2)
SKINNY(8x1x2, 8, 1, 2, 4)
