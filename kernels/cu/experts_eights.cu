// Products of few rows with experts, both in FP8 (e4m3), on Hopper. w and x are in the layout of `Fp8Rows` in ops/fp8.rs.
//
// A unit is 64 rows of an expert's matrix. The units of all experts that have rows are divided evenly over groups of four
// warps: each group has a run of neighbours, computes them alone, along all of k, and waits for no other group. The copy
// engine brings the weights of its units to a ring in shared memory, STAGES steps of k ahead. The rows of x, up to N of an
// expert, stay in shared memory while the units are those of one expert.
//
// The tensor cores add products of FP8 with less precision than f32 has. So they add up 128 numbers of k at a time, and
// these sums are added in f32, each times its scale of x, as in many_rows_fp8.cu.
constexpr u32 UNIT_TILE = 64, STAGES = 4, STAGE_BYTES = UNIT_TILE * TILE_ROW_BYTES, GROUP_THREADS = 128, GROUPS_MAX = 4;
constexpr u32 SCALED_ROWS = 64;
enum class WScales { ROWS, BLOCKS };

// x_apart: the distance between the scales of x for two groups of 128.
struct EightsShape {
    ExpertsShape of;
    u32 x_apart;
    const float *w_scales, *x_scales;
};
static_assert(sizeof(EightsShape) == 40, "as in ops/expert_products.rs");

__device__ __forceinline__ void product_of_eights(float (&c)[4], u64 a, u64 b, bool adds) {
    asm volatile(
        "{\n.reg .pred adds;\nsetp.ne.b32 adds, %6, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n8k32.f32.e4m3.e4m3 {%0, %1, %2, %3}, %4, %5, adds, 1, 1;\n}"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
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

// === Units ===

// A lane has the sums of row g of a half with rows 2t and 2t + 1 of x, then those of row g of the other half. Neighbouring
// lanes exchange numbers, so that each has two neighbouring rows of w and one row of x.
__device__ __forceinline__ u32 paired(float first, float second) {
    bool is_odd = threadIdx.x / 4 % 2;
    float other = __shfl_xor_sync(FULL_WARP, is_odd ? first : second, 4);
    return is_odd ? narrow(other, second) : narrow(first, other);
}
// The numbers of that row of x, and of that pair of rows of w.
__device__ __forceinline__ u32 row_of_pair() { return threadIdx.x % 4 * 2 + threadIdx.x / 4 % 2; }
__device__ __forceinline__ u32 paired_rows() { return threadIdx.x % 32 / 8; }

// A warp's 16 rows of a unit are a unit of expert_rows.cuh: 8 rows of gate, then 8 of up. A box has 8 rows of w.
struct GatedTile : GatedRows {
    static __device__ __forceinline__ u32 count(const ExpertsShape& shape) { return shape.n / UNIT_TILE; }
    static __device__ __forceinline__ void bring(u32 to, const TensorMap& of_w, u32 column, u32 expert, u32 unit, u32 barrier, const ExpertsShape& shape) {
#pragma unroll
        for (u32 i = 0; i < UNIT_TILE / UNIT; i++) {
            u32 from = expert * shape.n + row(unit * 4 + i / 2, i % 2, 0, shape);
            copy_tile(to + i * UNIT * TILE_ROW_BYTES, of_w, column, from, barrier, EVICT_FIRST);
        }
    }
    static __device__ __forceinline__ void end(bf16* y, u32 place, bool is_there, u32 unit, const float* sum, const ExpertsShape& shape) {
        u32 pair = paired(gated(sum[0], sum[2]), gated(sum[1], sum[3]));
        if (is_there) *reinterpret_cast<u32*>(y + (u64)place * (shape.n / 2) + unit * UNIT + paired_rows() * 2) = pair;
    }
};

// A box has all rows of a unit.
struct SummedTile : SummedRows<1> {
    static __device__ __forceinline__ u32 count(const ExpertsShape& shape) { return (shape.n + UNIT_TILE - 1) / UNIT_TILE; }
    static __device__ __forceinline__ void bring(u32 to, const TensorMap& of_w, u32 column, u32 expert, u32 unit, u32 barrier, const ExpertsShape& shape) {
        copy_tile(to, of_w, column, expert * shape.n + unit * UNIT_TILE, barrier, EVICT_FIRST);
    }
    static __device__ __forceinline__ void end(bf16* y, u32 place, bool is_there, u32 unit, const float* sum, const ExpertsShape& shape) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 pair = paired(sum[2 * half], sum[2 * half + 1]), column = (unit * 2 + half) * UNIT;
            if (is_there && column < shape.n) *reinterpret_cast<u32*>(y + (u64)place * shape.n + column + paired_rows() * 2) = pair;
        }
    }
};

