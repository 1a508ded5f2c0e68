//! Number formats narrower than f32, and casts from bytes to numbers.

pub use device::number::{bf16_to_f32, f32_to_bf16};

/// Widens an f16, which is exact: every f16, also a subnormal, is an f32.
#[inline(always)]
pub fn f16_to_f32(narrow: u16) -> f32 {
    let sign = u32::from(narrow & 0x8000) << 16;
    let magnitude = u32::from(narrow & 0x7FFF);
    let bits = if magnitude >= 0x7C00 {
        0x7F80_0000 | (magnitude << 13)
    } else {
        // The bits are read with f32's exponent bias, then scaled by the difference of the two biases: 2^(127
        // - 15).
        let scaled = f32::from_bits(magnitude << 13) * f32::from_bits((127 + 112) << 23);
        scaled.to_bits()
    };
    f32::from_bits(sign | bits)
}

/// Rounds to the nearest f16, ties to even. Larger numbers become infinity. NaN stays NaN.
pub fn f32_to_f16(wide: f32) -> u16 {
    let sign = ((wide.to_bits() >> 16) & 0x8000) as u16;
    let magnitude = wide.abs();
    if magnitude.is_nan() {
        return sign | 0x7E00;
    }
    if magnitude >= 65520.0 {
        return sign | 0x7C00;
    }
    if magnitude < 6.103_515_6e-5 {
        // A subnormal is a multiple of 2^-24, so the multiple is the magnitude's bits.
        return sign | (magnitude * 16_777_216.0).round_ties_even() as u16;
    }
    let bits = magnitude.to_bits();
    let rounded = bits + 0x0FFF + ((bits >> 13) & 1);
    sign | ((rounded >> 13) - ((127 - 15) << 10)) as u16
}

/// The largest finite 8-bit number (e4m3). There is no infinity.
pub const F8_MAX: f32 = 448.0;

/// Converts an 8-bit number (e4m3) to the f16 that is 256 times smaller, which is exact. NaN stays NaN.
#[inline(always)]
pub fn f8_to_f16_256th(narrow: u8) -> u16 {
    let (sign, magnitude) = (u16::from(narrow & 0x80) << 8, u16::from(narrow & 0x7F));
    // Numbers with the largest exponent are ordinary, so only the last bit pattern is NaN.
    sign | if magnitude == 0x7F { 0x7E00 } else { magnitude << 7 }
}

/// Widens an 8-bit number (e4m3), which is exact. NaN stays NaN.
#[inline(always)]
pub fn f8_to_f32(narrow: u8) -> f32 {
    f16_to_f32(f8_to_f16_256th(narrow)) * 256.0
}

/// Rounds to the nearest 8-bit number (e4m3), ties to even. Larger numbers become the largest. NaN stays NaN.
#[inline(always)]
pub fn f32_to_f8(wide: f32) -> u8 {
    let sign = ((wide.to_bits() >> 24) & 0x80) as u8;
    let magnitude = wide.abs();
    // A subnormal is a multiple of 2^-9. Around 2^14, f32 has no finer steps, so the addition rounds.
    let subnormal = (magnitude + 16_384.0).to_bits().wrapping_sub(16_384f32.to_bits());
    let bits = magnitude.min(F8_MAX).to_bits();
    // Nothing overflows. Without a check for it, also builds with checks have vector instructions here.
    let rounded = bits.wrapping_add(0x7_FFFF).wrapping_add((bits >> 20) & 1);
    let normal = (rounded >> 20).wrapping_sub((127 - 7) << 3);
    let number = if magnitude < 0.015_625 { subnormal } else { normal };
    sign | if wide.is_nan() { 0x7F } else { number as u8 }
}

/// Views bytes as numbers. Returns `None` if the bytes are not aligned or not whole numbers.
macro_rules! views {
    ($(#[$doc:meta] $name:ident, $name_mut:ident: $number:ty;)*) => {$(
        #[$doc]
        pub fn $name(bytes: &[u8]) -> Option<&[$number]> {
            // SAFETY: every bit pattern is a valid number of this type. `align_to` respects alignment and
            // length.
            match unsafe { bytes.align_to::<$number>() } {
                ([], numbers, []) => Some(numbers),
                _ => None,
            }
        }

        #[$doc]
        pub fn $name_mut(bytes: &mut [u8]) -> Option<&mut [$number]> {
            // SAFETY: every bit pattern is a valid number of this type, and every number is valid bytes.
            // `align_to_mut` respects alignment and length.
            match unsafe { bytes.align_to_mut::<$number>() } {
                ([], numbers, []) => Some(numbers),
                _ => None,
            }
        }
    )*};
}

