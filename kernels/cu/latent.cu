// The parts of latent attention around its product with latents, and that product for 16 queries at a time.
// Heads of q have UNROTATED numbers, then ROTATED ones; heads of the output have VALUE numbers.
constexpr u32 UNROTATED = 128, VALUE = 128, Q_HEAD = UNROTATED + ROTATED;

ATTEND_LATENTS(attend_latents_16, bf16, 1, 4)
ATTEND_LATENTS(attend_latents_fp8_16, f8, 1, 4)

// Adds up the parts of a query, one block of threads for each query. A thread has four numbers.
constexpr u32 MERGE_THREADS = RANK / 4;
extern "C" __global__ void __launch_bounds__(MERGE_THREADS)
merge_latents(bf16* out, const float* parts, const float2* part_sums, const u32* lengths, u32 n_heads, u32 n_parts, u32 chunk_tokens) {
    in_turn();
    u64 row = (u64)blockIdx.y * n_heads + blockIdx.x;
    u32 n_used = min((lengths[blockIdx.y] + chunk_tokens - 1) / chunk_tokens, n_parts);
    const float4* of_thread = reinterpret_cast<const float4*>(parts + row * n_parts * RANK) + threadIdx.x;
    const float2* sums = part_sums + row * n_parts;
    float most = -INF, total = 0.f;
    for (u32 i = threadIdx.x % 32; i < n_used; i += 32) most = fmaxf(most, sums[i].x);
#pragma unroll
    for (u32 lanes = 16; lanes > 0; lanes /= 2) most = fmaxf(most, __shfl_xor_sync(FULL_WARP, most, lanes));
    float number[4] = {};
#pragma unroll 8
    for (u32 i = 0; i < n_used; i++) {
        float2 of = sums[i];
        float share = of.x == -INF ? 0.f : power2(of.x - most);
        if (of.y != of.y) share = of.y;  // NaN makes the whole result NaN
        total += share * of.y;
        float4 four = of_thread[i * MERGE_THREADS];
        number[0] += share * four.x, number[1] += share * four.y, number[2] += share * four.z, number[3] += share * four.w;
    }
    float by = total == 0.f ? 0.f : 1.f / total;
    Four four = {narrow(number[0] * by, number[1] * by), narrow(number[2] * by, number[3] * by)};
    *reinterpret_cast<Four*>(out + row * RANK + threadIdx.x * 4) = four;
}

// === Latents and queries ===

constexpr u32 WRITE_THREADS = 256;

struct WriteShape {
    u32 stride;      // numbers between two rows
    u32 q_rank;      // the width of the latent of q, a multiple of 8; 0: there is none
    u32 q_real;      // its width without padding
    u32 kv_real;     // the width of the compressed key and value without padding
    u32 n_slots, n_positions;
    float epsilon;
};

__device__ __forceinline__ float sum_of_block(float x, float* of_warp) {
    x = warp_sum(x);
    if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = x;
    __syncthreads();
    float sum = 0.f;
#pragma unroll
    for (u32 warp = 0; warp < WRITE_THREADS / 32; warp++) sum += of_warp[warp];
    return sum;
}

__device__ __forceinline__ float squares(Eight eight) {
    float sum = 0.f;
#pragma unroll
    for (u32 i = 0; i < 4; i++) sum += low(eight.pair[i]) * low(eight.pair[i]) + high(eight.pair[i]) * high(eight.pair[i]);
    return sum;
}

template <typename Number>
__device__ __forceinline__ void store_scaled(Number* to, Eight eight, float by, Eight weight) {
    float wide[8];
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        wide[2 * i] = low(eight.pair[i]) * by * low(weight.pair[i]);
        wide[2 * i + 1] = high(eight.pair[i]) * by * high(weight.pair[i]);
    }
    store_rounded(to, wide);
}

