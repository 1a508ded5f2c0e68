// The products of many_rows_fp8.cu, for a w with a scale for each 64 rows and 128 columns: each part of 128 of k is
// multiplied by its scale.
MANY_ROWS_FP8_OF(many_rows_blocks, WScales::BLOCKS)
