// y = x * transpose(w * scales), for many rows of x, with both factors in FP8 (e4m3). It works like many_rows.cu,
// with tiles of 128 columns in place of 64.
//
// w is in the layout of `Fp8Rows` in ops/fp8.rs, and each of its rows has a scale. `quantize_rows` writes x in the
// same layout, so that the order of numbers within a group of 64 does not matter, with a scale for each row and
// each 128 of k. The tensor cores add up 128 of k with fewer bits than f32 has; these parts are added in f32, times
// the scale of x.
// See `docs/decisions/0031-activations-in-fp8.md`.
MANY_ROWS_FP8_OF(many_rows_fp8, WScales::ROWS)

__device__ __forceinline__ u32 in_fp8(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

constexpr u32 ROUND_THREADS = 256;

// Writes rows of bf16 as rows in FP8, `width` bytes each, and their scales.
//
// A lane has eight numbers: four pairs, which are 16 bytes apart. Two lanes exchange theirs, because a word has a
// pair of each: their first numbers in bytes 0 and 1, their second in bytes 2 and 3.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS)
quantize_rows(u32* out, float* scales, const bf16* x, u32 n_rows, u32 k, u32 width, u32 scales_apart) {
    in_turn();
    u32 of_row = (k + ROUND_GROUP - 1) / ROUND_GROUP * ROUND_LANES, odd = threadIdx.x % 2;
    u64 n_chunks = (u64)n_rows * of_row, step = (u64)gridDim.x * blockDim.x;
    // Whole blocks of threads loop together.
    for (u64 first = (u64)blockIdx.x * blockDim.x; first < n_chunks; first += step) {
        u64 chunk = first + threadIdx.x, row = chunk / of_row;
        u32 column = chunk % of_row * 8;
        bool is_here = chunk < n_chunks;
        Rounded eight = scaled(is_here && column < k ? once8(x + row * k + column) : Eight{0, 0, 0, 0});
        u32 pairs[4], words[2];
#pragma unroll
        for (u32 i = 0; i < 4; i++) pairs[i] = in_fp8(eight.number[2 * i], eight.number[2 * i + 1]);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            // The even lane makes the words of pairs 0 and 2, the odd lane those of pairs 1 and 3.
            u32 mine = odd ? pairs[2 * i + 1] : pairs[2 * i];
            u32 theirs = __shfl_xor_sync(FULL_WARP, odd ? pairs[2 * i] : pairs[2 * i + 1], 1);
            words[i] = odd ? __byte_perm(theirs, mine, 0x5140) : __byte_perm(mine, theirs, 0x5140);
        }
        if (!is_here) continue;
        if (column < width) {
            u32* to = out + (row * width + column / 64 * 64 + odd * 16 + column % 64 / 16 * 4) / 4;
            to[0] = words[0], to[8] = words[1];
        }
        if (threadIdx.x % ROUND_LANES == 0) scales[column / ROUND_GROUP * scales_apart + row] = __uint_as_float(eight.exponent << 23);
    }
}
