// How one given token of each row compares with the row's other tokens: its logit, and the number of tokens with
// greater logits. There is one block of threads for each row. No logit is greater than NaN, which is also the logit of
// an invalid token.
constexpr u32 THREADS = 1024;

struct Standing { u32 n_better; float logit; };

extern "C" __global__ void __launch_bounds__(THREADS)
count_better(Standing* standings, const float* logits, const u32* tokens, u32 width) {
    __shared__ u32 of_warp[THREADS / 32];
    in_turn();
    const float* row = logits + (u64)blockIdx.x * width;
    u32 token = tokens[blockIdx.x], n = 0;
    float own = token < width ? row[token] : __int_as_float(0x7fc00000);
#pragma unroll 4
    for (u32 at = threadIdx.x; at < width; at += THREADS) n += row[at] > own;
    n = __reduce_add_sync(FULL_WARP, n);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = n;
    __syncthreads();
    if (threadIdx.x != 0) return;
    for (u32 warp = 1; warp < THREADS / 32; warp++) n += of_warp[warp];
    standings[blockIdx.x] = {n, own};
}
