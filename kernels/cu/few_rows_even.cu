// y = x * transpose(w), for up to 64 rows of x: the products of few_rows.cu, divided evenly.
//
// All steps of k of all tiles of 128 rows of w form one list of units, tile after tile. Each block of threads
// takes the same number of consecutive units, so no block is idle while others work. A block's share is
// divided into pieces, each of one tile. When several blocks have pieces of a tile, each writes its part to
// memory, and the last one adds up all of them, in the order of k. So no block waits for another, and the
// sums do not depend on which block is last. The ring continues from piece to piece.
// The order of sums depends on the number of blocks of threads.
//
// Tiles of x are loaded after the previous kernel has ended. They are queued after the tiles of w that were
// requested before, so a longer ring would delay the first of them.
// See `docs/decisions/0020-products-divided-evenly.md`.
constexpr u32 STAGES = 6, GROUPS_WARPS = GROUPS_THREADS / 32;
// Rows whose ending inputs a warp loads at once: the registers beside the sums suffice for this number.
template <typename Ending>
constexpr u32 ROWS_AT_ONCE = 4;
template <>
constexpr u32 ROWS_AT_ONCE<Heads> = 1;

// The memory where blocks meet. A block leaves up to two parts of 64 * 128 sums in `parts` and counts itself
// in `arrived` of the tile's first block. One kernel uses them at a time; `arrived` is zero between kernels.
struct Meeting {
    float* parts;
    u32* arrived;
    u32 n_tiles;
};

// The steps of all tiles, and the range of them for this block of threads.
struct Units {
    u32 n_steps, count, from, to;

    __device__ __forceinline__ Units(const ProductShape& shape, const Meeting& meeting) {
        n_steps = (shape.k + TILE_COLUMNS - 1) / TILE_COLUMNS;
        count = n_steps * meeting.n_tiles;
        from = count * blockIdx.x / gridDim.x;
        to = count * (blockIdx.x + 1) / gridDim.x;
    }
    // The block that has this unit.
    __device__ __forceinline__ u32 block_of(u32 unit) const { return ((unit + 1) * gridDim.x - 1) / count; }
};

// The consecutive blocks of threads that have pieces of one tile.
struct Company {
    u32 first, n;

    __device__ __forceinline__ Company(const Units& units, u32 tile) {
        first = units.block_of(tile * units.n_steps);
        n = units.block_of((tile + 1) * units.n_steps - 1) - first + 1;
    }
    // A thread's place in a part. For the first block the tile is its last piece; for the others it is their
    // first. A thread finds the sums of the same thread of another block there, in fours; the fours of all
    // threads are adjacent.
    __device__ __forceinline__ float4* part(const Meeting& meeting, u32 nth) const {
        float* part = meeting.parts + (u64)(2 * (first + nth) + (nth == 0)) * 2 * UNIT * UNIT;
        return reinterpret_cast<float4*>(part) + threadIdx.x;
    }
};

__device__ __forceinline__ u32 arrivals_seen(const u32* arrived) {
    u32 n;
    asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(arrived) : "memory");
    return n;
}
// Counts this block and publishes all writes before the preceding barrier. Returns how many blocks came
// before, and makes their writes visible.
__device__ __forceinline__ u32 arrive(u32* arrived) {
    u32 before;
    asm volatile("atom.acq_rel.gpu.global.add.u32 %0, [%1], 1;" : "=r"(before) : "l"(arrived) : "memory");
    return before;
}
// One thread of a block signals another.
__device__ __forceinline__ void tell(u32 at) { asm volatile("st.release.cta.shared::cta.u32 [%0], 1;" ::"r"(at) : "memory"); }
__device__ __forceinline__ bool was_told(u32 at) {
    u32 told;
    asm volatile("ld.acquire.cta.shared::cta.u32 %0, [%1];" : "=r"(told) : "r"(at) : "memory");
    return told != 0;
}
__device__ __forceinline__ void load_part_if(bool is_wanted, float* x, const float4* from) {
    asm volatile("{\n.reg .pred wanted;\nsetp.ne.u32 wanted, %5, 0;\n@wanted ld.global.cg.v4.f32 {%0, %1, %2, %3}, [%4];\n}"
                 : "+f"(x[0]), "+f"(x[1]), "+f"(x[2]), "+f"(x[3]) : "l"(from), "r"((u32)is_wanted) : "memory");
}

