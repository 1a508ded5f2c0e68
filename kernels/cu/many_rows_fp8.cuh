// Common code of many_rows_fp8.cu and many_rows_blocks.cu.
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

// The scales of w: one for each row, or for each 64 rows and 128 of k.
enum class WScales { ROWS, BLOCKS };
constexpr u32 SCALED_ROWS = 64;

// Factors in FP8.
template <u32 N, WScales SCALES>
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
        OfBlocks of_blocks(shape, place, first_step);
        OfStep next;
        if (n_steps > 0) of_blocks.load(next, 0);
#pragma unroll
        for (u32 i = 0; i < HALVES * HALF / 2; i++) sum[i] = 0.f;
        // With scales of blocks, the loop is unrolled twice and the last step loads its own scales again. Without both, the
        // compiler copies the next step's scales to other registers, and each copy waits for its load.
#pragma unroll(SCALES == WScales::BLOCKS ? 2 : 1)
        for (u32 step = 0; step < n_steps; step++, turn.next()) {
            float scale[2] = {upper, lower};
            OfStep of_w = next;
            if constexpr (SCALES == WScales::BLOCKS) {
                u32 after = min(step + 1, n_steps - 1);
                scales += (after - step) * shape.scales_apart;
                of_blocks.load(next, after);
                upper = scales[0], lower = scales[8];
            } else {
                scales += shape.scales_apart;
                if (step + 1 < n_steps) upper = scales[0], lower = scales[8];
            }
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
                for (u32 i = 0; i < HALF / 2; i++) {
                    float of_x = scale[i / 2 % 2];
                    sum[half * HALF / 2 + i] += part[i] * (SCALES == WScales::BLOCKS ? of_x * of_w.by[half][i / (SCALED_ROWS / 2)] : of_x);
                }
            }
        }
        if (SCALES == WScales::ROWS) scale_columns(sum, place);
    }

    // The scales of a tile's blocks in one step.
    struct OfStep { float by[HALVES][HALF / SCALED_ROWS]; };

    // The places of the scales of a tile's blocks.
    struct OfBlocks {
        const float* of_step;
        u32 apart[HALVES][HALF / SCALED_ROWS];

        __device__ __forceinline__ OfBlocks(const EightsShape& shape, const Place& place, u32 first_step) {
            if constexpr (SCALES == WScales::BLOCKS) {
                u32 n_steps = (shape.tiles.k + COLUMNS - 1) / COLUMNS;
                of_step = shape.w_scales + first_step;
#pragma unroll
                for (u32 half = 0; half < HALVES; half++)
#pragma unroll
                    for (u32 i = 0; i < HALF / SCALED_ROWS; i++) {
                        u32 row = place.column * shape.tiles.tile_rows + half * shape.tiles.half_rows + i * SCALED_ROWS;
                        // Rows after the last have any scales: their sums are dropped.
                        apart[half][i] = min(row, shape.n - 1) / SCALED_ROWS * n_steps;
                    }
            }
        }
        __device__ __forceinline__ void load(OfStep& scales, u32 step) const {
            if constexpr (SCALES == WScales::BLOCKS) {
#pragma unroll
                for (u32 half = 0; half < HALVES; half++)
#pragma unroll
                    for (u32 i = 0; i < HALF / SCALED_ROWS; i++) scales.by[half][i] = of_step[apart[half][i] + step];
            }
        }
    };

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

using WideTiles = ManyTiles<EIGHTS_COLUMNS, 2>;
using NarrowTiles = ManyTiles<EIGHTS_COLUMNS, 1>;
#define MANY_ROWS_FP8(NAME, SCALES, ENDING, HALVES, TILES, FIRST_STEP)                                                    \
    extern "C" __global__ void __launch_bounds__((1 + GROUPS) * GROUP, 1)                                                 \
    NAME(const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,   \
         EightsShape shape) {                                                                                             \
        TILES tiles{shape.tiles};                                                                                         \
        many_rows<ENDING>(y, w, x, tiles, Eights<HALVES, SCALES>{shape, FIRST_STEP});                                     \
    }
#define MANY_ROWS_FP8_OF(NAME, SCALES)                                                                                    \
    MANY_ROWS_FP8(NAME, SCALES, Sums<false>, 2, WideTiles, 0)                                                             \
    MANY_ROWS_FP8(NAME##_added, SCALES, Sums<true>, 2, WideTiles, 0)                                                      \
    MANY_ROWS_FP8(NAME##_gated, SCALES, Gated, 2, WideTiles, 0)                                                           \
    MANY_ROWS_FP8(NAME##_narrow, SCALES, Sums<false>, 1, NarrowTiles, 0)                                                  \
    MANY_ROWS_FP8(NAME##_narrow_added, SCALES, Sums<true>, 1, NarrowTiles, 0)                                             \
    MANY_ROWS_FP8(NAME##_split, SCALES, Sums<false>, 1, SplitTiles, tiles.first_step())                                   \
    MANY_ROWS_FP8(NAME##_split_added, SCALES, Sums<true>, 1, SplitTiles, tiles.first_step())