__device__ __forceinline__ float2 turn_of(const float2* turns, u32 position, u32 pair, u32 n_positions) {
    if (position >= n_positions) return make_float2(__int_as_float(0x7fc00000), 0.f);
    return turns[(u64)position * (ROTATED / 2) + pair];
}

// Rotates the number at `at`, in the first half of a rotated part, and the one at the same place in the second half.
template <typename Number>
__device__ __forceinline__ void turn_pair(Number* to, const bf16* from, u32 at, float2 turn) {
    float a = widen(from[at]), b = widen(from[ROTATED / 2 + at]);
    store_rounded(to + at, a * turn.x - b * turn.y);
    store_rounded(to + ROTATED / 2 + at, b * turn.x + a * turn.y);
}

// A block of threads has one token. Norms the latent of q, if there is one. Norms and rotates the latent of the token,
// and writes it to its page.
template <typename Kv>
__device__ __forceinline__ void write(bf16* normed_q, Kv* pages, const bf16* rows, const u32* positions, const u32* slots, const float2* turns,
                                      const bf16* q_weight, const bf16* kv_weight, const WriteShape& shape) {
    __shared__ float of_warp[2][WRITE_THREADS / 32];
    in_turn();
    const bf16* row = rows + (u64)blockIdx.x * shape.stride;
    if (shape.q_rank > 0) {
        float sum = 0.f;
        for (u32 at = threadIdx.x * 8; at < shape.q_rank; at += WRITE_THREADS * 8) sum += squares(load8(row + at));
        float by = rsqrtf(sum_of_block(sum, of_warp[0]) / shape.q_real + shape.epsilon);
        for (u32 at = threadIdx.x * 8; at < shape.q_rank; at += WRITE_THREADS * 8)
            store_scaled(normed_q + (u64)blockIdx.x * shape.q_rank + at, load8(row + at), by, load8(q_weight + at));
    }
    const bf16* kv = row + shape.stride - LATENT;
    bool has_eight = threadIdx.x * 8 < RANK;
    Eight eight = has_eight ? load8(kv + threadIdx.x * 8) : Eight{};
    float by = rsqrtf(sum_of_block(squares(eight), of_warp[1]) / shape.kv_real + shape.epsilon);
    u32 slot = slots[blockIdx.x];
    if (slot >= shape.n_slots) return;
    Kv* to = pages + (u64)slot * LATENT;
    if (has_eight) store_scaled(to + threadIdx.x * 8, eight, by, load8(kv_weight + threadIdx.x * 8));
    u32 pair = threadIdx.x - RANK / 8;
    if (pair >= ROTATED / 2) return;
    turn_pair(to, kv, RANK + pair, turn_of(turns, positions[blockIdx.x], pair, shape.n_positions));
}

#define WRITE_LATENTS(NAME, KV)                                                                                           \
    extern "C" __global__ void __launch_bounds__(WRITE_THREADS)                                                           \
    NAME(bf16* normed_q, KV* pages, const bf16* rows, const u32* positions, const u32* slots, const float2* turns,        \
         const bf16* q_weight, const bf16* kv_weight, WriteShape shape) {                                                 \
        write(normed_q, pages, rows, positions, slots, turns, q_weight, kv_weight, shape);                                \
    }
WRITE_LATENTS(write_latents, bf16)
WRITE_LATENTS(write_latents_fp8, f8)

// q_row: numbers between two rows of q. row, head: numbers between two rows, and two heads of a row, of rotated numbers.
struct Turned {
    bf16* rotated;
    const u32* positions;
    const float2* turns;
    u32 q_row, row, head, n_heads, n_positions;
};
static_assert(sizeof(Turned) == 48, "as in ops/latent.rs");

// Rotates the rotated part of a head of q, and writes it elsewhere, or to the same place.
__device__ __forceinline__ void turn_head(const Turned& to, const bf16* q, u32 row, u32 head, u32 pair) {
    const bf16* from = q + (u64)row * to.q_row + head * Q_HEAD + UNROTATED;
    turn_pair(to.rotated + (u64)row * to.row + head * to.head, from, pair, turn_of(to.turns, to.positions[row], pair, to.n_positions));
}

