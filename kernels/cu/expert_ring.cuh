// Common code of experts_ring.cu and experts_ring_fp8.cu: products of few rows with experts, on Hopper.
//
// A tile is 128 rows of an expert's matrix. The tiles of all items are divided evenly over blocks: each has a run of
// neighbours, and computes them alone, along all of k. One thread and four warps fill a ring in shared memory, also for the
// next tile while the sums of one are written. The thread starts the copy engine, which copies the weights. The warps copy
// the item's rows of x, which lie apart in memory. Two groups of four warps compute the products. Each group multiplies 64
// rows of w (M) by the rows of x (N).
//
// The first product of a layer follows the choice of experts. It lets the next kernel start only after that choice has ended. So
// the second product knows its items from its start, and requests its first weights while the first product ends. The kernel that
// adds up the experts knows their places from its start.
//
// A struct Units has the rows of a tile, and the way from sums to the output. A struct Factors has
//   NUMBER_BYTES: the bytes of a number
//   place_scales(at), scale_of(...): the scales of x, and the one that a thread copies to each stage, if there are any
//   X_ARRIVALS, fill_x(...): how the four warps fill the stages with rows of x, and how many threads arrive at each
//   sum_up(...): the sums of a group with as many rows of x as a warp has registers for
constexpr u32 TILE_ROWS = 128, GROUP_ROWS = 64, X_ROWS = ITEM_ROWS, GROUPS = 2, GROUP_THREADS = 128;
constexpr u32 W_THREAD = GROUPS * GROUP_THREADS, X_THREAD = W_THREAD + 32, X_WARPS = 4, RING_THREADS = W_THREAD + (1 + X_WARPS) * 32;
constexpr u32 W_BYTES = TILE_ROWS * TILE_ROW_BYTES, X_BYTES = X_ROWS * TILE_ROW_BYTES, STAGE_BYTES = W_BYTES + X_BYTES, STAGES = 9;

// === Tiles ===

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

constexpr u32 WARP_UNITS = TILE_ROWS / (2 * UNIT);

// A warp's 16 rows of a tile are a unit of expert_rows.cuh: 8 rows of gate, then 8 of up. The map has the dimensions k, 8
// rows, gate and up, units, experts.
struct GatedTile : GatedRows {
    static constexpr bool FOLLOWS_CHOICE = true;
    static __device__ __forceinline__ u32 count(const ExpertsShape& shape) { return (GatedRows::count(shape) + WARP_UNITS - 1) / WARP_UNITS; }
    static __device__ __forceinline__ void bring(u32 to, const TensorMap& of_w, u32 column, u32 expert, u32 tile, u32 barrier, const ExpertsShape&) {
        copy_units(to, of_w, column, tile * WARP_UNITS, expert, barrier, EVICT_FIRST);
    }
    static __device__ __forceinline__ void end(bf16* y, u32 place, bool is_there, u32 unit, const float* sum, const ExpertsShape& shape) {
        u32 pair = paired(gated(sum[0], sum[2]), gated(sum[1], sum[3]));
        if (is_there && unit < GatedRows::count(shape)) *reinterpret_cast<u32*>(y + (u64)place * (shape.n / 2) + unit * UNIT + paired_rows() * 2) = pair;
    }
};

// A warp's 16 rows of a tile are neighbours. A box has all rows of a tile.
struct SummedTile : SummedRows<1> {
    static constexpr bool FOLLOWS_CHOICE = false;
    static __device__ __forceinline__ u32 count(const ExpertsShape& shape) { return (shape.n + TILE_ROWS - 1) / TILE_ROWS; }
    static __device__ __forceinline__ void bring(u32 to, const TensorMap& of_w, u32 column, u32 expert, u32 tile, u32 barrier, const ExpertsShape& shape) {
        copy_tile(to, of_w, column, expert * shape.n + tile * TILE_ROWS, barrier, EVICT_FIRST);
    }
    static __device__ __forceinline__ void end(bf16* y, u32 place, bool is_there, u32 unit, const float* sum, const ExpertsShape& shape) {
#pragma unroll
        for (u32 half = 0; half < 2; half++) {
            u32 pair = paired(sum[2 * half], sum[2 * half + 1]), column = (unit * 2 + half) * UNIT;
            if (is_there && column < shape.n) *reinterpret_cast<u32*>(y + (u64)place * shape.n + column + paired_rows() * 2) = pair;
        }
    }
};

