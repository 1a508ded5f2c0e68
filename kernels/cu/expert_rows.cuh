// Common code of the products of few rows with experts: the rows of w and of x that a unit multiplies.
constexpr u32 UNIT = 8;

// The work is divided by items, so that an expert with many rows is divided too. An item is a run of up to ITEM_ROWS of an
// expert's rows, and this is number `nth` of the expert. start, count: the expert's first place, and its number of rows.
constexpr u32 ITEM_ROWS = 64;
struct alignas(16) Item { u32 expert, nth, start, count; };
__device__ __forceinline__ u32 n_items(u32 count) { return (count + ITEM_ROWS - 1) / ITEM_ROWS; }

// items: expert by expert. The number of items is the count of the item after the last possible one.
struct ExpertRows { const Item* items; const u32* choices; };

// A kernel may read items before the previous kernel has ended. They are read from the L2 cache, because the L1 cache may have
// those of an earlier layer.
__device__ __forceinline__ Item item_at(const ExpertRows& rows, u32 nth) {
    uint4 item = __ldcg(reinterpret_cast<const uint4*>(rows.items + nth));
    return {item.x, item.y, item.z, item.w};
}
// n: the rows of an expert's matrix. per_token: the number of experts of a row.
struct ExpertsShape { u32 n, k, n_items_max, per_token; };

// An item with a unit of its expert's matrix, in a run of such pairs. The items of an expert with the same unit are
// neighbours, so that all but the first find the unit's weights in a cache.
struct ItemUnit {
    u32 expert, unit, nth, n, start, count;
    u32 first_item;  // the expert's first item

    __device__ __forceinline__ void of_expert(const ExpertRows& rows, u32 nth_item) {
        Item item = item_at(rows, nth_item);
        expert = item.expert, first_item = nth_item - item.nth;
        start = item.start, count = item.count, n = n_items(count);
    }
    // Pair number `pair` of all.
    __device__ __forceinline__ void begin(const ExpertRows& rows, u32 pair, u32 n_units) {
        of_expert(rows, pair / n_units);
        u32 of_this = pair - first_item * n_units;
        unit = of_this / n, nth = of_this % n;
    }
    // Goes on to the next pair, which must exist.
    __device__ __forceinline__ void next(const ExpertRows& rows, u32 n_units) {
        if (++nth < n) return;
        nth = 0;
        if (++unit < n_units) return;
        unit = 0;
        of_expert(rows, first_item + n);
    }
    __device__ __forceinline__ u32 place() const { return start + nth * ITEM_ROWS; }
    __device__ __forceinline__ u32 n_rows() const { return min(ITEM_ROWS, count - nth * ITEM_ROWS); }
};

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
