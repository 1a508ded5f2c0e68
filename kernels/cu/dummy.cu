// Generated weights: the same numbers as the CPU generates from the same key (SplitMix64, four numbers a
// draw).
__device__ __forceinline__ u64 mixed(u64 key) {
    u64 x = (key + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// A part of a larger matrix of `cols` columns: rows of `width` numbers. The first `n_real` rows are rows of the matrix, from
// `first_row`, and begin with `n_columns` numbers from `first_column`; the rest is zero. Columns are multiples of 4.
//
// The fields of `DummyPart` in ops/dummy.rs, in the same order.
struct DummyPart {
    u64 key;
    float scale;
    u32 cols, n_rows, n_real, first_row, width, first_column, n_columns;

    __device__ __forceinline__ bool has(u64 row, u32 column) const { return row < n_real && column < n_columns; }
    // The draw for four numbers of a row.
    __device__ __forceinline__ u64 draw(u64 row, u32 column) const { return mixed(key + (first_row + row) * cols + column); }
    __device__ __forceinline__ bf16 number(u64 draw) const { return narrow((float)(short)draw * scale); }
};

extern "C" __global__ void __launch_bounds__(256)
dummy_weights(bf16* out, u64 n, DummyPart part) {
    in_turn();
    u64 step = (u64)gridDim.x * blockDim.x * 4;
    for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4; at < n; at += step) {
        u64 row = at / part.width, column = at % part.width, draw = part.draw(row, part.first_column + column);
        for (u64 i = at; i < at + 4 && i < n; i++, draw >>= 16) out[i] = part.has(row, column) ? part.number(draw) : 0;
    }
}

// A part in FP8, in the layout of `Fp8Rows`. The greatest number of a whole row of the matrix becomes 448.
//
// With `has_blocks`, each 64 rows and 128 columns have a scale: that of the greatest number that can be drawn.
extern "C" __global__ void __launch_bounds__(256)
dummy_fp8(u32* out, float* scales, DummyPart part, u32 has_blocks) {
    in_turn();
    u32 lane = threadIdx.x % 32, n_blocks = (part.width + 127) / 128;
    u32 step = gridDim.x * (blockDim.x / 32);
    for (u32 row = (blockIdx.x * blockDim.x + threadIdx.x) / 32; row < part.n_rows; row += step) {
        bool is_real = row < part.n_real;
        u32 greatest = 0;
        for (u32 column = lane * 4; is_real && column < part.cols; column += 128) {
            u64 draw = part.draw(row, column);
            for (u32 i = 0; i < 4; i++, draw >>= 16) greatest = max(greatest, (u32)abs((int)(short)draw));
        }
        float largest = widen(narrow((float)__reduce_max_sync(FULL_WARP, greatest) * part.scale));
        float per_number = fminf(__fdiv_rn(448.f, largest), 3.402823466e38f);
        if (!has_blocks && lane == 0) scales[row] = is_real ? __fdiv_rn(largest, 448.f) : 0.f;
        if (has_blocks && row % 64 == 0)
            for (u32 block = lane; block < n_blocks; block += 32)
                scales[row / 64 * n_blocks + block] = part.has(row, block * 128) ? __fdiv_rn(part.scale * 32768.f, 448.f) : 0.f;
        // A lane has 16 numbers: a word for each of the four lanes of a tensor core.
        for (u32 column = lane * 16; column < part.width; column += 512) {
            u32 numbers[16];
            for (u32 of_draw = 0; of_draw < 16; of_draw += 4) {
                bool is_here = part.has(row, column + of_draw);
                u64 draw = part.draw(row, part.first_column + column + of_draw);
                for (u32 i = 0; i < 4; i++, draw >>= 16)
                    numbers[of_draw + i] = is_here ? narrow_f8(widen(part.number(draw)) * per_number) : 0;
            }
            u32* to = out + ((u64)row * part.width + column / 64 * 64 + column % 64 / 16 * 4) / 4;
            for (u32 pair = 0; pair < 8; pair += 2)
                to[pair * 2] = numbers[pair] | numbers[8 + pair] << 8 | numbers[pair + 1] << 16 | numbers[9 + pair] << 24;
        }
    }
}
