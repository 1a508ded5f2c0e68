// The work after a product of few rows, done by the kernel that multiplies instead of by a separate kernel.
//
// A kernel sums up 2 * UNIT rows of w for a row of x, and ends them with UNIT / 2 neighbouring lanes; each lane has four
// neighbouring rows. The two halves of these rows may lie apart in w, so that rows that belong together are in one lane.
// Each ending has inputs beside the sums (`Before`). They are loaded while other warps are still summing and are kept
// unconverted, so that nothing waits for them before the sums are ready.
// See `docs/decisions/0018-products-do-what-comes-after.md`.
// w is [n][k].
struct ProductShape { u32 n, k, n_rows; };

// The rows of w that are summed up together: two halves of UNIT.
template <u32 UNIT>
struct Halves {
    u32 first, second;
    __device__ __forceinline__ u32 row_of(u32 column) const { return column < UNIT ? first + column : second + column - UNIT; }
};
template <u32 UNIT>
__device__ __forceinline__ Halves<UNIT> neighbours(u32 nth) { return {nth * 2 * UNIT, nth * 2 * UNIT + UNIT}; }

// The pending norm of x. x holds its rows times the norm's weights; `squares` are partial sums of the rows' squares. The
// missing factor is one number for each row, and the sums of the product are multiplied by it. Without a pending norm there
// are no parts.
struct PendingNormArgs {
    const float* squares;
    u32 n_parts, width;
    float epsilon;

    // The scales of several rows, for a whole warp: all loads are in flight together. Rows past the last have none.
    template <u32 ROWS>
    __device__ __forceinline__ void scales(float (&scale)[ROWS], u32 first, u32 n_rows) const {
        constexpr u32 AT_ONCE = ROWS < 8 ? 8 / ROWS : 2;
        if (squares == nullptr) {
#pragma unroll
            for (u32 i = 0; i < ROWS; i++) scale[i] = 1.f;
            return;
        }
        float sum[ROWS] = {};
        for (u32 from = threadIdx.x % 32; from < n_parts; from += 32 * AT_ONCE) {
            float part[ROWS][AT_ONCE];
#pragma unroll
            for (u32 i = 0; i < ROWS; i++)
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; j++) {
                    bool is_there = first + i < n_rows && from + 32 * j < n_parts;
                    part[i][j] = is_there ? squares[(u64)(first + i) * n_parts + from + 32 * j] : 0.f;
                }
#pragma unroll
            for (u32 i = 0; i < ROWS; i++)
#pragma unroll
                for (u32 j = 0; j < AT_ONCE; j++) sum[i] += part[i][j];
        }
#pragma unroll
        for (u32 i = 0; i < ROWS; i++) scale[i] = rsqrtf(warp_sum(sum[i]) / width + epsilon);
    }
    __device__ __forceinline__ float scale(u32 row) const {
        float scale[1];
        scales(scale, row, row + 1);
        return scale[0];
    }
};

struct Nothing {};

__device__ __forceinline__ void store4(bf16* to, const float (&x)[4]) { *reinterpret_cast<Four*>(to) = {narrow(x[0], x[1]), narrow(x[2], x[3])}; }
__device__ __forceinline__ void store4(float* to, const float (&x)[4]) { *reinterpret_cast<float4*>(to) = make_float4(x[0], x[1], x[2], x[3]); }
__device__ __forceinline__ void store1(bf16* to, float x) { *to = narrow(x); }
__device__ __forceinline__ void store1(float* to, float x) { *to = x; }
__device__ __forceinline__ const Four* four_at(const bf16* from) { return reinterpret_cast<const Four*>(from); }

// Writes the sums.
template <typename Number>
struct Sums {
    Number* y;
    typedef Nothing Before;

    template <u32 UNIT>
    __device__ __forceinline__ Halves<UNIT> halves(u32 nth, const ProductShape&) const { return neighbours<UNIT>(nth); }
    __device__ __forceinline__ Before before(u32, u32, const ProductShape&) const { return {}; }
    template <u32 UNIT>
    __device__ __forceinline__ void end(u32, u32 row, u32 column, float (&x)[4], const Before&, const ProductShape& shape) const {
        if (row >= shape.n_rows) return;
        Number* to = y + (u64)row * shape.n + column;
        if (shape.n % 4 == 0) {
            if (column < shape.n) store4(to, x);
            return;
        }
#pragma unroll
        for (u32 i = 0; i < 4; i++)
            if (column + i < shape.n) store1(to + i, x[i]);
    }
};

