// Attention in which all heads share one latent vector for each token.
//
// A latent has RANK compressed numbers, which are key and value of every head, then ROTATED ones, which are
// part of the key only. Models with fewer are padded with zeroes. A page has the latents of BLOCK_TOKENS tokens.
// Queries are rows of the same width, the heads of a token one after the other, so the queries of consecutive
// tokens are the rows of one matrix.
constexpr u32 RANK = 512, ROTATED = 64, LATENT = RANK + ROTATED;

// A tile of latents or of queries in shared memory. Its chunks of 8 numbers are exchanged within groups of eight,
// so that the same chunk of eight neighbouring rows is in different banks.
constexpr u32 TILE_TOKENS = 32, TILE_CHUNKS = LATENT / 8;
__device__ __forceinline__ u32 latent_place(u32 row, u32 chunk) { return (row * TILE_CHUNKS + (chunk ^ row % 8)) * 16; }

// Scores have a row for each query. The stride keeps rows in different banks.
constexpr u32 SCORE_STRIDE = TILE_TOKENS + 4;

struct LatentShape {
    u32 n_heads;
    u32 table_stride;    // blocks between two sequences' tables
    u32 n_blocks;        // the number of KV blocks
    u32 chunk_tokens;    // tokens for one block of threads
    u32 rows_of_table;   // consecutive rows that share a table
    u32 last_is_new;     // only a sequence's last page was written since the step began
    float scale;
};

