// Tensor cores by mma.sync, on every GPU from sm_80 on, and copies that bypass registers.
//
// One mma is c[16][8] += a[16][16] * b[16][8]. With g = lane / 4 and t = lane % 4, a lane holds
//   a: rows g, g + 8, g, g + 8; columns 2t, 2t + 1 of the first eight (twice), then of the second eight
//   b: rows 2t, 2t + 1 of the first eight, then of the second eight; column g
//   c: row g, columns 2t, 2t + 1; then row g + 8
// The order of the 16 summed numbers is free, but must be the same in a and b.
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// The lower halves, or the upper halves, of two pairs.
__device__ __forceinline__ u32 lower(u32 a, u32 b) { return __byte_perm(a, b, 0x5410); }
__device__ __forceinline__ u32 upper(u32 a, u32 b) { return __byte_perm(a, b, 0x7632); }

// Transposes an 8 by 8 matrix across a warp.
__device__ __forceinline__ u32 transposed(u32 x) {
    u32 y;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(y) : "r"(x));
    return y;
}

__device__ __forceinline__ u32 shared_address(const void* at) { return (u32)__cvta_generic_to_shared(at); }

// Copies 16 bytes into shared memory. Writes zeroes and reads nothing if `wanted` is false.
__device__ __forceinline__ void copy16(u32 to, const void* from, bool wanted) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(wanted ? 16 : 0));
}
__device__ __forceinline__ void copy4(u32 to, const void* from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"(to), "l"(from));
}
__device__ __forceinline__ void put4(u32 to, u32 word) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(to), "r"(word) : "memory"); }
__device__ __forceinline__ void copies_committed() { asm volatile("cp.async.commit_group;"); }
template <u32 N>
__device__ __forceinline__ void copies_landed_but() { asm volatile("cp.async.wait_group %0;" ::"n"(N)); }

__device__ __forceinline__ void matrices(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}
__device__ __forceinline__ void matrices_transposed(u32 (&x)[4], u32 at) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(at));
}

// Two to the power of x, as softmax needs it: accurate to about 2^-22, and 0 for very small results.
__device__ __forceinline__ float power2(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}
#define LOG2E 1.4426950408889634f
