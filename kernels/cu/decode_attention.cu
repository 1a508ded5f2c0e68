// Attention of one new token per sequence over KV in pages, split along the sequence.
//
// Memory decides the time, so KV is read once: the query heads that share a KV head (up to 8, one tile) are computed
// together on tensor cores. Per page of 16 tokens, with the pages' rows as the tall side of each product:
//   scores[token][head] = K[token][dim] * q[head][dim], then softmax, then out[dim][head] += V[token][dim] * p[token][head]
// K and V go from memory straight into registers. Along the sums over dim and over tokens the order is free, which is
// what lets a lane load 16 bytes of a row; V is turned by permuting bytes.
// A warp takes every WARPS-th page of its block's chunk and loads the next page while it computes this one.
// Blocks of one sequence leave parts, which `merge_parts` adds up. With one chunk only, the result is written at once.
constexpr u32 DECODE_WARPS = 4;

struct DecodeShape {
    u32 n_q_heads, n_kv_heads;
    u32 q_stride;        // numbers between two rows of q
    u32 table_stride;    // blocks between two sequences' tables
    u32 n_blocks;        // blocks there are
    u32 chunk_blocks;    // blocks a block of threads takes
    u32 window;          // the last tokens a query sees
    float scale;
    u32 rows_of_table;   // rows that follow one another and share a table
    u32 last_is_new;     // nothing but a sequence's last page was written since the step began
};

template <u32 HEAD, typename Kv>
struct Page { typename EightOf<Kv>::Raw k[HEAD / 32][2], v[HEAD / 64][4]; };

// Lane (g, t) takes 8 numbers at 8t of each 32 of tokens g and g + 8 of K,
// and 8 numbers at 8g of each 64 of tokens 2t, 2t + 1, 2t + 8, 2t + 9 of V.
template <u32 HEAD, typename Kv>
__device__ __forceinline__ void load_k(Page<HEAD, Kv>& page, const Kv* k, u32 g, u32 t) {
#pragma unroll
    for (u32 i = 0; i < HEAD / 32; i++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) page.k[i][half] = once_raw(k + (g + half * 8) * HEAD + i * 32 + t * 8);
}
template <u32 HEAD, typename Kv>
__device__ __forceinline__ void load_v(Page<HEAD, Kv>& page, const Kv* v, u32 g, u32 t) {
#pragma unroll
    for (u32 i = 0; i < HEAD / 64; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) page.v[i][j] = once_raw(v + (2 * t + j % 2 + j / 2 * 8) * HEAD + i * 64 + g * 8);
}

