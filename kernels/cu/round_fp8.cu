// Rounds rows of bf16 as `quantize_rows` in many_rows_fp8.cu does, and keeps them in bf16. It runs on every GPU.
//
// From 2^-6 on, an e4m3 number has four significant bits; below, numbers are 2^-9 apart. Adding and subtracting
// a number whose last bit has that distance rounds to nearest, ties to even.
__device__ __forceinline__ float rounded(float x) {
    u32 exponent = max(__float_as_uint(x) >> 23 & 0xff, 127u - 6);
    float last = 1.5f * __uint_as_float((exponent + 20) << 23);
    return __fsub_rn(__fadd_rn(x, last), last);
}

extern "C" __global__ void __launch_bounds__(ROUND_THREADS)
round_rows(bf16* out, const bf16* x, u32 n_rows, u32 k) {
    in_turn();
    u32 of_row = (k + ROUND_GROUP - 1) / ROUND_GROUP * ROUND_LANES;
    u64 n_chunks = (u64)n_rows * of_row, step = (u64)gridDim.x * blockDim.x;
    // Whole blocks of threads loop together.
    for (u64 first = (u64)blockIdx.x * blockDim.x; first < n_chunks; first += step) {
        u64 chunk = first + threadIdx.x, row = chunk / of_row;
        u32 column = chunk % of_row * 8;
        bool is_here = chunk < n_chunks && column < k;
        Rounded eight = scaled(is_here ? load8(x + row * k + column) : Eight{0, 0, 0, 0});
        float scale = __uint_as_float(eight.exponent << 23);
        Eight given;
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            given.pair[i] = narrow(rounded(eight.number[2 * i]) * scale, rounded(eight.number[2 * i + 1]) * scale);
        if (is_here) store8(out + row * k + column, given);
    }
}
