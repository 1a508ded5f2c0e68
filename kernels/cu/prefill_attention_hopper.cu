// Prefill attention for Hopper and heads of 128 dims. The copy engine loads tiles, and groups of four warps
// multiply.
//
// A block of threads takes pieces of work until none are left: QUERIES rows of one head of one sequence each,
// the longest first. It goes along the sequence from its end, in steps of TOKENS. One warp draws the pieces
// and loads pages. A page is 16 rows of 128 numbers, so a tile of K or V is gathered page by page into two
// columns of tiles, one for each half of the dims.
// Two groups have 64 queries each, with their scores and output in registers. While one computes its softmax,
// the other uses the tensor cores. Each group's product with V runs while it weighs the scores of its next
// tile. The first tiles of the next piece are loaded while the last tiles of this one are computed.
//
// With latent attention, queries and keys have ROTATED numbers more than values. Keys and values of each head were
// made of latents (`expand_latents.cu`) and are in pages of their own, sequence by sequence. All heads share the
// rotated part of a key, which is read where it is: behind the RANK numbers of a latent in its page. The tiles are
// larger, so there is room for the queries of one piece only.
constexpr u32 HEAD = 128, QUERIES = 128, TOKENS = 128, STAGES = 2;
constexpr u32 HALF_BYTES = TOKENS * TILE_ROW_BYTES, TILE_BYTES = 2 * HALF_BYTES, RANK = 512;
template <u32 ROTATED>
struct Sizes { static constexpr u32 KEY = HEAD + ROTATED, KEY_BYTES = KEY / TILE_COLUMNS * HALF_BYTES, Q_STAGES = ROTATED ? 1 : STAGES; };
constexpr u32 GROUP = 128, PAGES = TOKENS / BLOCK_TOKENS, NONE = 0xffffffffu;
// Hardware barriers. Barrier 0 has all threads; 1 and 2 give the groups their turns. Groups take turns at
// every tile, also from piece to piece. Otherwise a group could run ahead into its next piece and give its
// turn away twice before the other had taken the first; it would complete the barrier alone, and the other
// would wait forever.
constexpr u32 TURN = 1, CLEARED = 3;

struct PrefillShape {
    u32 n_q_heads, n_kv_heads;
    u32 q_stride;      // numbers between two rows of q
    u32 table_stride;  // blocks between two sequences' tables
    u32 n_blocks;      // the number of KV blocks
    u32 window;        // the number of last tokens that a query sees
    float scale;
    u32 n_sequences, n_pieces;
    u32 n_out_heads;   // heads of a row of the output
    u32 n_pages;       // pages that were made of latents
};

// A piece of work.
struct Span {
    u32 sequence, first_row, n_queries, length, first_query, head, kv_head;
    u32 before;               // tokens before the first query
    u32 oldest;               // the first token that a query here sees
    u32 first_tile, n_tiles;  // tiles of TOKENS in the sequence; zero tiles mean no work
};

// Pieces are numbered so that the last queries of all heads of all sequences come first.
__device__ __forceinline__ Span piece(u32 nth, const uint3* sequences, const PrefillShape& shape) {
    Span span;
    u32 rest = nth / shape.n_q_heads;
    span.head = nth % shape.n_q_heads, span.kv_head = span.head / (shape.n_q_heads / shape.n_kv_heads);
    span.sequence = rest % shape.n_sequences;
    uint3 sequence = sequences[span.sequence];  // its first row in q, its queries, its tokens
    span.first_row = sequence.x, span.n_queries = sequence.y, span.length = sequence.z;
    u32 n_query_tiles = (span.n_queries + QUERIES - 1) / QUERIES, from_last = rest / shape.n_sequences;
    if (from_last >= n_query_tiles) {
        span.n_tiles = 0;
        return span;
    }
    span.first_query = (n_query_tiles - 1 - from_last) * QUERIES;
    span.before = span.length - span.n_queries;
    u32 first_position = span.before + span.first_query, end = min(first_position + QUERIES, span.length);
    span.oldest = first_position + 1 > shape.window ? first_position + 1 - shape.window : 0;
    span.first_tile = span.oldest / TOKENS;
    span.n_tiles = (end + TOKENS - 1) / TOKENS - span.first_tile;
    return span;
}

