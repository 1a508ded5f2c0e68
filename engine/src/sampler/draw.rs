//! Random numbers without state: Philox 4x32-10, a counter-based generator.
//!
//! The key is the request's seed, and the counter is the token's position in its sequence. So the number for
//! a position is the same on every machine and in every batch. (Salmon and others, "Parallel random numbers:
//! as easy as 1, 2, 3", 2011.)

const MULTIPLIERS: [u32; 2] = [0xD251_1F53, 0xCD9E_8D57];
const KEY_STEPS: [u32; 2] = [0x9E37_79B9, 0xBB67_AE85];
const ROUNDS: usize = 10;

/// Returns the number of a position: in [0, 1), with 53 random bits.
pub fn uniform(seed: u64, position: u64) -> f64 {
    let [a, b, ..] = philox([low(position), high(position), 0, 0], [low(seed), high(seed)]);
    let bits = (u64::from(a) << 32 | u64::from(b)) >> 11;
    bits as f64 / (1u64 << 53) as f64
}

fn philox(mut counter: [u32; 4], mut key: [u32; 2]) -> [u32; 4] {
    for _ in 0..ROUNDS {
        let left = u64::from(MULTIPLIERS[0]) * u64::from(counter[0]);
        let right = u64::from(MULTIPLIERS[1]) * u64::from(counter[2]);
        counter =
            [high(right) ^ counter[1] ^ key[0], low(right), high(left) ^ counter[3] ^ key[1], low(left)];
        key = [key[0].wrapping_add(KEY_STEPS[0]), key[1].wrapping_add(KEY_STEPS[1])];
    }
    counter
}

fn low(wide: u64) -> u32 {
    wide as u32
}

fn high(wide: u64) -> u32 {
    (wide >> 32) as u32
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The expected numbers are those that the authors publish with their code.
    #[test]
    fn it_is_philox() {
        assert_eq!(philox([0; 4], [0; 2]), [0x6627_e8d5, 0xe169_c58d, 0xbc57_ac4c, 0x9b00_dbd8]);
        assert_eq!(
            philox([u32::MAX; 4], [u32::MAX; 2]),
            [0x408f_276d, 0x41c8_3b0e, 0xa20b_c7c6, 0x6d54_51fd]
        );
        assert_eq!(
            philox([0x243f_6a88, 0x85a3_08d3, 0x1319_8a2e, 0x0370_7344], [0xa409_3822, 0x299f_31d0]),
            [0xd16c_fe09, 0x94fd_cceb, 0x5001_e420, 0x2412_6ea1]
        );
    }

    #[test]
    fn draws_fill_the_range() {
        let draws = (0..100_000).map(|nth| uniform(nth % 10, nth / 10));
        let mean = draws.clone().sum::<f64>() / 100_000.0;
        assert!((mean - 0.5).abs() < 0.005, "{mean}");
        assert!(draws.clone().all(|draw| (0.0..1.0).contains(&draw)));
        assert_ne!(uniform(1, 5), uniform(2, 5));
        assert_ne!(uniform(1, 5), uniform(1, 1 << 40 | 5));
    }
}
