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
using DenseTiles = ManyTiles<TILE_COLUMNS, Halves::HALVES>;
MANY_ROWS(many_rows, Sums<false>, DenseTiles, ManyShape)
MANY_ROWS(many_rows_added, Sums<true>, DenseTiles, ManyShape)
MANY_ROWS(many_rows_gated, Gated, DenseTiles, ManyShape)
