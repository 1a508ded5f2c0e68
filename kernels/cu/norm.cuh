// Common code of norm.cu and experts_few.cu: eight neighbouring numbers of a row that is added and normed.
//
// Both sum the squares of a row in the same order: each of ROW_THREADS threads adds those of its numbers, then each warp adds
// those of its threads, and the sums of the warps are added in order.
constexpr u32 ROW_THREADS = 256;

__device__ __forceinline__ Eight added(const Eight& x, const Eight& residual) {
    Eight sum;
#pragma unroll
    for (u32 j = 0; j < 4; j++) sum.pair[j] = narrow(low(x.pair[j]) + low(residual.pair[j]), high(x.pair[j]) + high(residual.pair[j]));
    return sum;
}

__device__ __forceinline__ void add_squares(float& squares, const Eight& x) {
#pragma unroll
    for (u32 j = 0; j < 4; j++) {
        float a = low(x.pair[j]), b = high(x.pair[j]);
        squares += a * a + b * b;
    }
}

__device__ __forceinline__ float norm_scale(float squares, u32 width, float epsilon) { return rsqrtf(squares / width + epsilon); }

__device__ __forceinline__ Eight normed(const Eight& x, float scale, const Eight& by) {
    Eight product;
#pragma unroll
    for (u32 j = 0; j < 4; j++) product.pair[j] = narrow(low(x.pair[j]) * scale * low(by.pair[j]), high(x.pair[j]) * scale * high(by.pair[j]));
    return product;
}