// === The work of a group ===

// A unit with up to N rows of its expert, in a run of units.
template <u32 N>
struct Task {
    u32 left, nth_touched, unit, expert, start, count, first;

    __device__ __forceinline__ void of_expert(const ExpertRows& rows) {
        expert = rows.touched[nth_touched], start = rows.starts[expert], count = rows.counts[expert], first = 0;
    }
    // Goes on to the next rows, or to the next unit. Returns false after the last one.
    __device__ __forceinline__ bool next(const ExpertRows& rows, u32 n_units) {
        first += N;
        if (first < count) return true;
        first = 0;
        if (--left == 0) return false;
        if (++unit == n_units) unit = 0, nth_touched++, of_expert(rows);
        return true;
    }
    __device__ __forceinline__ u32 place() const { return start + first; }
    __device__ __forceinline__ u32 n_rows() const { return min(N, count - first); }
};

// Asks for the weights of a group's tasks, one step of k at a time. One thread has it.
template <typename Units, u32 N>
struct Asker {
    Task<N> task;
    u32 step, stage, parity;
    bool is_more;

    // Waits until the stage is empty, except in the first round.
    __device__ __forceinline__ void ask(const Ring& ring, const TensorMap& of_w, const ExpertRows& rows, u32 n_units, u32 n_steps, const ExpertsShape& shape) {
        if (!is_more) return;
        u32 full = ring.full + stage * 8;
        barrier_wait(ring.empty + stage * 8, parity ^ 1);
        barrier_expect(full, STAGE_BYTES);
        Units::bring(ring.at + stage * STAGE_BYTES, of_w, step * TILE_ROW_BYTES, task.expert, task.unit, full, shape);
        if (++stage == STAGES) stage = 0, parity ^= 1;
        if (++step == n_steps) step = 0, is_more = task.next(rows, n_units);
    }
};

// The rows of x of a task, in shared memory: for each step of k a tile of N rows; then their scales: [step][row].
template <u32 N>
struct RowsOfX {
    static constexpr u32 TILE_BYTES = N * TILE_ROW_BYTES;
    u32 at, n_steps;

    __device__ __forceinline__ float* scales() const { return reinterpret_cast<float*>(__cvta_shared_to_generic(at + n_steps * TILE_BYTES)); }

    // Copies the rows of a task. All threads of the group call this, when none of them reads the rows of another task.
    template <typename Units>
    __device__ __forceinline__ void copy(const char* x, const ExpertRows& rows, u32 place, u32 n_rows, const EightsShape& shape) const {
        constexpr u32 CHUNKS = TILE_ROW_BYTES / 16;
        u32 thread = threadIdx.x % GROUP_THREADS;
        for (u32 nth = thread; nth < n_steps * N * CHUNKS; nth += GROUP_THREADS) {
            u32 chunk = nth % CHUNKS, row = nth / CHUNKS % N, step = nth / (CHUNKS * N), column = step * TILE_ROW_BYTES + chunk * 16;
            bool is_there = row < n_rows && column < shape.of.k;
            u32 of_x = is_there ? Units::row_of_x(rows, place + row, shape.of) : 0;
            copy16(at + step * TILE_BYTES + chunk_place(row, chunk), x + (u64)of_x * shape.of.k + (is_there ? column : 0), is_there);
        }
        for (u32 nth = thread; nth < n_steps * N; nth += GROUP_THREADS) {
            u32 row = nth % N, step = nth / N;
            scales()[nth] = row < n_rows ? shape.x_scales[(u64)step * shape.x_apart + Units::row_of_x(rows, place + row, shape.of)] : 0.f;
        }
        copies_committed();
        copies_landed_but<0>();
        stores_shown();
    }
};