// === A run of tiles ===

// An item with a tile of its expert's matrix, in a block's run of them.
struct Task : ItemUnit {
    u32 left;

    // Returns false if the block has none.
    __device__ __forceinline__ bool begin(const ExpertRows& rows, u32 n_tiles, u32 n_items_max) {
        u32 n_all = item_at(rows, n_items_max).count * n_tiles, nth = (u64)n_all * blockIdx.x / gridDim.x;
        left = (u64)n_all * (blockIdx.x + 1) / gridDim.x - nth;
        if (left > 0) ItemUnit::begin(rows, nth, n_tiles);
        return left > 0;
    }
    // Returns false after the last one.
    __device__ __forceinline__ bool next(const ExpertRows& rows, u32 n_tiles) {
        if (--left > 0) ItemUnit::next(rows, n_tiles);
        return left > 0;
    }
};

struct RingTurn {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
};

// Lets the copy engine bring the weights: one thread calls this.
template <typename Units, u32 COLUMNS>
__device__ __forceinline__ void bring_w(const Ring& ring, const TensorMap& of_w, const ExpertRows& rows, Task task, u32 n_tiles, u32 n_steps, const ExpertsShape& shape) {
    RingTurn turn;
    do {
        for (u32 step = 0; step < n_steps; step++, turn.next()) {
            u32 full = ring.full + turn.stage * 8;
            barrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
            barrier_expect(full, W_BYTES);
            Units::bring(ring.at + turn.stage * STAGE_BYTES, of_w, step * COLUMNS, task.expert, task.unit, full, shape);
        }
    } while (task.next(rows, n_tiles));
}

// The number of threads of copy_x that arrive at each stage.
constexpr u32 COPY_ARRIVALS = X_WARPS * 32;

// Copies the rows of x: four warps call this, because one waits too long for each stage. A thread copies 16 bytes of every
// 16th row.
template <typename Units, typename Factors>
__device__ __forceinline__ void copy_x(const Ring& ring, const char* x, const ExpertRows& rows, Task task, u32 n_tiles, u32 n_steps, const Factors& factors,
                                       const ExpertsShape& shape) {
    constexpr u32 CHUNKS = TILE_ROW_BYTES / 16, ROWS_AT_ONCE = 32 * X_WARPS / CHUNKS, COPIES = X_ROWS / ROWS_AT_ONCE;
    u32 thread = threadIdx.x - X_THREAD, chunk = thread % CHUNKS;
    RingTurn turn;
    do {
        u32 n_rows = task.n_rows();
        const char* from[COPIES];
#pragma unroll
        for (u32 i = 0; i < COPIES; i++) {
            u32 row = thread / CHUNKS + i * ROWS_AT_ONCE;
            if (row < n_rows) from[i] = x + (u64)Units::row_of_x(rows, task.place() + row, shape) * shape.k * Factors::NUMBER_BYTES + chunk * 16;
        }
        auto scale = factors.template scale_of<Units>(rows, task.place(), n_rows);
        for (u32 step = 0; step < n_steps; step++, turn.next()) {
            u32 to = ring.at + turn.stage * STAGE_BYTES + W_BYTES;
            bool is_there = step * TILE_ROW_BYTES + chunk * 16 < shape.k * Factors::NUMBER_BYTES;
            barrier_wait(ring.empty + turn.stage * 8, turn.parity ^ 1);
#pragma unroll
            for (u32 i = 0; i < COPIES; i++) {
                u32 row = thread / CHUNKS + i * ROWS_AT_ONCE;
                if (row < n_rows) copy16(to + chunk_place(row, chunk), is_there ? from[i] + step * TILE_ROW_BYTES : x, is_there);
            }
            scale.copy(turn.stage, step);
            arrive_after_copies(ring.full + turn.stage * 8);
        }
    } while (task.next(rows, n_tiles));
    copies_committed();
    copies_landed_but<0>();
}

