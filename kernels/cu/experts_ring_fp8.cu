// Products of few rows with experts, both in FP8 (e4m3), on Hopper: the tiles of expert_ring.cuh. w and x are in the layout of
// `Fp8Rows` in ops/fp8.rs. The rows of the second product come in bf16, and are rounded on their way into the ring.
//
// The tensor cores add products of FP8 with less precision than f32 has. So they add up 128 numbers of k at a time, and
// these sums are added in f32, each times its scale of x, as in many_rows_fp8.cu.
constexpr u32 SCALED_ROWS = 64;
static_assert(X_ROWS <= X_WARPS * 32, "a thread for the scale of each row of x");
enum class WScales { ROWS, BLOCKS };

// x_apart: the distance between the scales of x for two groups of 128. There are none if x is in bf16.
struct RingFp8Shape {
    ExpertsShape of;
    u32 x_apart;
    const float *w_scales, *x_scales;
};
static_assert(sizeof(RingFp8Shape) == 40, "as in ops/expert_ring.rs");

__device__ __forceinline__ void product_of_eights(float (&c)[4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, adds, 1, 1;\n}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "l"(a), "l"(b), "r"((u32)adds));
}
__device__ __forceinline__ void product_of_eights(float (&c)[8], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %10, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n16k32.f32.e4m3.e4m3 {%0, %1, %2, %3, %4, %5, %6, %7}, %8, %9, adds, 1, 1;\n}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7])
        : "l"(a), "l"(b), "r"((u32)adds));
}
__device__ __forceinline__ void product_of_eights(float (&c)[16], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15}, %16, %17, adds, 1, 1;\n}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15])
        : "l"(a), "l"(b), "r"((u32)adds));
}
__device__ __forceinline__ void product_of_eights(float (&c)[32], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %34, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k32.f32.e4m3.e4m3 {"
        "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, "
        "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31}, %32, %33, adds, 1, 1;\n}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]), "+f"(c[4]), "+f"(c[5]), "+f"(c[6]), "+f"(c[7]),
          "+f"(c[8]), "+f"(c[9]), "+f"(c[10]), "+f"(c[11]), "+f"(c[12]), "+f"(c[13]), "+f"(c[14]), "+f"(c[15]),
          "+f"(c[16]), "+f"(c[17]), "+f"(c[18]), "+f"(c[19]), "+f"(c[20]), "+f"(c[21]), "+f"(c[22]), "+f"(c[23]),
          "+f"(c[24]), "+f"(c[25]), "+f"(c[26]), "+f"(c[27]), "+f"(c[28]), "+f"(c[29]), "+f"(c[30]), "+f"(c[31])
        : "l"(a), "l"(b), "r"((u32)adds));
}

// The scale of x that a thread copies to each stage: that of one row, or none.
struct ScaleOfX {
    const float* from;
    u32 to, apart;

    __device__ __forceinline__ void copy(u32 stage, u32 step) const {
        if (from != nullptr) copy4(to + stage * X_ROWS * 4, from + (u64)step * apart);
    }
};

// The scales of the two rows of w whose sums a lane has, or of their blocks. Those of the next step are loaded one step ahead.
template <typename Units, WScales SCALES>
struct ScalesOfW {
    const float* of_blocks[2];
    float by[2], next[2];
    u32 n_steps;

    __device__ __forceinline__ ScalesOfW(u32 expert, u32 unit, u32 n_steps, const RingFp8Shape& shape) : n_steps(n_steps) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 n = shape.of.n, row = min(Units::row(unit, half, threadIdx.x % 32 / 4, shape.of), n - 1);
            if constexpr (SCALES == WScales::ROWS) by[half] = shape.w_scales[(u64)expert * n + row];
            else {
                of_blocks[half] = shape.w_scales + ((u64)expert * ((n + SCALED_ROWS - 1) / SCALED_ROWS) + row / SCALED_ROWS) * n_steps;
                next[half] = of_blocks[half][0];
            }
        }
    }
    __device__ __forceinline__ void load(u32 step) {
        if constexpr (SCALES == WScales::BLOCKS) {
            u32 after = min(step + 1, n_steps - 1);
#pragma unroll
            for (u32 half = 0; half < 2; half++) by[half] = next[half], next[half] = of_blocks[half][after];
        }
    }
};