// The scales of the two rows of w whose sums a lane has, or of their blocks.
template <typename Units, WScales SCALES>
struct ScalesOfW {
    const float* of_blocks[2];
    float by[2];

    __device__ __forceinline__ ScalesOfW(u32 expert, u32 unit, u32 n_steps, const EightsShape& shape) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 n = shape.of.n, row = min(Units::row(unit, half, threadIdx.x % 32 / 4, shape.of), n - 1);
            if constexpr (SCALES == WScales::ROWS) by[half] = shape.w_scales[(u64)expert * n + row];
            else of_blocks[half] = shape.w_scales + ((u64)expert * ((n + SCALED_ROWS - 1) / SCALED_ROWS) + row / SCALED_ROWS) * n_steps;
        }
    }
    __device__ __forceinline__ void load(u32 step) {
        if constexpr (SCALES == WScales::BLOCKS) by[0] = of_blocks[0][step], by[1] = of_blocks[1][step];
    }
};

template <typename Units, WScales SCALES, u32 N>
__device__ __forceinline__ void multiply_eights(bf16* y, const TensorMap& of_w, const char* x, const ExpertRows& rows, const EightsShape& shape) {
    extern __shared__ Eight shared[];  // for each group: the ring, then the rows of x
    __shared__ u64 barriers[GROUPS_MAX * 2 * STAGES];
    u32 group = threadIdx.x / GROUP_THREADS, n_groups = blockDim.x / GROUP_THREADS, warp = threadIdx.x % GROUP_THREADS / 32, lane = threadIdx.x % 32;
    bool is_first = threadIdx.x % GROUP_THREADS == 0;
    u32 n_steps = (shape.of.k + TILE_ROW_BYTES - 1) / TILE_ROW_BYTES;
    u32 group_bytes = STAGES * STAGE_BYTES + (n_steps * N * (TILE_ROW_BYTES + 4) + 1023) / 1024 * 1024;
    Ring ring;
    ring.at = (shared_address(shared) + 1023) / 1024 * 1024 + group * group_bytes;
    ring.full = shared_address(barriers) + group * 2 * STAGES * 8, ring.empty = ring.full + STAGES * 8;
    if (is_first) {
        fetch_map(of_w);
        ring_started<STAGES>(ring, GROUP_THREADS / 32);
    }
    __syncthreads();
    in_turn();

    u32 n_units = Units::count(shape.of), n_all = rows.touched[shape.of.n_experts] * n_units;
    u32 nth_group = blockIdx.x * n_groups + group, n_all_groups = gridDim.x * n_groups, nth = (u64)n_all * nth_group / n_all_groups;
    Task<N> task;
    task.left = (u64)n_all * (nth_group + 1) / n_all_groups - nth;
    if (task.left == 0) return;
    task.nth_touched = nth / n_units, task.unit = nth % n_units;
    task.of_expert(rows);
    Asker<Units, N> asker{task, 0, 0, 0, is_first};
    for (u32 i = 0; i < STAGES; i++) asker.ask(ring, of_w, rows, n_units, n_steps, shape.of);
    RowsOfX<N> of_x{ring.at + STAGES * STAGE_BYTES, n_steps};
    u32 stage = 0, parity = 0, copied = NOWHERE;
    bool has_asked = true;
    do {
        u32 n_rows = task.n_rows(), place = task.place(), unit = task.unit * 4 + warp;
        ScalesOfW<Units, SCALES> of_w_rows(task.expert, unit, n_steps, shape);
        if (place != copied) {
            threads_wait<GROUP_THREADS>(1 + group);
            of_x.template copy<Units>(x, rows, place, n_rows, shape);
            threads_wait<GROUP_THREADS>(1 + group);
            copied = place;
        }
        float sum[N / 2] = {};
        for (u32 step = 0; step < n_steps; step++) {
            const float* scales = of_x.scales() + step * N + lane % 4 * 2;
            of_w_rows.load(step);
            barrier_wait(ring.full + stage * 8, parity);
            u64 a = tile_of(ring.at + stage * STAGE_BYTES, 16), b = tile_of(of_x.at + step * RowsOfX<N>::TILE_BYTES, 16);
            float part[N / 2];
            held(part);
            products_begin();
#pragma unroll
            for (u32 i = 0; i < TILE_ROW_BYTES / 32; i++) product_of_eights(part, a + 2 * i, b + 2 * i, i > 0);
            products_committed();
            held(part);
            // While the tensor cores work, the stage of the step before is filled again.
            if (is_first && !has_asked) asker.ask(ring, of_w, rows, n_units, n_steps, shape.of);
            has_asked = false;
            __syncwarp();
            products_done_but<0>();
            held(part);
            if (lane == 0) barrier_arrive(ring.empty + stage * 8);
            if (++stage == STAGES) stage = 0, parity ^= 1;
#pragma unroll
            for (u32 i = 0; i < N / 8; i++) {
                float2 by = *reinterpret_cast<const float2*>(scales + i * 8);
                float upper = SCALES == WScales::BLOCKS ? of_w_rows.by[0] : 1.f, lower = SCALES == WScales::BLOCKS ? of_w_rows.by[1] : 1.f;
                sum[4 * i] += part[4 * i] * (by.x * upper), sum[4 * i + 1] += part[4 * i + 1] * (by.y * upper);
                sum[4 * i + 2] += part[4 * i + 2] * (by.x * lower), sum[4 * i + 3] += part[4 * i + 3] * (by.y * lower);
            }
        }
#pragma unroll
        for (u32 i = 0; i < N / 8; i++) {
            if (i * 8 >= n_rows) break;
            if constexpr (SCALES == WScales::ROWS) {
                sum[4 * i] *= of_w_rows.by[0], sum[4 * i + 1] *= of_w_rows.by[0];
                sum[4 * i + 2] *= of_w_rows.by[1], sum[4 * i + 3] *= of_w_rows.by[1];
            }
            u32 row = i * 8 + row_of_pair();
            Units::end(y, place + row, row < n_rows, unit, sum + 4 * i, shape.of);
        }
    } while (task.next(rows, n_units));
}

