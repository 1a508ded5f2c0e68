// Common code of experts.cu and experts_fp8.cu: the division of the work among blocks, and the way from sums to the output.
//
// A unit is 16 rows of an expert's matrix, or 32. The units of all items are divided evenly over blocks: each has a run of
// neighbours. A block's warps share k, and load weights directly into the registers
// for the tensor core, as in skinny.cu. In a unit of 32 rows, half of the warps have the first 16. The first weights of
// a unit are loaded before the sums of the unit before it are ended. Rows are computed eight at a time or, in the
// larger kernels, up to 32.
constexpr u32 UNIT_WARPS = 8, PART_STRIDE = 2 * UNIT + 4;

// Rows that FP8 matrices multiply are ordered for the tensor core within each group of 64 numbers. Each lane has 16 of
// them: the first 8 numbers of all lanes come first, then the last 8. Returns the place of pair number `pair` of the row's
// vector of eight number `eight`.
constexpr u32 LANES_GROUP = 64;
__device__ __forceinline__ u32 place_in_lanes(u32 eight, u32 pair) { return eight / 4 * 32 + pair * 8 + eight % 4 * 2; }

// silu(gate) * up of two neighbours.
template <typename Sum>
__device__ __forceinline__ u32 gated_pair(u32 pair, const Sum& sum) {
    float2 gate = sum(pair * 2), up = sum(UNIT + pair * 2);
    return narrow(gated(gate.x, up.x), gated(gate.y, up.y));
}

// silu(gate) * up is written at the place of each choice.
struct GatedUnits : GatedRows {
    static constexpr u32 TILES = 1;  // of 16 rows
    static constexpr u32 PAIRS = UNIT / 2;  // pairs of neighbouring numbers of a row
    template <typename Sum>
    static __device__ __forceinline__ void end(bf16* y, u32 place, u32 unit, u32 pair, const Sum& sum, const ExpertsShape& shape) {
        *reinterpret_cast<u32*>(y + (u64)place * (shape.n / 2) + unit * UNIT + pair * 2) = gated_pair(pair, sum);
    }
};

// The sums are at the place of each choice.
template <u32 N_TILES>
struct SummedUnits : SummedRows<N_TILES> {
    static constexpr u32 TILES = N_TILES, PAIRS = TILES * UNIT;
    template <typename Sum>
    static __device__ __forceinline__ void end(bf16* y, u32 place, u32 unit, u32 pair, const Sum& sum, const ExpertsShape& shape) {
        u32 column = unit * SummedRows<N_TILES>::ROWS + pair * 2;
        float2 both = sum(pair * 2);
        if (column < shape.n) *reinterpret_cast<u32*>(y + (u64)place * shape.n + column) = narrow(both.x, both.y);
    }
};

// The products of all experts. The struct Weights has
//   Matrices: the matrices of all experts
//   start<Units>(w, expert, unit, shape): loads the first weights of a unit
//   sum<Units, GROUPS>(...): writes a warp's sums with up to GROUPS times eight rows of x to its part
//   Scales<Units>: the scales of the sums that a thread ends
template <typename Units, typename Weights, u32 ROWS>
__device__ __forceinline__ void multiply_experts(bf16* y, const typename Weights::Matrices& w, const bf16* x, const ExpertRows& rows, const ExpertsShape& shape) {
    constexpr u32 PART = ROWS * PART_STRIDE, SHARES = UNIT_WARPS / Units::TILES;
    __shared__ float parts[2][UNIT_WARPS * PART];  // [turn][warp][row of x][row of w]
    in_turn();
    u32 warp = threadIdx.x / 32, n_units = Units::count(shape), n_all = item_at(rows, shape.n_items_max).count * n_units;
    u32 nth = (u64)n_all * blockIdx.x / gridDim.x, end = (u64)n_all * (blockIdx.x + 1) / gridDim.x, turn = 0;
    if (nth == end) return;
    ItemUnit next;
    next.begin(rows, nth, n_units);
    Weights weights;
    weights.template start<Units>(w, next.expert, next.unit, shape);
    for (; nth < end; nth++) {
        u32 expert = next.expert, unit = next.unit, start = next.place(), count = next.n_rows();
        if (nth + 1 < end) next.next(rows, n_units);
        typename Weights::template Scales<Units> scales(w, expert, unit, shape);
        for (u32 first = 0; first < count; first += ROWS, turn ^= 1) {
            u32 n_rows = min(ROWS, count - first), place = start + first;
            float* part = parts[turn] + warp * PART;
            if constexpr (ROWS == 8) weights.template sum<Units, 1>(part, x, rows, place, n_rows, shape);
            else if (n_rows <= 8) weights.template sum<Units, 1>(part, x, rows, place, n_rows, shape);
            else if (n_rows <= 16) weights.template sum<Units, 2>(part, x, rows, place, n_rows, shape);
            else weights.template sum<Units, ROWS / 8>(part, x, rows, place, n_rows, shape);
            if (first + ROWS < count) weights.template start<Units>(w, expert, unit, shape);
            else if (nth + 1 < end) weights.template start<Units>(w, next.expert, next.unit, shape);
            __syncthreads();
            for (u32 at = threadIdx.x; at < n_rows * Units::PAIRS; at += UNIT_WARPS * 32) {
                u32 row = at / Units::PAIRS;
                const float* of_row = parts[turn] + row * PART_STRIDE;
                auto sum = [&](u32 column) {  // over all warps that share k, of two neighbours
                    const float* of_tile = of_row + column / (2 * UNIT) * SHARES * PART + column % (2 * UNIT);
                    float2 total = {0.f, 0.f};
#pragma unroll
                    for (u32 i = 0; i < SHARES; i++) {
                        float2 more = *reinterpret_cast<const float2*>(of_tile + i * PART);
                        total.x += more.x, total.y += more.y;
                    }
                    return scales.times(total, column);
                };
                Units::end(y, place + row, unit, at % Units::PAIRS, sum, shape);
            }
        }
    }
}

#define EXPERTS(NAME, UNITS, WEIGHTS, ROWS, BLOCKS)                                                                        \
    extern "C" __global__ void __launch_bounds__(UNIT_WARPS * 32, BLOCKS)                                                  \
    NAME##_##ROWS(bf16* y, WEIGHTS::Matrices w, const bf16* x, ExpertRows rows, ExpertsShape shape) {                      \
        multiply_experts<UNITS, WEIGHTS, ROWS>(y, w, x, rows, shape);                                                      \
    }
