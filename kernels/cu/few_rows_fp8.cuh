// Common code of few_rows_fp8.cu and few_rows_blocks.cu: from FP8 weights in memory to products.
//
// w is [n][k padded with zeroes to whole groups of 64]. Within a group the numbers are in lane order: 16
// bytes for each of four lanes, 4 of them for each 16 numbers (see `Fp8Rows` in ops/fp8.rs). So a lane loads
// 16 bytes of a row and has its part of four products; a warp loads 512 contiguous bytes.
// A block takes two groups of 64 of k in one step.
constexpr u32 STEP_COLUMNS = 2 * TILE_COLUMNS;
constexpr u32 W_GROUP_BYTES = W_ROWS * TILE_COLUMNS, W_BYTES = 2 * W_GROUP_BYTES;

// === Products whose first factor comes from registers, in the layout of `mma` ===

__device__ __forceinline__ void product_of(float (&c)[4], const u32* a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n8k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3}, {%4, %5, %6, %7}, %8, 1, 1, 1, 0;"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void product_of(float (&c)[8], const u32* a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n16k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7}, {%8, %9, %10, %11}, %12, 1, 1, 1, 0;"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void product_of(float (&c)[16], const u32* a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n32k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, {%16, %17, %18, %19}, %20, 1, 1, 1, 0;"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void product_of(float (&c)[32], const u32* a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n64k16.f32.bf16.bf16 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, {%32, %33, %34, %35}, %36, 1, 1, 1, 0;"
        :
          "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}
__device__ __forceinline__ void product_of(float (&c)[64], const u32* a, u64 b) {
    asm volatile(
        "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16 {"
        SUM_NAMES_64 "}, {%64, %65, %66, %67}, %68, 1, 1, 1, 0;"
        : SUMS_64(c)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b));
}

// === Widening ===

// Two pairs of bf16 from four bytes: the first from bytes 0 and 2, the second from bytes 1 and 3. The bits of
// an e4m3 number, also of a subnormal, are those of a bf16 whose exponent is too small by 120.
__device__ __forceinline__ u32 widened(u32 upper_bytes) {
    u32 bits = (upper_bytes & 0x80008000u) | ((upper_bytes >> 4) & 0x07f007f0u), pair;
    asm("mul.rn.bf16x2 %0, %1, %2;" : "=r"(pair) : "r"(bits), "r"(0x7b807b80u));
    return pair;
}

// A lane's part of a group of 64 columns: enough for four products.
__device__ __forceinline__ void widen_group(u32 (&a)[16], u32 at) {
    u32 upper[4], lower[4];
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(upper[0]), "=r"(upper[1]), "=r"(upper[2]), "=r"(upper[3]) : "r"(at) : "memory");
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(lower[0]), "=r"(lower[1]), "=r"(lower[2]), "=r"(lower[3]) : "r"(at + 8 * TILE_COLUMNS) : "memory");
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        a[4 * i] = widened(upper[i] << 8), a[4 * i + 1] = widened(lower[i] << 8);
        a[4 * i + 2] = widened(upper[i]), a[4 * i + 3] = widened(lower[i]);
    }
}

// One thread issues the loads of all tiles. The previous kernel does not write weights, so they are loaded
// while it ends.
template <u32 ROWS, u32 STAGES, u32 COLUMNS>
__device__ __forceinline__ void bring_tiles(const Ring& ring, const TensorMap& of_w, const TensorMap& of_x, const Steps<COLUMNS>& steps, const Halves<UNIT>& rows) {
    constexpr u32 X_BYTES = ROWS * TILE_ROW_BYTES, STAGE_BYTES = W_BYTES + 2 * X_BYTES;
    auto bring_w = [&](u32 nth, u32 stage) {
        u32 to = ring.at + stage * STAGE_BYTES, column = steps.column(nth), full = ring.full + stage * 8;
        barrier_expect(full, STAGE_BYTES);
#pragma unroll
        for (u32 group = 0; group < 2; group++) {
            u32 at = to + group * W_GROUP_BYTES, from = column + group * TILE_COLUMNS;
            copy_tile(at, of_w, from, rows.first, full, EVICT_FIRST);
            copy_tile(at + W_GROUP_BYTES / 2, of_w, from, rows.second, full, EVICT_FIRST);
        }
    };
    auto bring_x = [&](u32 nth, u32 stage) {
        u32 to = ring.at + stage * STAGE_BYTES + W_BYTES, column = steps.column(nth), full = ring.full + stage * 8;
        copy_tile(to, of_x, column, 0, full, EVICT_LAST);
        copy_tile(to + X_BYTES, of_x, column + TILE_COLUMNS, 0, full, EVICT_LAST);
    };
    bring_steps<STAGES>(ring, steps.count, bring_w, bring_x);
}

// Starts four products and does not wait.
template <u32 N>
__device__ __forceinline__ void multiply_group(float (&sum)[N], const u32 (&a)[16], u64 b) {
    held(sum);
    products_begin();
#pragma unroll
    for (u32 i = 0; i < 4; i++) product_of(sum, a + 4 * i, b + 2 * i);
    products_committed();
    held(sum);
}

// The kernels of a family: the name has the ending and the maximum number of rows of x. A ring of about 100 KB leaves
// room for a second block; the sums of 128 rows do not.
#define FEW_ROWS_FP8(NAME, SCALES, ENDING, ROWS, STAGES, BLOCKS)                                                                    \
    extern "C" __global__ void __launch_bounds__(ALL_THREADS, BLOCKS)                                                               \
    NAME##_##ROWS(ENDING ending, PendingNormArgs pending, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, \
                  ProductShape shape, const float* scales) {                                                                        \
        few_rows<ROWS, STAGES, STEP_COLUMNS>(ending, pending, SCALES{scales}, w, x, shape);                                         \
    }
#define FEW_ROWS_FP8_OF(NAME, SCALES, ROWS, STAGES, BLOCKS)                                                               \
    FEW_ROWS_FP8(NAME, SCALES, Sums<bf16>, ROWS, STAGES, BLOCKS)                                                          \
    FEW_ROWS_FP8(NAME##_gated, SCALES, Gated, ROWS, STAGES, BLOCKS)                                                       \
    FEW_ROWS_FP8(NAME##_added, SCALES, Added, ROWS, STAGES, BLOCKS)                                                       \
    FEW_ROWS_FP8(NAME##_joined, SCALES, const __grid_constant__ Joined, ROWS, STAGES, BLOCKS)                             \
    FEW_ROWS_FP8(NAME##_heads, SCALES, Heads, ROWS, STAGES, BLOCKS)
#define FEW_ROWS_FP8_FAMILY(NAME, SCALES)                                                                                 \
    FEW_ROWS_FP8_OF(NAME, SCALES, 8, 6, 2)                                                                                \
    FEW_ROWS_FP8_OF(NAME, SCALES, 16, 5, 2)                                                                               \
    FEW_ROWS_FP8_OF(NAME, SCALES, 32, 4, 2)                                                                               \
    FEW_ROWS_FP8_OF(NAME, SCALES, 64, 3, 2)                                                                               \
    FEW_ROWS_FP8_OF(NAME, SCALES, 128, 4, 1)