// A block of threads computes GROUPS * 16 queries of one sequence over one chunk of its tokens. GROUPS * SHARES
// warps compute scores of TILE_TOKENS / SHARES tokens each, then RANK / SHARES numbers of the output each.
// Latents in e4m3 come into two tiles of their own, and are widened into the one that is computed with.
// `sequences` has the first row, the number of rows and the length of each sequence; without it, each row is a
// query of its own, with its own length.
template <typename Kv, u32 GROUPS, u32 SHARES>
__device__ __forceinline__ void attend_latents(bf16* out, float* parts, float2* part_sums, const bf16* q, const Kv* pages,
                                               const u32* tables, const u32* lengths, const uint3* sequences, LatentShape shape) {
    constexpr u32 ROWS = GROUPS * 16, THREADS = GROUPS * SHARES * 32, TOKENS = TILE_TOKENS / SHARES, DIMS = RANK / SHARES;
    constexpr bool IS_NARROW = sizeof(Kv) == 1;
    constexpr u32 TILE = TILE_TOKENS * LATENT * 2, LOADED = TILE_TOKENS * LATENT * sizeof(Kv);
    constexpr u32 TILES = ROWS * LATENT * 2, LOADS = TILES + (IS_NARROW ? TILE : 0), SCORES = LOADS + 2 * LOADED;
    extern __shared__ __align__(16) unsigned char memory[];
    next_may_come();
    u32 q_at = shared_address(memory), loads_at = q_at + LOADS;
    float* scores = reinterpret_cast<float*>(memory + SCORES);
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 group = warp % GROUPS, part = warp / GROUPS;

    uint3 sequence = sequences ? sequences[blockIdx.z] : make_uint3(blockIdx.z, 1, lengths[blockIdx.z]);
    const u32* table = tables + (u64)(sequences ? blockIdx.z : blockIdx.z / shape.rows_of_table) * shape.table_stride;
    u32 n_rows = sequence.y * shape.n_heads, n_tiles = (n_rows + ROWS - 1) / ROWS;
    if (blockIdx.y >= n_tiles) return;
    u32 first = (n_tiles - 1 - blockIdx.y) * ROWS;  // the rows with the most tokens first
    u32 before = sequence.z - sequence.y;           // tokens before the first query; wraps around for a length of 0
    u32 end = before + (min(first + ROWS, n_rows) - 1) / shape.n_heads + 1;
    u32 from = blockIdx.x * shape.chunk_tokens;
    if (gridDim.x > 1 && from >= end) return;  // this part is not read
    u32 to = end > from ? from + min(end - from, shape.chunk_tokens) : from;
    u64 first_row = (u64)sequence.x * shape.n_heads + first;

    bool is_bad = false;
    auto load = [&](u32 at, u32 tile) {
        constexpr u32 NUMBERS = 16 / sizeof(Kv), CHUNKS = LATENT / NUMBERS, ALL = TILE_TOKENS * CHUNKS;
#pragma unroll
        for (u32 i = 0; i < (ALL + THREADS - 1) / THREADS; i++) {
            u32 nth = threadIdx.x + i * THREADS, row = nth / CHUNKS, chunk = nth % CHUNKS, token = tile + row;
            if (ALL % THREADS > 0 && nth >= ALL) break;
            u32 block = token < to ? table[token / BLOCK_TOKENS] : 0;
            is_bad |= block >= shape.n_blocks;
            const Kv* latent = pages + ((u64)block * BLOCK_TOKENS + token % BLOCK_TOKENS) * LATENT;
            copy16(at + (IS_NARROW ? nth * 16 : latent_place(row, chunk)), latent + chunk * NUMBERS, token < to && block < shape.n_blocks);
        }
        copies_committed();
    };
    auto widen_tile = [&](u32 from) {
        for (u32 nth = threadIdx.x; nth < TILE_TOKENS * TILE_CHUNKS; nth += THREADS) {
            Eight eight = widened(reinterpret_cast<const Four*>(memory + from)[nth]);
            *reinterpret_cast<Eight*>(memory + TILES + latent_place(nth / TILE_CHUNKS, nth % TILE_CHUNKS)) = eight;
        }
    };
    // The kernels before this one write queries and the new pages. Old pages are loaded before the last of those kernels has ended.
    bool is_old = shape.last_is_new && from + TILE_TOKENS <= (end - 1) / BLOCK_TOKENS * BLOCK_TOKENS;
    if (is_old) load(loads_at, from);
    wait_for_last();
    for (u32 nth = threadIdx.x; nth < ROWS * TILE_CHUNKS; nth += THREADS) {
        u32 row = nth / TILE_CHUNKS, chunk = nth % TILE_CHUNKS;
        copy16(q_at + latent_place(row, chunk), q + (first_row + row) * LATENT + chunk * 8, first + row < n_rows);
    }
    if (is_old) copies_committed();
    else load(loads_at, from);

    // A lane keeps rows g and g + 8 of its group.
    float output[DIMS / 8][4] = {};
    float greatest[2] = {-INF, -INF}, sum[2] = {};
    u32 limit[2];  // the tokens that each of these rows sees
#pragma unroll
    for (u32 half = 0; half < 2; half++) limit[half] = before + (first + group * 16 + half * 8 + g) / shape.n_heads + 1;
    float scale = shape.scale * LOG2E;
    u32 now = 0;
    for (u32 tile = from; tile < to; tile += TILE_TOKENS, now ^= 1) {
        if (tile + TILE_TOKENS < to) {
            load(loads_at + (now ^ 1) * LOADED, tile + TILE_TOKENS);
            copies_landed_but<1>();
        } else {
            copies_landed_but<0>();
        }
        __syncthreads();
        if constexpr (IS_NARROW) {
            widen_tile(LOADS + now * LOADED);
            __syncthreads();
        }
        u32 here = q_at + TILES + (IS_NARROW ? 0 : now * TILE);

        float score[TOKENS / 8][4] = {};
#pragma unroll 6
        for (u32 step = 0; step < LATENT / 32; step++) {
            u32 a[2][4];
#pragma unroll
            for (u32 i = 0; i < 2; i++) matrices(a[i], q_at + latent_place(group * 16 + lane % 16, step * 4 + i * 2 + lane / 16));
#pragma unroll
            for (u32 n = 0; n < TOKENS / 8; n++) {
                u32 b[4];
                matrices(b, here + latent_place(part * TOKENS + n * 8 + lane % 8, step * 4 + lane / 8));
                mma(score[n], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
                mma(score[n], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
            }
        }
#pragma unroll
        for (u32 n = 0; n < TOKENS / 8; n++)
#pragma unroll
            for (u32 half = 0; half < 2; half++) {
                u32 column = part * TOKENS + n * 8 + 2 * t;
                float2 two = make_float2(score[n][2 * half] * scale, score[n][2 * half + 1] * scale);
                if (tile + column >= limit[half]) two.x = -INF;
                if (tile + column + 1 >= limit[half]) two.y = -INF;
                *reinterpret_cast<float2*>(scores + (group * 16 + half * 8 + g) * SCORE_STRIDE + column) = two;
            }
        __syncthreads();

        // Every warp of a group computes the same weights, in the same order.
        u32 weights[TILE_TOKENS / 16][4];
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            const float* row = scores + (group * 16 + half * 8 + g) * SCORE_STRIDE + 2 * t;
            float2 two[TILE_TOKENS / 8];
            float most = greatest[half];
#pragma unroll
            for (u32 n = 0; n < TILE_TOKENS / 8; n++) {
                two[n] = *reinterpret_cast<const float2*>(row + n * 8);
                most = fmaxf(most, fmaxf(two[n].x, two[n].y));
            }
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
            most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
            float base = most == -INF ? 0.f : most;  // a row may see no token of this tile
            float by = power2(greatest[half] - base);
            greatest[half] = most;
            sum[half] *= by;
#pragma unroll
            for (u32 n = 0; n < TILE_TOKENS / 8; n++) {
                // The sum uses the same weights as the product: rounded to bf16.
                u32 pair = narrow(power2(two[n].x - base), power2(two[n].y - base));
                sum[half] += low(pair) + high(pair);
                weights[n / 2][n % 2 * 2 + half] = pair;
            }
#pragma unroll
            for (u32 n = 0; n < DIMS / 8; n++) {
                output[n][2 * half] *= by;
                output[n][2 * half + 1] *= by;
            }
        }
#pragma unroll
        for (u32 step = 0; step < TILE_TOKENS / 16; step++)
#pragma unroll
            for (u32 n = 0; n < DIMS / 16; n++) {
                u32 b[4];
                matrices_transposed(b, here + latent_place(step * 16 + lane % 16, part * DIMS / 8 + n * 2 + lane / 16));
                u32(&a)[4] = weights[step];
                mma(output[2 * n], a[0], a[1], a[2], a[3], b[0], b[1]);
                mma(output[2 * n + 1], a[0], a[1], a[2], a[3], b[2], b[3]);
            }
        __syncthreads();
    }
    bool is_spoilt = __syncthreads_or(is_bad);  // NaN marks a block that does not exist
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float total = sum[half];
        total += __shfl_xor_sync(FULL_WARP, total, 1);
        total += __shfl_xor_sync(FULL_WARP, total, 2);
        if (is_spoilt) total = __int_as_float(0x7fc00000);
        u32 nth = group * 16 + half * 8 + g;
        if (first + nth >= n_rows) continue;
        u64 row = first_row + nth;
        if (gridDim.x == 1) {
            float by = total == 0.f ? 0.f : 1.f / total;
#pragma unroll
            for (u32 n = 0; n < DIMS / 8; n++)
                *reinterpret_cast<u32*>(out + row * RANK + part * DIMS + n * 8 + 2 * t) = narrow(output[n][2 * half] * by, output[n][2 * half + 1] * by);
        } else {
            u64 at = row * gridDim.x + blockIdx.x;
#pragma unroll
            for (u32 n = 0; n < DIMS / 8; n++)
                *reinterpret_cast<float2*>(parts + at * RANK + part * DIMS + n * 8 + 2 * t) = make_float2(output[n][2 * half], output[n][2 * half + 1]);
            if (part == 0 && t == 0) part_sums[at] = make_float2(greatest[half], total);
        }
    }
}

#define ATTEND_LATENTS(NAME, KV, GROUPS, SHARES)                                                                          \
    extern "C" __global__ void __launch_bounds__(GROUPS * SHARES * 32, 1)                                                 \
    NAME(bf16* out, float* parts, float2* part_sums, const bf16* q, const KV* pages,                                      \
         const u32* tables, const u32* lengths, const uint3* sequences, LatentShape shape) {                              \
        attend_latents<KV, GROUPS, SHARES>(out, parts, part_sums, q, pages, tables, lengths, sequences, shape);           \
    }
