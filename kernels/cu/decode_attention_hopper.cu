// Decode attention for Hopper. The copy engine loads pages, with enough in flight for the memory bandwidth.
//
// decode_attention.cu describes the computation, and its `merge_parts` merges the parts of several chunks. A
// warp takes every WARPS-th page of its block's chunk through its own ring, so that no warp waits for another
// until the end. In the ring a page is stored as tiles of 64 dims: first K's, then V's.
//
// The tokens of a prompt are many queries of one sequence. Consecutive queries are computed together, so that
// each does not read the earlier KV again. A tile has 8 columns: the heads of one, two or more queries. A
// head's sum and its order do not depend on the other columns.
//
// Pages of e4m3 are as many bytes in flight, in rings twice as long. Their numbers become f16 in registers,
// which is exact and keeps NaN, and the products are those of f16. Queries and weights are rounded to f16.
constexpr u32 WARPS = 4, MANY = 3;
template <typename Kv>
constexpr u32 RING = 6 / sizeof(Kv);
template <u32 HEAD, typename Kv>
constexpr u32 TOWERS = HEAD * sizeof(Kv) / TILE_ROW_BYTES;  // tiles for the row of a head

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

constexpr u32 TOWER_BYTES = BLOCK_TOKENS * TILE_ROW_BYTES;

// The work of one block of threads: some heads that share a KV head, in one sequence.
struct Work {
    u32 row, n_rows;  // the first row, and the number of queries
    u32 kv_head, first_head, n_heads;
    u32 per_tile;  // queries in a tile
    u32 length;    // in tokens, for the last query
    u32 from, to;  // in KV blocks
};

// The range of tokens that a query sees.
struct Seen { u32 first, end; };

template <u32 HEAD, typename Kv>
__device__ __forceinline__ void bring_page(u32 to, const TensorMap& of_pages, u32 block, const DecodeShape& shape, u32 kv_head, u32 full) {
    constexpr u32 N = TOWERS<HEAD, Kv>;
    barrier_expect(full, 2 * N * TOWER_BYTES);
#pragma unroll
    for (u32 part = 0; part < 2; part++)
#pragma unroll
        for (u32 i = 0; i < N; i++)
            copy_tile(to + (part * N + i) * TOWER_BYTES, of_pages, i * TILE_ROW_BYTES / sizeof(Kv),
                      ((block * 2 + part) * shape.n_kv_heads + kv_head) * BLOCK_TOKENS, full, EVICT_FIRST);
}

// Multiplies columns 2t and 2t + 1 of a lane's sums by their factors.
__device__ __forceinline__ void scale_columns(float (&c)[4], const float (&by)[2]) {
    c[0] *= by[0];
    c[1] *= by[1];
    c[2] *= by[0];
    c[3] *= by[1];
}

// The two products of a page, for each format of KV.
template <u32 HEAD, typename Kv>
struct Products;

template <u32 HEAD>
struct Products<HEAD, bf16> {
    // The query of a column: numbers 2t, 2t + 1, 2t + 8 and 2t + 9 of each 16. Returns the factor that scores need.
    static __device__ __forceinline__ float load(u32 (&query)[HEAD / 16][2], const bf16* q, bool is_column) {
        const bf16* of_lane = q + threadIdx.x % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < HEAD / 16; i++)
#pragma unroll
            for (u32 j = 0; j < 2; j++) query[i][j] = is_column ? *reinterpret_cast<const u32*>(of_lane + i * 16 + j * 8) : 0;
        return 1.f;
    }
    static __device__ __forceinline__ void scores(float (&score)[4], u32 page, const u32 (&query)[HEAD / 16][2]) {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 i = 0; i < HEAD / 16; i++) {
            u32 k[4];
            matrices(k, page + i / 4 * TOWER_BYTES + chunk_place(lane % 16, i % 4 * 2 + lane / 16));
            mma(score, k[0], k[1], k[2], k[3], query[i][0], query[i][1]);
        }
    }
    static __device__ __forceinline__ u32 rounded(float low, float high) { return narrow(low, high); }
    static __device__ __forceinline__ float first(u32 pair) { return low(pair); }
    static __device__ __forceinline__ float second(u32 pair) { return high(pair); }
    // `first_mask` covers tokens 2t and 2t + 1, `second_mask` the tokens 8 later.
    static __device__ __forceinline__ void add(float (&output)[HEAD / 16][4], const float (&by)[2], u32 page, u32 first_mask, u32 second_mask,
                                               u32 early, u32 late) {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 i = 0; i < HEAD / 16; i++) {
            u32 v[4];
            matrices_transposed(v, page + (HEAD / TILE_COLUMNS + i / 4) * TOWER_BYTES +
                                       chunk_place(lane % 8 + lane / 16 * 8, i % 4 * 2 + lane / 8 % 2));
            float(&c)[4] = output[i];
            scale_columns(c, by);
            mma(c, v[0] & first_mask, v[1] & first_mask, v[2] & second_mask, v[3] & second_mask, early, late);
        }
    }
    // The dim of number j of a lane's sums for 16 dims.
    static __device__ __forceinline__ u32 dim(u32 g, u32 j) { return g + j / 2 * 8; }
};

