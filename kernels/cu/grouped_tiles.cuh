// The tiles of products of many rows, each with the matrix of its expert. Common code of grouped_rows.cu and
// grouped_rows_fp8.cu. COLUMNS is the number of columns of a tile.
//
// w has the matrices of all experts, one after the other. x has the rows of each expert from a multiple of 128
// on, so that a tile has rows of one expert; rows between them are computed and not used. Two blocks form a
// cluster: they have the same rows of x and neighbouring tiles of w, and each loads half of the rows of x for
// both.
struct GroupedShape {
    u32 k, n_pairs;    // pairs of neighbouring tiles of w
    u32 n;             // rows of an expert's matrix
    u32 tile_rows;     // distance between tiles, in rows of w
    u32 half_rows;     // distance between the halves of a tile, in rows of w
    u32 n_tiles_max;
    const u32* tiles;  // the expert of each tile of rows, and at n_tiles_max their number
};

template <u32 COLUMNS>
struct GroupedTiles {
    static constexpr bool FOR_BOTH = true;
    const GroupedShape& shape;

    __device__ __forceinline__ u32 count() const { return shape.tiles[shape.n_tiles_max] * shape.n_pairs; }
    __device__ __forceinline__ Place at(u32 nth) const {
        return {nth / shape.n_pairs * ROWS, nth % shape.n_pairs * CLUSTER + cluster_rank()};
    }
    __device__ __forceinline__ u32 steps() const { return (shape.k + COLUMNS - 1) / COLUMNS; }
    template <u32 N>
    __device__ __forceinline__ bool join(float (&)[N], const Ring&) const { return true; }
    // A stage is free when the groups of both blocks have read it, because a block's half of x is written into
    // both.
    __device__ __forceinline__ void bring(const Ring& ring, const TensorMap& of_w, const TensorMap& of_x, u32 n_tiles, u32 n_steps) const {
        using Stage = Stage<2>;
        constexpr u32 X_HALF = ROWS / CLUSTER;
        u32 rank = cluster_rank();
        Turn<2> turn;
        for (u32 nth = blockIdx.x / CLUSTER; nth < n_tiles; nth += gridDim.x / CLUSTER) {
            Place place = at(nth);
            u32 of_w_rows = shape.tiles[nth / shape.n_pairs] * shape.n + place.column * shape.tile_rows;
            for (u32 step = 0; step < n_steps; step++, turn.next()) {
                u32 full = ring.full + turn.stage * 8, to = ring.at + turn.stage * Stage::BYTES, column = step * COLUMNS;
                barrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
                barrier_expect(full, Stage::BYTES);
                copy_tile_to_all(to + rank * (X_BYTES / CLUSTER), of_x, column, place.row + rank * X_HALF, full, EVICT_NORMAL, (1 << CLUSTER) - 1);
                copy_tile(to + X_BYTES, of_w, column, of_w_rows, full, EVICT_NORMAL);
                copy_tile(to + X_BYTES + HALF_BYTES, of_w, column, of_w_rows + shape.half_rows, full, EVICT_NORMAL);
            }
        }
    }
};
