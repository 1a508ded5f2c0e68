// Common code of many_rows_fp8.cu and experts_ring_fp8.cu: from rows of bf16 to rows in FP8 (e4m3), in the layout of `Fp8Rows` in
// ops/fp8.rs, with a scale for each row and each 128 of k.
__device__ __forceinline__ u32 in_fp8(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// width: the bytes of a row in FP8. scales_apart: the distance between the scales of two groups of 128.
struct QuantizedShape { u32 n_rows, k, width, scales_apart; };

// Rows that are read once.
struct RowsOnce {
    const bf16* x;
    u32 k;
    __device__ __forceinline__ Eight of(u64 row, u32 column) const { return once8(x + row * k + column); }
};

// Eight numbers of a lane in FP8: the words of two lanes are the numbers of both. `exponent` is that of the group's scale.
struct QuantizedEight {
    u32 words[2], exponent;
    __device__ __forceinline__ float scale() const { return __uint_as_float(exponent << 23); }
};

// A lane has four pairs, which are 16 bytes apart. Two lanes exchange theirs, because a word has a pair of each: their first
// numbers in bytes 0 and 1, their second in bytes 2 and 3. The even lane makes the words of pairs 0 and 2, the odd lane those of
// pairs 1 and 3: they are 32 bytes apart.
__device__ __forceinline__ QuantizedEight quantized8(Eight unrounded) {
    Rounded eight = scaled(unrounded);
    u32 pairs[4], odd = threadIdx.x % 2;
    QuantizedEight made;
    made.exponent = eight.exponent;
#pragma unroll
    for (u32 i = 0; i < 4; i++) pairs[i] = in_fp8(eight.number[2 * i], eight.number[2 * i + 1]);
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        u32 mine = odd ? pairs[2 * i + 1] : pairs[2 * i];
        u32 theirs = __shfl_xor_sync(FULL_WARP, odd ? pairs[2 * i] : pairs[2 * i + 1], 1);
        made.words[i] = odd ? __byte_perm(theirs, mine, 0x5140) : __byte_perm(mine, theirs, 0x5140);
    }
    return made;
}

// The byte of a lane's first word, within the 128 of its group. `chunk` is the number of the lane's eight numbers in the group.
__device__ __forceinline__ u32 quantized_place(u32 chunk) { return chunk / 8 * 64 + chunk % 2 * 16 + chunk % 8 / 2 * 4; }

// Writes the rows. `n_blocks` blocks share them, and this is block number `block`.
template <typename Source>
__device__ __forceinline__ void quantize(u32* out, float* scales, const Source& x, const QuantizedShape& shape, u32 block, u32 n_blocks) {
    u32 of_row = (shape.k + ROUND_GROUP - 1) / ROUND_GROUP * ROUND_LANES;
    u64 n_chunks = (u64)shape.n_rows * of_row, step = (u64)n_blocks * blockDim.x;
    // Whole blocks of threads loop together.
    for (u64 first = (u64)block * blockDim.x; first < n_chunks; first += step) {
        u64 chunk = first + threadIdx.x, row = chunk / of_row;
        u32 column = chunk % of_row * 8;
        bool is_here = chunk < n_chunks;
        QuantizedEight eight = quantized8(is_here && column < shape.k ? x.of(row, column) : Eight{0, 0, 0, 0});
        if (!is_here) continue;
        if (column < shape.width) {
            u32* to = out + (row * shape.width + column / ROUND_GROUP * ROUND_GROUP + quantized_place(chunk % of_row % ROUND_LANES)) / 4;
            to[0] = eight.words[0], to[8] = eight.words[1];
        }
        if (threadIdx.x % ROUND_LANES == 0) scales[column / ROUND_GROUP * shape.scales_apart + row] = eight.scale();
    }
}