__device__ __forceinline__ u32 half_pair(float low, float high) {
    u32 pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}
__device__ __forceinline__ float of_half(u32 half) {
    float wide;
    asm("cvt.f32.f16 %0, %1;" : "=f"(wide) : "h"((unsigned short)half));
    return wide;
}
// Four e4m3 numbers in f16.
struct Halves { u32 early, late; };
__device__ __forceinline__ Halves halves_of(u32 four) {
    Halves halves;
    asm("{\n.reg .b16 early, late;\nmov.b32 {early, late}, %2;\ncvt.rn.f16x2.e4m3x2 %0, early;\ncvt.rn.f16x2.e4m3x2 %1, late;\n}"
        : "=r"(halves.early), "=r"(halves.late) : "r"(four));
    return halves;
}
__device__ __forceinline__ void mma_half(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// A lane's 32 bits of a matrix are four dims of a token of K, and two dims of two tokens of V. The order of
// the dims is chosen so that no numbers change lanes.
template <u32 HEAD>
struct Products<HEAD, f8> {
    // Numbers 4t to 4t + 3 of each 16, in f16. The greatest of a query gets an exponent of 13, so that f16 has
    // every number of it that can change a score.
    static __device__ __forceinline__ float load(u32 (&query)[HEAD / 16][2], const bf16* q, bool is_column) {
        const bf16* of_lane = q + threadIdx.x % 4 * 4;
        float most = 0.f;
#pragma unroll
        for (u32 i = 0; i < HEAD / 16; i++) {
            Four four = is_column ? *reinterpret_cast<const Four*>(of_lane + i * 16) : Four{0, 0};
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                query[i][j] = four.pair[j];
                most = fmaxf(most, fmaxf(fabsf(low(four.pair[j])), fabsf(high(four.pair[j]))));
            }
        }
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
        u32 exponent = max(__float_as_uint(most) >> 23, 20u);
        float by = __uint_as_float((267 - exponent) << 23);
#pragma unroll
        for (u32 i = 0; i < HEAD / 16; i++)
#pragma unroll
            for (u32 j = 0; j < 2; j++) query[i][j] = half_pair(low(query[i][j]) * by, high(query[i][j]) * by);
        return __uint_as_float((exponent - 13) << 23);
    }
    static __device__ __forceinline__ void scores(float (&score)[4], u32 page, const u32 (&query)[HEAD / 16][2]) {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 i = 0; i < HEAD / 32; i++) {
            u32 k[4];
            matrices(k, page + i / 4 * TOWER_BYTES + chunk_place(lane % 16, i % 4 * 2 + lane / 16));
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                Halves a = halves_of(k[2 * j]), b = halves_of(k[2 * j + 1]);
                mma_half(score, a.early, b.early, a.late, b.late, query[2 * i + j][0], query[2 * i + j][1]);
            }
        }
    }
    static __device__ __forceinline__ u32 rounded(float low, float high) { return half_pair(low, high); }
    static __device__ __forceinline__ float first(u32 pair) { return of_half(pair & 0xffff); }
    static __device__ __forceinline__ float second(u32 pair) { return of_half(pair >> 16); }
    static __device__ __forceinline__ void add(float (&output)[HEAD / 16][4], const float (&by)[2], u32 page, u32 first_mask, u32 second_mask,
                                               u32 early, u32 late) {
        u32 lane = threadIdx.x % 32;
#pragma unroll
        for (u32 i = 0; i < HEAD / 32; i++) {
            u32 v[4];
            matrices_transposed(v, page + (TOWERS<HEAD, f8> + i / 4) * TOWER_BYTES +
                                       chunk_place(lane % 8 + lane / 16 * 8, i % 4 * 2 + lane / 8 % 2));
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                // The numbers of both tokens for one dim, then for the next.
                Halves a = halves_of(__byte_perm(v[j] & first_mask, 0, 0x3120));
                Halves b = halves_of(__byte_perm(v[j + 2] & second_mask, 0, 0x3120));
                float(&c)[4] = output[2 * i + j];
                scale_columns(c, by);
                mma_half(c, a.early, a.late, b.early, b.late, early, late);
            }
        }
    }
    static __device__ __forceinline__ u32 dim(u32 g, u32 j) { return 2 * g + j / 2; }
};

