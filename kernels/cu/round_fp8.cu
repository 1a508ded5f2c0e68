// Rounds rows of bf16 as `quantize_rows` in many_rows_fp8.cu does, and keeps them in bf16. It runs on every GPU.
constexpr u32 ROUND_THREADS = 256;

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
        Eight given = rounded8(is_here ? load8(x + row * k + column) : Eight{0, 0, 0, 0});
        if (is_here) store8(out + row * k + column, given);
    }
}
