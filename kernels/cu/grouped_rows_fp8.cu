// Products of many rows in FP8, each with the matrix of its expert: the tiles of grouped_tiles.cuh and the factors of
// many_eights.cuh. w is in the layout of `Fp8Rows` in ops/fp8.rs, with the scales of each expert one after the other.
struct GroupedEightsShape {
    GroupedShape tiles;
    u32 scales_of_expert;    // number of scales of an expert's matrix
    u32 scales_apart;        // distance between the scales of x for two groups of 128
    const float* w_scales;
    const float* x_scales;

    __device__ __forceinline__ u32 n_rows() const { return tiles.n; }
    __device__ __forceinline__ const float* scales_of(const Place& place) const {
        return w_scales + (u64)tiles.tiles[place.row / ROWS] * scales_of_expert;
    }
};
static_assert(sizeof(GroupedEightsShape) == 56, "as in ops/experts.rs");

using EightsTiles = GroupedTiles<EIGHTS_COLUMNS>;
#define GROUPED_FP8(NAME, SCALES, ENDING)                                                                                 \
    extern "C" __global__ void __launch_bounds__((1 + GROUPS) * GROUP, 1)                                                 \
    NAME(const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,   \
         GroupedEightsShape shape) {                                                                                      \
        EightsTiles tiles{shape.tiles};                                                                                   \
        many_rows<ENDING>(y, w, x, tiles, Eights<2, SCALES, GroupedEightsShape>{shape, 0});                               \
    }
GROUPED_FP8(grouped_rows_fp8, WScales::ROWS, Sums<false>)
GROUPED_FP8(grouped_rows_fp8_gated, WScales::ROWS, Gated)
GROUPED_FP8(grouped_rows_blocks, WScales::BLOCKS, Sums<false>)
GROUPED_FP8(grouped_rows_blocks_gated, WScales::BLOCKS, Gated)

// The rows of x in FP8, with the scales of its groups of 128. to_apart, from_apart: distance between those of two groups.
struct GatherShape { u32 tile_rows, width, per_token, n_groups, to_apart, from_apart; };

// Like `gather_choices`, for rows in FP8. Places without a choice get zeroes.
extern "C" __global__ void __launch_bounds__(256)
gather_quantized(bf16* to, float* to_scales, const bf16* x, const float* x_scales, const u32* choices, const u32* n_tiles, GatherShape shape) {
    in_turn();
    u32 n_places = *n_tiles * shape.tile_rows, halves = shape.width / 2;
    for (u32 place = blockIdx.x; place < n_places; place += gridDim.x) {
        u32 choice = choices[place];
        bool is_there = choice != NOWHERE;
        u64 row = is_there ? choice / shape.per_token : 0;
        for (u32 at = threadIdx.x * 8; at < halves; at += 256 * 8)
            store8(to + (u64)place * halves + at, is_there ? load8(x + row * halves + at) : Eight{0, 0, 0, 0});
        for (u32 group = threadIdx.x; group < shape.n_groups; group += 256)
            to_scales[(u64)group * shape.to_apart + place] = is_there ? x_scales[(u64)group * shape.from_apart + row] : 0.f;
    }
}