// A warp's result for its pages. Lane (g, t) keeps columns 2t and 2t + 1: heads of one query or of two.
template <u32 HEAD>
struct Part {
    float greatest[2] = {-INF, -INF}, sum[2] = {0.f, 0.f};
    float output[HEAD / 16][4] = {};
};

// Adds a page: scores[token][head] = K * q, then weights, then output[dim][head] += transpose(V) * weights.
template <u32 HEAD, typename Kv>
__device__ __forceinline__ void add_page(Part<HEAD>& part, u32 page, const u32 (&query)[HEAD / 16][2], const Seen (&seen)[2], u32 length, u32 at,
                                         bool is_there, const float (&scale)[2]) {
    typedef Products<HEAD, Kv> Of;
    u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float score[4] = {};
    Of::scores(score, page, query);
    // Tokens g and g + 8 of the page, columns 2t and 2t + 1.
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        u32 token = at * BLOCK_TOKENS + g + i / 2 * 8;
        score[i] = token >= seen[i % 2].first && token < seen[i % 2].end ? score[i] * scale[i % 2] : -INF;
        if (!is_there) score[i] = __int_as_float(0x7fc00000);  // NaN marks the error
    }
    float by[2];
#pragma unroll
    for (u32 i = 0; i < 2; i++) {
        float most = fmaxf(score[i], score[i + 2]);
#pragma unroll
        for (int of = 4; of < 32; of *= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, of));
        most = fmaxf(most, part.greatest[i]);
        float base = most == -INF ? 0.f : most;   // a query may see no token up to here
        by[i] = power2(part.greatest[i] - base);  // 0 at first: -INF - number
        part.greatest[i] = most;
        score[i] = power2(score[i] - base);
        score[i + 2] = power2(score[i + 2] - base);
    }
    // The sum uses the same weights as the second product: rounded.
    u32 early = Of::rounded(score[0], score[1]), late = Of::rounded(score[2], score[3]);
    part.sum[0] = part.sum[0] * by[0] + Of::first(early) + Of::first(late);
    part.sum[1] = part.sum[1] * by[1] + Of::second(early) + Of::second(late);
    early = transposed(early);
    late = transposed(late);
    // Numbers after the sequence's end may be NaN, which a weight of zero does not cancel.
    u32 token = at * BLOCK_TOKENS + 2 * t;
    auto mask = [&](u32 of) { return (of < length ? 0xffffu : 0) | (of + 1 < length ? 0xffff0000u : 0); };
    Of::add(part.output, by, page, mask(token), mask(token + 8), early, late);
}