template <u32 HEAD, typename Kv>
__device__ __forceinline__ void decode(bf16* out, float* parts, float2* part_sums, const bf16* q, const Kv* pages,
                                       const u32* tables, const u32* lengths, DecodeShape shape) {
    constexpr u32 TILES = HEAD / 16;
    in_turn();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 chunk = blockIdx.x, row = blockIdx.z;
    u32 group = shape.n_q_heads / shape.n_kv_heads, tiles_of_group = (group + 7) / 8;
    u32 kv_head = blockIdx.y / tiles_of_group, tile = blockIdx.y % tiles_of_group;
    u32 n_heads = min(group - tile * 8, 8u), first_head = kv_head * group + tile * 8;

    u32 length = lengths[row];
    u32 first_seen = length > shape.window ? length - shape.window : 0;
    u32 n_pages = (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    u32 from = max(chunk * shape.chunk_blocks, first_seen / BLOCK_TOKENS);
    u32 to = min((chunk + 1) * shape.chunk_blocks, n_pages);
    if (gridDim.x > 1 && chunk * shape.chunk_blocks >= n_pages) return;  // this part is not read
    const u32* table = tables + (u64)(row / shape.rows_of_table) * shape.table_stride;

    // q as the flat side of the first product: column g is a head; the order along dim is that of K's lanes.
    u32 query[HEAD / 32][4];
    const bf16* of_q = q + (u64)row * shape.q_stride + (u64)(first_head + min(g, n_heads - 1)) * HEAD;
#pragma unroll
    for (u32 i = 0; i < HEAD / 32; i++) {
        Eight eight = load8(of_q + i * 32 + t * 8);
#pragma unroll
        for (u32 j = 0; j < 4; j++) query[i][j] = g < n_heads ? eight.pair[j] : 0;
    }

    // Lane (g, t) keeps heads 2t and 2t + 1: their greatest score, its part of the sum, and its part of the output.
    float greatest[2] = {-INF, -INF}, sum[2] = {0.f, 0.f};
    float output[TILES][4] = {};
    float scale = shape.scale * LOG2E;
    u64 part_of_page = (u64)BLOCK_TOKENS * HEAD, page_numbers = 2 * shape.n_kv_heads * part_of_page;
    auto page_of = [&](u32 block) {  // a block that is not there is read as block 0, and spoils the result below
        return pages + (block < shape.n_blocks ? block : 0) * page_numbers + kv_head * part_of_page;
    };
    u64 v_after_k = shape.n_kv_heads * part_of_page;

    Page<HEAD, Kv> page;
    u32 block = from + warp < to ? table[from + warp] : 0, next_block = 0;
    if (from + warp < to) {
        load_k(page, page_of(block), g, t);
        load_v(page, page_of(block) + v_after_k, g, t);
    }
    if (from + warp + DECODE_WARPS < to) next_block = table[from + warp + DECODE_WARPS];
    for (u32 at = from + warp; at < to; at += DECODE_WARPS) {
        const Kv* next = page_of(next_block);
        bool is_there = block < shape.n_blocks;
        block = next_block;
        if (at + 2 * DECODE_WARPS < to) next_block = table[at + 2 * DECODE_WARPS];
        float score[4] = {};
#pragma unroll
        for (u32 i = 0; i < HEAD / 32; i++) {
            Eight a = widened(page.k[i][0]), b = widened(page.k[i][1]);
            mma(score, a.pair[0], b.pair[0], a.pair[1], b.pair[1], query[i][0], query[i][1]);
            mma(score, a.pair[2], b.pair[2], a.pair[3], b.pair[3], query[i][2], query[i][3]);
        }
        if (at + DECODE_WARPS < to) load_k(page, next, g, t);
        // Tokens g and g + 8 of the page, of heads 2t and 2t + 1.
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            u32 token = at * BLOCK_TOKENS + g + i / 2 * 8;
            score[i] = token >= first_seen && token < length ? score[i] * scale : -INF;
            if (!is_there) score[i] = __int_as_float(0x7fc00000);  // NaN marks the error
        }
        float by[2];
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            float most = fmaxf(score[i], score[i + 2]);
#pragma unroll
            for (int of = 4; of < 32; of *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, of));
            most = fmaxf(most, greatest[i]);
            by[i] = power2(greatest[i] - most);  // 0 at first: -INF - number
            greatest[i] = most;
            score[i] = power2(score[i] - most);
            score[i + 2] = power2(score[i + 2] - most);
        }
        // What is summed is what the second product sees: shares rounded to bf16.
        u32 early = narrow(score[0], score[1]), late = narrow(score[2], score[3]);
        sum[0] = sum[0] * by[0] + low(early) + low(late);
        sum[1] = sum[1] * by[1] + high(early) + high(late);
        if ((at + 1) * BLOCK_TOKENS > length) {  // what was there before this sequence may be NaN, which no share cancels
#pragma unroll
            for (u32 j = 0; j < 4; j++)
                if (at * BLOCK_TOKENS + 2 * t + j % 2 + j / 2 * 8 >= length)
#pragma unroll
                    for (u32 i = 0; i < HEAD / 64; i++) page.v[i][j] = {};
        }
        early = transposed(early);
        late = transposed(late);
