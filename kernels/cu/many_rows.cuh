// Common code of many_rows.cu, many_rows_fp8.cu and grouped_rows.cu: tiles of 128 rows of x by 256 rows of w, from
// the ring to the output. A struct Tiles has
//   count(), at(nth): the number of tiles of all clusters, and the rows of x and the column of the nth one
//   bring(...): one thread of each block issues the loads of its tiles
//   join(sum): whether this block writes the tile, after blocks that share it have added their sums
// A struct Factors has the type of the numbers, and the number of halves of w in a tile.
constexpr u32 ROWS = 128, HALF = 128, CLUSTER = 2, GROUPS = 2, GROUP = 128;
constexpr u32 X_BYTES = ROWS * TILE_ROW_BYTES, HALF_BYTES = HALF * TILE_ROW_BYTES;
// A group writes two boxes of 64 rows and 64 columns at a time.
constexpr u32 BOX_BYTES = 64 * TILE_ROW_BYTES, OUT_BYTES = 2 * BOX_BYTES;

// A stage of the ring has 128 rows of x, and of w one half or both.
template <u32 HALVES>
struct Stage { static constexpr u32 BYTES = X_BYTES + HALVES * HALF_BYTES, COUNT = HALVES == 2 ? 4 : 6; };

template <u32 HALVES>
struct Turn {
    u32 stage = 0, parity = 0;
    __device__ __forceinline__ void next() {
        if (++stage == Stage<HALVES>::COUNT) stage = 0, parity ^= 1;
    }
};

struct Place { u32 row, column; };  // the first row of x, and the column of tiles

// A stage is free when each warp of the blocks that it is loaded for has read it: of both, or of this one.
template <bool FOR_BOTH>
__device__ __forceinline__ void free_stage(const Ring& ring, u32 stage) {
    u32 lane = threadIdx.x % 32;
    if (FOR_BOTH && lane < CLUSTER) barrier_arrive_in(place_in(ring.empty + stage * 8, lane));
    if (!FOR_BOTH && lane == 0) barrier_arrive(ring.empty + stage * 8);
}

// Factors in bf16.
struct Halves {
    static constexpr u32 COLUMNS = TILE_COLUMNS, HALVES = 2;

    // Multiplies a group's 64 rows of x by all rows of w.
    template <bool FOR_BOTH>
    __device__ __forceinline__ void sum_up(float (&sum)[HALF], const Ring& ring, Turn<HALVES>& turn, u32 n_steps, const Place&) const {
        u32 group = threadIdx.x / GROUP - 1, last = 0;
        for (u32 step = 0; step < n_steps; step++) {
            u32 tile = ring.at + turn.stage * Stage<HALVES>::BYTES;
            barrier_wait(ring.full + turn.stage * 8, turn.parity);
            u64 a = tile_of(tile + group * 64 * TILE_ROW_BYTES, 16), b = tile_of(tile + X_BYTES, 16);
            held(sum);
            products_begin();
#pragma unroll
            for (u32 i = 0; i < TILE_COLUMNS / 16; i++) product(sum, a + 2 * i, b + 2 * i, step > 0 || i > 0);
            products_committed();
            held(sum);
            products_done_but<1>();
            if (step > 0) free_stage<FOR_BOTH>(ring, last);
            last = turn.stage;
            turn.next();
        }
        products_done_but<0>();
        held(sum);
        free_stage<FOR_BOTH>(ring, last);
    }
};

