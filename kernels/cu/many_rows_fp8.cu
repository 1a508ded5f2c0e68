// y = x * transpose(w * scales), for many rows of x, with both factors in FP8 (e4m3). It works like many_rows.cu,
// with tiles of 128 columns in place of 64.
//
// w is in the layout of `Fp8Rows` in ops/fp8.rs, and each of its rows has a scale. `quantize_rows` writes x in the
// same layout, so that the order of numbers within a group of 64 does not matter, with a scale for each row and
// each 128 of k. The tensor cores add up 128 of k with fewer bits than f32 has; these parts are added in f32, times
// the scale of x.
// See `docs/decisions/0031-activations-in-fp8.md`.
struct EightsShape {
    ManyShape tiles;
    u32 n;                   // rows of w
    u32 scales_apart;        // distance between the scales of x for two groups of 128
    const float* w_scales;
    const float* x_scales;
};
static_assert(sizeof(EightsShape) == 48, "as in ops/many_rows.rs");

__device__ __forceinline__ void product_of_eights(float (&c)[64], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %66, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3 {"
        SUM_NAMES_64 "}, %64, %65, adds, 1, 1;\n}"
        : SUMS_64(c)
        : "l"(a), "l"(b), "r"((u32)adds));
}

constexpr u32 EIGHTS_COLUMNS = TILE_ROW_BYTES;

// Factors in FP8.
template <u32 N>
struct Eights {
    static constexpr u32 COLUMNS = EIGHTS_COLUMNS, HALVES = N;
    const EightsShape& shape;
    u32 first_step;  // the step of k at which this block begins

    // Multiplies a group's 64 rows of x by all rows of w, 128 rows at a time. While this group adds a part to its
    // sums, the tensor cores compute the other group's.
    template <bool FOR_BOTH>
    __device__ __forceinline__ void sum_up(float (&sum)[HALVES * HALF / 2], const Ring& ring, Turn<HALVES>& turn, u32 n_steps, const Place& place) const {
        u32 group = threadIdx.x / GROUP - 1, warp = threadIdx.x % GROUP / 32, lane = threadIdx.x % 32;
        const float* scales = shape.x_scales + first_step * shape.scales_apart + place.row + group * 64 + warp * 16 + lane / 4;
        float upper = 0.f, lower = 0.f;
        if (n_steps > 0) upper = scales[0], lower = scales[8];
#pragma unroll
        for (u32 i = 0; i < HALVES * HALF / 2; i++) sum[i] = 0.f;
        for (u32 step = 0; step < n_steps; step++, turn.next()) {
            float scale[2] = {upper, lower};
            scales += shape.scales_apart;
            if (step + 1 < n_steps) upper = scales[0], lower = scales[8];
            u32 tile = ring.at + turn.stage * Stage<HALVES>::BYTES;
            barrier_wait(ring.full + turn.stage * 8, turn.parity);
            u64 a = tile_of(tile + group * 64 * TILE_ROW_BYTES, 16), b = tile_of(tile + X_BYTES, 16);
#pragma unroll
            for (u32 half = 0; half < HALVES; half++) {
                float part[HALF / 2];
                held(part);
                products_begin();
#pragma unroll
                for (u32 i = 0; i < COLUMNS / 32; i++) product_of_eights(part, a + 2 * i, b + half * (HALF_BYTES / 16) + 2 * i, i > 0);
                products_committed();
                held(part);
                products_done_but<0>();
                held(part);
                if (half == HALVES - 1) free_stage<FOR_BOTH>(ring, turn.stage);
#pragma unroll
                for (u32 i = 0; i < HALF / 2; i++) sum[half * HALF / 2 + i] += part[i] * scale[i / 2 % 2];
            }
        }
        scale_columns(sum, place);
    }

    // Multiplies the sums by the scales of w.
    __device__ __forceinline__ void scale_columns(float (&sum)[HALVES * HALF / 2], const Place& place) const {
        u32 first = place.column * shape.tiles.tile_rows + threadIdx.x % 4 * 2;
#pragma unroll
        for (u32 i = 0; i < HALVES * HALF / 8; i++) {
            u32 row = first + i / 16 * shape.tiles.half_rows + i % 16 * 8;
            float2 scale = row < shape.n ? *reinterpret_cast<const float2*>(shape.w_scales + row) : float2{0.f, 0.f};
            sum[4 * i] *= scale.x, sum[4 * i + 1] *= scale.y;
            sum[4 * i + 2] *= scale.x, sum[4 * i + 3] *= scale.y;
        }
    }
};

// For few tiles with a large k: both blocks of a cluster have the same tile, with one half of w, and each adds up
// half of k. Each cluster has one tile.
struct SplitTiles {
    static constexpr bool FOR_BOTH = false;
    const ManyShape& shape;  // here n_pairs is the number of tiles of rows of x

    __device__ __forceinline__ u32 count() const { return gridDim.x / CLUSTER; }
    __device__ __forceinline__ Place at(u32 nth) const { return {nth % shape.n_pairs * ROWS, nth / shape.n_pairs}; }
    __device__ __forceinline__ u32 all_steps() const { return (shape.k + EIGHTS_COLUMNS - 1) / EIGHTS_COLUMNS; }
    __device__ __forceinline__ u32 first_step() const { return cluster_rank() * ((all_steps() + 1) / 2); }
    __device__ __forceinline__ u32 steps() const { return cluster_rank() == 0 ? (all_steps() + 1) / 2 : all_steps() / 2; }