// silu(gate) * up. w has the rows of gate, then the rows of up. One block sums the same rows of both.
struct Gated {
    bf16* y;
    typedef Nothing Before;

    template <u32 UNIT>
    __device__ __forceinline__ Halves<UNIT> halves(u32 nth, const ProductShape& shape) const {
        return {nth * UNIT, shape.n / 2 + nth * UNIT};
    }
    __device__ __forceinline__ Before before(u32, u32, const ProductShape&) const { return {}; }
    template <u32 UNIT>
    __device__ __forceinline__ void end(u32, u32 row, u32 column, float (&x)[4], const Before&, const ProductShape& shape) const {
        u32 width = shape.n / 2, lanes = UNIT / 4;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float up = __shfl_xor_sync(FULL_WARP, x[i], lanes);
            x[i] = gated(x[i], up);
        }
        bool is_gate = threadIdx.x % (2 * lanes) < lanes;
        if (is_gate && row < shape.n_rows && column < width) store4(y + (u64)row * width + column, x);
    }
};

// residual += the sums; out = residual * weight, without the norm's scale; squares = a partial sum of squares
// for each group of rows. The squares use the sum as stored in bf16, because later readers of the residual
// see the same numbers.
struct Added {
    bf16 *residual, *out;
    const bf16* weight;
    float* squares;
    u32 n_parts;
    struct Before { Four residual, weight; };

    template <u32 UNIT>
    __device__ __forceinline__ Halves<UNIT> halves(u32 nth, const ProductShape&) const { return neighbours<UNIT>(nth); }
    __device__ __forceinline__ Before before(u32 row, u32 column, const ProductShape& shape) const {
        Before before = {};
        if (row < shape.n_rows && column < shape.n) {
            before.residual = *four_at(residual + (u64)row * shape.n + column);
            before.weight = *four_at(weight + column);
        }
        return before;
    }
    template <u32 UNIT>
    __device__ __forceinline__ void end(u32 nth, u32 row, u32 column, float (&x)[4], const Before& before, const ProductShape& shape) const {
        float square = 0.f, residuals[4], weights[4];
        widen4(residuals, before.residual);
        widen4(weights, before.weight);
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            x[i] = widen(narrow(x[i] + residuals[i]));
            square += column < shape.n ? x[i] * x[i] : 0.f;
        }
#pragma unroll
        for (u32 of = UNIT / 4; of > 0; of /= 2) square += __shfl_xor_sync(FULL_WARP, square, of);
        if (row >= shape.n_rows) return;
        if (threadIdx.x % (UNIT / 2) == 0) squares[(u64)row * n_parts + nth] = square;
        if (column >= shape.n) return;
        store4(residual + (u64)row * shape.n + column, x);
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] *= weights[i];
        store4(out + (u64)row * shape.n + column, x);
    }
};

// The same on several GPUs, each with a part of every sum. A GPU sends its part to the others and adds up all
// parts. GPUs that wait for each other here run their blocks of threads in the same order, so the first block
// to wait is waiting for a block that runs.
struct Joined {
    Added added;
    Inboxes inboxes;
    struct Before { Added::Before added; u32 round; };

    template <u32 UNIT>
    __device__ __forceinline__ Halves<UNIT> halves(u32 nth, const ProductShape& shape) const { return added.halves<UNIT>(nth, shape); }
    __device__ __forceinline__ Before before(u32 row, u32 column, const ProductShape& shape) const {
        Before before = {added.before(row, column, shape), 0};
        if (row < shape.n_rows && column < shape.n) before.round = *inboxes.rounds_of(row, column / 4);
        return before;
    }
    // Sends a row. All rows are sent before any is ended, so they travel while later rows are summed.
    __device__ __forceinline__ void give(u32 row, u32 column, const float (&x)[4], const Before& before, const ProductShape& shape) const {
        if (row < shape.n_rows && column < shape.n) inboxes.give(row, column / 4, x, before.round);
    }
    template <u32 UNIT>
    __device__ __forceinline__ void end(u32 nth, u32 row, u32 column, float (&x)[4], const Before& before, const ProductShape& shape) const {
        if (row < shape.n_rows && column < shape.n) inboxes.take(x, row, column / 4, before.round);
        __syncwarp();
        added.end<UNIT>(nth, row, column, x, before.added, shape);
    }
};
template <typename Ending>
constexpr bool is_joined = false;
template <>
constexpr bool is_joined<Joined> = true;

