// Attention of many new tokens per sequence over KV pages: whole prompts, chunks of them, and tails after a
// cached prefix.
//
// Products limit the speed, so they are tiles on tensor cores. A block of threads takes QUERIES rows of one
// head of one sequence and goes along the sequence in steps of TOKENS. Scores stay in registers, with an
// online softmax. K and V come through shared memory; while one is multiplied, the other is loaded. A warp
// computes 32 rows, so that it uses each load from shared memory twice.
// Query i of a sequence with `n` queries has position length - n + i. It sees the tokens up to itself, at
// most the last `window`.
constexpr u32 WARPS = 4, QUERIES = 128, TOKENS = 64;

struct PrefillShape {
    u32 n_q_heads, n_kv_heads;
    u32 q_stride;      // numbers between two rows of q
    u32 table_stride;  // blocks between two sequences' tables
    u32 n_blocks;      // the number of KV blocks
    u32 window;        // the number of last tokens that a query sees
    float scale;
};

// The offset of chunk `chunk` (8 numbers) of a row. Chunks of neighbouring rows are in different banks.
template <u32 HEAD>
__device__ __forceinline__ u32 place(u32 row, u32 chunk) { return row * HEAD * 2 + ((chunk ^ (row & 7)) * 16); }

// Tiles of K and V on their way to shared memory. bf16 is copied directly. FP8 is widened in registers, and
// is loaded one product before it is needed.
template <u32 HEAD, typename Kv>
struct Fetched;
template <u32 HEAD>
struct Fetched<HEAD, bf16> {
    __device__ __forceinline__ void fetch(u32, u32 to, const bf16* from, bool wanted) { copy16(to, from, wanted); }
    __device__ __forceinline__ void put(u32, u32) {}
};
template <u32 HEAD>
struct Fetched<HEAD, f8> {
    Four raw[TOKENS * (HEAD / 8) / (WARPS * 32)];
    __device__ __forceinline__ void fetch(u32 i, u32, const f8* from, bool wanted) { raw[i] = wanted ? once_raw(from) : Four{}; }
    __device__ __forceinline__ void put(u32 i, u32 to) {
        Eight eight = widened(raw[i]);
        asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(eight.pair[0]), "r"(eight.pair[1]), "r"(eight.pair[2]), "r"(eight.pair[3]) : "memory");
    }
};

