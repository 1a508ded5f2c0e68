// The beginning of every kernel source: bf16 without a header, vectors of 16 bytes, reductions over a warp.
//
// bf16 is the upper half of an f32, so widening is a shift; narrowing is one PTX instruction, to nearest even.
// Nothing is included, so NVRTC needs no headers, and users need only the driver and libnvrtc.
typedef unsigned short bf16;
typedef unsigned int u32;
typedef unsigned long long u64;
typedef long long i64;

constexpr u32 FULL_WARP = 0xffffffffu;
// The number of what is not there.
#define NOWHERE 0xffffffffu
#define INF __int_as_float(0x7f800000)

// 8 bf16 numbers, the size of one load or store.
struct alignas(16) Eight { u32 pair[4]; };
struct alignas(8) Four { u32 pair[2]; };

__device__ __forceinline__ float low(u32 pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float high(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }
__device__ __forceinline__ float widen(bf16 narrow) { return __uint_as_float((u32)narrow << 16); }
__device__ __forceinline__ void widen4(float (&x)[4], Four four) {
    x[0] = low(four.pair[0]), x[1] = high(four.pair[0]), x[2] = low(four.pair[1]), x[3] = high(four.pair[1]);
}

__device__ __forceinline__ u32 narrow(float low, float high) {
    u32 pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ bf16 narrow(float wide) { return (bf16)narrow(wide, 0.f); }

__device__ __forceinline__ Eight load8(const bf16* from) { return *reinterpret_cast<const Eight*>(from); }
__device__ __forceinline__ void store8(bf16* to, Eight eight) { *reinterpret_cast<Eight*>(to) = eight; }

// Loads of data that is read once, so it must not evict other data from the cache. `constant8` is for data
// that no kernel writes: it may be loaded before the previous kernel has ended. Computed data is loaded by
// plain loads through pointers without __restrict__, which would allow the compiler the same early loads.
__device__ __forceinline__ Eight constant8(const bf16* from) {
    Eight eight;
    asm volatile("ld.global.nc.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(eight.pair[0]), "=r"(eight.pair[1]), "=r"(eight.pair[2]), "=r"(eight.pair[3])
                 : "l"(from));
    return eight;
}

__device__ __forceinline__ Eight once8(const bf16* from) {
    Eight eight;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(eight.pair[0]), "=r"(eight.pair[1]), "=r"(eight.pair[2]), "=r"(eight.pair[3])
                 : "l"(from)
                 : "memory");
    return eight;
}

// The time of a GPU's clock.
__device__ __forceinline__ u64 nanoseconds() {
    u64 now;
    asm volatile("mov.u64 %0, %globaltimer;" : "=l"(now));
    return now;
}

// From sm_90 on, a kernel is launched while the previous one still runs, so that no time passes between them.
// Each kernel says when the next one may start. It waits for the previous one before it reads computed data
// or writes anything. On older GPUs the launch itself waits.
__device__ __forceinline__ void next_may_come() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}
__device__ __forceinline__ void wait_for_last() {
#if __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}
__device__ __forceinline__ void in_turn() {
    next_may_come();
    wait_for_last();
}

// silu(gate) * up with a fast quotient. The quotient is zero from 2^126 on, where the exact result is almost
// zero.
__device__ __forceinline__ float gated(float gate, float up) { return __fdividef(gate, 1.f + __expf(-gate)) * up; }

__device__ __forceinline__ float warp_sum(float x) {
#pragma unroll
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}
