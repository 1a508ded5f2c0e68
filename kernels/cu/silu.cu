// out = silu(gate) * up. Each row of the input has gate, then up.
extern "C" __global__ void __launch_bounds__(256)
silu_mul(bf16* out, const bf16* gate_up, u32 width) {
    in_turn();
    u32 at = (blockIdx.x * blockDim.x + threadIdx.x) * 8;
    if (at >= width) return;
    const bf16* row = gate_up + (u64)blockIdx.y * 2 * width;
    Eight gate = load8(row + at), up = load8(row + width + at), result;
#pragma unroll
    for (int j = 0; j < 4; j++) {
        float a = low(gate.pair[j]), b = high(gate.pair[j]);
        a = a / (1.f + __expf(-a)) * low(up.pair[j]);
        b = b / (1.f + __expf(-b)) * high(up.pair[j]);
        result.pair[j] = narrow(a, b);
    }
    store8(out + (u64)blockIdx.y * width + at, result);
}
