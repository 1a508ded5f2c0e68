// Copies one row of the table for each token. An invalid token gives a row of NaN, so that the error is
// visible.
extern "C" __global__ void __launch_bounds__(128)
embedding(bf16* out, const bf16* table, const u32* tokens, u32 width, u32 n_tokens) {
    in_turn();
    u32 token = tokens[blockIdx.x];
    bf16* row = out + (u64)blockIdx.x * width;
    const bf16* from = table + (u64)token * width;
    Eight nan = {0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u, 0x7fc07fc0u};
    for (u32 at = threadIdx.x * 8; at < width; at += blockDim.x * 8)
        store8(row + at, token < n_tokens ? load8(from + at) : nan);
}
