// Products of few rows with experts in FP8 (e4m3), by the units of expert_units.cuh. They run on every GPU.
//
// w is in the layout of `Fp8Rows` in ops/fp8.rs: a lane loads 16 bytes of a row, its part of four products along 64 of
// k. Weights are widened exactly to bf16 in registers. x has rows of the same width, in the order of `place_in_lanes`.
// A scale of a row multiplies its sum. A scale of a block multiplies the sum of each 64 of k.
struct ExpertMatrices {
    const bf16* numbers;  // two in each
    const float* scales;  // for each expert: one for each row, or for each 64 rows and 128 of k
};

// Like GatedUnits, but the output has the order in which the second product reads it.
struct OrderedUnits : GatedUnits {
    template <typename Sum>
    static __device__ __forceinline__ void end(bf16* y, u32 place, u32 unit, u32 pair, const Sum& sum, const ExpertsShape& shape) {
        *reinterpret_cast<u32*>(y + (u64)place * (shape.n / 2) + place_in_lanes(unit, pair)) = gated_pair(pair, sum);
    }
};

// Two pairs of bf16 from four bytes, as in few_rows_fp8.cuh: the multiplication and addition of -0 runs on every GPU.
__device__ __forceinline__ u32 widened(u32 upper_bytes) {
    u32 bits = (upper_bytes & 0x80008000u) | ((upper_bytes >> 4) & 0x07f007f0u), pair;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(pair) : "r"(bits), "r"(0x7b807b80u), "r"(0x80008000u));
    return pair;
}

enum class WScales { ROWS, BLOCKS };
constexpr u32 SCALED_ROWS = 64, SCALED_COLUMNS = 128;

// The weights of a lane: UNROLL groups of 64. A warp has every group whose number is its share modulo the shares.
template <u32 UNROLL, WScales SCALES>
struct UnitEights {
    typedef ExpertMatrices Matrices;

    // The scales of the two neighbours that a thread ends, of the first and the second half of a unit.
    template <typename Units>
    struct Scales {
        float2 by[2];

        __device__ __forceinline__ Scales(const ExpertMatrices& w, u32 expert, u32 unit, const ExpertsShape& shape) {
            if constexpr (SCALES == WScales::ROWS) {
                u32 column = threadIdx.x % Units::PAIRS * 2;
                const float* of_expert = w.scales + (u64)expert * shape.n;
                auto of = [&](u32 column) { return of_expert[Units::row(unit, column / UNIT, column % UNIT, shape)]; };
                by[0] = {of(column), of(column + 1)};
                if (Units::PAIRS == UNIT / 2) by[1] = {of(UNIT + column), of(UNIT + column + 1)};
            }
        }
        __device__ __forceinline__ float2 times(float2 total, u32 column) const {
            if constexpr (SCALES == WScales::BLOCKS) return total;
            float2 scale = by[Units::PAIRS == UNIT / 2 && column >= UNIT];
            return {total.x * scale.x, total.y * scale.y};
        }
    };

    Eight of[UNROLL][2];
    const bf16* rows[2];
    const float* scales;  // scales of blocks: even lanes have those of the unit's first half, odd lanes of the second
    float scale;          // lane 2i + half: that of group i of this turn

    template <typename Units>
    static __device__ __forceinline__ u32 share() { return threadIdx.x / 32 % (UNIT_WARPS / Units::TILES); }
    // The number of a warp's group of a turn.
    template <typename Units>
    static __device__ __forceinline__ u32 group(u32 turn, u32 i) { return (turn * UNROLL + i) * (UNIT_WARPS / Units::TILES) + share<Units>(); }

    template <typename Units>
    __device__ __forceinline__ void start(const ExpertMatrices& w, u32 expert, u32 unit, const ExpertsShape& shape) {
        u32 lane = threadIdx.x % 32, first = threadIdx.x / 32 / (UNIT_WARPS / Units::TILES) * 2;
#pragma unroll
        for (u32 half = 0; half < 2; half++)
            rows[half] = w.numbers + ((u64)expert * shape.n + Units::row(unit, first + half, lane / 4, shape)) * (shape.k / 2) + lane % 4 * 8;
        if constexpr (SCALES == WScales::BLOCKS) {
            u32 of_row = (shape.k + SCALED_COLUMNS - 1) / SCALED_COLUMNS, n_blocks = (shape.n + SCALED_ROWS - 1) / SCALED_ROWS;
            u32 block = Units::row(unit, first + lane % 2, 0, shape) / SCALED_ROWS;
            scales = w.scales + ((u64)expert * n_blocks + block) * of_row;
        }
        load_scale<Units>(0, shape);
#pragma unroll
        for (u32 i = 0; i < UNROLL; i++) load<Units>(i, 0, shape);
    }
    template <typename Units>
    __device__ __forceinline__ void load(u32 i, u32 turn, const ExpertsShape& shape) {
        u32 at = group<Units>(turn, i) * LANES_GROUP;
#pragma unroll
        for (u32 half = 0; half < 2; half++) of[i][half] = at < shape.k ? constant8(rows[half] + at / 2) : Eight{0, 0, 0, 0};
    }
    template <typename Units>
    __device__ __forceinline__ void load_scale(u32 turn, const ExpertsShape& shape) {
        if constexpr (SCALES == WScales::BLOCKS) {
            u32 i = threadIdx.x % 32 / 2, at = group<Units>(turn, i) * LANES_GROUP;
            scale = i < UNROLL && at < shape.k ? scales[at / SCALED_COLUMNS] : 0.f;
        }
    }