views! {
    /// Returns `None` unless address and length are multiples of 4.
    f32s, f32s_mut: f32;
    /// Returns `None` unless address and length are multiples of 2.
    u16s, u16s_mut: u16;
    /// Returns numbers for all bytes: one byte needs no alignment.
    i8s, i8s_mut: i8;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_f16_survives_the_way_there_and_back() {
        for narrow in 0..=u16::MAX {
            let wide = f16_to_f32(narrow);
            if wide.is_nan() {
                assert!(f16_to_f32(f32_to_f16(wide)).is_nan());
            } else {
                assert_eq!(f32_to_f16(wide), narrow, "{wide}");
            }
        }
    }

    #[test]
    fn every_bf16_survives_the_way_there_and_back() {
        for narrow in 0..=u16::MAX {
            let wide = bf16_to_f32(narrow);
            if wide.is_nan() {
                assert!(bf16_to_f32(f32_to_bf16(wide)).is_nan());
            } else {
                assert_eq!(f32_to_bf16(wide), narrow, "{wide}");
            }
        }
    }

    #[test]
    fn every_number_of_8_bits_survives_the_way_there_and_back() {
        for narrow in 0..=u8::MAX {
            let wide = f8_to_f32(narrow);
            if narrow & 0x7F == 0x7F {
                assert!(wide.is_nan() && f8_to_f32(f32_to_f8(wide)).is_nan());
                continue;
            }
            let (exponent, fraction) = (i32::from(narrow >> 3 & 15), f32::from(narrow & 7) / 8.0);
            let size = if exponent == 0 {
                fraction * 2f32.powi(-6)
            } else {
                (1.0 + fraction) * 2f32.powi(exponent - 7)
            };
            assert_eq!(wide, if narrow & 0x80 == 0 { size } else { -size });
            assert_eq!(f32_to_f8(wide), narrow, "{wide}");
        }
    }

    #[test]
    fn numbers_of_8_bits_are_the_nearest() {
        for nth in 0..40_000u32 {
            let wide = (nth as f32 - 20_000.0) / 40.0 * 2f32.powi(-((nth % 17) as i32));
            let narrow = f8_to_f32(f32_to_f8(wide));
            let nearest = (0..=u8::MAX).map(f8_to_f32).filter(|number| number.is_finite());
            let nearest = nearest.map(|number| (number - wide).abs()).fold(f32::INFINITY, f32::min);
            assert_eq!((narrow - wide).abs(), nearest, "{wide} became {narrow}");
        }
        for (wide, narrow) in
            [(1e9, 448.0), (-f32::INFINITY, -448.0), (464.0, 448.0), (1.0625, 1.0), (1.1875, 1.25)]
        {
            assert_eq!(f8_to_f32(f32_to_f8(wide)), narrow, "{wide}");
        }
        let finest = 2f32.powi(-9);
        for (wide, narrow) in [(0.5, 0.0), (0.51, 1.0), (1.5, 2.0), (2.5, 2.0), (7.6, 8.0)] {
            assert_eq!(f8_to_f32(f32_to_f8(wide * finest)), narrow * finest, "{wide}");
        }
    }

    #[test]
    fn halves_go_to_even() {
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F80_8000)), 0x3F80);
        assert_eq!(f32_to_bf16(f32::from_bits(0x3F81_8000)), 0x3F82);
        assert_eq!(f32_to_f16(1.0 + 1.0 / 2048.0), f32_to_f16(1.0));
        assert_eq!(f32_to_f16(65519.9), 0x7BFF);
        assert_eq!(f32_to_f16(65520.0), 0x7C00);
    }

    #[test]
    fn bytes_off_the_edge_are_no_numbers() {
        let bytes = [0f32; 2];
        // SAFETY: the slice covers the eight bytes of the array.
        let bytes = unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<u8>(), 8) };
        assert_eq!(f32s(bytes), Some([0.0, 0.0].as_slice()));
        assert_eq!(f32s(&bytes[1..5]), None);
        assert_eq!(u16s(&bytes[..3]), None);
    }
}