// The addresses in shared memory: STAGES of each buffer and of its barriers.
struct Places { u32 q, k, v, q_full, q_empty, k_full, k_empty, v_full, v_empty; };

// Messages from the loading warp to the groups: the piece whose queries are in this stage, and whether a page
// did not exist.
struct Told { volatile u32 piece[STAGES], spoilt[STAGES]; };

// The stage of the nth use of a buffer, and the parities of its barriers for full and for empty.
template <u32 N = STAGES>
__device__ __forceinline__ u32 stage_of(u32 nth) { return nth % N; }
template <u32 N = STAGES>
__device__ __forceinline__ u32 full_parity(u32 nth) { return nth / N % 2; }
template <u32 N = STAGES>
__device__ __forceinline__ void wait_until_empty(u32 empty, u32 nth) {
    if (nth >= N) barrier_wait(empty + stage_of<N>(nth) * 8, (nth / N - 1) % 2);
}

// The warp that loads tiles: each of lanes 0 to 15 loads half a page. A page that no query sees is read
// outside of the map, which gives zeroes. So is a block that does not exist, which is also reported. K is
// loaded one tile before V. `n_before` tiles were loaded before this piece. Lanes 16 to 23 each load the rotated
// part of a page's keys, if it is elsewhere.
template <u32 ROTATED>
__device__ __forceinline__ void bring_tiles(const Span& span, const PrefillShape& shape, const TensorMap& of_pages, const TensorMap& of_latents,
                                            const u32* tables, const uint3* sequences, const Places& at, u32 n_before, volatile u32* spoilt) {
    constexpr u32 KEY_BYTES = Sizes<ROTATED>::KEY_BYTES;
    u32 lane = threadIdx.x % 32, page = lane < 2 * PAGES ? lane / 2 : lane - 2 * PAGES, half = lane % 2;
    const u32* table = tables + (u64)span.sequence * shape.table_stride;
    u32 own_pages = ROTATED ? first_page(sequences, span.sequence) : 0;
    u32 n_pages = ROTATED ? shape.n_pages : shape.n_blocks;
    auto block_of = [&](u32 nth) {  // for this lane's page in the nth tile from the end
        if (lane >= (ROTATED ? 3 : 2) * PAGES || nth >= span.n_tiles) return NONE;
        u32 token = ((span.first_tile + span.n_tiles - 1 - nth) * PAGES + page) * BLOCK_TOKENS;
        if (token >= span.length || token + BLOCK_TOKENS <= span.oldest) return NONE;
        if (ROTATED && lane < 2 * PAGES) return own_pages + token / BLOCK_TOKENS;
        u32 block = table[token / BLOCK_TOKENS];
        if (block >= shape.n_blocks) *spoilt = 1;
        return block;
    };
    auto bring = [&](u32 tile, u32 block, u32 part, u32 full) {
        if (lane == 0) barrier_expect(full, part == 0 ? KEY_BYTES : TILE_BYTES);
        __syncwarp();
        if (lane < 2 * PAGES) {
            u32 page_part = (min(block, n_pages) * 2 + part) * shape.n_kv_heads + span.kv_head;
            u32 to = tile + half * HALF_BYTES + page * BLOCK_TOKENS * TILE_ROW_BYTES;
            copy_tile(to, of_pages, half * TILE_COLUMNS, page_part * BLOCK_TOKENS, full, EVICT_LAST);
        } else if (ROTATED && part == 0 && lane < 3 * PAGES) {
            u32 to = tile + TILE_BYTES + page * BLOCK_TOKENS * TILE_ROW_BYTES;
            copy_tile(to, of_latents, RANK, min(block, shape.n_blocks) * BLOCK_TOKENS, full, EVICT_LAST);
        }
    };
    u32 of_k = block_of(0), of_v = NONE;
    for (u32 nth = 0; nth <= span.n_tiles; nth++) {
        u32 next = block_of(nth + 1), k = n_before + nth, v = k - 1;
        if (nth < span.n_tiles) {
            wait_until_empty(at.k_empty, k);
            bring(at.k + stage_of(k) * KEY_BYTES, of_k, 0, at.k_full + stage_of(k) * 8);
        }
        if (nth > 0) {
            wait_until_empty(at.v_empty, v);
            bring(at.v + stage_of(v) * TILE_BYTES, of_v, 1, at.v_full + stage_of(v) * 8);
        }
        of_v = of_k;
        of_k = next;
    }
}

