//! Experts that are spread over ranks: each rank has whole experts, every n-th one for n ranks.
//!
//! All ranks have all rows before a layer of experts, so no row is sent: a rank computes the choices of its own experts, and
//! the ranks add up their sums, as they do if experts are cut (docs/decisions/0035).

use std::ops::Range;

use kernels::cuda::{ExpertSizes, HeldExperts};

use super::CudaSettings;
use super::share::Share;
use super::weights::Sizes;
use crate::backend::ExpertPlacement;
use crate::error::OpenError;
use crate::model::{Mixture, ModelConfig};

/// Refuses to spread experts that are not there, or that do not divide over the ranks.
pub(super) fn check(config: &ModelConfig, settings: &CudaSettings) -> Result<(), OpenError> {
    if settings.experts == ExpertPlacement::Cut {
        return Ok(());
    }
    let n_ranks = usize::from(settings.ranks.get());
    match &config.mixture {
        None => Err(OpenError::Experts("\"spread\" is set, and the model has no experts".to_owned())),
        Some(mixture) if !mixture.n_experts.is_multiple_of(n_ranks) => {
            let n_experts = mixture.n_experts;
            Err(OpenError::Experts(format!("{n_experts} experts do not spread evenly over {n_ranks} GPUs")))
        }
        Some(_) => Ok(()),
    }
}

impl Sizes {
    /// Returns the sizes of a rank with whole experts.
    pub(super) fn with_spread_experts(self, mixture: &Mixture) -> Self {
        let Share { nth: first, n_ranks: every } = self.share;
        let held = HeldExperts { first, every };
        let width = Share::WHOLE.width(mixture.intermediate);
        let experts = self.experts.map(|experts| ExpertSizes { width, held, ..experts });
        Self { experts, ..self }
    }

    /// Returns the columns of each expert's inner layer that the rank has.
    pub(super) fn expert_columns(self, mixture: &Mixture) -> Range<usize> {
        match self.experts {
            Some(ExpertSizes { held: HeldExperts::ALL, .. }) | None => self.share.range(mixture.intermediate),
            Some(_) => Share::WHOLE.range(mixture.intermediate),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;
    use std::path::Path;

    use super::super::fp8::{LayerFormats, WeightFormat};
    use super::super::heads::Heads;
    use super::*;
    use crate::load::ModelFolder;

    fn config(name: &str) -> ModelConfig {
        config_in("../bench/shapes", name)
    }

    fn config_in(folder: &str, name: &str) -> ModelConfig {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join(folder).join(name);
        ModelFolder::open(&folder).expect("it opens").config
    }

    #[test]
    fn each_rank_has_whole_experts_and_all_shared_ones() {
        let config = config("deepseek-v2-lite");
        let heads = Heads::of(config.head_dim).expect("a size for kernels");
        let mixture = config.mixture.as_ref().expect("it has experts");
        let formats = LayerFormats::all_in(WeightFormat::Bf16, config.n_layers, Some(mixture));
        for (n_ranks, n_held) in [(1, 64), (2, 32), (4, 16)] {
            let cut = |share| Sizes::of(&config, heads, share).expect("multiples of 8");
            let n_bytes = |sizes: Sizes| sizes.for_formats(&config, &formats).bytes(&formats);
            for share in Share::of_all(n_ranks) {
                let spread = cut(share).with_spread_experts(mixture).for_formats(&config, &formats);
                let experts = spread.experts.expect("it has experts");
                assert_eq!((experts.n_held(), experts.n_all(), experts.width), (n_held, n_held + 2, 1408));
                assert_eq!(spread.expert_columns(mixture), 0..1408);
                // Beside its share of the routed experts, a rank has all of the two shared ones in 26 layers.
                let more = 26 * 2 * 3 * 1408 * 2048 * 2 * (n_ranks - 1) / n_ranks;
                assert_eq!(spread.bytes(&formats), n_bytes(cut(share)) + more, "{n_ranks} ranks");
            }
        }
    }

    #[test]
    fn widths_of_whole_experts_are_padded_to_what_kernels_move_at_once() {
        let config = config_in("tests/models", "deepseek-v3");
        let heads = Heads::of(config.head_dim).expect("a size for kernels");
        let mixture = config.mixture.as_ref().expect("it has experts");
        for share in Share::of_all(2) {
            let sizes = Sizes::of(&config, heads, share).expect("sizes").with_spread_experts(mixture);
            assert_eq!(sizes.experts.map(|experts| experts.width), Some(16));
            assert_eq!(sizes.expert_columns(mixture), 0..12);
        }
    }

    #[test]
    fn experts_that_cannot_be_spread_are_refused() {
        let refusal = |name: &str, n_ranks| {
            let ranks = NonZero::new(n_ranks).expect("some");
            let settings =
                CudaSettings { ranks, experts: ExpertPlacement::Spread, ..CudaSettings::default() };
            check(&config(name), &settings).map_err(|refusal| refusal.to_string())
        };
        assert_eq!(refusal("mixtral-8x7b", 4), Ok(()));
        let uneven = "expert.model.experts: 8 experts do not spread evenly over 3 GPUs";
        assert_eq!(refusal("mixtral-8x7b", 3), Err(uneven.to_owned()));
        let none = "expert.model.experts: \"spread\" is set, and the model has no experts";
        assert_eq!(refusal("llama-3.1-8b", 2), Err(none.to_owned()));
    }
}
