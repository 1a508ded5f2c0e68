// KV pages: [K|V][kv_head][token][dim], with BLOCK_TOKENS tokens each.
constexpr u32 BLOCK_TOKENS = 16;

// A page has bf16 or e4m3 numbers. e4m3 has 8 bits and no scale here; numbers that are too large become the
// largest one. A lane moves 8 numbers at a time.
struct f8 { unsigned char bits; };
template <typename Kv>
struct EightOf;
template <>
struct EightOf<bf16> { typedef Eight Raw; };
template <>
struct EightOf<f8> { typedef Four Raw; };

__device__ __forceinline__ Eight once_raw(const bf16* from) { return once8(from); }
__device__ __forceinline__ Four once_raw(const f8* from) {
    Four four;
    asm volatile("ld.global.L1::no_allocate.L2::128B.v2.u32 {%0, %1}, [%2];" : "=r"(four.pair[0]), "=r"(four.pair[1]) : "l"(from) : "memory");
    return four;
}

// The bits of an e4m3 number, also of a subnormal, are those of a bf16 whose exponent is too small by 120.
// The conversion is exact and keeps the order.
__device__ __forceinline__ Eight widened(Eight raw) { return raw; }
__device__ __forceinline__ Eight widened(Four raw) {
    Eight eight;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 upper = __byte_perm(raw.pair[i / 2], 0, i % 2 ? 0x3424 : 0x1404);
        u32 bits = (upper & 0x80008000u) | ((upper >> 4) & 0x07f007f0u);
        asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(eight.pair[i]) : "r"(bits), "r"(0x7b807b80u), "r"(0x80008000u));
    }
    // A NaN among the eight makes all of them NaN, which marks the error.
    u32 none = ((raw.pair[0] & 0x7f7f7f7fu) + 0x01010101u) | ((raw.pair[1] & 0x7f7f7f7fu) + 0x01010101u);
    if (none & 0x80808080u) eight = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};
    return eight;
}

// Rounds to the nearest e4m3, ties to even.
__device__ __forceinline__ u32 narrow_f8(float wide) {
    u32 sign = __float_as_uint(wide) >> 24 & 0x80;
    float magnitude = fabsf(wide);
    if (magnitude != magnitude) return 0x7f;
    // A subnormal is a multiple of 2^-9. Around 2^14, f32 has no finer steps, so the addition rounds.
    if (magnitude < 0.015625f) return sign | (__float_as_uint(magnitude + 16384.f) - __float_as_uint(16384.f));
    u32 bits = __float_as_uint(fminf(magnitude, 448.f));
    return sign | (((bits + 0x7ffff + (bits >> 20 & 1)) >> 20) - (120 << 3));
}

// Store numbers in the format of memory.
__device__ __forceinline__ void store_rounded(bf16* to, float wide) { *to = narrow(wide); }
__device__ __forceinline__ void store_rounded(f8* to, float wide) { to->bits = narrow_f8(wide); }
__device__ __forceinline__ void store_rounded(bf16* to, const float (&wide)[8]) {
    Eight eight;
#pragma unroll
    for (u32 i = 0; i < 4; i++) eight.pair[i] = narrow(wide[2 * i], wide[2 * i + 1]);
    store8(to, eight);
}
__device__ __forceinline__ void store_rounded(f8* to, const float (&wide)[8]) {
    Four four = {};
#pragma unroll
    for (u32 i = 0; i < 8; i++) four.pair[i / 4] |= narrow_f8(wide[i]) << i % 4 * 8;
    *reinterpret_cast<Four*>(to) = four;
}

// The first of a sequence's pages that were made of latents. All threads of a warp call this.
__device__ __forceinline__ u32 first_page(const uint3* sequences, u32 sequence) {
    u32 n_before = 0;
    for (u32 i = threadIdx.x % 32; i < sequence; i += 32) n_before += (sequences[i].z + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    return __reduce_add_sync(FULL_WARP, n_before);
}