// Draws the next piece; the first piece of each block is fixed. The last block that finds none resets the
// tickets.
__device__ __forceinline__ u32 draw_piece(u32* tickets, u32 n_pieces) {
    u32 nth = 0;
    if (threadIdx.x % 32 == 0) {
        nth = gridDim.x + atomicAdd(&tickets[0], 1);
        if (nth >= n_pieces && atomicAdd(&tickets[1], 1) == gridDim.x - 1) tickets[0] = 0, tickets[1] = 0;
    }
    return __shfl_sync(FULL_WARP, nth, 0);
}

template <u32 ROTATED>
__device__ __forceinline__ void bring_pieces(const PrefillShape& shape, const TensorMap& of_q, const TensorMap& of_pages, const TensorMap& of_latents,
                                             const u32* tables, const uint3* sequences, const Places& at, Told& told, u32* tickets) {
    constexpr u32 KEY = Sizes<ROTATED>::KEY, KEY_BYTES = Sizes<ROTATED>::KEY_BYTES, Q_STAGES = Sizes<ROTATED>::Q_STAGES;
    u32 lane = threadIdx.x % 32, n_tiles = 0, turn = 0;
    for (u32 nth = blockIdx.x; nth < shape.n_pieces; nth = draw_piece(tickets, shape.n_pieces)) {
        Span span = piece(nth, sequences, shape);
        if (span.n_tiles == 0) continue;
        u32 stage = stage_of<Q_STAGES>(turn), q = at.q + stage * KEY_BYTES, full = at.q_full + stage * 8;
        wait_until_empty<Q_STAGES>(at.q_empty, turn);
        if (lane == 0) {
            told.piece[stage] = nth;
            told.spoilt[stage] = 0;
            barrier_expect(full, KEY_BYTES);
            for (u32 i = 0; i < KEY / TILE_COLUMNS; i++)
                copy_tile(q + i * HALF_BYTES, of_q, span.head * KEY + i * TILE_COLUMNS, span.first_row + span.first_query, full, EVICT_FIRST);
        }
        __syncwarp();
        bring_tiles<ROTATED>(span, shape, of_pages, of_latents, tables, sequences, at, n_tiles, &told.spoilt[stage]);
        n_tiles += span.n_tiles;
        turn++;
    }
    wait_until_empty<Q_STAGES>(at.q_empty, turn);
    if (lane == 0) {
        told.piece[stage_of<Q_STAGES>(turn)] = NONE;
        barrier_arrive(at.q_full + stage_of<Q_STAGES>(turn) * 8);
    }
}

// Starts score = q * K of a tile.
template <u32 KEY>
__device__ __forceinline__ void begin_scores(float (&score)[64], u32 q, u32 k) {
    held(score);
    products_begin();
#pragma unroll
    for (u32 i = 0; i < KEY / 16; i++) {
        u64 a = tile_of(q + i / 4 * QUERIES * TILE_ROW_BYTES, 16) + i % 4 * 2;
        u64 b = tile_of(k + i / 4 * HALF_BYTES, 16) + i % 4 * 2;
        product(score, a, b, i > 0);
    }
    products_committed();
}