// Rounds rows of x in bf16, and writes them and their scales to the stages. The warps take stages in turn. A lane has eight
// numbers of every second row.
template <typename Units>
__device__ __forceinline__ void round_x(const Ring& ring, const bf16* x, float* x_scales, const ExpertRows& rows, Task task, u32 n_tiles, u32 n_steps, const ExpertsShape& shape) {
    constexpr u32 AT_ONCE = 32 / ROUND_LANES, LOADS = 4;
    u32 warp = (threadIdx.x - X_THREAD) / 32, lane = threadIdx.x % 32, chunk = lane % ROUND_LANES, first_row = lane / ROUND_LANES;
    u32 place = quantized_place(chunk), nth = 0;
    RingTurn turn;
    do {
        u32 n_rows = task.n_rows();
        for (u32 step = 0; step < n_steps; step++, nth++, turn.next()) {
            if (nth % X_WARPS != warp) continue;
            u32 column = step * ROUND_GROUP + chunk * 8, to = ring.at + turn.stage * STAGE_BYTES + W_BYTES;
            for (u32 first = 0; first < n_rows; first += LOADS * AT_ONCE) {
                Eight eights[LOADS];
#pragma unroll
                for (u32 i = 0; i < LOADS; i++) {
                    u32 row = first + i * AT_ONCE + first_row;
                    bool is_there = row < n_rows && column < shape.k;
                    eights[i] = is_there ? load8(x + (u64)Units::row_of_x(rows, task.place() + row, shape) * shape.k + column) : Eight{0, 0, 0, 0};
                }
                if (first == 0) barrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
#pragma unroll
                for (u32 i = 0; i < LOADS; i++) {
                    u32 row = first + i * AT_ONCE + first_row;
                    if (first + i * AT_ONCE >= n_rows) break;
                    QuantizedEight eight = quantized8(eights[i]);
                    put4(to + chunk_place(row, place / 16) + place % 16, eight.words[0]);
                    put4(to + chunk_place(row, place / 16 + 2) + place % 16, eight.words[1]);
                    if (chunk == 0) x_scales[turn.stage * X_ROWS + row] = eight.scale();
                }
            }
            stores_shown();
            __syncwarp();
            if (lane == 0) barrier_arrive(ring.full + turn.stage * 8);
        }
    } while (task.next(rows, n_tiles));
}
static_assert(TILE_ROW_BYTES == ROUND_GROUP, "a step has a group of numbers");

enum class XForm { FP8, BF16 };

template <WScales SCALES, XForm X>
struct Fp8Factors {
    static constexpr u32 NUMBER_BYTES = 1, X_ARRIVALS = X == XForm::FP8 ? COPY_ARRIVALS : 1;
    const RingFp8Shape& shape;
    float* x_scales;  // [stage][row], in shared memory

    __device__ __forceinline__ void place_scales(char* free) { x_scales = reinterpret_cast<float*>(free); }

    template <typename Units>
    __device__ __forceinline__ void fill_x(const Ring& ring, const char* x, const ExpertRows& rows, Task task, u32 n_tiles, u32 n_steps, const ExpertsShape& of) const {
        if constexpr (X == XForm::FP8) copy_x<Units>(ring, x, rows, task, n_tiles, n_steps, *this, of);
        else round_x<Units>(ring, reinterpret_cast<const bf16*>(x), x_scales, rows, task, n_tiles, n_steps, of);
    }

