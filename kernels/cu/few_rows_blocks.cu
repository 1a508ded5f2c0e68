// The products of few_rows_fp8.cu, for a w with a scale for each 64 rows and 128 columns. A step has 128 columns, so
// each group of four warps has one scale for a step.
//
// The tensor cores add to sums that are divided by the step's scale: before a step, the sums are multiplied by the last
// scale divided by the next one. Sums of their own for each step would be a little quicker for up to 32 rows of x, but
// more rows have no registers for them, and a row's result must not depend on the number of rows.

// The scales of w: for each 64 rows, one for each step.
struct BlockScales {
    const float* at;
    static constexpr const float* of_rows = nullptr;

    // Those of a group of four warps, from a step on. Rows after the last have any scales: their sums are dropped.
    template <typename Ending>
    __device__ __forceinline__ const float* of_group(const Ending& ending, u32 step, const ProductShape& shape) const {
        Halves<UNIT> rows = ending.template halves<UNIT>(blockIdx.y, shape);
        u32 first = threadIdx.x / 128 == 0 ? rows.first : rows.second, n_steps = (shape.k + STEP_COLUMNS - 1) / STEP_COLUMNS;
        return at + (u64)(min(first, shape.n - 1) / UNIT) * n_steps + step;
    }
};

// A divisor in place of a scale near 0: numbers that are so small change no sum.
__device__ __forceinline__ float divisor(float scale) {
    constexpr float LEAST = 1.2621774e-29f;  // 2 to the power of -96
    return fabsf(scale) < LEAST ? LEAST : scale;
}

template <u32 N>
__device__ __forceinline__ void multiply_by(float (&sum)[N], float factor) {
#pragma unroll
    for (u32 i = 0; i < N; i++) sum[i] *= factor;
}

// Sums a group's 64 rows of w. With several shares, this is a partial sum. While one group of columns is multiplied,
// the next is widened.
template <u32 ROWS, u32 STAGES, typename GroupScales>
__device__ __forceinline__ void sum_up(float (&sum)[ROWS / 2], const Ring& ring, u32 count, const GroupScales& scales) {
    constexpr u32 X_BYTES = ROWS * TILE_ROW_BYTES, STAGE_BYTES = W_BYTES + 2 * X_BYTES;
    u32 lane = threadIdx.x % 32, stage = 0, parity = 0;
    u32 place = (threadIdx.x / 32 * 16 + lane / 4) * TILE_COLUMNS + lane % 4 * 16;
    u32 first[16], second[16];
    auto widen_first = [&] {
        barrier_wait(ring.full + stage * 8, parity);
        widen_group(first, ring.at + stage * STAGE_BYTES + place);
    };
    float scale = 1.f, ratio = 1.f;  // this step's, and the last one divided by it
    if (count > 0) {
        scale = divisor(scales[0]);
        widen_first();
    }
    for (u32 nth = 0; nth < count; nth++) {
        u32 tile = ring.at + stage * STAGE_BYTES, x = tile + W_BYTES, last = stage;
        multiply_by(sum, ratio);
        multiply_group(sum, first, tile_of(x, 16));
        widen_group(second, tile + place + W_GROUP_BYTES);
        multiply_group(sum, second, tile_of(x + X_BYTES, 16));
        products_done_but<1>();
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (nth + 1 < count) {
            float next = divisor(scales[nth + 1]);
            widen_first();
            ratio = __fdividef(scale, next), scale = next;
        }
        products_done_but<0>();
        held(sum);
        if (lane == 0) barrier_arrive(ring.empty + last * 8);
    }
    multiply_by(sum, scale);
}

FEW_ROWS_FP8_FAMILY(few_rows_blocks, BlockScales)
