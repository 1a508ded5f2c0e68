//! Random numbers from a seed. The code is our own, because a seed in a report must give the same run years
//! later, and generators in crates change between versions.

/// A SplitMix64 generator: one word of state, good enough for load, and the same on every machine.
#[derive(Clone, Debug)]
pub struct Random(u64);

impl Random {
    /// Makes the generator `stream` of `seed`. Arrivals, lengths and contents have generators of their own,
    /// so that a change of one does not affect the others.
    pub fn stream(seed: u64, stream: u64) -> Self {
        Self(mix(seed, stream))
    }

    pub fn next_u64(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        scramble(self.0)
    }

    /// Returns a uniform number in (0, 1). It is never 0, so its logarithm is finite.
    pub fn unit(&mut self) -> f64 {
        ((self.next_u64() >> 11) as f64 + 0.5) / (1u64 << 53) as f64
    }

    /// Returns a uniform number in `0..n`. The bias of the multiplication is below 2^-32 for every `n` that
    /// occurs here.
    pub fn below(&mut self, n: u64) -> u64 {
        ((u128::from(self.next_u64()) * u128::from(n)) >> 64) as u64
    }

    pub fn exponential(&mut self, mean: f64) -> f64 {
        -mean * self.unit().ln()
    }

    /// Returns a number with the standard normal distribution, by Box and Muller.
    pub fn normal(&mut self) -> f64 {
        let radius = (-2.0 * self.unit().ln()).sqrt();
        radius * (std::f64::consts::TAU * self.unit()).cos()
    }

    /// Returns a number with the gamma distribution of this shape and scale, by Marsaglia and Tsang; shapes
    /// under 1 by boosting.
    pub fn gamma(&mut self, shape: f64, scale: f64) -> f64 {
        if shape < 1.0 {
            let boost = self.unit().powf(1.0 / shape);
            return boost * self.gamma(shape + 1.0, scale);
        }
        let d = shape - 1.0 / 3.0;
        let c = 1.0 / (9.0 * d).sqrt();
        loop {
            let x = self.normal();
            let v = (1.0 + c * x).powi(3);
            if v > 0.0 && self.unit().ln() < 0.5 * x * x + d - d * v + d * v.ln() {
                return d * v * scale;
            }
        }
    }
}

/// Mixes two words into one: the same pair always gives the same word.
pub fn mix(seed: u64, value: u64) -> u64 {
    scramble(seed.wrapping_mul(0xd134_2543_de82_ef95) ^ scramble(value.wrapping_add(0x9e37_79b9_7f4a_7c15)))
}

/// Returns a random seed, for runs without `--seed`. It is written into the report.
pub fn fresh_seed() -> u64 {
    // The seed is limited to 48 bits, because many tools read JSON numbers as doubles, which hold such
    // numbers exactly.
    getrandom::u64().map_or(0x5eed, |word| word >> 16)
}

fn scramble(mut z: u64) -> u64 {
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns the mean and the standard deviation of `n` draws.
    fn moments(n: usize, mut draw: impl FnMut() -> f64) -> (f64, f64) {
        let draws: Vec<f64> = (0..n).map(|_| draw()).collect();
        let mean = draws.iter().sum::<f64>() / n as f64;
        let variance = draws.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / n as f64;
        (mean, variance.sqrt())
    }

    fn check(got: (f64, f64), mean: f64, std: f64) {
        assert!((got.0 - mean).abs() < 0.02 * mean.abs().max(1.0), "mean {} is not {mean}", got.0);
        assert!((got.1 - std).abs() < 0.03 * std.max(1.0), "deviation {} is not {std}", got.1);
    }

    #[test]
    fn distributions_have_their_moments() {
        let mut random = Random::stream(7, 0);
        check(moments(100_000, || random.unit()), 0.5, 12f64.sqrt().recip());
        check(moments(100_000, || random.exponential(3.0)), 3.0, 3.0);
        check(moments(100_000, || random.normal()), 0.0, 1.0);
        check(moments(100_000, || random.gamma(4.0, 0.5)), 2.0, 1.0);
        check(moments(100_000, || random.gamma(0.25, 4.0)), 1.0, 2.0);
    }

    #[test]
    fn a_seed_repeats_and_streams_differ() {
        let draws = |seed, stream| {
            let mut random = Random::stream(seed, stream);
            [random.next_u64(), random.next_u64()]
        };
        assert_eq!(draws(1, 2), draws(1, 2));
        assert_ne!(draws(1, 2), draws(1, 3));
        assert_ne!(draws(1, 2), draws(2, 2));
    }

    /// Compares the first words of seed 1 with fixed ones. They must never change, because reports contain
    /// seeds.
    #[test]
    fn the_generator_never_changes() {
        let mut random = Random::stream(1, 0);
        let first = [random.next_u64(), random.next_u64()];
        assert_eq!(first, GOLDEN, "{first:#x?}");
    }

    const GOLDEN: [u64; 2] = [0xf304_2972_8e32_fa04, 0x8e2d_98d5_7708_8940];
}
