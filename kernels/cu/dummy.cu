// Generated weights: the same numbers as the CPU generates from the same key (SplitMix64, four numbers a
// draw).
__device__ __forceinline__ u64 mixed(u64 key) {
    u64 x = (key + 1) * 0x9e3779b97f4a7c15ull;
    x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ull;
    x = (x ^ (x >> 27)) * 0x94d049bb133111ebull;
    return x ^ (x >> 31);
}

// Part of a larger matrix: `out` has rows of `width` numbers. A row starts with `n_real` numbers of the
// matrix, from `first`, and `stride` further in each next row; the others are zero. All are multiples of 4.
extern "C" __global__ void __launch_bounds__(256)
dummy_weights(bf16* out, u64 n, u64 key, float scale, u64 first, u64 width, u64 n_real, u64 stride) {
    in_turn();
    u64 step = (u64)gridDim.x * blockDim.x * 4;
    for (u64 at = ((u64)blockIdx.x * blockDim.x + threadIdx.x) * 4; at < n; at += step) {
        u64 row = at / width, column = at % width, draw = mixed(key + first + row * stride + column);
        for (u64 i = at; i < at + 4 && i < n; i++, draw >>= 16)
            out[i] = column < n_real ? narrow((float)(short)draw * scale) : 0;
    }
}