    __device__ __forceinline__ void bring(const Ring& ring, const TensorMap& of_w, const TensorMap& of_x, u32, u32 n_steps) const {
        using Stage = Stage<1>;
        Place place = at(blockIdx.x / CLUSTER);
        Turn<1> turn;
        for (u32 step = 0; step < n_steps; step++, turn.next()) {
            u32 full = ring.full + turn.stage * 8, to = ring.at + turn.stage * Stage::BYTES, column = (first_step() + step) * EIGHTS_COLUMNS;
            barrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
            barrier_expect(full, Stage::BYTES);
            copy_tile(to, of_x, column, place.row, full, EVICT_NORMAL);
#pragma unroll
            for (u32 part = 0; part < CLUSTER; part++)
                copy_tile(to + X_BYTES + part * (HALF_BYTES / CLUSTER), of_w, column, place.column * shape.tile_rows + part * shape.half_rows, full, EVICT_NORMAL);
        }
    }

    // The second block puts its sums where its ring was, and the first adds them to its own.
    template <u32 N>
    __device__ __forceinline__ bool join(float (&sum)[N], const Ring& ring) const {
        u32 mine = ring.at + (threadIdx.x - GROUP) * 16, apart = GROUPS * GROUP * 16;
        bool ends = cluster_rank() == 0;
        if (!ends) {
            threads_wait<GROUPS * GROUP>(1 + GROUPS);  // the other group may still read the ring
#pragma unroll
            for (u32 i = 0; i < N / 4; i++)
                asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};" ::"r"(mine + i * apart), "f"(sum[4 * i]), "f"(sum[4 * i + 1]), "f"(sum[4 * i + 2]), "f"(sum[4 * i + 3]) : "memory");
        }
        cluster_arrive();
        cluster_wait();
        if (ends) {
            u32 theirs = place_in(mine, 1);
#pragma unroll
            for (u32 i = 0; i < N / 4; i++) {
                float4 other = cluster_load4(theirs + i * apart);
                sum[4 * i] += other.x, sum[4 * i + 1] += other.y, sum[4 * i + 2] += other.z, sum[4 * i + 3] += other.w;
            }
        }
        return ends;
    }
};

#define MANY_ROWS_FP8(NAME, ENDING, HALVES, TILES, FIRST_STEP)                                                                                       \
    extern "C" __global__ void __launch_bounds__((1 + GROUPS) * GROUP, 1)                                                 \
    NAME(const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,   \
         EightsShape shape) {                                                                                             \
        TILES tiles{shape.tiles};                                                                                         \
        many_rows<ENDING>(y, w, x, tiles, Eights<HALVES>{shape, FIRST_STEP});                                             \
    }
using WideTiles = ManyTiles<EIGHTS_COLUMNS, 2>;
using NarrowTiles = ManyTiles<EIGHTS_COLUMNS, 1>;
MANY_ROWS_FP8(many_rows_fp8, Sums<false>, 2, WideTiles, 0)
MANY_ROWS_FP8(many_rows_fp8_added, Sums<true>, 2, WideTiles, 0)
MANY_ROWS_FP8(many_rows_fp8_gated, Gated, 2, WideTiles, 0)
MANY_ROWS_FP8(many_rows_fp8_narrow, Sums<false>, 1, NarrowTiles, 0)
MANY_ROWS_FP8(many_rows_fp8_narrow_added, Sums<true>, 1, NarrowTiles, 0)
MANY_ROWS_FP8(many_rows_fp8_split, Sums<false>, 1, SplitTiles, tiles.first_step())
MANY_ROWS_FP8(many_rows_fp8_split_added, Sums<true>, 1, SplitTiles, tiles.first_step())

__device__ __forceinline__ u32 in_fp8(float low, float high) {
    unsigned short pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
}

// Writes rows of bf16 as rows in FP8, `width` bytes each, and their scales.
//
// A lane has eight numbers: four pairs, which are 16 bytes apart. Two lanes exchange theirs, because a word has a
// pair of each: their first numbers in bytes 0 and 1, their second in bytes 2 and 3.
extern "C" __global__ void __launch_bounds__(ROUND_THREADS)
quantize_rows(u32* out, float* scales, const bf16* x, u32 n_rows, u32 k, u32 width, u32 scales_apart) {
    in_turn();
    u32 of_row = (k + ROUND_GROUP - 1) / ROUND_GROUP * ROUND_LANES, odd = threadIdx.x % 2;
    u64 n_chunks = (u64)n_rows * of_row, step = (u64)gridDim.x * blockDim.x;
    // Whole blocks of threads loop together.
    for (u64 first = (u64)blockIdx.x * blockDim.x; first < n_chunks; first += step) {
        u64 chunk = first + threadIdx.x, row = chunk / of_row;
        u32 column = chunk % of_row * 8;
        bool is_here = chunk < n_chunks;
        Rounded eight = scaled(is_here && column < k ? once8(x + row * k + column) : Eight{0, 0, 0, 0});
        u32 pairs[4], words[2];
#pragma unroll
        for (u32 i = 0; i < 4; i++) pairs[i] = in_fp8(eight.number[2 * i], eight.number[2 * i + 1]);
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            // The even lane makes the words of pairs 0 and 2, the odd lane those of pairs 1 and 3.
            u32 mine = odd ? pairs[2 * i + 1] : pairs[2 * i];
            u32 theirs = __shfl_xor_sync(FULL_WARP, odd ? pairs[2 * i] : pairs[2 * i + 1], 1);
            words[i] = odd ? __byte_perm(theirs, mine, 0x5140) : __byte_perm(mine, theirs, 0x5140);
        }
        if (!is_here) continue;
        if (column < width) {
            u32* to = out + (row * width + column / 64 * 64 + odd * 16 + column % 64 / 16 * 4) / 4;
            to[0] = words[0], to[8] = words[1];
        }
        if (threadIdx.x % ROUND_LANES == 0) scales[column / ROUND_GROUP * scales_apart + row] = __uint_as_float(eight.exponent << 23);
    }
}
