//! Heads with the widths that kernels support. Narrower heads are padded with zeroes.
//!
//! Zeroes add nothing to a product, so scores and outputs do not change. A rotation combines number `i` with
//! number `i + width / 2`, so each half is padded separately. A norm divides by the padded width, so its
//! weights are scaled.

use kernels::cpu::Rotation;

use crate::error::OpenError;

/// The widths of heads that the attention kernels are compiled for.
const WIDTHS: [usize; 2] = [64, 128];

/// The width of a model's heads, and their padded width on the GPU.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Heads {
    pub(super) real: usize,
    pub(super) padded: usize,
}

impl Heads {
    pub(super) fn of(head_dim: usize) -> Result<Self, OpenError> {
        let padded = WIDTHS.into_iter().find(|width| *width >= head_dim);
        let padded = padded.ok_or(OpenError::CudaModel(format!(
            "heads of {head_dim} numbers are too wide: the GPU's kernels support at most {}",
            WIDTHS[WIDTHS.len() - 1]
        )))?;
        Ok(Self { real: head_dim, padded })
    }

    pub(super) fn are_padded(self) -> bool {
        self.real != self.padded
    }

    /// Returns the index on the GPU of number `nth` of the unpadded heads.
    pub(super) fn place(self, nth: usize) -> usize {
        let (head, dim) = (nth / self.real, nth % self.real);
        let (half, padded_half) = (self.real / 2, self.padded / 2);
        let in_head = if dim < half { dim } else { padded_half + dim - half };
        head * self.padded + in_head
    }

    /// Returns the factor for a head's norm weights that corrects the division by the padded width.
    pub(super) fn norm_factor(self) -> f32 {
        (self.real as f32 / self.padded as f32).sqrt()
    }

    /// Returns the epsilon that matches [`norm_factor`](Self::norm_factor).
    pub(super) fn norm_epsilon(self, epsilon: f32) -> f32 {
        epsilon * self.real as f32 / self.padded as f32
    }

    /// Returns the size of [`turns`](Self::turns) in bytes.
    pub(super) fn turns_bytes(self, n_positions: usize) -> usize {
        n_positions * self.padded / 2 * size_of::<[f32; 2]>()
    }

    /// Computes cosine and sine for each position and each number of half a head, with the function that the CPU uses.
    pub(super) fn turns(self, rotation: Rotation<'_>, n_positions: usize) -> Vec<[f32; 2]> {
        let half = self.padded / 2;
        let mut turns = vec![[1.0, 0.0]; n_positions * half];
        for (position, turns) in turns.chunks_exact_mut(half).enumerate() {
            for (turn, of_pair) in turns.iter_mut().zip(rotation.turns(position)) {
                *turn = of_pair;
            }
        }
        turns
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_half_of_a_head_is_filled_up_by_itself() {
        let heads = Heads::of(6).expect("narrow enough");
        assert_eq!(heads.padded, 64);
        let places: Vec<usize> = (0..8).map(|nth| heads.place(nth)).collect();
        assert_eq!(places, [0, 1, 2, 32, 33, 34, 64, 65]);
        let plain = Heads::of(128).expect("a usual width");
        assert!(!plain.are_padded() && (0..300).all(|nth| plain.place(nth) == nth));
        Heads::of(192).expect_err("wider than any kernel");
    }

    #[test]
    fn a_norm_over_zeroes_comes_out_even() {
        let heads = Heads::of(16).expect("narrow enough");
        let (x, epsilon) = ([3.0_f32, -1.0], 0.1);
        let squares: f32 = x.iter().map(|x| x * x).sum();
        let wanted = x[0] / (squares / 16.0 + epsilon).sqrt();
        let found = x[0] * heads.norm_factor() / (squares / 64.0 + heads.norm_epsilon(epsilon)).sqrt();
        assert!((wanted - found).abs() < 1e-6, "{wanted} {found}");
    }

    #[test]
    fn what_is_filled_up_does_not_turn() {
        let heads = Heads::of(4).expect("narrow enough");
        let turns = heads.turns(Rotation { frequencies: &[1.0, 0.5], factor: 2.0 }, 3);
        assert_eq!(turns.len(), 3 * 32);
        assert_eq!(size_of_val(&*turns), heads.turns_bytes(3));
        assert_eq!(turns[2 * 32 + 1], [2.0 * 1.0_f32.cos(), 2.0 * 1.0_f32.sin()]);
        assert_eq!(turns[2 * 32 + 2], [1.0, 0.0]);
    }
}
