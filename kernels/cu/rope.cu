// The work between the projection of q, k and v and attention: norms of heads, rotation, and writing K and V
// into pages.
//
// A row of `qkv` has all heads of q, then of k, then of v. q is rotated in place; k and v are written to
// their page: [K|V][kv_head][token][dim]. A block of threads computes one token. A thread has 8 numbers of
// the first half of a head and the 8 of the second half that rotate with them, and the same of further heads;
// so it reads its cosines and sines once.
// A slot is block * BLOCK_TOKENS + token. A slot that is not below `n_slots` is not written (rows of
// padding).
struct RopeShape { u32 n_q_heads, n_kv_heads, n_slots, n_positions; float epsilon; };

struct Halves { float first[8], second[8]; };

__device__ __forceinline__ void widen8(float (&wide)[8], Eight narrow) {
#pragma unroll
    for (u32 i = 0; i < 4; i++) wide[2 * i] = low(narrow.pair[i]), wide[2 * i + 1] = high(narrow.pair[i]);
}
// Scales a head by its norm and the norm's weights. LANES neighbouring lanes hold one head.
template <u32 HEAD, u32 LANES>
__device__ __forceinline__ void norm(Halves& head, const bf16* weight, u32 lane, float epsilon) {
    float squares = 0.f;
#pragma unroll
    for (u32 i = 0; i < 8; i++) squares += head.first[i] * head.first[i] + head.second[i] * head.second[i];
#pragma unroll
    for (int of = LANES / 2; of > 0; of /= 2) squares += __shfl_xor_sync(FULL_WARP, squares, of);
    float scale = rsqrtf(squares / HEAD + epsilon);
    float first[8], second[8];
    widen8(first, load8(weight + lane * 8));
    widen8(second, load8(weight + HEAD / 2 + lane * 8));
#pragma unroll
    for (u32 i = 0; i < 8; i++) head.first[i] *= scale * first[i], head.second[i] *= scale * second[i];
}

template <u32 HEAD, typename Kv>
__device__ __forceinline__ void rope_heads(bf16* qkv, Kv* pages, const u32* positions, const u32* slots, const float2* turns,
                                           const bf16* q_weight, const bf16* k_weight, RopeShape shape) {
    constexpr u32 LANES = HEAD / 16;
    in_turn();
    u32 lane = threadIdx.x % LANES, n_heads = shape.n_q_heads + 2 * shape.n_kv_heads;
    u32 position = positions[blockIdx.x], slot = slots[blockIdx.x];
    bf16* row = qkv + (u64)blockIdx.x * n_heads * HEAD + lane * 8;

    float2 turn[8];
#pragma unroll
    for (u32 i = 0; i < 8; i += 2) {
        float4 two = make_float4(__int_as_float(0x7fc00000), 0.f, __int_as_float(0x7fc00000), 0.f);
        if (position < shape.n_positions) two = *reinterpret_cast<const float4*>(turns + (u64)position * (HEAD / 2) + lane * 8 + i);
        turn[i] = make_float2(two.x, two.y), turn[i + 1] = make_float2(two.z, two.w);
    }
    // The loop runs in whole warps, because the norm needs all lanes. A lane after the last head reads that
    // head and writes nothing.
    for (u32 start = threadIdx.x / 32 * (32 / LANES); start < n_heads; start += blockDim.x / LANES) {
        u32 nth = start + threadIdx.x % 32 / LANES;
        bf16* from = row + (u64)min(nth, n_heads - 1) * HEAD;
        Halves head;
        widen8(head.first, load8(from));
        widen8(head.second, load8(from + HEAD / 2));
        bool is_q = nth < shape.n_q_heads, is_v = nth >= shape.n_q_heads + shape.n_kv_heads;
        if (q_weight != nullptr) {
            Halves normed = head;
            norm<HEAD, LANES>(normed, is_q ? q_weight : k_weight, lane, shape.epsilon);
            if (!is_v) head = normed;
        }
        if (!is_v) {
#pragma unroll
            for (u32 i = 0; i < 8; i++) {
                float a = head.first[i], b = head.second[i];
                head.first[i] = a * turn[i].x - b * turn[i].y;
                head.second[i] = b * turn[i].x + a * turn[i].y;
            }
        }
        if (nth >= n_heads || (!is_q && slot >= shape.n_slots)) continue;
        if (is_q) {
            store_rounded(from, head.first);
            store_rounded(from + HEAD / 2, head.second);
            continue;
        }
        u64 part = nth - shape.n_q_heads;  // heads of K, then of V
        u64 page = (u64)(slot / BLOCK_TOKENS) * 2 * shape.n_kv_heads + part;
        Kv* to = pages + (page * BLOCK_TOKENS + slot % BLOCK_TOKENS) * HEAD + lane * 8;
        store_rounded(to, head.first);
        store_rounded(to + HEAD / 2, head.second);
    }
}

#define ROPE(HEAD)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                     \
    rope_write_kv_##HEAD(bf16* qkv, bf16* pages, const u32* positions, const u32* slots, const float2* turns,             \
                         const bf16* q_weight, const bf16* k_weight, RopeShape shape) {                                   \
        rope_heads<HEAD>(qkv, pages, positions, slots, turns, q_weight, k_weight, shape);                                 \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(256)                                                                     \
    rope_write_kv_fp8_##HEAD(bf16* qkv, f8* pages, const u32* positions, const u32* slots, const float2* turns,           \
                             const bf16* q_weight, const bf16* k_weight, RopeShape shape) {                               \
        rope_heads<HEAD>(qkv, pages, positions, slots, turns, q_weight, k_weight, shape);                                 \
    }
ROPE(64)
ROPE(128)
