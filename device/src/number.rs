//! Conversions between f32 and bf16, the number format of weights and KV.

/// Widens a bf16, which is exact: bf16 is the upper half of an f32.
#[inline(always)]
pub fn bf16_to_f32(narrow: u16) -> f32 {
    f32::from_bits(u32::from(narrow) << 16)
}

/// Rounds to the nearest bf16, ties to even. NaN stays NaN.
#[inline(always)]
pub fn f32_to_bf16(wide: f32) -> u16 {
    let bits = wide.to_bits();
    let rounded = bits.wrapping_add(0x7FFF + ((bits >> 16) & 1));
    let quiet_nan = bits | 0x0040_0000;
    ((if wide.is_nan() { quiet_nan } else { rounded }) >> 16) as u16
}
