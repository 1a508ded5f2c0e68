// Attention of one new token per sequence over KV in pages, split along the sequence.
//
// Memory bandwidth limits the speed, so KV is read once. The query heads that share a KV head (up to 8, one
// tile) are computed together on tensor cores. For each page of 16 tokens, with the page's rows as the first
// factor (M):
//   scores[token][head] = K[token][dim] * q[head][dim], then softmax, then out[dim][head] += V[token][dim] * p[token][head]
// K and V are loaded directly into registers. The order of the sums over dim and over tokens is free, so a
// lane can load 16 bytes of a row. V is transposed by permuting bytes.
// A warp takes every WARPS-th page of its block's chunk and loads the next page while it computes this one.
// Blocks of one sequence write partial results, which `merge_parts` adds up. With one chunk, the result is
// written directly.
constexpr u32 DECODE_WARPS = 4;

struct DecodeShape {
    u32 n_q_heads, n_kv_heads;
    u32 q_stride;        // numbers between two rows of q
    u32 table_stride;    // blocks between two sequences' tables
    u32 n_blocks;        // the number of KV blocks
    u32 chunk_blocks;    // KV blocks for one block of threads
    u32 window;          // the number of last tokens that a query sees
    float scale;
    u32 rows_of_table;   // consecutive rows that share a table
    u32 last_is_new;     // only a sequence's last page was written since the step began
};

template <u32 HEAD, typename Kv>
struct Page { typename EightOf<Kv>::Raw k[HEAD / 32][2], v[HEAD / 64][4]; };

// For K, lane (g, t) loads the 8 numbers at 8t of each group of 32, for tokens g and g + 8. For V, it loads
// the 8 numbers at 8g of each group of 64, for tokens 2t, 2t + 1, 2t + 8 and 2t + 9.
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

    // q is the second factor (N) of the first product: column g is a head. The order along dim is that of K's
    // lanes.
    u32 query[HEAD / 32][4];
    const bf16* of_q = q + (u64)row * shape.q_stride + (u64)(first_head + min(g, n_heads - 1)) * HEAD;
#pragma unroll
    for (u32 i = 0; i < HEAD / 32; i++) {
        Eight eight = load8(of_q + i * 32 + t * 8);
#pragma unroll
        for (u32 j = 0; j < 4; j++) query[i][j] = g < n_heads ? eight.pair[j] : 0;
    }

    // Lane (g, t) keeps heads 2t and 2t + 1: the greatest score, a partial sum and a part of the output.
    float greatest[2] = {-INF, -INF}, sum[2] = {0.f, 0.f};
    float output[TILES][4] = {};
    float scale = shape.scale * LOG2E;
    u64 part_of_page = (u64)BLOCK_TOKENS * HEAD, page_numbers = 2 * shape.n_kv_heads * part_of_page;
    auto page_of = [&](u32 block) {  // an invalid block is read as block 0, and the result becomes NaN below
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
        // The sum uses the same weights as the second product: rounded to bf16.
        u32 early = narrow(score[0], score[1]), late = narrow(score[2], score[3]);
        sum[0] = sum[0] * by[0] + low(early) + low(late);
        sum[1] = sum[1] * by[1] + high(early) + high(late);
        if ((at + 1) * BLOCK_TOKENS > length) {  // numbers after the end may be NaN
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

    // Scales the warps' parts to the greatest score of all warps and adds them up in warp order.
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

// One block of threads adds up one head's parts. Its warps share the parts, so that all are read at once: a
// lane has HEAD / 32 dims. The warps' results are added in warp order.
//
// A lane keeps the sums of the first 64 parts. A warp requests its own parts among these before any have
// arrived, so nearly every sequence needs one trip to memory.
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

    // Every warp computes the greatest score and the total itself, in the same order.
    float most = -INF, total = 0.f;
#pragma unroll
    for (u32 i = 0; i < SUMS_KEPT; i++) most = fmaxf(most, kept[i].x);
    for (u32 i = lane + SUMS_KEPT * 32; i < n_used; i += 32) most = fmaxf(most, sums[i].x);
#pragma unroll
    for (int of = 16; of > 0; of /= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, of));
    auto share_of = [&](float2 sum) {
        if (sum.y != sum.y) return sum.y;  // NaN makes the whole result NaN
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