// One thread issues the loads of all tiles of all pieces. The previous kernel does not write weights, so they
// are loaded while it ends. While the last loads are in flight, the thread checks whether all other blocks
// have left their parts of the last piece's tile.
template <u32 ROWS, typename Ending>
__device__ __forceinline__ void bring_units(const Ending& ending, const Ring& ring, const TensorMap& of_w, const TensorMap& of_x,
                                            const Units& units, const ProductShape& shape, const Meeting& meeting, u32 are_there) {
    constexpr u32 W_BYTES = W_ROWS * TILE_ROW_BYTES, STAGE_BYTES = W_BYTES + ROWS * TILE_ROW_BYTES;
    u32 tile = units.from / units.n_steps, step = units.from % units.n_steps;
    u32 first_step = step;
    Halves<UNIT> rows = ending.template halves<UNIT>(tile, shape);
    auto bring_w = [&](u32 stage) {
        u32 to = ring.at + stage * STAGE_BYTES, column = step * TILE_COLUMNS, full = ring.full + stage * 8;
        barrier_expect(full, STAGE_BYTES);
        copy_tile(to, of_w, column, rows.first, full, EVICT_FIRST);
        copy_tile(to + W_BYTES / 2, of_w, column, rows.second, full, EVICT_FIRST);
    };
    auto bring_x = [&](u32 of_step, u32 stage) {
        copy_tile(ring.at + stage * STAGE_BYTES + W_BYTES, of_x, of_step * TILE_COLUMNS, 0, ring.full + stage * 8, EVICT_LAST);
    };
    auto next = [&](u32& of_step) { return ++of_step == units.n_steps ? of_step = 0, true : false; };
    auto advance = [&]() {
        if (next(step)) rows = ending.template halves<UNIT>(++tile, shape);
    };
    u32 n_first = min(STAGES, units.to - units.from), stage = 0, parity = 0;
    for (u32 i = 0; i < n_first; i++) bring_w(i), advance();
    wait_for_last();
    for (u32 i = 0; i < n_first; i++) bring_x(first_step, i), next(first_step);
    for (u32 unit = units.from + n_first; unit < units.to; unit++) {
        barrier_wait(ring.empty + stage * 8, parity);
        bring_w(stage);
        bring_x(step, stage);
        advance();
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    Company company(units, (units.to - 1) / units.n_steps);
    if (company.n == 1) return;
    for (u32 i = 0; i < n_first; i++) {  // from the oldest stage in the ring
        barrier_wait(ring.full + stage * 8, parity);
        if (arrivals_seen(meeting.arrived + company.first) == company.n - 1) {
            tell(are_there);
            return;
        }
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
}

// Sums a group's 64 rows of w over one piece.
template <u32 ROWS>
__device__ __forceinline__ void sum_piece(float (&sum)[ROWS / 2], const Ring& ring, u32 count, u32& stage, u32& parity) {
    u32 lane = threadIdx.x % 32, last = 0;
    for (u32 nth = 0; nth < count; nth++) {
        multiply_tiles<ROWS>(sum, ring, stage, parity);
        if (nth > 0 && lane == 0) barrier_arrive(ring.empty + last * 8);
        last = stage;
        if (++stage == STAGES) stage = 0, parity ^= 1;
    }
    products_done_but<0>();
    held(sum);
    if (lane == 0) barrier_arrive(ring.empty + last * 8);
}

// Data that a block's threads share, beside the ring.
template <u32 ROWS>
struct Shared {
    float scales[ROWS];
    u32 are_there;  // all others have left their parts of the last piece's tile
    u32 is_last;    // this block is the last with a piece of this tile
};

// Adds up a thread's sums over all blocks, in the order of k. Its own sums are in registers. Several parts
// are in flight before the first is used.
template <u32 N>
__device__ __forceinline__ void add_company(float (&sum)[N], const Company& company, const Meeting& meeting) {
    constexpr u32 AT_ONCE = N > 16 ? 2 : 4;
    u32 own = blockIdx.x - company.first, n_others = company.n - 1;
    float total[N] = {};
    auto add = [&](const float (&more)[N]) {
#pragma unroll
        for (u32 i = 0; i < N; i++) total[i] += more[i];
    };
    for (u32 first = 0; first < n_others; first += AT_ONCE) {
        float more[AT_ONCE][N] = {};
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            u32 other = first + j;
            const float4* part = company.part(meeting, other < own ? other : other + 1);
#pragma unroll
            for (u32 i = 0; i < N; i += 4) load_part_if(other < n_others, more[j] + i, part + i / 4 * GROUPS_THREADS);
        }
#pragma unroll
        for (u32 j = 0; j < AT_ONCE; j++) {
            if (first + j == own && own < n_others) add(sum);
            add(more[j]);
        }
    }
    if (own == n_others) add(sum);
#pragma unroll
    for (u32 i = 0; i < N; i++) sum[i] = total[i];
}

// Writes a piece's sums for other blocks. Afterwards the first thread knows whether all blocks have arrived.
template <u32 N>
__device__ __forceinline__ void leave_part(const float (&sum)[N], const Company& company, const Meeting& meeting, u32* is_last) {
    float4* part = company.part(meeting, blockIdx.x - company.first);
#pragma unroll
    for (u32 i = 0; i < N; i += 4) part[i / 4 * GROUPS_THREADS] = make_float4(sum[i], sum[i + 1], sum[i + 2], sum[i + 3]);
    threads_wait<GROUPS_THREADS>(1);
    if (threadIdx.x == 0) *is_last = arrive(meeting.arrived + company.first) == company.n - 1;
    threads_wait<GROUPS_THREADS>(1);
}

// Ends a piece: writes its sums for others, or adds up all parts of the tile and runs the ending. A warp ends
// a few rows at a time and loads the inputs of the next rows meanwhile.
template <u32 ROWS, typename Ending>
__device__ __forceinline__ void end_piece(const Ending& ending, float (&sum)[ROWS / 2], float* mine, Shared<ROWS>& shared, u32 tile,
                                          bool is_last_piece, const Company& company, const Meeting& meeting, const ProductShape& shape) {
    constexpr u32 OF_WARP = ROWS / GROUPS_WARPS, MOST = ROWS_AT_ONCE<Ending>, AT_ONCE = OF_WARP < MOST ? OF_WARP : MOST;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32, column = ending.template halves<UNIT>(tile, shape).row_of(lane * 4);
    typename Ending::Before before[AT_ONCE] = {}, next[AT_ONCE] = {};
    auto ask = [&](typename Ending::Before(&of_rows)[AT_ONCE], u32 first_row) {
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++)
            if (first_row + i * GROUPS_WARPS < shape.n_rows) of_rows[i] = ending.before(first_row + i * GROUPS_WARPS, column, shape);
    };
    threads_wait<GROUPS_THREADS>(1);  // the previous piece's data has been read
    if (company.n > 1) {
        if (threadIdx.x == 0) shared.is_last = is_last_piece && was_told(shared_address(&shared.are_there));
        threads_wait<GROUPS_THREADS>(1);
        if (!shared.is_last) {
            leave_part(sum, company, meeting, &shared.is_last);
            if (!shared.is_last) return;
        }
        if (threadIdx.x == 0) meeting.arrived[company.first] = 0;
    }
    ask(before, warp);
    if (company.n > 1) add_company(sum, company, meeting);
    show_part<ROWS>(mine, sum);
    threads_wait<GROUPS_THREADS>(1);
#pragma unroll
    for (u32 from = 0; from < OF_WARP; from += AT_ONCE) {
        u32 first_row = warp + from * GROUPS_WARPS;
        if (first_row >= shape.n_rows) break;
        if (from + AT_ONCE < OF_WARP) ask(next, first_row + AT_ONCE * GROUPS_WARPS);
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) {
            u32 row = first_row + i * GROUPS_WARPS;
            if (row >= shape.n_rows) break;
            float4 total = *reinterpret_cast<const float4*>(mine + row * PART_STRIDE + lane * 4);
            float scale = shared.scales[row], x[4] = {total.x * scale, total.y * scale, total.z * scale, total.w * scale};
            ending.template end<UNIT>(tile, row, column, x, before[i], shape);
        }
#pragma unroll
        for (u32 i = 0; i < AT_ONCE; i++) before[i] = next[i];
    }
}

