// Common code of experts.cu and norm.cu: the sum of a row's experts, each times its weight, in the order of choices.
//
// y has the output of each choice at its place. A choice without a place adds zeroes times its weight: the weight is NaN if the
// row is, and 0 if another rank computes the choice.
struct ChoiceSums {
    const bf16* y;
    const u32* places;
    const float* weights;
    u32 per_row;

    // Eight neighbouring numbers of a row.
    __device__ __forceinline__ Eight of(u64 row, u32 at, u32 width) const {
        float sum[8] = {};
#pragma unroll 4
        for (u32 slot = 0; slot < per_row; slot++) {
            u32 place = places[row * per_row + slot];
            float by = weights[row * per_row + slot];
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
