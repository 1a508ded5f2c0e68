// x[row] += bias
extern "C" __global__ void __launch_bounds__(256)
add_bias(bf16* x, const bf16* bias, u32 width) {
    in_turn();
    u32 at = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= width) return;
    bf16* row = x + (u64)blockIdx.y * width;
    Eight a = load8(row + at), b = load8(bias + at);
#pragma unroll
    for (int j = 0; j < 4; j++) a.pair[j] = narrow(low(a.pair[j]) + low(b.pair[j]), high(a.pair[j]) + high(b.pair[j]));
    store8(row + at, a);
}