// Scales the warps' parts of a tile to the greatest score of all warps and adds them up in warp order.
template <u32 HEAD, typename Kv>
__device__ __forceinline__ void add_up(bf16* out, float* parts, float2* part_sums, Part<HEAD>& part, const Work& work, u32 tile,
                                       const DecodeShape& shape, float* room) {
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    float2* of_warp = reinterpret_cast<float2*>(room);  // [warp][column]
    float* added = room + WARPS * 8 * 2;                // [warp][column][HEAD + 4]
#pragma unroll
    for (u32 i = 0; i < 2; i++)
#pragma unroll
        for (int of = 4; of < 32; of *= 2) part.sum[i] += __shfl_xor_sync(FULL_WARP, part.sum[i], of);
    if (g == 0)
#pragma unroll
        for (u32 i = 0; i < 2; i++) of_warp[warp * 8 + 2 * t + i] = make_float2(part.greatest[i], part.sum[i]);
#pragma unroll
    for (u32 i = 0; i < HEAD / 16; i++)
#pragma unroll
        for (u32 j = 0; j < 4; j++)
            added[(warp * 8 + 2 * t + j % 2) * (HEAD + 4) + i * 16 + Products<HEAD, Kv>::dim(g, j)] = part.output[i][j];
    __syncthreads();
    u32 first_query = tile * work.per_tile, n_queries = min(work.n_rows - first_query, work.per_tile);
    for (u32 at = threadIdx.x; at < n_queries * work.n_heads * HEAD; at += WARPS * 32) {
        u32 column = at / HEAD, dim = at % HEAD, head = column % work.n_heads;
        float most = -INF, total = 0.f, number = 0.f;
        bool is_nan = false;
#pragma unroll
        for (u32 i = 0; i < WARPS; i++) most = fmaxf(most, of_warp[i * 8 + column].x);
#pragma unroll
        for (u32 i = 0; i < WARPS; i++) {
            float2 of = of_warp[i * 8 + column];
            is_nan |= of.y != of.y;
            float share = of.x == -INF ? 0.f : power2(of.x - most);
            total += share * of.y;
            if (share > 0.f) number += share * added[(i * 8 + column) * (HEAD + 4) + dim];
        }
        if (is_nan) number = __int_as_float(0x7fc00000);
        u64 row = work.row + first_query + column / work.n_heads, q_head = row * shape.n_q_heads + work.first_head + head;
        if (gridDim.x == 1) {
            out[q_head * HEAD + dim] = narrow(total > 0.f || is_nan ? number / total : 0.f);
        } else {
            u64 place = q_head * gridDim.x + blockIdx.x;
            parts[place * HEAD + dim] = number;
            if (dim == 0) part_sums[place] = make_float2(most, is_nan ? number : total);
        }
    }
}