// The work of rope.cu, with the bias before it. w has all heads of q, then of k, then of v. Rotated q is
// written to the row of all heads; k and v are written to their page only. For a norm, a whole head must be
// summed by one block.
struct Heads {
    bf16* qkv;
    void* pages;
    const u32 *positions, *slots;
    const float2* turns;
    const bf16 *bias, *q_norm, *k_norm;
    u32 n_q_heads, n_kv_heads, head_dim, n_slots, n_positions, is_fp8;
    float epsilon;
    struct Before { float2 turn[4]; Four bias; u32 slot; };

    template <u32 UNIT>
    __device__ __forceinline__ Halves<UNIT> halves(u32 nth, const ProductShape&) const {
        if (2 * UNIT >= head_dim) return neighbours<UNIT>(nth);
        u32 of_head = head_dim / (2 * UNIT), first = nth / of_head * head_dim + nth % of_head * UNIT;
        return {first, first + head_dim / 2};
    }
    __device__ __forceinline__ Before before(u32 row, u32 column, const ProductShape& shape) const {
        Before before = {};
        if (row >= shape.n_rows || column >= shape.n) return before;
        u32 position = positions[row], half = head_dim / 2;
        before.slot = slots[row];
        const float4* from = reinterpret_cast<const float4*>(turns + (u64)position * half + column % half);
#pragma unroll
        for (u32 i = 0; i < 4; i += 2) {
            float4 two = make_float4(__int_as_float(0x7fc00000), 0.f, __int_as_float(0x7fc00000), 0.f);
            if (position < n_positions) two = from[i / 2];
            before.turn[i] = make_float2(two.x, two.y), before.turn[i + 1] = make_float2(two.z, two.w);
        }
        if (bias != nullptr) before.bias = *four_at(bias + column);
        return before;
    }
    template <u32 UNIT>
    __device__ __forceinline__ void end(u32, u32 row, u32 column, float (&x)[4], const Before& before, const ProductShape& shape) const {
        u32 head = column / head_dim, dim = column % head_dim, lanes = min(head_dim / 4, UNIT / 2);
        bool is_q = head < n_q_heads, is_v = head >= n_q_heads + n_kv_heads;
        float biases[4];
        widen4(biases, before.bias);
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] += biases[i];
        if (q_norm != nullptr) norm(x, is_q ? q_norm : k_norm, dim, lanes, !is_v);
        float sign = dim < head_dim / 2 ? -1.f : 1.f;
#pragma unroll
        for (u32 i = 0; i < 4; i++) {
            float other = __shfl_xor_sync(FULL_WARP, x[i], lanes / 2);
            if (!is_v) x[i] = x[i] * before.turn[i].x + sign * other * before.turn[i].y;
        }
        if (row >= shape.n_rows || column >= shape.n || (!is_q && before.slot >= n_slots)) return;
        if (is_q) {
            store4(qkv + (u64)row * shape.n + column, x);
            return;
        }
        u32 part = head - n_q_heads;  // K's heads come first, then V's
        u64 page = (u64)(before.slot / BLOCK_TOKENS) * 2 * n_kv_heads + part;
        u64 to = (page * BLOCK_TOKENS + before.slot % BLOCK_TOKENS) * head_dim + dim;
        if (!is_fp8) {
            store4((bf16*)pages + to, x);
            return;
        }
        u32 four = 0;
#pragma unroll
        for (u32 i = 0; i < 4; i++) four |= narrow_f8(x[i]) << i * 8;
        *reinterpret_cast<u32*>((f8*)pages + to) = four;
    }
    // Called by a whole warp. Heads of v take part and are not changed.
    __device__ __forceinline__ void norm(float (&x)[4], const bf16* weight, u32 dim, u32 lanes, bool is_normed) const {
        float square = x[0] * x[0] + x[1] * x[1] + x[2] * x[2] + x[3] * x[3];
        for (u32 of = lanes / 2; of > 0; of /= 2) square += __shfl_xor_sync(FULL_WARP, square, of);
        if (!is_normed) return;
        float scale = rsqrtf(square / head_dim + epsilon), by[4];
        widen4(by, *four_at(weight + dim));
#pragma unroll
        for (u32 i = 0; i < 4; i++) x[i] *= scale * by[i];
    }
};
