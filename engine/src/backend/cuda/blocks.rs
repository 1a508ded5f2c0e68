//! Which blocks of an FP8 matrix lie where on the GPU. Kernels have one scale for each 64 rows and 128 columns of the
//! GPU's matrix; a checkpoint has one for each 128 by 128 of the whole matrix. So neither the cut between ranks nor the
//! padding of heads may put numbers of two blocks where one scale is.

use kernels::cpu::FP8_BLOCK;
use kernels::cuda::Fp8Scales;

use super::fp8::{FeedForwardFormats, LayerFormats, WeightFormat, blocks_of, spread};
use super::heads::Heads;
use super::share::Share;
use crate::backend::ExpertPlacement;
use crate::error::OpenError;
use crate::model::ModelConfig;

const IN_BLOCKS: WeightFormat = WeightFormat::Fp8(Fp8Scales::OfBlocks);

/// Numbers of a matrix on a GPU that must have whole blocks.
struct CheckedPlaces {
    tensor: String,
    places: Vec<Option<usize>>,
    group: usize,
    /// The number of numbers after which the next matrix begins.
    apart: usize,
}

/// Returns whether a layer has block scales in one kind of matrix.
type HasBlocks = fn(&LayerFormats) -> bool;
/// Returns the places of a rank's numbers in these matrices.
type PlacesOf = fn(&ModelConfig, Heads, Share) -> Vec<CheckedPlaces>;

/// Rejects models whose blocks do not fit the GPU's matrices, with the name of a tensor.
pub(super) fn check(
    config: &ModelConfig,
    heads: Heads,
    formats: &[LayerFormats],
    n_ranks: usize,
    experts: ExpertPlacement,
) -> Result<(), OpenError> {
    // Experts that are spread are whole.
    let n_cuts = if experts == ExpertPlacement::Spread { 1 } else { n_ranks };
    let kinds: [(HasBlocks, PlacesOf, usize); 4] = [
        (has_attention_blocks, of_attention, n_ranks),
        (has_dense_and_blocks, of_dense, n_ranks),
        (has_expert_blocks, of_experts, n_cuts),
        (has_shared_blocks, of_shared, n_ranks),
    ];
    for (has_blocks, places, n_ranks) in kinds {
        let Some(layer) = formats.iter().position(has_blocks) else { continue };
        let mut all = Share::of_all(n_ranks).flat_map(|share| places(config, heads, share));
        if let Some(wrong) = all.find(|places| !places.have_whole_blocks()) {
            let (part, advice) = match n_ranks {
                1 => ("it".to_owned(), "use --device cpu"),
                _ => (format!("its part on each of {n_ranks} GPUs"), "use fewer GPUs or --device cpu"),
            };
            return Err(OpenError::CudaModel(format!(
                "model.layers.{layer}.{}.weight has a scale for each block of {FP8_BLOCK} by {FP8_BLOCK}, and {part} \
                 does not consist of whole blocks: {advice}",
                wrong.tensor
            )));
        }
    }
    Ok(())
}

fn has_attention_blocks(layer: &LayerFormats) -> bool {
    [layer.qkv, layer.o].contains(&IN_BLOCKS)
}

fn has_dense_and_blocks(layer: &LayerFormats) -> bool {
    layer.has_blocks() && matches!(layer.feed_forward, FeedForwardFormats::Dense { .. })
}

fn has_expert_blocks(layer: &LayerFormats) -> bool {
    matches!(layer.feed_forward, FeedForwardFormats::Experts { routed: IN_BLOCKS, .. })
}

fn has_shared_blocks(layer: &LayerFormats) -> bool {
    matches!(layer.feed_forward, FeedForwardFormats::Experts { shared: IN_BLOCKS, .. })
}

fn of_attention(config: &ModelConfig, heads: Heads, share: Share) -> Vec<CheckedPlaces> {
    let of_heads = |n_heads: usize| {
        let here = share.heads(n_heads);
        let numbers = here.start * heads.real..here.end * heads.real;
        spread(numbers, here.len() * heads.padded, |nth| heads.place(nth))
    };
    let q = of_heads(config.n_heads);
    vec![
        CheckedPlaces::of("self_attn.q_proj", q.clone(), Fp8Scales::BLOCK_ROWS),
        CheckedPlaces::of("self_attn.k_proj", of_heads(config.n_kv_heads), Fp8Scales::BLOCK_ROWS),
        CheckedPlaces::of("self_attn.o_proj", q, Fp8Scales::BLOCK_COLUMNS),
    ]
}

fn of_dense(config: &ModelConfig, _: Heads, share: Share) -> Vec<CheckedPlaces> {
    of_gated("mlp", config.intermediate, share)
}

fn of_shared(config: &ModelConfig, _: Heads, share: Share) -> Vec<CheckedPlaces> {
    let Some(mixture) = &config.mixture else { return Vec::new() };
    mixture.shared.map_or_else(Vec::new, |width| of_gated(&mixture.shared_part(), width, share))
}

/// Returns the places of gate and up, and of down, with an inner layer of `n` numbers on all ranks together.
fn of_gated(part: &str, n: usize, share: Share) -> Vec<CheckedPlaces> {
    let width = share.width(n);
    let inner = spread(share.range(n), width, |nth| nth);
    vec![
        // The rows of up follow those of gate.
        CheckedPlaces {
            apart: width,
            ..CheckedPlaces::of(&format!("{part}.up_proj"), inner.clone(), Fp8Scales::BLOCK_ROWS)
        },
        CheckedPlaces::of(&format!("{part}.down_proj"), inner, Fp8Scales::BLOCK_COLUMNS),
    ]
}

