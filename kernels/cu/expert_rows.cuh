// Common code of the products of few rows with experts: the rows of w and of x that a unit multiplies.
constexpr u32 UNIT = 8;

struct ExpertRows { const u32 *starts, *counts, *touched, *choices; };
// n: the rows of an expert's matrix.
struct ExpertsShape { u32 n, k, n_experts, per_token; };

// A unit is 8 rows of gate and the same 8 of up. The rows of x are those of the choices.
struct GatedRows {
    static __device__ __forceinline__ u32 count(const ExpertsShape& shape) { return shape.n / 2 / UNIT; }
    static __device__ __forceinline__ u32 row(u32 unit, u32 half, u32 g, const ExpertsShape& shape) { return half * (shape.n / 2) + unit * UNIT + g; }
    static __device__ __forceinline__ u32 row_of_x(const ExpertRows& rows, u32 place, const ExpertsShape& shape) { return rows.choices[place] / shape.per_token; }
};

// A unit is N_TILES times 16 rows. The rows of x are at the place of each choice.
template <u32 N_TILES>
struct SummedRows {
    static constexpr u32 ROWS = N_TILES * 2 * UNIT;
    static __device__ __forceinline__ u32 count(const ExpertsShape& shape) { return (shape.n + ROWS - 1) / ROWS; }
    static __device__ __forceinline__ u32 row(u32 unit, u32 half, u32 g, const ExpertsShape& shape) { return min(unit * ROWS + half * UNIT + g, shape.n - 1); }
    static __device__ __forceinline__ u32 row_of_x(const ExpertRows&, u32 place, const ExpertsShape&) { return place; }
};