template <u32 ROWS, typename Ending>
__device__ __forceinline__ void few_rows_even(const Ending& ending, const PendingNormArgs& pending, const TensorMap& of_w, const TensorMap& of_x,
                                              const ProductShape& shape, const Meeting& meeting) {
    constexpr u32 STAGE_BYTES = (W_ROWS + ROWS) * TILE_ROW_BYTES, ROWS_OF_WARP = ROWS / GROUPS_WARPS;
    extern __shared__ Eight room[];
    __shared__ u64 barriers[2 * STAGES];
    __shared__ Shared<ROWS> shared;
    Ring ring;
    ring.at = (shared_address(room) + 1023) / 1024 * 1024;
    ring.full = shared_address(barriers), ring.empty = ring.full + STAGES * 8;
    u32 warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    Units units(shape, meeting);

    if (threadIdx.x == GROUPS_THREADS) {
        fetch_map(of_w);
        fetch_map(of_x);
        ring_started<STAGES>(ring, GROUPS_WARPS);
        shared.are_there = 0;
    }
    next_may_come();
    __syncthreads();
    if (warp == GROUPS_WARPS) {
        if (lane == 0) bring_units<ROWS>(ending, ring, of_w, of_x, units, shape, meeting, shared_address(&shared.are_there));
        return;
    }

    // The rows' pending norm scales are computed while weights are in flight.
    wait_for_last();
    float scales[ROWS_OF_WARP];
    pending.scales(scales, warp * ROWS_OF_WARP, shape.n_rows);
#pragma unroll
    for (u32 i = 0; i < ROWS_OF_WARP; i++)
        if (lane == 0) shared.scales[warp * ROWS_OF_WARP + i] = scales[i];

    float* mine = reinterpret_cast<float*>(reinterpret_cast<char*>(room) + (ring.at - shared_address(room)) + STAGES * STAGE_BYTES);
    u32 stage = 0, parity = 0, tile = units.from / units.n_steps;
    for (u32 unit = units.from; unit < units.to; tile++) {
        u32 end = min((tile + 1) * units.n_steps, units.to);
        Company company(units, tile);
        float sum[ROWS / 2] = {};
        sum_piece<ROWS>(sum, ring, end - unit, stage, parity);
        end_piece<ROWS>(ending, sum, mine, shared, tile, end == units.to, company, meeting, shape);
        unit = end;
    }
}

