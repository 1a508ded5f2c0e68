// Converts the pages of some sequences from e4m3 to bf16, for kernels that read bf16.
//
// Page number i of sequence s becomes page number s * table_stride + i of the output. The kernel writes
// only the pages that queries of the sequence attend to. For an invalid block number it writes NaN, so that the output
// of attention shows the error.
extern "C" __global__ void __launch_bounds__(256)
widen_pages(bf16* out, const f8* pages, const u32* tables, const uint3* sequences, u32 table_stride, u32 page_numbers,
            u32 n_blocks, u32 window) {
    in_turn();
    uint3 sequence = sequences[blockIdx.y];  // its first row in q, its queries, its tokens
    u32 before = sequence.z - sequence.y, oldest = before + 1 > window ? before + 1 - window : 0;
    u32 n_pages = min((sequence.z + BLOCK_TOKENS - 1) / BLOCK_TOKENS, table_stride);
    if (sequence.y == 0) return;
    for (u32 page = oldest / BLOCK_TOKENS + blockIdx.x; page < n_pages; page += gridDim.x) {
        u64 place = (u64)blockIdx.y * table_stride + page;
        u32 block = tables[place];
        bool is_there = block < n_blocks;
        const f8* from = pages + (u64)(is_there ? block : 0) * page_numbers;
        bf16* to = out + place * page_numbers;
#pragma unroll 4
        for (u32 at = threadIdx.x * 8; at < page_numbers; at += blockDim.x * 8) {
            Eight eight = widened(once_raw(from + at));
            if (!is_there) eight = {0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu, 0x7fff7fffu};
            store8(to + at, eight);
        }
    }
}
