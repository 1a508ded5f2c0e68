// Products of tiles in FP8, for both factors. Common code of many_rows_fp8.cu, many_rows_blocks.cu and
// grouped_rows_fp8.cu.
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

// Factors in FP8. A struct Shape has
//   tiles: k, and the distances between tiles and between their halves
//   n_rows(), scales_of(place): the number of rows of the matrix that a tile is of, and their scales
//   x_scales, scales_apart: the scales of x, and the distance between those of two groups of 128
template <u32 N, WScales SCALES, typename Shape>
struct Eights {
    static constexpr u32 COLUMNS = EIGHTS_COLUMNS, HALVES = N;
    const Shape& shape;
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

        __device__ __forceinline__ OfBlocks(const Shape& shape, const Place& place, u32 first_step) {
            if constexpr (SCALES == WScales::BLOCKS) {
                u32 n_steps = (shape.tiles.k + COLUMNS - 1) / COLUMNS;
                of_step = shape.scales_of(place) + first_step;
#pragma unroll
                for (u32 half = 0; half < HALVES; half++)
#pragma unroll
                    for (u32 i = 0; i < HALF / SCALED_ROWS; i++) {
                        u32 row = place.column * shape.tiles.tile_rows + half * shape.tiles.half_rows + i * SCALED_ROWS;
                        // Rows after the last have any scales: their sums are dropped.
                        apart[half][i] = min(row, shape.n_rows() - 1) / SCALED_ROWS * n_steps;
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
        const float* scales = shape.scales_of(place);
#pragma unroll
        for (u32 i = 0; i < HALVES * HALF / 8; i++) {
            u32 row = first + i / 16 * shape.tiles.half_rows + i % 16 * 8;
            float2 scale = row < shape.n_rows() ? *reinterpret_cast<const float2*>(scales + row) : float2{0.f, 0.f};
            sum[4 * i] *= scale.x, sum[4 * i + 1] *= scale.y;
            sum[4 * i + 2] *= scale.x, sum[4 * i + 3] *= scale.y;
        }
    }
};
