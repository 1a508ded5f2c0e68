//! Pseudorandom numbers, the same in every run.

use device::cuda::Bf16;

/// A small generator (SplitMix64), good enough for filling matrices.
pub(crate) struct Draw(u64);

impl Draw {
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    pub(crate) fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9E37_79B9_7F4A_7C15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
        z ^ (z >> 31)
    }

    pub(crate) fn below(&mut self, n: usize) -> usize {
        (self.bits() % n as u64) as usize
    }

    /// Draws a number between -1 and 1.
    pub(crate) fn number(&mut self) -> f32 {
        (self.bits() >> 40) as f32 / (1 << 23) as f32 - 1.0
    }

    pub(crate) fn narrow(&mut self, n: usize, scale: f32) -> Vec<Bf16> {
        (0..n).map(|_| Bf16::from(self.number() * scale)).collect()
    }

    /// Draws many numbers for measurements: a random run, repeated.
    pub(crate) fn many(&mut self, n: usize, scale: f32) -> Vec<Bf16> {
        let run = self.narrow(n.min(1 << 20), scale);
        run.iter().copied().cycle().take(n).collect()
    }

    /// Returns all numbers of 0..n in random order.
    pub(crate) fn order(&mut self, n: usize) -> Vec<u32> {
        let mut order: Vec<u32> = (0..n as u32).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i + 1));
        }
        order
    }
}

pub(crate) fn wide(narrow: &[Bf16]) -> Vec<f64> {
    narrow.iter().map(|number| f64::from(f32::from(*number))).collect()
}
