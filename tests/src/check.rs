//! Prompts for tests: many different ones, the same in each run.

/// Returns `n` prompts of mixed lengths, the same for the same seed. Some prompts share a beginning.
pub fn prompts(seed: u64, n: usize, longest: usize) -> Vec<Vec<u32>> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut next = move || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        state
    };
    let common: Vec<u32> = (0..64).map(|_| (next() % 256) as u32).collect();
    (0..n)
        .map(|idx| {
            let len = 1 + (next() as usize) % longest;
            let own = (0..len).map(|_| (next() % 256) as u32);
            if idx % 4 == 3 { common.iter().copied().chain(own).collect() } else { own.collect() }
        })
        .collect()
}
