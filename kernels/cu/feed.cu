// A step's tokens on the GPU, when the host does not know them yet because the previous step draws them.
//
// from[i] is the index of token i among the drawn tokens. With NOWHERE the host knows the token, and it is in
// `known`.

extern "C" __global__ void __launch_bounds__(256)
feed_tokens(u32* tokens, const u32* known, const u32* from, const u32* drawn, u32 n, u32 n_from, u32 n_drawn) {
    in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 place = i < n_from ? from[i] : NOWHERE;
    tokens[i] = place == NOWHERE ? known[i] : place < n_drawn ? drawn[place] : NOWHERE;
}

// Keeps the likeliest token of each row. If its logit is not finite, there is no token.
extern "C" __global__ void __launch_bounds__(256)
keep_tokens(u32* drawn, const u32* best, const float* logits, u32 width, u32 n) {
    in_turn();
    u32 i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    u32 token = best[i];
    float logit = token < width ? logits[(u64)i * width + token] : INF;
    drawn[i] = fabsf(logit) < INF ? token : NOWHERE;
}
