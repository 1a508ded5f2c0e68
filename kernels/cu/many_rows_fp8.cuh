// Common code of many_rows_fp8.cu and many_rows_blocks.cu: the shape of a product, and the tiles of few rows.
struct EightsShape {
    ManyShape tiles;
    u32 n;                   // rows of w
    u32 scales_apart;        // distance between the scales of x for two groups of 128
    const float* w_scales;
    const float* x_scales;

    __device__ __forceinline__ u32 n_rows() const { return n; }
    __device__ __forceinline__ const float* scales_of(const Place&) const { return w_scales; }
};
static_assert(sizeof(EightsShape) == 48, "as in ops/many_rows.rs");

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
        many_rows<ENDING>(y, w, x, tiles, Eights<HALVES, SCALES, EightsShape>{shape, FIRST_STEP});                                     \
    }
#define MANY_ROWS_FP8_OF(NAME, SCALES)                                                                                    \
    MANY_ROWS_FP8(NAME, SCALES, Sums<false>, 2, WideTiles, 0)                                                             \
    MANY_ROWS_FP8(NAME##_added, SCALES, Sums<true>, 2, WideTiles, 0)                                                      \
    MANY_ROWS_FP8(NAME##_gated, SCALES, Gated, 2, WideTiles, 0)                                                           \
    MANY_ROWS_FP8(NAME##_narrow, SCALES, Sums<false>, 1, NarrowTiles, 0)                                                  \
    MANY_ROWS_FP8(NAME##_narrow_added, SCALES, Sums<true>, 1, NarrowTiles, 0)                                             \
    MANY_ROWS_FP8(NAME##_split, SCALES, Sums<false>, 1, SplitTiles, tiles.first_step())                                   \
    MANY_ROWS_FP8(NAME##_split_added, SCALES, Sums<true>, 1, SplitTiles, tiles.first_step())
