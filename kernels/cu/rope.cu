// What lies between the projection of q, k and v and attention: the norms of heads, rotation, and K and V into pages.
//
// A row of `qkv` is all heads of q, then of k, then of v. q is rotated where it lies; k and v go to their page:
// [K|V][kv_head][token][dim]. A warp does one head of one token. Number i turns with number i + HEAD / 2.
// A slot is block * BLOCK_TOKENS + token; one that is not below `n_slots` is written nowhere (rows of padding).
struct RopeShape { u32 n_q_heads, n_kv_heads, n_slots, n_positions; float epsilon; };

template <u32 HEAD>
__device__ __forceinline__ void rope_head(bf16* qkv, bf16* pages, const u32* positions, const u32* slots, const float2* turns,
                                          const bf16* q_weight, const bf16* k_weight, RopeShape shape) {
    in_turn();
    constexpr u32 PER_LANE = HEAD / 64;  // of each half
    u32 lane = threadIdx.x % 32;
    u32 head = blockIdx.x * (blockDim.x / 32) + threadIdx.x / 32;
    u32 n_heads = shape.n_q_heads + 2 * shape.n_kv_heads;
    if (head >= n_heads) return;
    bf16* from = qkv + ((u64)blockIdx.y * n_heads + head) * HEAD;
    u32 position = positions[blockIdx.y], slot = slots[blockIdx.y];
    bool is_q = head < shape.n_q_heads, is_v = head >= shape.n_q_heads + shape.n_kv_heads;

    float first[PER_LANE], second[PER_LANE];
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
        first[i] = widen(from[lane + 32 * i]);
        second[i] = widen(from[lane + 32 * i + HEAD / 2]);
    }
    const bf16* weight = is_q ? q_weight : k_weight;
    if (weight != nullptr && !is_v) {
        float squares = 0.f;
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) squares += first[i] * first[i] + second[i] * second[i];
        float scale = rsqrtf(warp_sum(squares) / HEAD + shape.epsilon);
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) {
            first[i] *= scale * widen(weight[lane + 32 * i]);
            second[i] *= scale * widen(weight[lane + 32 * i + HEAD / 2]);
        }
    }
    if (!is_v) {
#pragma unroll
        for (u32 i = 0; i < PER_LANE; i++) {
            float2 turn = position < shape.n_positions ? turns[(u64)position * (HEAD / 2) + lane + 32 * i]
                                                       : make_float2(__int_as_float(0x7fc00000), 0.f);
            float a = first[i], b = second[i];
            first[i] = a * turn.x - b * turn.y;
            second[i] = b * turn.x + a * turn.y;
        }
    }
    bf16* to = from;
    if (!is_q) {
        if (slot >= shape.n_slots) return;
        u64 part = head - shape.n_q_heads;  // heads of K, then of V
        u64 page = (u64)(slot / BLOCK_TOKENS) * 2 * shape.n_kv_heads + part;
        to = pages + (page * BLOCK_TOKENS + slot % BLOCK_TOKENS) * HEAD;
    }
#pragma unroll
    for (u32 i = 0; i < PER_LANE; i++) {
        to[lane + 32 * i] = narrow(first[i]);
        to[lane + 32 * i + HEAD / 2] = narrow(second[i]);
    }
}

#define ROPE(HEAD)                                                                                                        \
    extern "C" __global__ void __launch_bounds__(256)                                                                     \
    rope_write_kv_##HEAD(bf16* qkv, bf16* pages, const u32* positions, const u32* slots, const float2* turns,             \
                         const bf16* q_weight, const bf16* k_weight, RopeShape shape) {                                   \
        rope_head<HEAD>(qkv, pages, positions, slots, turns, q_weight, k_weight, shape);                                  \
    }
ROPE(64)
ROPE(128)
