// The index of the greatest number of each row; the lowest index if several are equal. NaN counts as the
// greatest number, so that errors are visible.
//
// A number and its index form one integer key whose order is the wanted order. The greatest key of a row is
// found in two steps, so that many blocks of threads can read one long row.
constexpr u32 ARGMAX_THREADS = 256;

__device__ __forceinline__ u64 key_of(float x, u32 index) {
    u32 bits = __float_as_uint(x);
    u32 ordered = bits & 0x80000000u ? ~bits : bits | 0x80000000u;
    if (x != x) ordered = 0xffffffffu;
    if (x == 0.f) ordered = 0x80000000u;  // both zeros are equal
    return (u64)ordered << 32 | (u32)~index;
}

__device__ __forceinline__ u64 block_max(u64 key) {
    __shared__ u64 of_warp[ARGMAX_THREADS / 32];
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) {
        u64 other = __shfl_xor_sync(FULL_WARP, key, lane);
        key = other > key ? other : key;
    }
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = key;
    __syncthreads();
#pragma unroll
    for (u32 warp = 0; warp < ARGMAX_THREADS / 32; warp++) key = of_warp[warp] > key ? of_warp[warp] : key;
    return key;
}

extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
argmax_parts(u64* keys, const float* logits, u32 width, u32 part_width) {
    in_turn();
    u32 start = blockIdx.x * part_width, end = min(start + part_width, width);
    const float* row = logits + (u64)blockIdx.y * width;
    u64 key = 0;
    for (u32 at = start + threadIdx.x; at < end; at += ARGMAX_THREADS) {
        u64 here = key_of(row[at], at);
        key = here > key ? here : key;
    }
    key = block_max(key);
    if (threadIdx.x == 0) keys[(u64)blockIdx.y * gridDim.x + blockIdx.x] = key;
}

extern "C" __global__ void __launch_bounds__(ARGMAX_THREADS)
argmax_rows(u32* out, const u64* keys, u32 n_parts) {
    in_turn();
    u64 key = threadIdx.x < n_parts ? keys[(u64)blockIdx.x * n_parts + threadIdx.x] : 0;
    key = block_max(key);
    if (threadIdx.x == 0) out[blockIdx.x] = ~(u32)key;
}