fn of_experts(config: &ModelConfig, _: Heads, share: Share) -> Vec<CheckedPlaces> {
    let Some(mixture) = &config.mixture else { return Vec::new() };
    let [_, up, down] = mixture.style.matrices.map(|matrix| mixture.expert(0, matrix));
    let range = share.range(mixture.intermediate);
    let inner = spread(range, share.width(mixture.intermediate), |nth| nth);
    vec![
        CheckedPlaces::of(&up, inner.clone(), Fp8Scales::BLOCK_ROWS),
        // The next expert's rows follow.
        CheckedPlaces { apart: config.hidden, ..CheckedPlaces::of(&down, Vec::new(), Fp8Scales::BLOCK_ROWS) },
        CheckedPlaces::of(&down, inner, Fp8Scales::BLOCK_COLUMNS),
    ]
}

impl CheckedPlaces {
    fn of(tensor: &str, places: Vec<Option<usize>>, group: usize) -> Self {
        Self { tensor: tensor.to_owned(), places, group, apart: 0 }
    }

    fn have_whole_blocks(&self) -> bool {
        self.apart.is_multiple_of(self.group) && blocks_of(&self.places, self.group).is_ok()
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::load::ModelFolder;

    const CUT: ExpertPlacement = ExpertPlacement::Cut;

    #[test]
    fn cuts_within_a_block_are_refused_by_the_name_of_the_tensor() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/llama-3.1-8b");
        let config = ModelFolder::open(&folder).expect("it opens").config;
        let blocks = WeightFormat::Fp8(Fp8Scales::OfBlocks);
        let with_blocks = [LayerFormats::default(), LayerFormats { o: blocks, ..LayerFormats::default() }];
        let refusal = |change: fn(&mut ModelConfig), n_ranks: usize| {
            let mut changed = config.clone();
            change(&mut changed);
            let heads = Heads::of(changed.head_dim).expect("a width that kernels support");
            check(&changed, heads, &with_blocks, n_ranks, CUT).map_err(|refusal| refusal.to_string())
        };
        for n_ranks in [1, 2, 4, 8] {
            assert_eq!(refusal(|_| {}, n_ranks), Ok(()));
        }
        assert_eq!(refusal(|config| config.head_dim = 64, 8), Ok(()));
        assert_eq!(refusal(|config| config.head_dim = 16, 1), Ok(()), "blocks have whole heads");
        for (change, n_ranks, tensor) in [
            ((|config| config.head_dim = 48) as fn(&mut ModelConfig), 1, "self_attn.q_proj"),
            (
                |config| (config.head_dim, config.n_heads, config.n_kv_heads) = (64, 6, 2),
                2,
                "self_attn.o_proj",
            ),
            (|config| config.intermediate = 1000, 1, "mlp.up_proj"),
            (|config| config.intermediate = 384, 2, "mlp.down_proj"),
        ] {
            let sentence = refusal(change, n_ranks).expect_err("refused");
            let start = format!("model.layers.1.{tensor}.weight has a scale for each block");
            assert!(sentence.contains(&start), "{sentence}");
        }
        let plain = LayerFormats::all_in(WeightFormat::OF_ROWS, 1, None);
        assert!(check(&config, Heads::of(128).expect("128"), &plain, 3, CUT).is_ok(), "rows have scales");
    }

    #[test]
    fn experts_are_cut_between_their_blocks() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/qwen3-30b-a3b");
        let mut config = ModelFolder::open(&folder).expect("it opens").config;
        let heads = Heads::of(config.head_dim).expect("128");
        let [in_blocks, in_rows] = [WeightFormat::Fp8(Fp8Scales::OfBlocks), WeightFormat::OF_ROWS]
            .map(|format| LayerFormats::all_in(format, 48, config.mixture.as_ref()));
        let refusal = |config: &ModelConfig, formats: &[LayerFormats], n_ranks| {
            check(config, heads, formats, n_ranks, CUT).map_err(|refusal| refusal.to_string())
        };
        // 768 numbers are 6 blocks.
        for n_ranks in [1, 2] {
            assert_eq!(refusal(&config, &in_blocks, n_ranks), Ok(()));
        }
        for n_ranks in [4, 8] {
            assert_eq!(refusal(&config, &in_rows, n_ranks), Ok(()));
            let sentence = refusal(&config, &in_blocks, n_ranks).expect_err("refused");
            let start = "model.layers.0.mlp.experts.0.up_proj.weight has a scale for each block";
            let alternative = "model.layers.0.mlp.experts.0.down_proj.weight has a scale for each block";
            assert!(sentence.contains(if n_ranks == 4 { alternative } else { start }), "{sentence}");
            let spread = ExpertPlacement::Spread;
            assert!(check(&config, heads, &in_blocks, n_ranks, spread).is_ok(), "experts are whole");
        }
        config.hidden = 136;
        let sentence = refusal(&config, &in_blocks, 1).expect_err("experts follow each other");
        assert!(sentence.contains("model.layers.0.mlp.experts.0.down_proj.weight"), "{sentence}");
    }

    #[test]
    fn shared_experts_are_cut_between_their_blocks() {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../bench/shapes/deepseek-v2-lite");
        let config = ModelFolder::open(&folder).expect("it opens").config;
        let heads = Heads::of(128).expect("128");
        let feed_forward = FeedForwardFormats::Experts { routed: WeightFormat::OF_ROWS, shared: IN_BLOCKS };
        let formats = [LayerFormats { feed_forward, ..LayerFormats::default() }];
        // 2,816 numbers are 22 blocks.
        assert!(check(&config, heads, &formats, 2, CUT).is_ok());
        let sentence = check(&config, heads, &formats, 4, CUT).expect_err("refused").to_string();
        assert!(sentence.contains("model.layers.0.mlp.shared_experts.down_proj.weight"), "{sentence}");
    }
}