// Waits for a stage. The tensor cores read x by another way than the copies wrote it, so that this orders both.
__device__ __forceinline__ void wait_for_stage(const Ring& ring, const RingTurn& turn) {
    barrier_wait(ring.full + turn.stage * 8, turn.parity);
    stores_shown();
}
// A warp is done with a stage of the ring.
__device__ __forceinline__ void free_ring_stage(const Ring& ring, u32 stage) {
    if (threadIdx.x % 32 == 0) barrier_arrive(ring.empty + stage * 8);
}
// The tile of this group's 64 rows of w in a stage, and that of the rows of x.
__device__ __forceinline__ u64 tile_of_w(const Ring& ring, u32 stage) {
    return tile_of(ring.at + stage * STAGE_BYTES + threadIdx.x / GROUP_THREADS * GROUP_ROWS * TILE_ROW_BYTES, 16);
}
__device__ __forceinline__ u64 tile_of_x(const Ring& ring, u32 stage) { return tile_of(ring.at + stage * STAGE_BYTES + W_BYTES, 16); }

// Computes the products of this group's 64 rows of w with the task's rows of x, up to N, and writes them.
template <typename Units, u32 N, typename Factors>
__device__ __forceinline__ void multiply_task(bf16* y, const Ring& ring, RingTurn& turn, const Task& task, u32 n_steps, const Factors& factors, const ExpertsShape& shape) {
    u32 n_rows = task.n_rows(), unit = task.unit * WARP_UNITS + threadIdx.x / 32;
    float sum[N / 2] = {};
    factors.template sum_up<Units>(sum, ring, turn, n_steps, unit, task.expert);
#pragma unroll
    for (u32 i = 0; i < N / 8; i++) {
        if (i * 8 >= n_rows) break;
        u32 row = i * 8 + row_of_pair();
        Units::end(y, task.place() + row, row < n_rows, unit, sum + 4 * i, shape);
    }
}

template <typename Units, typename Factors>
__device__ __forceinline__ void multiply_in_ring(bf16* y, const TensorMap& of_w, const char* x, const ExpertRows& rows, Factors factors, const ExpertsShape& shape) {
    extern __shared__ Eight shared[];
    __shared__ u64 barriers[2 * STAGES];
    constexpr u32 COLUMNS = TILE_ROW_BYTES / Factors::NUMBER_BYTES;
    Ring ring;
    ring.at = (shared_address(shared) + 1023) / 1024 * 1024;
    ring.full = shared_address(barriers), ring.empty = ring.full + STAGES * 8;
    factors.place_scales(reinterpret_cast<char*>(shared) + (ring.at - shared_address(shared)) + STAGES * STAGE_BYTES);
    if (threadIdx.x == 0) {
        fetch_map(of_w);
        ring_started<STAGES>(ring, W_THREAD / 32, 1 + Factors::X_ARRIVALS);
    }
    __syncthreads();
    u32 n_tiles = Units::count(shape), n_steps = (shape.k + COLUMNS - 1) / COLUMNS;
    Task task;
    bool has_tiles;
    if (Units::FOLLOWS_CHOICE) {
        wait_for_last();
        next_may_come();
        has_tiles = task.begin(rows, n_tiles, shape.n_items_max);
    } else {
        next_may_come();
        has_tiles = task.begin(rows, n_tiles, shape.n_items_max);
        if (threadIdx.x != W_THREAD) wait_for_last();
    }
    if (!has_tiles) return;
    if (threadIdx.x >= W_THREAD) {
        if (threadIdx.x == W_THREAD) bring_w<Units, COLUMNS>(ring, of_w, rows, task, n_tiles, n_steps, shape);
        if (threadIdx.x >= X_THREAD) factors.template fill_x<Units>(ring, x, rows, task, n_tiles, n_steps, shape);
        return;
    }
    RingTurn turn;
    do {
        u32 n_rows = task.n_rows();
        if (n_rows <= 8) multiply_task<Units, 8>(y, ring, turn, task, n_steps, factors, shape);
        else if (n_rows <= 16) multiply_task<Units, 16>(y, ring, turn, task, n_steps, factors, shape);
        else if (n_rows <= 32) multiply_task<Units, 32>(y, ring, turn, task, n_steps, factors, shape);
        else multiply_task<Units, 64>(y, ring, turn, task, n_steps, factors, shape);
    } while (task.next(rows, n_tiles));
}

