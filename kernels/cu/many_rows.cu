// y = x * transpose(w), for many rows of x. Multiplying takes all the time.
//
// w is [n][k], as in checkpoints. A block of threads takes tiles of y one after the other: 128 rows of x by
// 256 rows of w. One warp lets the copy engine load tiles of both through a ring, and two groups of four
// warps multiply 64 rows of x each. Two blocks form a cluster: they have neighbouring rows of x and the same
// rows of w, and each loads half of w for both. While a tile is written, through shared memory and by the
// copy engine, the ring fills for the next one. A tile overwrites y or is added to it.
//
// The 256 rows of w are two halves, which may be at any distance. If w has gate and up, a thread therefore
// has the sums of both. A number is summed in the order of k, whatever the other rows are.
// See `docs/decisions/0021-many-rows-by-a-kernel-of-our-own.md`.
// Tiles are ordered so that concurrent tiles share rows of x and of w: this number of pairs of neighbouring
// rows of tiles, column by column.
constexpr u32 PAIRS_TOGETHER = 8;

struct ManyShape {
    u32 k, n_pairs, n_columns;  // numbers of tiles: two tiles of rows of x form a pair
    u32 tile_rows;              // distance between tiles, in rows of w
    u32 half_rows;              // distance between the halves of a tile, in rows of w
};

struct Tile { u32 pair, column; };

__device__ __forceinline__ Tile tile_at(u32 nth, const ManyShape& shape) {
    u32 in_full = PAIRS_TOGETHER * shape.n_columns, first = nth / in_full * PAIRS_TOGETHER, rest = nth % in_full;
    u32 n_pairs = min(PAIRS_TOGETHER, shape.n_pairs - first);
    return {first + rest % n_pairs, rest / n_pairs};
}

struct ManyTiles {
    const ManyShape& shape;

    __device__ __forceinline__ u32 count() const { return shape.n_pairs * shape.n_columns; }
    __device__ __forceinline__ Place at(u32 nth) const {
        Tile tile = tile_at(nth, shape);
        return {(tile.pair * CLUSTER + cluster_rank()) * ROWS, tile.column};
    }
    // A stage is free when the groups of both blocks have read it, because a block's half of w is written into
    // both.
    __device__ __forceinline__ void bring(const Ring& ring, const TensorMap& of_w, const TensorMap& of_x, u32 n_tiles, u32 n_steps) const {
        u32 rank = cluster_rank(), step_of = gridDim.x / CLUSTER;
        Turn turn;
        for (u32 nth = blockIdx.x / CLUSTER; nth < n_tiles; nth += step_of) {
            Tile tile = tile_at(nth, shape);
            u32 row = (tile.pair * CLUSTER + rank) * ROWS, of_half = tile.column * shape.tile_rows + rank * shape.half_rows;
            for (u32 step = 0; step < n_steps; step++, turn.next()) {
                u32 full = ring.full + turn.stage * 8, to = ring.at + turn.stage * STAGE_BYTES;
                barrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
                barrier_expect(full, STAGE_BYTES);
                copy_tile(to, of_x, step * TILE_COLUMNS, row, full, EVICT_NORMAL);
                copy_tile_to_all(to + X_BYTES + rank * HALF_BYTES, of_w, step * TILE_COLUMNS, of_half, full, EVICT_NORMAL, (1 << CLUSTER) - 1);
            }
        }
    }
};

MANY_ROWS(many_rows, Sums<false>, ManyTiles, ManyShape)
MANY_ROWS(many_rows_added, Sums<true>, ManyTiles, ManyShape)
MANY_ROWS(many_rows_gated, Gated, ManyTiles, ManyShape)