    template <typename Units, u32 GROUPS>
    __device__ __forceinline__ void sum(float* part, const bf16* x, const ExpertRows& rows_of_x, u32 place, u32 n_rows, const ExpertsShape& shape) {
        u32 lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
        const bf16* of_x[GROUPS];
        float sum[GROUPS][4] = {};
#pragma unroll
        for (u32 j = 0; j < GROUPS; j++)  // rows after the last one repeat it, and are not written
            of_x[j] = x + (u64)Units::row_of_x(rows_of_x, place + min(j * 8 + g, n_rows - 1), shape) * shape.k + t * 8;
        for (u32 turn = 0; group<Units>(turn, 0) * LANES_GROUP < shape.k; turn++) {
            float of_turn = scale;
            load_scale<Units>(turn + 1, shape);
#pragma unroll
            for (u32 i = 0; i < UNROLL; i++) {
                u32 at = group<Units>(turn, i) * LANES_GROUP;
                if (at >= shape.k) break;
                Eight upper = of[i][0], lower = of[i][1];
                load<Units>(i, turn + 1, shape);
                float some[GROUPS][4] = {};
                multiply_group(SCALES == WScales::BLOCKS ? some : sum, upper, lower, of_x, at);
                if constexpr (SCALES == WScales::BLOCKS) {
                    float of_upper = __shfl_sync(FULL_WARP, of_turn, 2 * i), of_lower = __shfl_sync(FULL_WARP, of_turn, 2 * i + 1);
#pragma unroll
                    for (u32 j = 0; j < GROUPS; j++) {
                        sum[j][0] += some[j][0] * of_upper, sum[j][1] += some[j][1] * of_upper;
                        sum[j][2] += some[j][2] * of_lower, sum[j][3] += some[j][3] * of_lower;
                    }
                }
            }
        }
#pragma unroll
        for (u32 j = 0; j < GROUPS; j++)
#pragma unroll
            for (u32 i = 0; i < 4; i++) part[(j * 8 + 2 * t + i % 2) * PART_STRIDE + g + i / 2 * 8] = sum[j][i];
    }

    // Adds the products of a group of 64 of k.
    template <u32 GROUPS>
    static __device__ __forceinline__ void multiply_group(float (&sum)[GROUPS][4], const Eight& upper, const Eight& lower, const bf16* (&of_x)[GROUPS], u32 at) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            Eight v[GROUPS];
#pragma unroll
            for (u32 j = 0; j < GROUPS; j++) v[j] = load8(of_x[j] + at + half * (LANES_GROUP / 2));
#pragma unroll
            for (u32 i = 0; i < 2; i++) {
                u32 first = upper.pair[2 * half + i], second = lower.pair[2 * half + i];
                u32 a[4] = {widened(first << 8), widened(second << 8), widened(first), widened(second)};
#pragma unroll
                for (u32 j = 0; j < GROUPS; j++) mma(sum[j], a[0], a[1], a[2], a[3], v[j].pair[2 * i], v[j].pair[2 * i + 1]);
            }
        }
    }
};

// A unit of 32 rows lets all warps share the k of an inner layer of 768.
#define EXPERTS_FP8(NAME, SCALES)                                                      \
    using NAME##_gated_weights = UnitEights<4, SCALES>;                                \
    using NAME##_summed_weights = UnitEights<3, SCALES>;                               \
    EXPERTS(NAME##_gated, OrderedUnits, NAME##_gated_weights, 8, 3)                    \
    EXPERTS(NAME##_gated, OrderedUnits, NAME##_gated_weights, 32, 2)                   \
    EXPERTS(NAME##_summed, SummedUnits<2>, NAME##_summed_weights, 8, 3)                \
    EXPERTS(NAME##_summed, SummedUnits<2>, NAME##_summed_weights, 32, 2)
EXPERTS_FP8(experts_fp8, WScales::ROWS)
EXPERTS_FP8(experts_blocks, WScales::BLOCKS)