#pragma unroll
        for (u32 i = 0; i < HEAD / 64; i++) {
            Eight v[4];
#pragma unroll
            for (u32 j = 0; j < 4; j++) v[j] = widened(page.v[i][j]);
#pragma unroll
            for (u32 j = 0; j < 4; j++) {  // dims 8g + 2j and 8g + 2j + 1 of these 64: rows g and g + 8 of a tile
                float(&c)[4] = output[i * 4 + j];
                c[0] *= by[0];
                c[1] *= by[1];
                c[2] *= by[0];
                c[3] *= by[1];
                mma(c, lower(v[0].pair[j], v[1].pair[j]), upper(v[0].pair[j], v[1].pair[j]),
                    lower(v[2].pair[j], v[3].pair[j]), upper(v[2].pair[j], v[3].pair[j]), early, late);
            }
        }
        if (at + DECODE_WARPS < to) load_v(page, next + v_after_k, g, t);
    }
#pragma unroll
    for (u32 i = 0; i < 2; i++)
#pragma unroll
        for (int of = 4; of < 32; of *= 2) sum[i] += __shfl_xor_sync(FULL_WARP, sum[i], of);

    // The warps' parts, brought to the greatest of their scores, added up in the order of warps.
    __shared__ float2 of_warp[DECODE_WARPS][8];
    __shared__ float added[DECODE_WARPS][8][HEAD + 4];
    if (g == 0) {
        of_warp[warp][2 * t] = make_float2(greatest[0], sum[0]);
        of_warp[warp][2 * t + 1] = make_float2(greatest[1], sum[1]);
    }
#pragma unroll
    for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++) {
            u32 dim = i / 4 * 64 + g * 8 + i % 4 * 2 + j / 2;
            added[warp][2 * t + j % 2][dim] = output[i][j];
        }
    __syncthreads();
    for (u32 at = threadIdx.x; at < n_heads * HEAD; at += DECODE_WARPS * 32) {
        u32 head = at / HEAD, dim = at % HEAD;
        float most = -INF, total = 0.f, number = 0.f;
        bool is_nan = false;
#pragma unroll
        for (u32 i = 0; i < DECODE_WARPS; i++) most = fmaxf(most, of_warp[i][head].x);
#pragma unroll
        for (u32 i = 0; i < DECODE_WARPS; i++) {
            float2 of = of_warp[i][head];
            is_nan |= of.y != of.y;
            float share = of.x == -INF ? 0.f : power2(of.x - most);
            total += share * of.y;
            if (share > 0.f) number += share * added[i][head][dim];
        }
        if (is_nan) number = __int_as_float(0x7fc00000);
        u64 q_head = (u64)row * shape.n_q_heads + first_head + head;
        if (gridDim.x == 1) {
            out[q_head * HEAD + dim] = narrow(total > 0.f || is_nan ? number / total : 0.f);
        } else {
            u64 part = q_head * gridDim.x + chunk;
            parts[part * HEAD + dim] = number;
            if (dim == 0) part_sums[part] = make_float2(most, is_nan ? number : total);
        }
    }
}

// One block of threads adds up one head's parts. Its warps take turns over them, so that all are read at once: a lane has
// HEAD / 32 dims. What warps found is added up in their order.
//
// A lane keeps the sums of the first 64 parts, and a warp asks for its own of these before any have come: one trip to memory
// for nearly every sequence.
constexpr u32 MERGE_WARPS = 8, SUMS_KEPT = 2, PARTS_KEPT = SUMS_KEPT * 32 / MERGE_WARPS;