    template <typename Units>
    __device__ __forceinline__ ScaleOfX scale_of(const ExpertRows& rows, u32 place, u32 n_rows) const {
        u32 row = threadIdx.x - X_THREAD;
        const float* from = row < n_rows ? shape.x_scales + Units::row_of_x(rows, place + row, shape.of) : nullptr;
        return {from, shared_address(x_scales) + row * 4, shape.x_apart};
    }

    template <typename Units, u32 SUMS>
    __device__ __forceinline__ void sum_up(float (&sum)[SUMS], const Ring& ring, RingTurn& turn, u32 n_steps, u32 unit, u32 expert) const {
        ScalesOfW<Units, SCALES> of_w(expert, unit, n_steps, shape);
        for (u32 step = 0; step < n_steps; step++, turn.next()) {
            of_w.load(step);
            wait_for_stage(ring, turn);
            u64 a = tile_of_w(ring, turn.stage), b = tile_of_x(ring, turn.stage);
            float part[SUMS];
            held(part);
            products_begin();
#pragma unroll
            for (u32 i = 0; i < TILE_ROW_BYTES / 32; i++) product_of_eights(part, a + 2 * i, b + 2 * i, i > 0);
            products_committed();
            held(part);
            float2 by[SUMS / 4];
            const float* scales = x_scales + turn.stage * X_ROWS + threadIdx.x % 4 * 2;
#pragma unroll
            for (u32 i = 0; i < SUMS / 4; i++) by[i] = *reinterpret_cast<const float2*>(scales + i * 8);
            products_done_but<0>();
            held(part);
            free_ring_stage(ring, turn.stage);
#pragma unroll
            for (u32 i = 0; i < SUMS / 4; i++) {
                float upper = SCALES == WScales::BLOCKS ? of_w.by[0] : 1.f, lower = SCALES == WScales::BLOCKS ? of_w.by[1] : 1.f;
                sum[4 * i] += part[4 * i] * (by[i].x * upper), sum[4 * i + 1] += part[4 * i + 1] * (by[i].y * upper);
                sum[4 * i + 2] += part[4 * i + 2] * (by[i].x * lower), sum[4 * i + 3] += part[4 * i + 3] * (by[i].y * lower);
            }
        }
        if constexpr (SCALES == WScales::ROWS) {
#pragma unroll
            for (u32 i = 0; i < SUMS; i++) sum[i] *= of_w.by[i / 2 % 2];
        }
    }
};

#define EXPERTS_RING_FP8(NAME, SCALES, UNITS, X)                                                                            \
    extern "C" __global__ void __launch_bounds__(RING_THREADS, 1)                                                          \
    NAME(bf16* y, const __grid_constant__ TensorMap w, const char* x, ExpertRows rows, RingFp8Shape shape) {               \
        multiply_in_ring<UNITS>(y, w, x, rows, Fp8Factors<SCALES, X>{shape, nullptr}, shape.of);                           \
    }
EXPERTS_RING_FP8(experts_ring_fp8_gated, WScales::ROWS, GatedTile, XForm::FP8)
EXPERTS_RING_FP8(experts_ring_fp8_summed, WScales::ROWS, SummedTile, XForm::BF16)
EXPERTS_RING_FP8(experts_ring_blocks_gated, WScales::BLOCKS, GatedTile, XForm::FP8)
EXPERTS_RING_FP8(experts_ring_blocks_summed, WScales::BLOCKS, SummedTile, XForm::BF16)

// === Before the products ===

// Places choices as `place_choices` does. The blocks after those of experts write the rows of x in FP8.
extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
place_and_quantize(Places to, const u32* experts, PlacesShape shape, u32* quantized, float* scales, const bf16* x, QuantizedShape rows) {
    in_turn();
    if (blockIdx.x < shape.n_experts) place_expert(to, experts, shape);
    else quantize(quantized, scales, RowsOnce{x, rows.k}, rows, blockIdx.x - shape.n_experts, gridDim.x - shape.n_experts);
}
