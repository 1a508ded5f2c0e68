//! One pipeline stage's share of a model: neighbouring layers. The first stage also embeds, and the last one samples.

use std::ops::Range;

use device::cuda::Bf16;
use types::StageLayers;

use crate::backend::StepLimits;

/// The share of one of the stages of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct StageShare {
    pub(super) nth: usize,
    pub(super) n_stages: usize,
    /// The stages that this process computes.
    first_here: usize,
    n_here: usize,
    first_layer: usize,
    n_layers: usize,
}

impl StageShare {
    /// Returns the share of a single stage: all layers.
    pub(super) fn whole(n_layers: usize) -> Self {
        Self { nth: 0, n_stages: 1, first_here: 0, n_here: 1, first_layer: 0, n_layers }
    }

    /// Returns the share of each stage that this process computes, in order: `only` this one, or all.
    pub(super) fn of_process(stages: &StageLayers, only: Option<usize>) -> impl Iterator<Item = Self> {
        let n_stages = stages.n_stages();
        let (first_here, n_here) = only.map_or((0, n_stages), |nth| (nth, 1));
        let share = move |(nth, layers): (usize, Range<u16>)| Self {
            nth,
            n_stages,
            first_here,
            n_here,
            first_layer: layers.start.into(),
            n_layers: layers.len(),
        };
        stages.iter().enumerate().map(share).skip(first_here).take(n_here)
    }

    /// Returns the stage's number among those of this process.
    pub(super) fn nth_here(self) -> usize {
        self.nth - self.first_here
    }

    /// Returns whether other processes compute the other stages.
    pub(super) fn has_others_elsewhere(self) -> bool {
        self.n_here < self.n_stages
    }

    /// Returns the stage's layers, by their numbers in the model.
    pub(super) fn layers(self) -> Range<usize> {
        self.first_layer..self.first_layer + self.n_layers
    }

    /// Returns whether the stage embeds tokens.
    pub(super) fn is_first(self) -> bool {
        self.nth == 0
    }

    /// Returns whether the stage samples tokens.
    pub(super) fn is_last(self) -> bool {
        self.nth + 1 == self.n_stages
    }

    /// Returns the first layer of the next stage; `None` for the last stage.
    pub(super) fn next_layer(self) -> Option<usize> {
        (!self.is_last()).then_some(self.layers().end)
    }

    /// Returns the bytes of the rows that the stage keeps on its GPU for the next one: the residual and the normed rows, for
    /// each step in flight.
    pub(super) fn kept_bytes(self, limits: StepLimits, hidden: usize) -> usize {
        let of_step = 2 * limits.tokens * hidden * size_of::<Bf16>();
        if self.is_last() || self.has_others_elsewhere() { 0 } else { self.steps_in_flight_max() * of_step }
    }

    /// Returns the number of steps that may be in flight: one more than the stages compute at the same time.
    pub(super) fn steps_in_flight_max(self) -> usize {
        self.n_stages + 1
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use types::StageSplit;

    use super::*;

    #[test]
    fn stages_have_all_layers_in_order_and_the_ends_are_known() {
        for (n_stages, n_layers, expected) in
            [(1, 3, &[(0, 3)][..]), (2, 5, &[(0, 3), (3, 5)]), (3, 3, &[(0, 1), (1, 2), (2, 3)])]
        {
            let split = StageSplit { n_stages: NonZero::new(n_stages).expect("some"), layers: Vec::new() };
            let shares: Vec<_> =
                StageShare::of_process(&split.over(n_layers).expect("they divide"), None).collect();
            let layers: Vec<_> =
                shares.iter().map(|share| (share.layers().start, share.layers().end)).collect();
            assert_eq!(layers, expected);
            let last = shares.len() - 1;
            for (nth, share) in shares.iter().enumerate() {
                assert_eq!((share.is_first(), share.is_last()), (nth == 0, nth == last));
                assert_eq!(share.next_layer(), shares.get(nth + 1).map(|next| next.layers().start));
                assert_eq!(share.steps_in_flight_max(), shares.len() + 1);
            }
        }
        let two = StageSplit { n_stages: NonZero::new(2).expect("two"), layers: Vec::new() };
        let limits = StepLimits { tokens: 8192, rows: 256 };
        let stages = two.over(32).expect("they divide");
        let kept: Vec<usize> =
            StageShare::of_process(&stages, None).map(|stage| stage.kept_bytes(limits, 4096)).collect();
        assert_eq!(kept, [3 * 2 * 8192 * 4096 * 2, 0], "every stage but the last keeps rows");
        let one = StageSplit::default().over(4).expect("they divide");
        assert_eq!(StageShare::of_process(&one, None).collect::<Vec<_>>(), [StageShare::whole(4)]);
        for nth in 0..2 {
            let only: Vec<_> = StageShare::of_process(&stages, Some(nth)).collect();
            let [stage] = only[..] else { panic!("{only:?}") };
            assert_eq!((stage.nth, stage.nth_here(), stage.layers().start), (nth, 0, 16 * nth));
            assert!(stage.has_others_elsewhere());
            assert_eq!(stage.kept_bytes(limits, 4096), 0, "rows leave through host memory");
        }
    }
}
