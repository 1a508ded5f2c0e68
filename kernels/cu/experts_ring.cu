// Products of few rows of bf16 with experts, on Hopper: the tiles of expert_ring.cuh.
struct NoScale {
    __device__ __forceinline__ void copy(u32, u32) const {}
};

struct Bf16Factors {
    static constexpr u32 NUMBER_BYTES = 2, X_ARRIVALS = COPY_ARRIVALS;

    __device__ __forceinline__ void place_scales(char*) {}
    template <typename Units>
    __device__ __forceinline__ NoScale scale_of(const ExpertRows&, u32, u32) const { return {}; }

    template <typename Units>
    __device__ __forceinline__ void fill_x(const Ring& ring, const char* x, const ExpertRows& rows, Task task, u32 n_tiles, u32 n_steps, const ExpertsShape& shape) const {
        copy_x<Units>(ring, x, rows, task, n_tiles, n_steps, *this, shape);
    }

    template <typename Units, u32 SUMS>
    __device__ __forceinline__ void sum_up(float (&sum)[SUMS], const Ring& ring, RingTurn& turn, u32 n_steps, u32, u32) const {
        u32 last = 0;
        for (u32 step = 0; step < n_steps; step++, turn.next()) {
            wait_for_stage(ring, turn);
            add_products(sum, tile_of_w(ring, turn.stage), tile_of_x(ring, turn.stage));
            if (step > 0) free_ring_stage(ring, last);
            last = turn.stage;
        }
        products_done_but<0>();
        held(sum);
        free_ring_stage(ring, last);
    }
};

#define EXPERTS_RING(NAME, UNITS)                                                                                          \
    extern "C" __global__ void __launch_bounds__(RING_THREADS, 1)                                                          \
    NAME(bf16* y, const __grid_constant__ TensorMap w, const char* x, ExpertRows rows, ExpertsShape shape) {               \
        multiply_in_ring<UNITS>(y, w, x, rows, Bf16Factors{}, shape);                                                      \
    }
EXPERTS_RING(experts_ring_gated, GatedTile)
EXPERTS_RING(experts_ring_summed, SummedTile)