extern "C" __global__ void __launch_bounds__(WRITE_THREADS)
turn_queries(const bf16* q, Turned to) {
    in_turn();
    for (u32 nth = threadIdx.x; nth < to.n_heads * ROTATED / 2; nth += WRITE_THREADS)
        turn_head(to, q, blockIdx.x, nth / (ROTATED / 2), nth % (ROTATED / 2));
}

// === Products of each head with a matrix of its own ===

// A block of threads multiplies rows of one head by rows of the head's matrix. Each warp has 16 rows of x. A stage has 64 numbers
// of each row. The previous kernel writes x, but not w. So a block loads the first stages of w before that kernel has ended.
constexpr u32 HEADS_WARPS = 4, HEADS_THREADS = HEADS_WARPS * 32, STAGE_NUMBERS = 64, STAGE_CHUNKS = STAGE_NUMBERS / 8;
__device__ __forceinline__ u32 heads_place(u32 row, u32 chunk) { return (row * STAGE_CHUNKS + (chunk ^ row % 8)) * 16; }

// Numbers between two rows, and between two heads of a row.
struct HeadsShape { u32 n_rows, x_row, x_head, y_row, y_head; };

// ROW_WARPS: the warps with rows of their own; the others share COLUMNS rows of the matrix.
template <u32 K, u32 N, u32 ROW_WARPS, u32 COLUMNS, u32 STAGES>
__device__ __forceinline__ void multiply_heads(bf16* y, const bf16* x, const bf16* w, const HeadsShape& shape) {
    constexpr u32 ROWS = ROW_WARPS * 16, EIGHTS = COLUMNS * ROW_WARPS / HEADS_WARPS / 8, N_STEPS = K / STAGE_NUMBERS;
    constexpr u32 X_BYTES = ROWS * STAGE_NUMBERS * 2, STAGE_BYTES = X_BYTES + COLUMNS * STAGE_NUMBERS * 2;
    __shared__ __align__(16) unsigned char memory[STAGES * STAGE_BYTES];
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    u32 first_n = blockIdx.x * COLUMNS, first_row = blockIdx.y * ROWS, head = blockIdx.z;
    u32 of_warp = warp % ROW_WARPS * 16, n_of_warp = warp / ROW_WARPS * EIGHTS * 8;
    auto stage_at = [&](u32 step) { return shared_address(memory) + step % STAGES * STAGE_BYTES; };
    auto load_w = [&](u32 step) {
        u32 at = stage_at(step) + X_BYTES;
#pragma unroll
        for (u32 nth = threadIdx.x; nth < COLUMNS * STAGE_CHUNKS; nth += HEADS_THREADS) {
            u32 row = nth / STAGE_CHUNKS, chunk = nth % STAGE_CHUNKS;
            copy16(at + heads_place(row, chunk), w + ((u64)head * N + first_n + row) * K + step * STAGE_NUMBERS + chunk * 8, true);
        }
    };
    auto load_x = [&](u32 step) {
        u32 at = stage_at(step);
#pragma unroll
        for (u32 nth = threadIdx.x; nth < ROWS * STAGE_CHUNKS; nth += HEADS_THREADS) {
            u32 row = nth / STAGE_CHUNKS, chunk = nth % STAGE_CHUNKS;
            const bf16* from = x + (u64)(first_row + row) * shape.x_row + head * shape.x_head + step * STAGE_NUMBERS + chunk * 8;
            copy16(at + heads_place(row, chunk), from, first_row + row < shape.n_rows);
        }
        copies_committed();
    };
#pragma unroll
    for (u32 step = 0; step < STAGES; step++) load_w(step);
    wait_for_last();
#pragma unroll
    for (u32 step = 0; step < STAGES; step++) load_x(step);
    float sum[EIGHTS][4] = {};
    for (u32 step = 0; step < N_STEPS; step++) {
        copies_landed_but<STAGES - 1>();
        __syncthreads();
        u32 x_at = stage_at(step), w_at = x_at + X_BYTES;
#pragma unroll
        for (u32 chunk = 0; chunk < STAGE_CHUNKS; chunk += 4) {
            u32 a[2][4];
#pragma unroll
            for (u32 i = 0; i < 2; i++) matrices(a[i], x_at + heads_place(of_warp + lane % 16, chunk + i * 2 + lane / 16));
#pragma unroll
            for (u32 n = 0; n < EIGHTS; n++) {
                u32 b[4];
                matrices(b, w_at + heads_place(n_of_warp + n * 8 + lane % 8, chunk + lane / 8));
                mma(sum[n], a[0][0], a[0][1], a[0][2], a[0][3], b[0], b[1]);
                mma(sum[n], a[1][0], a[1][1], a[1][2], a[1][3], b[2], b[3]);
            }
        }
        if (step + STAGES < N_STEPS) {
            __syncthreads();
            load_w(step + STAGES);
            load_x(step + STAGES);
        } else {
            copies_committed();  // an empty group, so that the number of later groups is known
        }
    }
#pragma unroll
    for (u32 half = 0; half < 2; half++) {
        u32 row = first_row + of_warp + half * 8 + g;
        if (row >= shape.n_rows) continue;
        bf16* to = y + (u64)row * shape.y_row + head * shape.y_head + first_n + n_of_warp + 2 * t;
#pragma unroll
        for (u32 n = 0; n < EIGHTS; n++) *reinterpret_cast<u32*>(to + n * 8) = narrow(sum[n][2 * half], sum[n][2 * half + 1]);
    }
}

