// Rounding of activations to FP8 (e4m3): each group of 128 numbers of a row has a scale, a power of two.
//
// A rounded number is therefore also a bf16 number, and a product of bf16 gets the same factors as one of FP8.
constexpr u32 ROUND_GROUP = 128, ROUND_LANES = ROUND_GROUP / 8;

// The smallest power of two that makes the greatest number 448 at most, which is 1.75 * 2^8. The exponent is
// bounded, so that the scale and its inverse are normal numbers.
__device__ __forceinline__ u32 scale_exponent(float greatest) {
    u32 bits = __float_as_uint(greatest);
    u32 exponent = (bits >> 23) + ((bits & 0x7fffff) > 0x600000 ? 1 : 0);
    return min(max(exponent, 32u) - 8, 246u);
}

// Eight numbers of a lane; 16 lanes have a group. `exponent` is that of the group's scale.
struct Rounded { float number[8]; u32 exponent; };

__device__ __forceinline__ Rounded scaled(Eight eight) {
    Rounded rounded;
    float greatest = 0.f;
#pragma unroll
    for (u32 i = 0; i < 4; i++) {
        rounded.number[2 * i] = low(eight.pair[i]), rounded.number[2 * i + 1] = high(eight.pair[i]);
        greatest = fmaxf(greatest, fmaxf(fabsf(rounded.number[2 * i]), fabsf(rounded.number[2 * i + 1])));
    }
#pragma unroll
    for (u32 lane = ROUND_LANES / 2; lane > 0; lane /= 2) greatest = fmaxf(greatest, __shfl_xor_sync(FULL_WARP, greatest, lane));
    rounded.exponent = scale_exponent(greatest);
    float inverse = __uint_as_float((254 - rounded.exponent) << 23);
#pragma unroll
    for (u32 i = 0; i < 8; i++) rounded.number[i] *= inverse;
    return rounded;
}

// Rounds to an e4m3 number, which is kept in f32.
//
// From 2^-6 on, an e4m3 number has four significant bits; below, numbers are 2^-9 apart. Adding and subtracting
// a number whose last bit has that distance rounds to nearest, ties to even.
__device__ __forceinline__ float rounded(float x) {
    u32 exponent = max(__float_as_uint(x) >> 23 & 0xff, 127u - 6);
    float last = 1.5f * __uint_as_float((exponent + 20) << 23);
    return __fsub_rn(__fadd_rn(x, last), last);
}

// Rounds a lane's eight numbers, and keeps them in bf16.
__device__ __forceinline__ Eight rounded8(Eight eight) {
    Rounded numbers = scaled(eight);
    float scale = __uint_as_float(numbers.exponent << 23);
    Eight given;
#pragma unroll
    for (u32 i = 0; i < 4; i++)
        given.pair[i] = narrow(rounded(numbers.number[2 * i]) * scale, rounded(numbers.number[2 * i + 1]) * scale);
    return given;
}
