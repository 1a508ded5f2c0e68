// Converts FP8 weights (e4m3), in the layout of `Fp8Rows` in ops/fp8.rs, to rows of k bf16 numbers, each
// times the scale of its row, or of its block of 64 rows and 128 columns.
//
// A thread loads a lane's 16 bytes of a group of 64 numbers: four of each 16 numbers. Four threads exchange
// theirs, so that each writes 16 contiguous numbers.
__device__ __forceinline__ float widened(u32 word, u32 byte) {
    u32 bits = word >> 8 * byte;
    // 2 to the power of 120: the difference of the exponents.
    return __uint_as_float((bits & 0x80) << 24 | (bits & 0x7f) << 20) * 1.329227995784916e36f;
}

struct RowScales {
    const float* at;
    __device__ __forceinline__ float of(u64 row, u32) const { return at[row]; }
};
struct BlockScales {
    const float* at;
    u32 of_row;
    __device__ __forceinline__ float of(u64 row, u32 column) const { return at[row / 64 * of_row + column / 128]; }
};

template <typename Scales>
__device__ __forceinline__ void widen_rows(bf16* out, const bf16* w, const Scales& scales, u32 n, u32 k, u32 width) {
    in_turn();
    u32 of_row = width / 16, t = threadIdx.x % 4;
    u64 n_chunks = (u64)n * of_row, step = (u64)gridDim.x * blockDim.x;
    // Whole blocks of threads loop together.
    for (u64 first = (u64)blockIdx.x * blockDim.x; first < n_chunks; first += step) {
        u64 chunk = first + threadIdx.x;
        bool is_here = chunk < n_chunks;
        u64 row = is_here ? chunk / of_row : 0;
        u32 column = is_here ? chunk % of_row * 16 : 0;
        Eight eight = is_here ? once8(w + chunk * 8) : Eight{0, 0, 0, 0};
        float scale = is_here ? scales.of(row, column) : 0.f;
        Eight low, high;
#pragma unroll
        for (u32 r = 0; r < 4; r++) {
            u32 other = t ^ r, mine = 0;
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (i == other) mine = eight.pair[i];
            u32 theirs = __shfl_xor_sync(FULL_WARP, mine, r);
            u32 first_pair = narrow(widened(theirs, 0) * scale, widened(theirs, 2) * scale);
            u32 second_pair = narrow(widened(theirs, 1) * scale, widened(theirs, 3) * scale);
#pragma unroll
            for (u32 i = 0; i < 4; i++)
                if (i == other) low.pair[i] = first_pair, high.pair[i] = second_pair;
        }
        // The group's four threads have its 64 columns: 16 each.
        column = column / 64 * 64 + t * 16;
        if (is_here && column < k) store8(out + row * k + column, low);
        if (is_here && column + 8 < k) store8(out + row * k + column + 8, high);
    }
}

extern "C" __global__ void __launch_bounds__(256)
widen_fp8(bf16* out, const bf16* w, const float* scales, u32 n, u32 k, u32 width) {
    widen_rows(out, w, RowScales{scales}, n, k, width);
}

extern "C" __global__ void __launch_bounds__(256)
widen_fp8_blocks(bf16* out, const bf16* w, const float* scales, u32 n, u32 k, u32 width) {
    widen_rows(out, w, BlockScales{scales, (k + 127) / 128}, n, k, width);
}
