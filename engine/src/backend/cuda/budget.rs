//! The GPU memory that a model needs, computed before the allocation.

use std::fmt;

use super::fp8::LayerFormats;
use super::stage::StageShare;
use super::weights::Sizes;
use crate::error::OpenError;

/// The bytes reserved for the driver, for code that is loaded late, and for graphs.
const SPARE_BYTES: usize = 1 << 30;

/// The bytes that one rank's GPU needs, by purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Budget {
    /// The number of GPUs that share the stage. All need the same number of bytes.
    pub(super) n_ranks: usize,
    pub(super) stage: StageShare,
    pub(super) weights: usize,
    /// The bytes of a step's workspace, of widened matrices, and of the table of rotations.
    pub(super) workspace: usize,
    pub(super) kv: KvBytes,
}

/// The bytes of KV on one GPU, and on all GPUs of the model.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct KvBytes {
    pub(super) here: usize,
    pub(super) all: usize,
}

impl Budget {
    /// Computes the budget of a rank whose stage's layers have these formats.
    pub(super) fn of(sizes: Sizes, formats: &[LayerFormats], workspace: usize, kv: KvBytes) -> Self {
        let (n_ranks, stage) = (sizes.share.n_ranks, sizes.stage);
        Self { n_ranks, stage, weights: sizes.bytes(formats), workspace, kv }
    }

    pub(super) fn without_kv(self) -> usize {
        self.weights + self.workspace + SPARE_BYTES
    }

    /// Rejects a model that does not fit. The error lists the bytes by purpose.
    pub(super) fn check(self, free_bytes: usize) -> Result<(), OpenError> {
        if self.without_kv() + self.kv.here <= free_bytes {
            return Ok(());
        }
        Err(OpenError::CudaMemory(self.refusal(free_bytes)))
    }

    fn refusal(self, free_bytes: usize) -> String {
        let advice = match free_bytes.checked_sub(self.without_kv()) {
            Some(left) => format!("set model.kv_memory to {} at most", Mib(self.kv.all_with(left))),
            None => "a smaller model, fewer tokens per step, or a larger GPU".to_owned(),
        };
        let whose = match (self.stage.n_stages, self.n_ranks) {
            (1, 1) => String::new(),
            (1, n_ranks) => format!("on each of {n_ranks} GPUs that share the model: "),
            (_, n_ranks) => format!("on each of {n_ranks} GPUs of pipeline stage {}: ", self.stage.nth),
        };
        format!(
            "{whose}{} of weights + {} of workspace + {} of KV + {} spare = {}, and the GPU has {} free: {advice}",
            Mib(self.weights),
            Mib(self.workspace),
            Mib(self.kv.here),
            Mib(SPARE_BYTES),
            Mib(self.without_kv() + self.kv.here),
            Mib(free_bytes),
        )
    }
}

impl KvBytes {
    /// Returns the bytes on all GPUs if this one has `here` bytes.
    fn all_with(self, here: usize) -> usize {
        (here as u128 * self.all as u128 / self.here.max(1) as u128) as usize
    }
}

struct Mib(usize);

impl fmt::Display for Mib {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} MiB", self.0 >> 20)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_does_not_fit_is_refused_with_the_sum() {
        let kv = KvBytes { here: 100 << 30, all: 100 << 30 };
        let stage = StageShare::whole(32);
        let budget = Budget { n_ranks: 1, stage, weights: 15 << 30, workspace: 1 << 30, kv };
        budget.check(140 << 30).expect("it fits");
        assert_eq!(
            budget.check(64 << 30).expect_err("too much KV").to_string(),
            "15360 MiB of weights + 1024 MiB of workspace + 102400 MiB of KV + 1024 MiB spare = 119808 MiB, and the \
             GPU has 65536 MiB free: set model.kv_memory to 48128 MiB at most"
        );
        let error = budget.check(8 << 30).expect_err("not even the weights").to_string();
        assert!(error.ends_with("a smaller model, fewer tokens per step, or a larger GPU"), "{error}");
    }
    #[test]
    fn the_sum_is_that_of_each_card_and_the_advice_is_for_all_of_them() {
        let kv = KvBytes { here: 50 << 30, all: 100 << 30 };
        let stage = StageShare::whole(32);
        let budget = Budget { n_ranks: 2, stage, weights: 8 << 30, workspace: 1 << 30, kv };
        assert_eq!(
            budget.check(40 << 30).expect_err("too much KV").to_string(),
            "on each of 2 GPUs that share the model: 8192 MiB of weights + 1024 MiB of workspace + 51200 MiB of KV + \
             1024 MiB spare = 61440 MiB, and the GPU has 40960 MiB free: set model.kv_memory to 61440 MiB at most"
        );
    }
    #[test]
    fn the_advice_for_a_stage_counts_the_layers_of_all() {
        let split =
            types::StageSplit { n_stages: std::num::NonZero::new(2).expect("two"), layers: vec![10, 30] };
        let stages = split.over(40).expect("they add up");
        let kv = KvBytes { here: 30 << 30, all: 40 << 30 };
        let stage = StageShare::of_process(&stages, None).nth(1).expect("two");
        let budget = Budget { n_ranks: 1, stage, weights: 8 << 30, workspace: 1 << 30, kv };
        assert_eq!(
            budget.check(25 << 30).expect_err("too much KV").to_string(),
            "on each of 1 GPUs of pipeline stage 1: 8192 MiB of weights + 1024 MiB of workspace + 30720 MiB of KV + \
             1024 MiB spare = 40960 MiB, and the GPU has 25600 MiB free: set model.kv_memory to 20480 MiB at most"
        );
    }
}