// Starts output += weights * V of a tile. The sum is over tokens, 16 at a time: rows of two columns of tiles.
__device__ __forceinline__ void begin_output(float (&output)[64], const u32 (&shares)[32], u32 v) {
    held(output);
    products_begin();
#pragma unroll
    for (u32 i = 0; i < TOKENS / 16; i++)
        product_turned(output, shares[4 * i], shares[4 * i + 1], shares[4 * i + 2], shares[4 * i + 3],
                       tile_of(v + i * 16 * TILE_ROW_BYTES, HALF_BYTES));
    products_committed();
}

// The online softmax of rows g and g + 8 of a warp.
struct Softmax { float greatest[2] = {-INF, -INF}, sum[2] = {0.f, 0.f}; };

// Turns scores into weights. Returns in `by` the factors for the earlier sums.
__device__ __forceinline__ void weigh(float (&score)[64], Softmax& kept, float (&by)[2], float scale) {
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float most = kept.greatest[half];
#pragma unroll
        for (u32 i = 0; i < 16; i++) most = fmaxf(most, fmaxf(score[4 * i + 2 * half], score[4 * i + 2 * half + 1]));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 1));
        most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, 2));
        float base = most == -INF ? 0.f : most * scale;  // a row may see no token of this tile
        by[half] = power2(kept.greatest[half] * scale - base);
        kept.greatest[half] = most;
        float sum = 0.f;
#pragma unroll
        for (u32 i = 0; i < 16; i++)
#pragma unroll
            for (u32 j = 0; j < 2; j++) {
                float& number = score[4 * i + 2 * half + j];
                number = power2(number * scale - base);
                sum += number;
            }
        kept.sum[half] = kept.sum[half] * by[half] + sum;
    }
}

// Forces the compiler to compute the weights before the product, which then runs at the same time. The
// compiler must assume that this store can happen: it does not know that sums are never negative.
__device__ __forceinline__ void weighed_by_now(const Softmax& kept, u32 anywhere) {
    asm volatile("{\n.reg .pred never;\nsetp.lt.f32 never, %0, 0f00000000;\n@never st.shared.f32 [%1], %0;\n}"
                 ::"f"(kept.sum[0] + kept.sum[1]), "r"(anywhere) : "memory");
}

// Rounds weights to bf16 in the layout of the next product: for 16 tokens, rows g and g + 8 of the first and
// second 8.
__device__ __forceinline__ void round_shares(u32 (&shares)[32], const float (&score)[64]) {
#pragma unroll
    for (u32 i = 0; i < 32; i++) shares[i] = narrow(score[2 * i], score[2 * i + 1]);
}

// Masks tokens after a query, or before its window, if the tile has any.
__device__ __forceinline__ void hide(float (&score)[64], u32 tile, u32 first_position, u32 window) {
    u32 lane = threadIdx.x % 32, row = threadIdx.x % GROUP / 32 * 16 + lane / 4;
    bool is_edge = (tile + 1) * TOKENS > first_position + 1 || (u64)tile * TOKENS + window < first_position + 64;
    if (!is_edge) return;
#pragma unroll
    for (u32 i = 0; i < 64; i++) {
        u32 token = tile * TOKENS + i / 4 * 8 + lane % 4 * 2 + i % 2, position = first_position + row + i / 2 % 2 * 8;
        if (token > position || (u64)token + window <= position) score[i] = -INF;
    }
}

// Clears the last page after the sequence's end. Numbers there may be NaN, which a weight of zero does not
// cancel. Both groups clear it.
__device__ __forceinline__ void clear_after_end(const Span& span, const Places& at, u32 nth) {
    u32 from = span.length - (span.first_tile + span.n_tiles - 1) * TOKENS, n_rows = (16 - from % 16) % 16;
    if (from >= TOKENS || n_rows == 0) return;
    barrier_wait(at.v_full + stage_of(nth) * 8, full_parity(nth));
    u32 row = from + threadIdx.x % 16, half = threadIdx.x / 16 % 2, chunk = threadIdx.x / 32 - 4;
    if (row < from + n_rows) {
        u32 to = at.v + stage_of(nth) * TILE_BYTES + half * HALF_BYTES + row * TILE_ROW_BYTES + chunk * 16;
        asm volatile("st.shared.v4.u32 [%0], {%1, %1, %1, %1};" ::"r"(to), "r"(0) : "memory");
    }
    stores_shown();
    threads_wait<2 * GROUP>(CLEARED);
}

