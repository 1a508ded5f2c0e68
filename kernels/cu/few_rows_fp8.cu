// y = x * transpose(w * scales), for up to 128 rows of x and a w in FP8 (e4m3) with a scale for each row. It
// works like few_rows.cu, with half the bytes to read. Weights are widened exactly to bf16 on the way from
// shared memory to the tensor cores' registers. A row's scale multiplies its sums.
// See `docs/decisions/0016-fp8-is-read-and-bf16-multiplied.md`.

// Sums a group's 64 rows of w. With several shares, this is a partial sum. While one group of columns is
// multiplied, the next is widened.
template <u32 ROWS, u32 STAGES, typename GroupScales>
__device__ __forceinline__ void sum_up(float (&sum)[ROWS / 2], const Ring& ring, u32 count, const GroupScales&) {
    constexpr u32 X_BYTES = ROWS * TILE_ROW_BYTES, STAGE_BYTES = W_BYTES + 2 * X_BYTES;
    u32 lane = threadIdx.x % 32, stage = 0, parity = 0, last = 0;
    u32 place = (threadIdx.x / 32 * 16 + lane / 4) * TILE_COLUMNS + lane % 4 * 16;
    u32 first[16], second[16];
    for (u32 nth = 0; nth < count; nth++) {
        barrier_wait(ring.full + stage * 8, parity);
        u32 w = ring.at + stage * STAGE_BYTES + place, x = ring.at + stage * STAGE_BYTES + W_BYTES;
        widen_group(first, w);
        multiply_group(sum, first, tile_of(x, 16));
        products_done_but<1>();
        if (nth > 0 && lane == 0) barrier_arrive(ring.empty + last * 8);
        widen_group(second, w + W_GROUP_BYTES);
        multiply_group(sum, second, tile_of(x + X_BYTES, 16));
        products_done_but<1>();
        last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    products_done_but<0>();
    held(sum);
}

FEW_ROWS_FP8_FAMILY(few_rows_fp8, RowScales)
