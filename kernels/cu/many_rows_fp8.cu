// y = x * transpose(w * scales), for many rows of x, with both factors in FP8 (e4m3). It works like many_rows.cu,
// with tiles of 128 columns in place of 64.
//
// w is in the layout of `Fp8Rows` in ops/fp8.rs, and each of its rows has a scale. `quantize_rows` writes x in the
// same layout, so that the order of numbers within a group of 64 does not matter, with a scale for each row and
// each 128 of k. The tensor cores add up 128 of k with fewer bits than f32 has; these parts are added in f32, times
// the scale of x.
// See `docs/decisions/0031-activations-in-fp8.md`.
MANY_ROWS_FP8_OF(many_rows_fp8, WScales::ROWS)

constexpr u32 ROUND_THREADS = 256;

// Writes rows of bf16 as rows in FP8, and their scales.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS)
quantize_rows(u32* out, float* scales, const bf16* x, QuantizedShape shape) {
    in_turn();
    quantize(out, scales, RowsOnce{x, shape.k}, shape, blockIdx.x, gridDim.x);
}