// Computes TILES tiles. A tile has one query, or as many queries with a common table as fit.
template <u32 HEAD, u32 TILES, typename Kv>
__device__ __forceinline__ void decode(bf16* out, float* parts, float2* part_sums, const bf16* q, const TensorMap& of_pages,
                                       const u32* tables, const u32* lengths, const DecodeShape& shape, u32 n_rows) {
    constexpr u32 PAGE_BYTES = 2 * TOWERS<HEAD, Kv> * TOWER_BYTES, RING = ::RING<Kv>;
    extern __shared__ Eight shared[];
    __shared__ u64 barriers[WARPS * RING];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 ring = (shared_address(shared) + 1023) / 1024 * 1024;
    u32 mine = ring + warp * RING * PAGE_BYTES, full = shared_address(barriers) + warp * RING * 8;
    u32 group = shape.n_q_heads / shape.n_kv_heads, tiles_of_group = (group + 7) / 8, tile = blockIdx.y % tiles_of_group;
    Work work;
    work.kv_head = blockIdx.y / tiles_of_group;
    work.n_heads = min(group - tile * 8, 8u), work.first_head = work.kv_head * group + tile * 8;
    work.per_tile = TILES == 1 ? 1 : 8 / group > 0 ? 8 / group : 1;
    work.row = blockIdx.z * TILES * work.per_tile;
    work.n_rows = TILES == 1 ? 1 : min(n_rows - work.row, TILES * work.per_tile);
    const u32* table = tables + (u64)(work.row / shape.rows_of_table) * shape.table_stride;
    u32 first = blockIdx.x * shape.chunk_blocks;

    next_may_come();
    if (lane == 0) {
        for (u32 i = 0; i < RING; i++) barrier_start(full + i * 8, 1);
        barriers_started();
    }
    __syncwarp();

    // Tables and lengths do not change during the step. Pages before a sequence's last one do not either; the
    // previous kernel writes its new token to the last page. They are therefore read while that kernel ends.
    // A lane knows the KV block of every 32nd of the warp's pages. An invalid block is read as block 0, and
    // the result becomes NaN. Without a window, the first blocks are read before the length is known.
    auto block_at = [&](u32 at) { return at < shape.table_stride ? table[at] : 0; };
    u32 here = block_at(first + warp + lane * WARPS), ahead = block_at(first + warp + (lane + 32) * WARPS);
    // The query of a column. Columns after the last query repeat it and are not written.
    auto query_of = [&](u32 tile, u32 column) {
        return min(tile * work.per_tile + min(column / work.n_heads, work.per_tile - 1), work.n_rows - 1);
    };
    auto seen_by = [&](u32 query) -> Seen {
        u32 end = lengths[work.row + query];
        return {end > shape.window ? end - shape.window : 0, end};
    };
    Seen seen[TILES][2];
#pragma unroll
    for (u32 i = 0; i < TILES; i++)
#pragma unroll
        for (u32 j = 0; j < 2; j++) seen[i][j] = seen_by(query_of(i, 2 * t + j));
    work.length = lengths[work.row + work.n_rows - 1];
    u32 n_pages = (work.length + BLOCK_TOKENS - 1) / BLOCK_TOKENS;
    work.from = max(first, seen_by(0).first / BLOCK_TOKENS);
    work.to = min(first + shape.chunk_blocks, n_pages);
    if (gridDim.x > 1 && first >= n_pages) return;  // this part is not read
    u32 n_old = shape.last_is_new ? n_pages - min(n_pages, 1u) : 0;
    u32 n_mine = work.to > work.from + warp ? (work.to - work.from - warp + WARPS - 1) / WARPS : 0;
    auto blocks_from = [&](u32 nth) { return block_at(work.from + warp + (nth + lane) * WARPS); };
    if (work.from != first) here = blocks_from(0), ahead = blocks_from(32);
    u32 base = 0;  // the page whose block the first lane knows
    auto bring = [&](u32 nth) {  // called by all lanes
        u32 block = __shfl_sync(FULL_WARP, nth - base < 32 ? here : ahead, nth % 32);
        if (lane == 0)
            bring_page<HEAD, Kv>(mine + nth % RING * PAGE_BYTES, of_pages, block < shape.n_blocks ? block : 0, shape, work.kv_head, full + nth % RING * 8);
    };
    u32 n_first = min(RING, n_mine), n_early = 0;
    for (; n_early < n_first && work.from + warp + n_early * WARPS < n_old; n_early++) bring(n_early);
    wait_for_last();
    for (u32 nth = n_early; nth < n_first; nth++) bring(nth);

    // q is the second factor (N) of the first product: column g is a head of a query.
    u32 query[TILES][HEAD / 16][2];
    float scale[TILES][2];
#pragma unroll
    for (u32 nth = 0; nth < TILES; nth++) {
        bool is_column = g < work.per_tile * work.n_heads;
        u64 row = work.row + query_of(nth, g), head = work.first_head + g % work.n_heads;
        float by = Products<HEAD, Kv>::load(query[nth], q + row * shape.q_stride + head * HEAD, is_column);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            scale[nth][i] = shape.scale * LOG2E;
            if (sizeof(Kv) == 1) scale[nth][i] *= __shfl_sync(FULL_WARP, by, (2 * t + i) * 4);
        }
    }

    Part<HEAD> part[TILES];
    for (u32 nth = 0; nth < n_mine; nth++) {
        if (nth - base == 32) {
            base += 32;
            here = ahead;
            ahead = blocks_from(base + 32);
        }
        bool is_there = __shfl_sync(FULL_WARP, here, nth % 32) < shape.n_blocks;
        barrier_wait(full + nth % RING * 8, nth / RING % 2);
#pragma unroll
        for (u32 i = 0; i < TILES; i++)
            add_page<HEAD, Kv>(part[i], mine + nth % RING * PAGE_BYTES, query[i], seen[i], work.length, work.from + warp + nth * WARPS, is_there, scale[i]);
        __syncwarp();
        if (nth + RING < n_mine) bring(nth + RING);
    }
    float* room = reinterpret_cast<float*>(reinterpret_cast<char*>(shared) + (ring - shared_address(shared)));
#pragma unroll
    for (u32 i = 0; i < TILES; i++) {
        __syncthreads();  // the rings are free, and the previous tile's sums have been read
        if (i * work.per_tile < work.n_rows) add_up<HEAD, Kv>(out, parts, part_sums, part[i], work, i, shape, room);
    }
}

#define DECODE(NAME, HEAD, KV)                                                                                            \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)                                                           \
    decode_attention_hopper_##NAME(bf16* out, float* parts, float2* part_sums, const bf16* q,                             \
                                   const __grid_constant__ TensorMap of_pages, const u32* tables, const u32* lengths,     \
                                   DecodeShape shape) {                                                                   \
        decode<HEAD, 1, KV>(out, parts, part_sums, q, of_pages, tables, lengths, shape, 0);                               \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, 2)                                                           \
    decode_attention_hopper_many_##NAME(bf16* out, float* parts, float2* part_sums, const bf16* q,                        \
                                        const __grid_constant__ TensorMap of_pages, const u32* tables,                    \
                                        const u32* lengths, DecodeShape shape, u32 n_rows) {                              \
        decode<HEAD, MANY, KV>(out, parts, part_sums, q, of_pages, tables, lengths, shape, n_rows);                       \
    }
DECODE(64, 64, bf16)
DECODE(128, 128, bf16)
DECODE(fp8_128, 128, f8)
