//! Hot path.
//! The exponential function, with the same results on every CPU.

use super::simd::Simd;

/// Computes e to the power of each lane, within two units in the last place. Below -87 the result is 1.6e-38,
/// and above 88 it is 1.7e38.
///
/// `x = n ln 2 + r` with an integer n and r within ±0.35. So `e^x = 2^n e^r`, and `e^r` is a polynomial of
/// degree seven.
#[inline(always)]
pub(super) fn exp<S: Simd>(simd: S, x: S::Floats) -> S::Floats {
    // The number ln 2 in two parts. The first part has so few bits that its product with n is exact.
    const LN2_HIGH: f32 = 0.693_359_4;
    const LN2_LOW: f32 = -2.121_944_4e-4;
    const COEFFICIENTS: [f32; 7] = [1.0 / 720.0, 1.0 / 120.0, 1.0 / 24.0, 1.0 / 6.0, 0.5, 1.0, 1.0];
    let x = simd.max(simd.min(x, simd.splat(88.0)), simd.splat(-87.0));
    let n = simd.round(simd.mul(x, simd.splat(std::f32::consts::LOG2_E)));
    let r = simd.mul_add(n, simd.splat(-LN2_HIGH), x);
    let r = simd.mul_add(n, simd.splat(-LN2_LOW), r);
    let mut sum = simd.splat(1.0 / 5040.0);
    for coefficient in COEFFICIENTS {
        sum = simd.mul_add(sum, r, simd.splat(coefficient));
    }
    simd.mul(sum, simd.exp2_whole(n))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::cpu::simd::{Isa, Kernel, LANES};

    struct Exp([f32; LANES]);

    impl Kernel for Exp {
        type Output = [f32; LANES];

        #[inline(always)]
        fn run<S: Simd>(self, simd: S) -> [f32; LANES] {
            let mut out = [0.0; LANES];
            simd.store(exp(simd, simd.load(&self.0)), &mut out);
            out
        }
    }

    fn inputs() -> impl Iterator<Item = [f32; LANES]> {
        (0..2000).map(|i| std::array::from_fn(|lane| -87.0 + (i * LANES + lane) as f32 * (175.0 / 32_000.0)))
    }

    #[test]
    fn it_is_near_the_true_value() {
        for x in inputs() {
            for (x, y) in x.into_iter().zip(Isa::best().run(Exp(x))) {
                let truth = f64::from(x).exp();
                assert!((f64::from(y) - truth).abs() <= truth * 2.5e-7, "e^{x} is {truth}, not {y}");
            }
        }
    }

    #[test]
    fn all_processors_agree() {
        for x in inputs() {
            let results: Vec<_> = Isa::all().into_iter().map(|isa| isa.run(Exp(x))).collect();
            assert!(results.iter().all(|result| *result == results[0]));
        }
    }

    #[test]
    fn the_ends_are_finite() {
        let mut x = [0.0; LANES];
        x[0] = f32::NEG_INFINITY;
        x[1] = f32::INFINITY;
        let y = Isa::best().run(Exp(x));
        assert!(y[0] > 0.0 && y[0] < 1e-37 && y[1].is_finite() && y[2] == 1.0);
    }
}