// Divides the sums and writes the output.
__device__ __forceinline__ void write_output(bf16* out, const Span& span, const float (&output)[64], const Softmax& kept,
                                             const PrefillShape& shape, bool is_spoilt) {
    u32 group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32, warp = threadIdx.x % GROUP / 32;
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        float total = kept.sum[half];
        total += __shfl_xor_sync(FULL_WARP, total, 1);
        total += __shfl_xor_sync(FULL_WARP, total, 2);
        float share = is_spoilt ? __int_as_float(0x7fc00000) : 1.f / total;  // NaN marks the error
        u32 query = span.first_query + group * 64 + warp * 16 + half * 8 + lane / 4;
        if (query >= span.n_queries) continue;
        bf16* row = out + ((u64)(span.first_row + query) * shape.n_out_heads + span.head) * HEAD + lane % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < 16; i++)
            *reinterpret_cast<u32*>(row + i * 8) = narrow(output[4 * i + 2 * half] * share, output[4 * i + 2 * half + 1] * share);
    }
}

// One group computes one piece. `n_before` tiles came before it. Its queries are in stage `q_stage`.
template <u32 ROTATED>
__device__ __forceinline__ void attend(bf16* out, const Span& span, const PrefillShape& shape, const Places& at, u32 n_before,
                                       u32 q_stage, const volatile u32* spoilt) {
    constexpr u32 KEY = Sizes<ROTATED>::KEY, KEY_BYTES = Sizes<ROTATED>::KEY_BYTES;
    u32 group = threadIdx.x / GROUP - 1, lane = threadIdx.x % 32;
    u32 first_position = span.before + span.first_query + group * 64;
    u32 q = at.q + q_stage * KEY_BYTES + group * 64 * TILE_ROW_BYTES, last_tile = span.first_tile + span.n_tiles - 1;
    float score[64], output[64] = {}, by[2];
    u32 shares[32];
    Softmax kept;
    float scale = shape.scale * LOG2E;

    clear_after_end(span, at, n_before);
    barrier_wait(at.k_full + stage_of(n_before) * 8, full_parity(n_before));
    threads_wait<2 * GROUP>(TURN + group);
    begin_scores<KEY>(score, q, at.k + stage_of(n_before) * KEY_BYTES);
    threads_arrive<2 * GROUP>(TURN + (group ^ 1));
    products_done_but<0>();
    held(score);
    if (lane == 0) barrier_arrive(at.k_empty + stage_of(n_before) * 8);
    hide(score, last_tile, first_position, shape.window);
    weigh(score, kept, by, scale);
    round_shares(shares, score);
    for (u32 nth = 1; nth < span.n_tiles; nth++) {
        u32 of_k = n_before + nth, of_v = of_k - 1;
        barrier_wait(at.k_full + stage_of(of_k) * 8, full_parity(of_k));
        threads_wait<2 * GROUP>(TURN + group);
        begin_scores<KEY>(score, q, at.k + stage_of(of_k) * KEY_BYTES);
        barrier_wait(at.v_full + stage_of(of_v) * 8, full_parity(of_v));
        begin_output(output, shares, at.v + stage_of(of_v) * TILE_BYTES);
        threads_arrive<2 * GROUP>(TURN + (group ^ 1));
        products_done_but<1>();
        held(score);
        if (lane == 0) barrier_arrive(at.k_empty + stage_of(of_k) * 8);
        hide(score, last_tile - nth, first_position, shape.window);
        weigh(score, kept, by, scale);
        weighed_by_now(kept, at.q);
        products_done_but<0>();
        held(output);
        if (lane == 0) barrier_arrive(at.v_empty + stage_of(of_v) * 8);
#pragma unroll
        for (u32 i = 0; i < 64; i++) output[i] *= by[i / 2 % 2];
        round_shares(shares, score);
    }
    u32 last = n_before + span.n_tiles - 1;
    barrier_wait(at.v_full + stage_of(last) * 8, full_parity(last));
    bool is_spoilt = *spoilt != 0;
    if (lane == 0) barrier_arrive(at.q_empty + q_stage * 8);
    begin_output(output, shares, at.v + stage_of(last) * TILE_BYTES);
    products_done_but<0>();
    held(output);
    if (lane == 0) barrier_arrive(at.v_empty + stage_of(last) * 8);
    write_output(out, span, output, kept, shape, is_spoilt);
}

