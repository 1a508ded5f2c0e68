// Weights that are made up: the same numbers as the processor makes of the same key (SplitMix64, four numbers a draw).
__device__ __forceinline__ u64 mixed(u64 key) {
    u64 x = (key + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

extern "C" __global__ void __launch_bounds__(256)
dummy_weights(bf16* out, u64 n, u64 key, float scale) {
    in_turn();
    u64 stride = (u64)gridDim.x * blockDim.x * 4;
    for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4; at < n; at += stride) {
        u64 draw = mixed(key + at);
        for (u64 i = at; i < at + 4 && i < n; i++, draw >>= 16) out[i] = narrow((float)(short)draw * scale);
    }
}