template <u32 HEAD>
__device__ __forceinline__ void merge(bf16* out, const float* parts, const float2* part_sums, const u32* lengths,
                                      u32 n_q_heads, u32 n_parts, u32 chunk_blocks) {
    constexpr u32 DIMS = HEAD / 32;
    struct alignas(DIMS * 4) Dims { float of[DIMS]; };
    __shared__ float found[MERGE_WARPS][HEAD];
    next_may_come();
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    u64 q_head = (u64)blockIdx.y * n_q_heads + blockIdx.x;
    u32 chunk_tokens = chunk_blocks * BLOCK_TOKENS;
    u32 n_used = min((lengths[blockIdx.y] + chunk_tokens - 1) / chunk_tokens, n_parts);
    const float2* sums = part_sums + q_head * n_parts;
    auto part_at = [&](u32 i) { return *reinterpret_cast<const Dims*>(parts + (q_head * n_parts + i) * HEAD + lane * DIMS); };
    wait_for_last();

    float2 kept[SUMS_KEPT];
    Dims kept_parts[PARTS_KEPT];
#pragma unroll
    for (u32 i = 0; i < SUMS_KEPT; i++) kept[i] = lane + i * 32 < n_used ? sums[lane + i * 32] : make_float2(-INF, 0.f);
#pragma unroll
    for (u32 i = 0; i < PARTS_KEPT; i++) kept_parts[i] = warp + i * MERGE_WARPS < n_used ? part_at(warp + i * MERGE_WARPS) : Dims{};

    // Every warp finds the greatest score and the total for itself, in the same order.
    float most = -INF, total = 0.f;
#pragma unroll
    for (u32 i = 0; i < SUMS_KEPT; i++) most = fmaxf(most, kept[i].x);
    for (u32 i = lane + SUMS_KEPT * 32; i < n_used; i += 32) most = fmaxf(most, sums[i].x);
#pragma unroll
    for (int of = 16; of > 0; of /= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, of));
    auto share_of = [&](float2 sum) {
        if (sum.y != sum.y) return sum.y;  // NaN spoils all of it
        return sum.x == -INF ? 0.f : power2(sum.x - most);
    };
    float shares[SUMS_KEPT];
#pragma unroll
    for (u32 i = 0; i < SUMS_KEPT; i++) {
        shares[i] = share_of(kept[i]);
        total += shares[i] * kept[i].y;
    }
    for (u32 i = lane + SUMS_KEPT * 32; i < n_used; i += 32) total += share_of(sums[i]) * sums[i].y;
    total = warp_sum(total);

    float number[DIMS] = {};
    auto add = [&](float share, const Dims& part) {
#pragma unroll
        for (u32 j = 0; j < DIMS; j++) number[j] += share * part.of[j];
    };
#pragma unroll
    for (u32 i = 0; i < PARTS_KEPT; i++) {
        u32 nth = warp + i * MERGE_WARPS;
        float share = __shfl_sync(FULL_WARP, shares[i * MERGE_WARPS / 32], nth % 32);
        if (nth < n_used) add(share, kept_parts[i]);
    }
#pragma unroll 4
    for (u32 i = warp + SUMS_KEPT * 32; i < n_used; i += MERGE_WARPS) add(share_of(sums[i]), part_at(i));
#pragma unroll
    for (u32 j = 0; j < DIMS; j++) found[warp][lane * DIMS + j] = number[j];
    __syncthreads();
    if (threadIdx.x >= HEAD) return;
    float all = 0.f;
#pragma unroll
    for (u32 i = 0; i < MERGE_WARPS; i++) all += found[i][threadIdx.x];
    out[q_head * HEAD + threadIdx.x] = narrow(total == 0.f ? 0.f : all / total);
}

#define DECODE(HEAD)                                                                                                      \
    extern "C" __global__ void __launch_bounds__(DECODE_WARPS * 32, 3)                                                    \
    decode_attention_##HEAD(bf16* out, float* parts, float2* part_sums, const bf16* q,                       \
                            const bf16* pages, const u32* tables,                               \
                            const u32* lengths, DecodeShape shape) {                                         \
        decode<HEAD>(out, parts, part_sums, q, pages, tables, lengths, shape);                                            \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(DECODE_WARPS * 32, 3)                                                    \
    decode_attention_fp8_##HEAD(bf16* out, float* parts, float2* part_sums, const bf16* q,                                \
                                const f8* pages, const u32* tables,                                                       \
                                const u32* lengths, DecodeShape shape) {                                                  \
        decode<HEAD>(out, parts, part_sums, q, pages, tables, lengths, shape);                                            \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(MERGE_WARPS * 32)                                                        \
    merge_parts_##HEAD(bf16* out, const float* parts, const float2* part_sums,                  \
                       const u32* lengths, u32 n_q_heads, u32 n_parts, u32 chunk_blocks) {                   \
        merge<HEAD>(out, parts, part_sums, lengths, n_q_heads, n_parts, chunk_blocks);                                    \
    }
DECODE(64)
DECODE(128)