// Blocks for many rows have 64 of them. Blocks for up to 16 rows load all of k at once.
#define MULTIPLY_MANY(K, N) multiply_heads<K, N, 4, 64, 2>(y, x, w, shape)
#define MULTIPLY_FEW(K, N) multiply_heads<K, N, 1, 32, K / STAGE_NUMBERS>(y, x, w, shape)

// The queries for latents, of the unrotated part of each head of q. The last block of each tile of rows and head rotates the other part.
#define MULTIPLY_KEYS(NAME, MULTIPLY, ROWS, COLUMNS)                                                                      \
    extern "C" __global__ void __launch_bounds__(HEADS_THREADS)                                                           \
    NAME(bf16* y, const bf16* x, const bf16* w, HeadsShape shape, Turned turned) {                                        \
        next_may_come();                                                                                                  \
        if (blockIdx.x < RANK / COLUMNS) {                                                                                \
            MULTIPLY(UNROTATED, RANK);                                                                                    \
            return;                                                                                                       \
        }                                                                                                                 \
        wait_for_last();                                                                                                  \
        for (u32 nth = threadIdx.x; nth < ROWS * ROTATED / 2; nth += HEADS_THREADS) {                                     \
            u32 row = blockIdx.y * ROWS + nth / (ROTATED / 2);                                                            \
            if (row < shape.n_rows) turn_head(turned, x, row, blockIdx.z, nth % (ROTATED / 2));                           \
        }                                                                                                                 \
    }
MULTIPLY_KEYS(multiply_keys, MULTIPLY_MANY, 64, 64)
MULTIPLY_KEYS(multiply_keys_few, MULTIPLY_FEW, 16, 32)

// The output of each head, of its sum of latents.
#define MULTIPLY_VALUES(NAME, MULTIPLY)                                                                                   \
    extern "C" __global__ void __launch_bounds__(HEADS_THREADS)                                                           \
    NAME(bf16* y, const bf16* x, const bf16* w, HeadsShape shape) {                                                       \
        next_may_come();                                                                                                  \
        MULTIPLY(RANK, VALUE);                                                                                            \
    }
MULTIPLY_VALUES(multiply_values, MULTIPLY_MANY)
MULTIPLY_VALUES(multiply_values_few, MULTIPLY_FEW)