#define FEW_ROWS_EVEN(NAME, ENDING, ROWS)                                                                                           \
    extern "C" __global__ void __launch_bounds__(ALL_THREADS, 1)                                                                    \
    NAME##_##ROWS(ENDING ending, PendingNormArgs pending, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x, \
                  ProductShape shape, Meeting meeting) {                                                                            \
        few_rows_even<ROWS>(ending, pending, w, x, shape, meeting);                                                                 \
    }
#define FEW_ROWS_EVEN_OF(ROWS)                                                                                            \
    FEW_ROWS_EVEN(few_rows_even, Sums<bf16>, ROWS)                                                                        \
    FEW_ROWS_EVEN(few_rows_even_wide, Sums<float>, ROWS)                                                                  \
    FEW_ROWS_EVEN(few_rows_even_gated, Gated, ROWS)                                                                       \
    FEW_ROWS_EVEN(few_rows_even_added, Added, ROWS)                                                                       \
    FEW_ROWS_EVEN(few_rows_even_heads, Heads, ROWS)
// The name has the ending and the maximum number of rows of x.
FEW_ROWS_EVEN_OF(8)
FEW_ROWS_EVEN_OF(16)
FEW_ROWS_EVEN_OF(32)
FEW_ROWS_EVEN_OF(64)
