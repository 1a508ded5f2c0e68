// Common code of experts.cu and norm.cu: the sum of a row's experts, each times its weight, in the order of choices.
//
// y has the output of each choice at its place. A choice without a place adds zeroes times its weight: the weight is NaN if the
// row is, and 0 if another rank computes the choice.
constexpr u32 ROW_CHOICES = 32;
struct RowChoices { u32 places[ROW_CHOICES]; float weights[ROW_CHOICES]; };
__device__ __forceinline__ RowChoices& choices_of_row() {
    __shared__ RowChoices all;
    return all;
}

struct ChoiceSums {
    const bf16* y;
    const u32* places;
    const float* weights;
    // are_early: whether places, weights and the residual are complete before the previous kernel has ended.
    u32 per_row, are_early;

    // Prepares the sums of a row: all threads of a block call this.
    __device__ __forceinline__ void begin(u64 row) const {
        RowChoices& choices = choices_of_row();
        for (u32 slot = threadIdx.x; slot < per_row; slot += blockDim.x)
            choices.places[slot] = __ldcg(places + row * per_row + slot), choices.weights[slot] = __ldcg(weights + row * per_row + slot);
        __syncthreads();
    }
    // Eight neighbouring numbers of the row.
    __device__ __forceinline__ Eight of(u64, u32 at, u32 width) const {
        const RowChoices& choices = choices_of_row();
        float sum[8] = {};
#pragma unroll 4
        for (u32 slot = 0; slot < per_row; slot++) {
            u32 place = choices.places[slot];
            float by = choices.weights[slot];
            Eight of = place == NOWHERE ? Eight{0, 0, 0, 0} : load8(y + (u64)place * width + at);
#pragma unroll
            for (u32 j = 0; j < 4; j++) sum[2 * j] += low(of.pair[j]) * by, sum[2 * j + 1] += high(of.pair[j]) * by;
        }
        Eight narrowed;
#pragma unroll
        for (u32 j = 0; j < 4; j++) narrowed.pair[j] = narrow(sum[2 * j], sum[2 * j + 1]);
        return narrowed;
    }
};
static_assert(sizeof(ChoiceSums) == 32, "as in ops/experts.rs");
