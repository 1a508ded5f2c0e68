// Products of many rows, each with the matrix of its expert, by the tiles of grouped_tiles.cuh.
using BF16Tiles = GroupedTiles<TILE_COLUMNS>;
MANY_ROWS(grouped_rows, Sums<false>, BF16Tiles, GroupedShape)
MANY_ROWS(grouped_rows_gated, Gated, BF16Tiles, GroupedShape)
