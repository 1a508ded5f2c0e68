// RMS norm of rows. It can first add the output of the layer's previous part to the residual, also if that is still a sum of
// experts.
//
// One block of threads has a row. Each thread keeps its part of the row in registers, so that memory is read
// once. The norm uses the sum as stored in bf16, because later readers of the residual see the same numbers.
constexpr u32 ROW_THREADS = 256;
constexpr u32 ROW_PARTS = 8;  // groups of 8 numbers for each thread: rows of up to 16,384

__device__ __forceinline__ float block_sum(float x) {
    __shared__ float of_warp[ROW_THREADS / 32];
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (u32 warp = 0; warp < ROW_THREADS / 32; warp++) sum += of_warp[warp];
    return sum;
}

// Rows in memory.
struct Rows {
    const bf16* x;
    __device__ __forceinline__ Eight of(u64 row, u32 at, u32 width) const { return load8(x + row * width + at); }
};

template <bool ADD, u32 PARTS, typename Source>
__device__ __forceinline__ void norm_row(bf16* out, bf16* residual, const Source& x, const bf16* weight, u32 width, float epsilon) {
    in_turn();
    u64 row = (u64)blockIdx.x * width;
    Eight part[PARTS];
    float squares = 0.f;
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        u32 at = (i * ROW_THREADS + threadIdx.x) * 8;
        if (at >= width) break;
        part[i] = x.of(blockIdx.x, at, width);
        if (ADD) {
            Eight before = load8(residual + row + at);
#pragma unroll
            for (int j = 0; j < 4; j++)
                part[i].pair[j] = narrow(low(part[i].pair[j]) + low(before.pair[j]), high(part[i].pair[j]) + high(before.pair[j]));
            store8(residual + row + at, part[i]);
        }
#pragma unroll
        for (int j = 0; j < 4; j++) {
            float a = low(part[i].pair[j]), b = high(part[i].pair[j]);
            squares += a * a + b * b;
        }
    }
    float scale = rsqrtf(block_sum(squares) / width + epsilon);
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        u32 at = (i * ROW_THREADS + threadIdx.x) * 8;
        if (at >= width) break;
        Eight by = load8(weight + at), normed;
#pragma unroll
        for (int j = 0; j < 4; j++)
            normed.pair[j] = narrow(low(part[i].pair[j]) * scale * low(by.pair[j]), high(part[i].pair[j]) * scale * high(by.pair[j]));
        store8(out + row + at, normed);
    }
}

template <bool ADD, typename Source>
__device__ __forceinline__ void norm_row_of(bf16* out, bf16* residual, const Source& x, const bf16* weight, u32 width, float epsilon) {
    if (width <= 2 * ROW_THREADS * 8) norm_row<ADD, 2>(out, residual, x, weight, width, epsilon);
    else norm_row<ADD, ROW_PARTS>(out, residual, x, weight, width, epsilon);
}

// out = norm(x)
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
rms_norm(bf16* out, const bf16* x, const bf16* weight, u32 width, float epsilon) {
    norm_row_of<false>(out, nullptr, Rows{x}, weight, width, epsilon);
}

// residual += x; out = norm(residual)
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
add_rms_norm(bf16* out, bf16* residual, const bf16* x, const bf16* weight,
             u32 width, float epsilon) {
    norm_row_of<true>(out, residual, Rows{x}, weight, width, epsilon);
}

// residual += the sums of experts; out = norm(residual)
extern "C" __global__ void __launch_bounds__(ROW_THREADS)
add_choices_rms_norm(bf16* out, bf16* residual, ChoiceSums x, const bf16* weight, u32 width, float epsilon) {
    norm_row_of<true>(out, residual, x, weight, width, epsilon);
}