// The name has the number of rows of an expert that are computed at a time.
#define EXPERTS_EIGHTS(NAME, UNITS, SCALES, N)                                                                             \
    extern "C" __global__ void __launch_bounds__(GROUPS_MAX * GROUP_THREADS, 1)                                            \
    NAME##_##N(bf16* y, const __grid_constant__ TensorMap w, const char* x, ExpertRows rows, EightsShape shape) {          \
        multiply_eights<UNITS, SCALES, N>(y, w, x, rows, shape);                                                           \
    }
EXPERTS_EIGHTS(experts_eights_gated, GatedTile, WScales::ROWS, 8)
EXPERTS_EIGHTS(experts_eights_gated, GatedTile, WScales::ROWS, 32)
EXPERTS_EIGHTS(experts_eights_summed, SummedTile, WScales::ROWS, 8)
EXPERTS_EIGHTS(experts_eights_summed, SummedTile, WScales::ROWS, 32)
EXPERTS_EIGHTS(experts_eight_blocks_gated, GatedTile, WScales::BLOCKS, 8)
EXPERTS_EIGHTS(experts_eight_blocks_gated, GatedTile, WScales::BLOCKS, 32)
EXPERTS_EIGHTS(experts_eight_blocks_summed, SummedTile, WScales::BLOCKS, 8)
EXPERTS_EIGHTS(experts_eight_blocks_summed, SummedTile, WScales::BLOCKS, 32)

// === Before the products ===

// Places choices as `place_choices` does. The blocks after those of experts write the rows of x in FP8.
extern "C" __global__ void __launch_bounds__(PLACE_THREADS)
place_and_quantize(Places to, const u32* experts, PlacesShape shape, u32* quantized, float* scales, const bf16* x, QuantizedShape rows) {
    in_turn();
    if (blockIdx.x < shape.n_experts) place_expert(to, experts, shape);
    else quantize(quantized, scales, x, rows, blockIdx.x - shape.n_experts, gridDim.x - shape.n_experts);
}
