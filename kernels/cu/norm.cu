// RMS norm of rows. It can first add the output of the layer's previous part to the residual, also if that is still a sum of
// experts.
//
// One block of threads has a row. Each thread keeps its part of the row in registers, so that memory is read
// once. The norm uses the sum as stored in bf16, because later readers of the residual see the same numbers.
constexpr u32 ROW_PARTS = 8;  // groups of 8 numbers for each thread: rows of up to 16,384
constexpr u32 EARLY_PARTS = 2;  // those that may be requested before the previous kernel has ended

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

// The L1 cache may have the residual of an earlier layer.
__device__ __forceinline__ Eight from_l2(const bf16* from) {
    uint4 eight = __ldcg(reinterpret_cast<const uint4*>(from));
    return {eight.x, eight.y, eight.z, eight.w};
}

// Rows in memory.
struct Rows {
    const bf16* x;
    static constexpr u32 are_early = false;
    __device__ __forceinline__ void begin(u64) const {}
    __device__ __forceinline__ Eight of(u64 row, u32 at, u32 width) const { return load8(x + row * width + at); }
};

template <bool ADD, u32 PARTS, typename Source>
__device__ __forceinline__ void norm_row(bf16* out, bf16* residual, const Source& x, const bf16* weight, u32 width, float epsilon) {
    next_may_come();
    u64 row = (u64)blockIdx.x * width;
    Eight part[PARTS], by[EARLY_PARTS], before[EARLY_PARTS];
    float squares = 0.f;
#pragma unroll
    for (u32 i = 0; i < EARLY_PARTS; i++) {  // no kernel writes the weights
        u32 at = (i * ROW_THREADS + threadIdx.x) * 8;
        if (at >= width) break;
        by[i] = constant8(weight + at);
        if (ADD && x.are_early) before[i] = from_l2(residual + row + at);
    }
    if (x.are_early) x.begin(blockIdx.x);
    wait_for_last();
    if (!x.are_early) x.begin(blockIdx.x);
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        u32 at = (i * ROW_THREADS + threadIdx.x) * 8;
        if (at >= width) break;
        part[i] = x.of(blockIdx.x, at, width);
        if (ADD) {
            part[i] = added(part[i], x.are_early && i < EARLY_PARTS ? before[i % EARLY_PARTS] : load8(residual + row + at));
            store8(residual + row + at, part[i]);
        }
        add_squares(squares, part[i]);
    }
    float scale = norm_scale(block_sum(squares), width, epsilon);
#pragma unroll
    for (u32 i = 0; i < PARTS; i++) {
        u32 at = (i * ROW_THREADS + threadIdx.x) * 8;
        if (at >= width) break;
        store8(out + row + at, normed(part[i], scale, i < EARLY_PARTS ? by[i % EARLY_PARTS] : constant8(weight + at)));
    }
}

template <bool ADD, typename Source>
__device__ __forceinline__ void norm_row_of(bf16* out, bf16* residual, const Source& x, const bf16* weight, u32 width, float epsilon) {
    if (width <= EARLY_PARTS * ROW_THREADS * 8) norm_row<ADD, EARLY_PARTS>(out, residual, x, weight, width, epsilon);
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
