// The order in which clusters compute the tiles of a dense product, and the loads of each tile. Common code of
// many_rows.cu and many_rows_fp8.cu. COLUMNS is the number of columns of a tile, HALVES that of its halves of w.

// Tiles are ordered so that concurrent tiles share rows of x and of w: this number of pairs of neighbouring
// rows of tiles, column by column.
constexpr u32 PAIRS_TOGETHER = 8;

struct ManyShape {
    u32 k, n_pairs, n_columns;  // numbers of tiles: two tiles of rows of x form a pair
    u32 tile_rows;              // distance between tiles, in rows of w
    u32 half_rows;              // distance between the two parts of a tile that blocks load, in rows of w
};

struct Tile { u32 pair, column; };

__device__ __forceinline__ Tile tile_at(u32 nth, const ManyShape& shape) {
    u32 in_full = PAIRS_TOGETHER * shape.n_columns, first = nth / in_full * PAIRS_TOGETHER, rest = nth % in_full;
    u32 n_pairs = min(PAIRS_TOGETHER, shape.n_pairs - first);
    return {first + rest % n_pairs, rest / n_pairs};
}

template <u32 COLUMNS, u32 HALVES>
struct ManyTiles {
    static constexpr bool FOR_BOTH = true;
    const ManyShape& shape;

    __device__ __forceinline__ u32 count() const { return shape.n_pairs * shape.n_columns; }
    __device__ __forceinline__ Place at(u32 nth) const {
        Tile tile = tile_at(nth, shape);
        return {(tile.pair * CLUSTER + cluster_rank()) * ROWS, tile.column};
    }
    __device__ __forceinline__ u32 steps() const { return (shape.k + COLUMNS - 1) / COLUMNS; }
    template <u32 N>
    __device__ __forceinline__ bool join(float (&)[N], const Ring&) const { return true; }
    // A stage is free when the groups of both blocks have read it, because a block's part of w is written into
    // both.
    __device__ __forceinline__ void bring(const Ring& ring, const TensorMap& of_w, const TensorMap& of_x, u32 n_tiles, u32 n_steps) const {
        using Stage = Stage<HALVES>;
        u32 rank = cluster_rank(), step_of = gridDim.x / CLUSTER;
        Turn<HALVES> turn;
        for (u32 nth = blockIdx.x / CLUSTER; nth < n_tiles; nth += step_of) {
            Tile tile = tile_at(nth, shape);
            u32 row = (tile.pair * CLUSTER + rank) * ROWS, of_part = tile.column * shape.tile_rows + rank * shape.half_rows;
            for (u32 step = 0; step < n_steps; step++, turn.next()) {
                u32 full = ring.full + turn.stage * 8, to = ring.at + turn.stage * Stage::BYTES;
                barrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
                barrier_expect(full, Stage::BYTES);
                copy_tile(to, of_x, step * COLUMNS, row, full, EVICT_NORMAL);
                copy_tile_to_all(to + X_BYTES + rank * (HALVES * HALF_BYTES / CLUSTER), of_w, step * COLUMNS, of_part, full, EVICT_NORMAL, (1 << CLUSTER) - 1);
            }
        }
    }
};