__device__ __forceinline__ void store_matrices(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Writes 64 rows and 128 columns of a group: pair(i, j) has columns 8i + 2t and 8i + 2t + 1 of row g (j = 0)
// or g + 8. The copy engine reads them from the memory of the group's previous output, which it has read by
// then.
template <bool ADDS, typename Pair>
__device__ __forceinline__ void give(const TensorMap& of_y, u32 column, u32 row, u32 out, const Pair& pair) {
    u32 group = threadIdx.x / GROUP - 1, warp = threadIdx.x % GROUP / 32, lane = threadIdx.x % 32;
    bool gives = threadIdx.x % GROUP == 0;
    if (gives) tiles_read();
    threads_wait<GROUP>(1 + group);
    u32 of_row = warp * 16 + lane % 16;
#pragma unroll
    for (u32 i = 0; i < 16; i += 2) {
        u32 box = out + i / 8 * BOX_BYTES;
        store_matrices(box + chunk_place(of_row, i % 8 + lane / 16), pair(i, 0), pair(i, 1), pair(i + 1, 0), pair(i + 1, 1));
    }
    stores_shown();
    threads_wait<GROUP>(1 + group);
    if (gives) {
#pragma unroll
        for (u32 i = 0; i < 2; i++) {
            if (ADDS) add_tile_to(of_y, column + i * TILE_COLUMNS, row, out + i * BOX_BYTES);
            else copy_tile_out(of_y, column + i * TILE_COLUMNS, row, out + i * BOX_BYTES);
        }
        tiles_committed();
    }
}

template <bool ADDS>
struct Sums {
    template <u32 N>
    static __device__ __forceinline__ void end(const float (&sum)[N], const TensorMap& of_y, u32 nth, u32 row, u32 out) {
        constexpr u32 HALVES = 2 * N / HALF;
#pragma unroll
        for (u32 half = 0; half < HALVES; half++)
            give<ADDS>(of_y, (nth * HALVES + half) * HALF, row, out, [&](u32 i, u32 j) {
                u32 at = half * 64 + 4 * i + 2 * j;
                return narrow(sum[at], sum[at + 1]);
            });
    }
};

// silu(gate) * up.
struct Gated {
    static __device__ __forceinline__ void end(const float (&sum)[HALF], const TensorMap& of_y, u32 nth, u32 row, u32 out) {
        auto of_both = [&](u32 at) { return gated(sum[at], sum[64 + at]); };
        give<false>(of_y, nth * HALF, row, out, [&](u32 i, u32 j) { return narrow(of_both(4 * i + 2 * j), of_both(4 * i + 2 * j + 1)); });
    }
};

template <typename Ending, typename Tiles, typename Factors>
__device__ __forceinline__ void many_rows(const TensorMap& of_y, const TensorMap& of_w, const TensorMap& of_x, const Tiles& tiles, const Factors& factors) {
    using Stage = Stage<Factors::HALVES>;
    extern __shared__ Eight shared[];
    __shared__ u64 barriers[2 * Stage::COUNT];
    Ring ring;
    ring.at = (shared_address(shared) + 1023) / 1024 * 1024;
    ring.full = shared_address(barriers), ring.empty = ring.full + Stage::COUNT * 8;
    if (threadIdx.x == 0) {
        fetch_map(of_w);
        fetch_map(of_x);
        ring_started<Stage::COUNT>(ring, (Tiles::FOR_BOTH ? CLUSTER : 1) * GROUPS * GROUP / 32);
    }
    cluster_arrive();  // no block loads or frees a stage before the other's barriers are ready
    cluster_wait();
    in_turn();

    u32 n_tiles = tiles.count(), n_steps = tiles.steps();
    if (threadIdx.x < GROUP) {
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
        if (threadIdx.x == 0) tiles.bring(ring, of_w, of_x, n_tiles, n_steps);
        __syncwarp();
        if (!Tiles::FOR_BOTH) cluster_arrive(), cluster_wait();
    } else {
        asm volatile("setmaxnreg.inc.sync.aligned.u32 232;");
        u32 group = threadIdx.x / GROUP - 1, out = ring.at + Stage::COUNT * Stage::BYTES + group * OUT_BYTES;
        float sum[Factors::HALVES * HALF / 2];
        Turn<Factors::HALVES> turn;
        for (u32 nth = blockIdx.x / CLUSTER; nth < n_tiles; nth += gridDim.x / CLUSTER) {
            Place place = tiles.at(nth);
            factors.template sum_up<Tiles::FOR_BOTH>(sum, ring, turn, n_steps, place);
            if (tiles.join(sum, ring)) Ending::end(sum, of_y, place.column, place.row + group * 64, out);
        }
        if (threadIdx.x % GROUP == 0) tiles_written();
    }
    cluster_arrive();  // no block ends while the other loads into it or frees its stages
    cluster_wait();
}

#define MANY_ROWS(NAME, ENDING, TILES, SHAPE)                                                                             \
    extern "C" __global__ void __launch_bounds__((1 + GROUPS) * GROUP, 1)                                                 \
    NAME(const __grid_constant__ TensorMap y, const __grid_constant__ TensorMap w, const __grid_constant__ TensorMap x,   \
         SHAPE shape) {                                                                                                   \
        many_rows<ENDING>(y, w, x, TILES{shape}, Halves{});                                                               \
    }
