//! The pipeline stages of one node: which of a model's layers each stage computes.

use std::num::NonZero;
use std::ops::Range;

/// The number of pipeline stages, as set, for a model whose layers are not known yet.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageSplit {
    pub n_stages: NonZero<u16>,
    /// The number of layers of each stage; empty: as even as possible.
    pub layers: Vec<u16>,
}

/// The layers of each pipeline stage of a node, or of one process of it: neighbours, in order, at least one in each
/// stage. A process may have only some of the ranks of its stage.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct StageLayers {
    layers: Vec<Range<u16>>,
    /// `None`: all ranks.
    ranks: Option<Range<u16>>,
}

/// The reason why a model's layers cannot be divided as the settings say.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum StageError {
    #[error("{n_stages} stages for {n_layers} layers: every stage needs a layer")]
    TooMany { n_stages: u16, n_layers: u16 },
    #[error("stage_layers has {n_listed} numbers for {n_stages} stages")]
    OtherCount { n_listed: usize, n_stages: u16 },
    #[error("there is no stage {nth} of {n_stages}")]
    NoStage { nth: usize, n_stages: usize },
    #[error("stage_layers gives stage {stage} no layer")]
    NoLayer { stage: usize },
    #[error("stage_layers adds up to {sum} layers, and the model has {n_layers}")]
    OtherSum { sum: usize, n_layers: u16 },
}

impl StageSplit {
    /// Divides the layers of a model. The first stages get a layer more if the division leaves a rest.
    pub fn over(&self, n_layers: u16) -> Result<StageLayers, StageError> {
        let n_stages = self.n_stages.get();
        if n_stages > n_layers {
            return Err(StageError::TooMany { n_stages, n_layers });
        }
        if self.layers.is_empty() {
            let more = n_layers % n_stages;
            let counts = (0..n_stages).map(|stage| n_layers / n_stages + u16::from(stage < more));
            return Ok(StageLayers::of_counts(counts));
        }
        if self.layers.len() != usize::from(n_stages) {
            return Err(StageError::OtherCount { n_listed: self.layers.len(), n_stages });
        }
        if let Some(stage) = self.layers.iter().position(|n| *n == 0) {
            return Err(StageError::NoLayer { stage });
        }
        let sum: usize = self.layers.iter().copied().map(usize::from).sum();
        if sum != usize::from(n_layers) {
            return Err(StageError::OtherSum { sum, n_layers });
        }
        Ok(StageLayers::of_counts(self.layers.iter().copied()))
    }
}

impl Default for StageSplit {
    fn default() -> Self {
        Self { n_stages: NonZero::<u16>::MIN, layers: Vec::new() }
    }
}

impl StageLayers {
    /// Returns one stage that has all layers of any model.
    pub fn one() -> Self {
        Self::part(0..u16::MAX)
    }

    /// Returns one stage that has only these layers, for a process that has no others.
    pub fn part(layers: Range<u16>) -> Self {
        Self { layers: std::iter::once(layers).collect(), ranks: None }
    }

    /// Returns the same stages, for a process that has only these ranks of each.
    #[must_use]
    pub fn with_ranks(self, ranks: Range<u16>) -> Self {
        Self { ranks: Some(ranks), ..self }
    }

    /// Returns only this stage, or all of them.
    pub fn only(&self, nth: Option<usize>) -> Result<Self, StageError> {
        let Some(nth) = nth else { return Ok(self.clone()) };
        let none = StageError::NoStage { nth, n_stages: self.n_stages() };
        self.layers.get(nth).cloned().map(Self::part).ok_or(none)
    }

    /// Returns the ranks of each stage, of `n_ranks` in all.
    pub fn ranks(&self, n_ranks: u16) -> Range<u16> {
        self.ranks.clone().unwrap_or(0..n_ranks)
    }

    fn of_counts(counts: impl Iterator<Item = u16>) -> Self {
        let mut end = 0;
        let stage = |n| {
            let start = end;
            end += n;
            start..end
        };
        Self { layers: counts.map(stage).collect(), ranks: None }
    }

    pub fn n_stages(&self) -> usize {
        self.layers.len()
    }

    /// Returns the layers of each stage, in order.
    pub fn iter(&self) -> impl Iterator<Item = Range<u16>> {
        self.layers.iter().cloned()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn split(n_stages: u16, layers: &[u16]) -> StageSplit {
        StageSplit { n_stages: NonZero::new(n_stages).expect("some"), layers: layers.to_vec() }
    }

    #[test]
    fn layers_are_divided_in_order() {
        for (n_stages, layers, n_layers, expected) in [
            (1, &[][..], 32, &[(0, 32)][..]),
            (2, &[], 32, &[(0, 16), (16, 32)]),
            (3, &[], 32, &[(0, 11), (11, 22), (22, 32)]),
            (3, &[], 3, &[(0, 1), (1, 2), (2, 3)]),
            (2, &[17, 15], 32, &[(0, 17), (17, 32)]),
            (3, &[1, 2, 1], 4, &[(0, 1), (1, 3), (3, 4)]),
        ] {
            let stages = split(n_stages, layers).over(n_layers).expect("they divide");
            let ends: Vec<(u16, u16)> = stages.iter().map(|layers| (layers.start, layers.end)).collect();
            assert_eq!(ends, expected);
            assert_eq!(stages.n_stages(), usize::from(n_stages));
        }
    }

    #[test]
    fn a_part_is_one_stage_with_these_layers() {
        let part = StageLayers::part(3..7);
        assert_eq!((part.n_stages(), part.iter().next()), (1, Some(3..7)));
        let two = StageLayers::of_counts([3, 4].into_iter());
        let none = StageError::NoStage { nth: 2, n_stages: 2 };
        assert_eq!((part.clone().with_ranks(2..4).ranks(4), two.ranks(4)), (2..4, 0..4));
        assert_eq!([None, Some(1), Some(2)].map(|nth| two.only(nth)), [Ok(two.clone()), Ok(part), Err(none)]);
    }

    #[test]
    fn what_cannot_be_is_refused_with_a_sentence() {
        for (n_stages, layers, n_layers, expected) in [
            (4, &[][..], 3, "4 stages for 3 layers: every stage needs a layer"),
            (2, &[1, 1, 1], 3, "stage_layers has 3 numbers for 2 stages"),
            (1, &[1, 2], 3, "stage_layers has 2 numbers for 1 stages"),
            (2, &[3, 0], 3, "stage_layers gives stage 1 no layer"),
            (2, &[17, 14], 32, "stage_layers adds up to 31 layers, and the model has 32"),
            (2, &[u16::MAX, u16::MAX], 32, "stage_layers adds up to 131070 layers, and the model has 32"),
        ] {
            let error = split(n_stages, layers).over(n_layers).expect_err(expected);
            assert_eq!(error.to_string(), expected);
        }
    }
}
