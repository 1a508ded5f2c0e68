//! One rank's share of a model: whole heads, and an equal part of everything else.

use std::ops::Range;

use crate::error::LoadError;
use crate::model::ModelConfig;

/// The number of numbers that kernels move at a time.
const NUMBERS_AT_ONCE: usize = 8;

/// The share of one of the ranks of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Share {
    pub(super) nth: usize,
    pub(super) n_ranks: usize,
}

impl Share {
    /// The share of a single rank: the whole model.
    pub(super) const WHOLE: Self = Self { nth: 0, n_ranks: 1 };

    pub(super) fn of_all(n_ranks: usize) -> impl Iterator<Item = Self> {
        (0..n_ranks).map(move |nth| Self { nth, n_ranks })
    }

    /// Checks that query heads can be divided equally. The layout checks KV heads.
    pub(super) fn check(config: &ModelConfig, n_ranks: usize) -> Result<(), LoadError> {
        if n_ranks > kernels::cuda::PEERS_MAX {
            let most = kernels::cuda::PEERS_MAX;
            return Err(LoadError::Ranks(format!(
                "{n_ranks} GPUs are more than the maximum of {most} for one model"
            )));
        }
        match config.n_heads.is_multiple_of(n_ranks) {
            true => Ok(()),
            false => {
                Err(LoadError::Ranks(format!("{} heads do not spread over {n_ranks} ranks", config.n_heads)))
            }
        }
    }

    /// Returns the range of the rank's heads. With fewer heads than ranks, several ranks hold the same head.
    pub(super) fn heads(self, n_heads: usize) -> Range<usize> {
        match self.n_ranks / n_heads.max(1) {
            0 | 1 => n_heads * self.nth / self.n_ranks..n_heads * (self.nth + 1) / self.n_ranks,
            n_holders => self.nth / n_holders..self.nth / n_holders + 1,
        }
    }

    /// Returns the padded size of each rank's share of `n` numbers: equal on all ranks, in whole vectors.
    pub(super) fn width(self, n: usize) -> usize {
        n.div_ceil(self.n_ranks).next_multiple_of(NUMBERS_AT_ONCE)
    }

    /// Returns the rank's share of `n` numbers. The last ranks may have less than the padded size; the rest
    /// is zeroes.
    pub(super) fn range(self, n: usize) -> Range<usize> {
        let width = self.width(n);
        (self.nth * width).min(n)..((self.nth + 1) * width).min(n)
    }

    /// Returns whether this rank adds the terms that only one rank may add.
    pub(super) fn is_first(self) -> bool {
        self.nth == 0
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::load::ModelFolder;

    fn config(name: &str) -> ModelConfig {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        ModelFolder::open(&folder).expect("it opens").config
    }

    #[test]
    fn everything_belongs_to_somebody_once() {
        for n_ranks in [1, 2, 3, 4, 8] {
            for n in [40, 96, 128_256, 14_336, 8, 16] {
                let shares: Vec<_> = Share::of_all(n_ranks).map(|share| share.range(n)).collect();
                assert!(shares.windows(2).all(|two| two[0].end == two[1].start), "{shares:?}");
                assert_eq!((shares[0].start, shares[n_ranks - 1].end), (0, n));
                let width = Share { nth: 0, n_ranks }.width(n);
                assert!(width.is_multiple_of(8) && shares.iter().all(|share| share.len() <= width));
            }
        }
        assert_eq!(Share { nth: 1, n_ranks: 2 }.range(40), 24..40, "16, and room for 24");
        assert_eq!(Share { nth: 1, n_ranks: 2 }.range(14_336), 7168..14_336);
        assert_eq!(Share::WHOLE.range(40), 0..40);
    }

    #[test]
    fn heads_are_whole_and_queries_have_their_kv() {
        for (n_ranks, n_heads, n_kv_heads) in [(2, 32, 8), (4, 32, 8), (4, 4, 2), (2, 4, 1), (8, 16, 2)] {
            for share in Share::of_all(n_ranks) {
                let (q, kv) = (share.heads(n_heads), share.heads(n_kv_heads));
                assert!(!q.is_empty() && !kv.is_empty());
                let group = n_heads / n_kv_heads;
                assert_eq!(q.start / group, kv.start, "{share:?} of {n_heads}/{n_kv_heads}");
                assert_eq!((q.end - 1) / group, kv.end - 1);
                assert!(q.len().is_multiple_of(kv.len()), "each head of KV has the same number of queries");
            }
        }
    }

    #[test]
    fn what_does_not_spread_is_refused_with_the_reason() {
        let config = config("tests/models/llama");
        Share::check(&config, 2).expect("4 heads over 2");
        let error = Share::check(&config, 3).expect_err("4 heads over 3").to_string();
        assert_eq!(error, "tensor parallel: 4 heads do not spread over 3 ranks");
        let error = Share::check(&config, 16).expect_err("more than there can be").to_string();
        assert_eq!(error, "tensor parallel: 16 GPUs are more than the maximum of 8 for one model");
    }
}