template <u32 HEAD, typename Kv>
__device__ __forceinline__ void prefill(bf16* out, const bf16* q, const Kv* pages, const u32* tables, const uint3* sequences,
                                        PrefillShape shape) {
    constexpr u32 CHUNKS = HEAD / 8, DIM_STEPS = HEAD / 16, THREADS = WARPS * 32;
    extern __shared__ Eight shared[];
    u32 q_at = shared_address(shared), k_at = q_at + QUERIES * HEAD * 2, v_at = k_at + TOKENS * HEAD * 2;

    in_turn();
    uint3 sequence = sequences[blockIdx.z];  // its first row in q, its queries, its tokens
    u32 first_row = sequence.x, n_queries = sequence.y, length = sequence.z;
    u32 n_tiles = (n_queries + QUERIES - 1) / QUERIES;
    if (blockIdx.y >= n_tiles) return;
    u32 first_query = (n_tiles - 1 - blockIdx.y) * QUERIES;  // the longest first, for all heads
    u32 head = blockIdx.x, kv_head = head / (shape.n_q_heads / shape.n_kv_heads);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;

    u32 before = length - n_queries;  // tokens before the first query
    u32 end = min(before + first_query + QUERIES, length);
    u32 oldest = before + first_query + 1 > shape.window ? before + first_query + 1 - shape.window : 0;
    u32 first_tile = oldest / TOKENS, end_tile = (end + TOKENS - 1) / TOKENS;

    const u32* table = tables + (u64)blockIdx.z * shape.table_stride;
    u64 part_of_page = (u64)BLOCK_TOKENS * HEAD, page_numbers = 2 * shape.n_kv_heads * part_of_page;
    bool is_bad = false;
    Fetched<HEAD, Kv> fetched;
    auto put = [&](u32 to) {
#pragma unroll
        for (u32 i = 0; i < TOKENS * CHUNKS / THREADS; i++)
            fetched.put(i, to + place<HEAD>((threadIdx.x + i * THREADS) / CHUNKS, threadIdx.x % CHUNKS));
    };
    auto load = [&](u32 to, u32 tile, u64 after_k) {
#pragma unroll
        for (u32 i = 0; i < TOKENS * CHUNKS / THREADS; i++) {
            u32 row = (threadIdx.x + i * THREADS) / CHUNKS, chunk = threadIdx.x % CHUNKS, token = tile * TOKENS + row;
            bool is_seen = token < length && token >= oldest;
            u32 block = is_seen ? table[token / BLOCK_TOKENS] : 0;
            is_bad |= block >= shape.n_blocks;
            const Kv* from = pages + block * page_numbers + after_k + (kv_head * BLOCK_TOKENS + token % BLOCK_TOKENS) * HEAD + chunk * 8;
            fetched.fetch(i, to + place<HEAD>(row, chunk), from, is_seen && block < shape.n_blocks);
        }
        copies_committed();
    };
#pragma unroll
    for (u32 i = 0; i < QUERIES * CHUNKS / THREADS; i++) {
        u32 row = (threadIdx.x + i * THREADS) / CHUNKS, chunk = threadIdx.x % CHUNKS, query = min(first_query + row, n_queries - 1);
        copy16(q_at + place<HEAD>(row, chunk), q + (u64)(first_row + query) * shape.q_stride + head * HEAD + chunk * 8, true);
    }
    load(k_at, first_tile, 0);
    put(k_at);

    // A lane keeps rows g, g + 8, g + 16 and g + 24 of its warp's 32.
    float output[2][HEAD / 8][4] = {};
    float greatest[2][2] = {{-INF, -INF}, {-INF, -INF}}, sum[2][2] = {};
    float scale = shape.scale * LOG2E;

    for (u32 tile = first_tile; tile < end_tile; tile++) {
        copies_landed_but<0>();
        __syncthreads();
        load(v_at, tile, shape.n_kv_heads * part_of_page);

        float score[2][TOKENS / 8][4] = {};
#pragma unroll
        for (u32 step = 0; step < DIM_STEPS; step++) {
            u32 a[2][4];
#pragma unroll
            for (u32 m = 0; m < 2; m++) matrices(a[m], q_at + place<HEAD>(warp * 32 + m * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (u32 n = 0; n < TOKENS / 16; n++) {
                u32 b[4];
                matrices(b, k_at + place<HEAD>(n * 16 + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    mma(score[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    mma(score[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
        put(v_at);
        copies_landed_but<0>();
        __syncthreads();
        if (tile + 1 < end_tile) load(k_at, tile + 1, 0);

        u32 first_position = before + first_query + warp * 32;  // of this warp's rows
        bool is_edge = (tile + 1) * TOKENS > first_position + 1 || (u64)tile * TOKENS + shape.window < first_position + 32;
        if (is_edge) {
#pragma unroll
            for (u32 m = 0; m < 2; m++)
#pragma unroll
                for (u32 n = 0; n < TOKENS / 8; n++)
#pragma unroll
                    for (u32 i = 0; i < 4; i++) {
                        u32 token = tile * TOKENS + n * 8 + 2 * t + i % 2, position = first_position + m * 16 + g + i / 2 * 8;
                        if (token > position || (u64)token + shape.window <= position) score[m][n][i] = -INF;
                    }
        }
#pragma unroll
        for (u32 m = 0; m < 2; m++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                float most = greatest[m][half];
#pragma unroll
                for (u32 n = 0; n < TOKENS / 8; n++) most = fmaxf(most, fmaxf(score[m][n][2 * half], score[m][n][2 * half + 1]));
                most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
                most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
                float base = most == -INF ? 0.f : most * scale;  // a row may see no token of this tile
                float by = power2(greatest[m][half] * scale - base);
                greatest[m][half] = most;
                sum[m][half] *= by;
#pragma unroll
                for (u32 n = 0; n < TOKENS / 8; n++)
#pragma unroll
                    for (u32 i = 0; i < 2; i++) {
                        float& number = score[m][n][2 * half + i];
                        number = power2(number * scale - base);
                        sum[m][half] += number;
                    }
#pragma unroll
                for (u32 n = 0; n < HEAD / 8; n++) {
                    output[m][n][2 * half] *= by;
                    output[m][n][2 * half + 1] *= by;
                }
            }
#pragma unroll
        for (u32 step = 0; step < TOKENS / 16; step++) {
            u32 a[2][4];
#pragma unroll
            for (u32 m = 0; m < 2; m++)
#pragma unroll
                for (u32 i = 0; i < 4; i++) {
                    float(&c)[4] = score[m][2 * step + i / 2];
                    a[m][i] = narrow(c[i % 2 * 2], c[i % 2 * 2 + 1]);
                }
#pragma unroll
            for (u32 n = 0; n < HEAD / 16; n++) {
                u32 b[4];
                matrices_transposed(b, v_at + place<HEAD>(step * 16 + lane % 16, n * 2 + lane / 16));
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    mma(output[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    mma(output[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
        if (tile + 1 < end_tile) put(k_at);
    }
    bool is_spoilt = __syncthreads_or(is_bad);  // NaN marks a block that does not exist
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            float total = sum[m][half];
            total += __shfl_xor_sync(FULL_WARP, total, 1);
            total += __shfl_xor_sync(FULL_WARP, total, 2);
            float by = is_spoilt ? __int_as_float(0x7fc00000) : 1.f / total;
            u32 query = first_query + warp * 32 + m * 16 + half * 8 + g;
            if (query >= n_queries) continue;
            bf16* row = out + ((u64)(first_row + query) * shape.n_q_heads + head) * HEAD;
#pragma unroll
            for (u32 n = 0; n < HEAD / 8; n++)
                *reinterpret_cast<u32*>(row + n * 8 + 2 * t) = narrow(output[m][n][2 * half] * by, output[m][n][2 * half + 1] * by);
        }
}

#define PREFILL(HEAD, BLOCKS)                                                                                             \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                      \
    prefill_attention_##HEAD(bf16* out, const bf16* q, const bf16* pages,                       \
                             const u32* tables, const uint3* sequences, PrefillShape shape) {   \
        prefill<HEAD>(out, q, pages, tables, sequences, shape);                                                           \
    }                                                                                                                     \
    extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS)                                                      \
    prefill_attention_fp8_##HEAD(bf16* out, const bf16* q, const f8* pages,                                               \
                                 const u32* tables, const uint3* sequences, PrefillShape shape) {                         \
        prefill<HEAD>(out, q, pages, tables, sequences, shape);                                                           \
    }
PREFILL(64, 2)
PREFILL(128, 2)