template <u32 ROTATED>
__device__ __forceinline__ void attend_pieces(bf16* out, const TensorMap& of_q, const TensorMap& of_pages, const TensorMap& of_latents,
                                              const u32* tables, const uint3* sequences, u32* tickets, const PrefillShape& shape) {
    constexpr u32 KEY_BYTES = Sizes<ROTATED>::KEY_BYTES, Q_STAGES = Sizes<ROTATED>::Q_STAGES;
    extern __shared__ Eight shared[];
    __shared__ u64 barriers[6 * STAGES];
    __shared__ Told told;
    Places at;
    at.q = (shared_address(shared) + 1023) / 1024 * 1024;
    at.k = at.q + Q_STAGES * KEY_BYTES;
    at.v = at.k + STAGES * KEY_BYTES;
    at.q_full = shared_address(barriers), at.q_empty = at.q_full + STAGES * 8;
    at.k_full = at.q_empty + STAGES * 8, at.k_empty = at.k_full + STAGES * 8;
    at.v_full = at.k_empty + STAGES * 8, at.v_empty = at.v_full + STAGES * 8;
    if (threadIdx.x == 0) {
        fetch_map(of_q);
        fetch_map(of_pages);
        if (ROTATED) fetch_map(of_latents);
        for (u32 i = 0; i < STAGES; i++) {
            u32 full[] = {at.q_full, at.k_full, at.v_full}, empty[] = {at.q_empty, at.k_empty, at.v_empty};
            for (u32 j = 0; j < 3; j++) barrier_start(full[j] + i * 8, 1), barrier_start(empty[j] + i * 8, 2 * GROUP / 32);
        }
        barriers_started();
    }
    in_turn();
    __syncthreads();

    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 24;");
        if (threadIdx.x < 32) bring_pieces<ROTATED>(shape, of_q, of_pages, of_latents, tables, sequences, at, told, tickets);
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 240;");
        u32 n_tiles = 0;
        if (threadIdx.x >= 2 * GROUP) threads_arrive<2 * GROUP>(TURN);  // the first group begins
        for (u32 turn = 0;; turn++) {
            u32 stage = stage_of<Q_STAGES>(turn);
            barrier_wait(at.q_full + stage * 8, full_parity<Q_STAGES>(turn));
            u32 nth = told.piece[stage];
            if (nth == NONE) break;
            Span span = piece(nth, sequences, shape);
            attend<ROTATED>(out, span, shape, at, n_tiles, stage, &told.spoilt[stage]);
            n_tiles += span.n_tiles;
        }
    }
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
prefill_attention_hopper(bf16* out, const __grid_constant__ TensorMap of_q, const __grid_constant__ TensorMap of_pages,
                         const u32* tables, const uint3* sequences, u32* tickets, PrefillShape shape) {
    attend_pieces<0>(out, of_q, of_pages, of_pages, tables, sequences, tickets, shape);
}

extern "C" __global__ void __launch_bounds__(3 * GROUP, 1)
prefill_attention_expanded(bf16* out, const __grid_constant__ TensorMap of_q, const __grid_constant__ TensorMap of_pages,
                           const __grid_constant__ TensorMap of_latents, const u32* tables, const uint3* sequences, u32* tickets,
                           PrefillShape shape) {
    attend_pieces<64>(out, of_q, of_pages, of_latents, tables, sequences, tickets, shape);
}
