// y = x * transpose(w), for 1 to 8 rows of x. Every weight is read once, and reading weights takes all the
// time.
//
// w is [n][k], as in checkpoints. A block takes 16 rows of w, and each of its warps a share of k. Weights are
// loaded directly into the registers for the tensor core: a lane loads 16 bytes of a row, in its own order
// along k, and loads x in the same order. x is small and stays in the caches.
// One more warp loads the inputs of the ending while the others multiply, and then adds up their sums: each
// lane has four neighbouring numbers of a row.
constexpr u32 UNIT = 8, W_ROWS = 2 * UNIT, ROWS = 8, PART_STRIDE = W_ROWS + 4;

template <u32 WARPS, u32 UNROLL>
__device__ __forceinline__ void multiply(float (&sum)[4], const bf16* w, const bf16* x, const Halves<UNIT>& halves, const ProductShape& shape) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, k = shape.k;
    const bf16* rows[2];
#pragma unroll
    for (u32 half = 0; half < 2; half++)  // rows after the end read the last row and are not written
        rows[half] = w + (u64)min((half ? halves.second : halves.first) + g, shape.n - 1) * k + t * 8;
    const bf16* of_x = x + (u64)min(g, shape.n_rows - 1) * k + t * 8;

    Eight weights[UNROLL][2];
    // The previous kernel does not write weights, so the first ones are loaded while it ends.
#pragma unroll
    for (u32 i = 0; i < UNROLL; i++) {
        u32 at = (warp * UNROLL + i) * 32;
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            weights[i][half] = at + t * 8 < k ? constant8(rows[half] + at) : Eight{0, 0, 0, 0};
    }
    wait_for_last();
    Eight numbers[UNROLL];
    bool is_row = g < shape.n_rows;
#pragma unroll
    for (u32 i = 0; i < UNROLL; i++) {
        u32 at = (warp * UNROLL + i) * 32;
        numbers[i] = is_row && at + t * 8 < k ? load8(of_x + at) : Eight{0, 0, 0, 0};
    }
    // Warps take turns of UNROLL * 32 numbers along k, so that together they read rows in long runs.
    for (u32 turn = warp * UNROLL * 32; turn < k; turn += WARPS * UNROLL * 32) {
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) {
            u32 next = turn + WARPS * UNROLL * 32 + i * 32;
            Eight &a = weights[i][0], &b = weights[i][1], &v = numbers[i];
            mma(sum, a.pair[0], b.pair[0], a.pair[1], b.pair[1], v.pair[0], v.pair[1]);
            mma(sum, a.pair[2], b.pair[2], a.pair[3], b.pair[3], v.pair[2], v.pair[3]);
            // After use, these registers are loaded for the next turn. x is reloaded too: eight rows do not
            // stay in the L1 cache, and a warp that waits for L2 loads no weights.
            if (next + t * 8 < k) {
                a = constant8(rows[0] + next);
                b = constant8(rows[1] + next);
                v = is_row ? load8(of_x + next) : Eight{0, 0, 0, 0};
            } else {
                a = b = v = Eight{0, 0, 0, 0};
            }
        }
    }
}

template <u32 WARPS, u32 UNROLL, typename Ending>
__device__ __forceinline__ void skinny(const Ending& ending, const PendingNormArgs& pending, const bf16* w, const bf16* x, const ProductShape& shape) {
    __shared__ float part[WARPS][ROWS * PART_STRIDE];  // [row of x][row of w]
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4, nth = blockIdx.x;
    Halves<UNIT> halves = ending.template halves<UNIT>(nth, shape);
    next_may_come();
    if (warp < WARPS) {
        float sum[4] = {};
        multiply<WARPS, UNROLL>(sum, w, x, halves, shape);
#pragma unroll
        for (u32 i = 0; i < 4; i++) part[warp][(2 * t + i % 2) * PART_STRIDE + g + i / 2 * 8] = sum[i];
        __syncthreads();
        return;
    }
    wait_for_last();
    u32 row = lane / 4, column = halves.row_of(lane % 4 * 4);
    typename Ending::Before before = ending.before(row, column, shape);
    float scales[ROWS], scale = 1.f;
    pending.scales(scales, 0, shape.n_rows);
#pragma unroll
    for (u32 i = 0; i < ROWS; i++)
        if (i == row) scale = scales[i];
    __syncthreads();
    float total[4] = {};
#pragma unroll
    for (u32 i = 0; i < WARPS; i++) {
        float4 more = *reinterpret_cast<const float4*>(&part[i][row * PART_STRIDE + lane % 4 * 4]);
        total[0] += more.x, total[1] += more.y, total[2] += more.z, total[3] += more.w;
    }
#pragma unroll
    for (u32 i = 0; i < 4; i++) total[i] *= scale;
    if constexpr (is_joined<Ending>) ending.give(row, column, total, before, shape);
    ending.template end<UNIT>(nth, row, column, total, before, shape);
}

#define SKINNY(NAME, ENDING, WARPS, UNROLL, BLOCKS)                                                                                    \
    extern "C" __global__ void __launch_bounds__((WARPS + 1) * 32, BLOCKS)                                                             \
    NAME##_##WARPS##x##UNROLL(ENDING ending, PendingNormArgs pending, const bf16* __restrict__ w, const bf16* x, ProductShape shape) { \
        skinny<WARPS, UNROLL>(ending, pending, w, x, shape);                                                                           \
    }
#define SKINNY_OF(WARPS, UNROLL, BLOCKS)                                                                                  \
    SKINNY(skinny, Sums<bf16>, WARPS, UNROLL, BLOCKS)                                                                     \
    SKINNY(skinny_wide, Sums<float>, WARPS, UNROLL, BLOCKS)                                                               \
    SKINNY(skinny_gated, Gated, WARPS, UNROLL, BLOCKS)                                                                    \
    SKINNY(skinny_added, Added, WARPS, UNROLL, BLOCKS)                                                                    \
    SKINNY(skinny_joined, const __grid_constant__ Joined, WARPS, UNROLL, BLOCKS)                                          \
    SKINNY(skinny_heads, Heads, WARPS, UNROLL, BLOCKS)
// The name has the ending, the number of warps that multiply, and the loads of 32 numbers in flight.
SKINNY_OF(16, 2, 2)
SKINNY_OF(8, 4, 3)
SKINNY_OF(4, 4, 5)
SKINNY_OF(8, 2, 4)
