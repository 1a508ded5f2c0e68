// Makes keys and values of each head of latents, for prompts of many tokens (`prefill_attention_hopper.cu`).
//
// A block of threads has TOKENS tokens of one sequence, one head, and its keys or its values. Eight warps multiply
// latents by the head's matrix: 32 tokens by 64 numbers each. Sequences have their pages one after the other, and a
// page is [K|V][head][token][number], so a page here is as a page of a model whose heads have keys of their own. The
// rotated part of a key is not among them. Tokens after a sequence's end are zeroes.
constexpr u32 RANK = 512, LATENT = RANK + 64, NUMBERS = 128;
constexpr u32 TOKENS = 128, THREADS = 256, STEP = 64;
// A tile of one step, of the latents or of the matrix, and the chunks of 8 numbers in its rows.
constexpr u32 TILE_BYTES = TOKENS * STEP * 2, NARROW = STEP / 8, WIDE = NUMBERS / 8;
template <u32 CHUNKS>
__device__ __forceinline__ u32 place(u32 row, u32 chunk) { return (row * CHUNKS + (chunk ^ row % 8)) * 16; }

struct ExpandShape { u32 n_heads, first_head, table_stride, n_blocks; };

template <bool IS_KEYS>
__device__ __forceinline__ void expand(bf16* out, const bf16* pages, const u32* table, const bf16* w, u32 length, const ExpandShape& shape) {
    extern __shared__ __align__(16) unsigned char memory[];  // two tiles of latents, two of the matrix
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 first_row = warp % 4 * 32, first_number = warp / 4 * 64, first_token = blockIdx.x * TOKENS;
    u32 x_at = shared_address(memory), w_at = x_at + 2 * TILE_BYTES;
    auto load = [&](u32 now, u32 k) {
#pragma unroll
        for (u32 i = 0; i < TOKENS * NARROW / THREADS; i++) {
            u32 nth = threadIdx.x + i * THREADS, row = nth / NARROW, chunk = nth % NARROW, token = first_token + row;
            u32 block = token < length ? table[token / BLOCK_TOKENS] : shape.n_blocks;
            const bf16* latent = pages + ((u64)(block < shape.n_blocks ? block : 0) * BLOCK_TOKENS + token % BLOCK_TOKENS) * LATENT;
            copy16(x_at + now * TILE_BYTES + place<NARROW>(row, chunk), latent + k + chunk * 8, block < shape.n_blocks);
        }
#pragma unroll
        for (u32 i = 0; i < TOKENS * NARROW / THREADS; i++) {
            u32 nth = threadIdx.x + i * THREADS, to = w_at + now * TILE_BYTES;
            if (IS_KEYS)  // rows of the latent's numbers
                copy16(to + place<WIDE>(nth / WIDE, nth % WIDE), w + (k + nth / WIDE) * NUMBERS + nth % WIDE * 8, true);
            else  // rows of the value's numbers
                copy16(to + place<NARROW>(nth / NARROW, nth % NARROW), w + nth / NARROW * RANK + k + nth % NARROW * 8, true);
        }
        copies_committed();
    };
    load(0, 0);
    float sum[2][8][4] = {};
    for (u32 k = 0, now = 0; k < RANK; k += STEP, now ^= 1) {
        if (k + STEP < RANK) {
            load(now ^ 1, k + STEP);
            copies_landed_but<1>();
        } else {
            copies_landed_but<0>();
        }
        __syncthreads();
#pragma unroll 2
        for (u32 step = 0; step < STEP / 16; step++) {
            u32 a[2][4];
#pragma unroll
            for (u32 m = 0; m < 2; m++)
                matrices(a[m], x_at + now * TILE_BYTES + place<NARROW>(first_row + m * 16 + lane % 16, step * 2 + lane / 16));
#pragma unroll
            for (u32 n = 0; n < 4; n++) {
                u32 b[4], from = w_at + now * TILE_BYTES, number = first_number + n * 16;
                if (IS_KEYS)
                    matrices_transposed(b, from + place<WIDE>(step * 16 + lane % 16, number / 8 + lane / 16));
                else
                    matrices(b, from + place<NARROW>(number + lane % 8 + lane / 16 * 8, step * 2 + lane / 8 % 2));
#pragma unroll
                for (u32 m = 0; m < 2; m++) {
                    mma(sum[m][2 * n], a[m][0], a[m][1], a[m][2], a[m][3], b[0], b[1]);
                    mma(sum[m][2 * n + 1], a[m][0], a[m][1], a[m][2], a[m][3], b[2], b[3]);
                }
            }
        }
        __syncthreads();
    }
    u32 n_pages = (length + BLOCK_TOKENS - 1) / BLOCK_TOKENS, head = blockIdx.y / 2;
#pragma unroll
    for (u32 m = 0; m < 2; m++)
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 token = first_token + first_row + m * 16 + half * 8 + g, page = token / BLOCK_TOKENS;
            if (page >= n_pages) continue;
            u64 row = (((u64)page * 2 + (IS_KEYS ? 0 : 1)) * shape.n_heads + head) * BLOCK_TOKENS + token % BLOCK_TOKENS;
            bf16* to = out + row * NUMBERS + first_number + 2 * t;
#pragma unroll
            for (u32 n = 0; n < 8; n++) *reinterpret_cast<u32*>(to + n * 8) = narrow(sum[m][n][2 * half], sum[m][n][2 * half + 1]);
        }
}

extern "C" __global__ void __launch_bounds__(THREADS, 2)
expand_latents(bf16* out, const bf16* pages, const u32* tables, const uint3* sequences, const bf16* keys, const bf16* values, ExpandShape shape) {
    in_turn();
    u32 sequence = blockIdx.z, length = sequences[sequence].z;
    if (blockIdx.x * TOKENS >= length) return;
    u64 n_before = first_page(sequences, sequence);
    bf16* to = out + n_before * 2 * shape.n_heads * BLOCK_TOKENS * NUMBERS;
    const u32* table = tables + (u64)sequence * shape.table_stride;
    u64 of_head = (u64)(shape.first_head + blockIdx.y / 2) * RANK * NUMBERS;
    if (blockIdx.y % 2 == 0)
        expand<true>(to, pages, table, keys + of_head, length, shape);
    else
        expand<false>(to, pages, table, values + of_head, length, shape);
}
