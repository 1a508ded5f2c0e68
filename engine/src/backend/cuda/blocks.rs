//! Which blocks of an FP8 matrix lie where on the GPU. Kernels have one scale for each 64 rows and 128 columns of the
//! GPU's matrix; a checkpoint has one for each 128 by 128 of the whole matrix. So neither the cut between ranks nor the
//! padding of heads may put numbers of two blocks where one scale is.

use kernels::cpu::FP8_BLOCK;
use kernels::cuda::Fp8Scales;

use super::fp8::{LayerFormats, blocks_of, spread};
use super::heads::Heads;
use super::share::Share;
use crate::error::OpenError;
use crate::model::ModelConfig;

/// Rejects models whose blocks do not fit the GPU's matrices, with the name of a tensor.
pub(super) fn check(
    config: &ModelConfig,
    heads: Heads,
    formats: &[LayerFormats],
    n_ranks: usize,
) -> Result<(), OpenError> {
    let Some(layer) = formats.iter().position(|layer| layer.has_blocks()) else { return Ok(()) };
    for share in Share::of_all(n_ranks) {
        let of_heads = |n_heads: usize| {
            let here = share.heads(n_heads);
            let numbers = here.start * heads.real..here.end * heads.real;
            spread(numbers, here.len() * heads.padded, |nth| heads.place(nth))
        };
        let width = share.width(config.intermediate);
        let inner = spread(share.range(config.intermediate), width, |nth| nth);
        let q = of_heads(config.n_heads);
        for (tensor, places, group) in [
            ("self_attn.q_proj", &q, Fp8Scales::BLOCK_ROWS),
            ("self_attn.k_proj", &of_heads(config.n_kv_heads), Fp8Scales::BLOCK_ROWS),
            ("self_attn.o_proj", &q, Fp8Scales::BLOCK_COLUMNS),
            ("mlp.up_proj", &inner, Fp8Scales::BLOCK_ROWS),
            ("mlp.down_proj", &inner, Fp8Scales::BLOCK_COLUMNS),
        ] {
            // The rows of up follow those of gate.
            let begins_well = tensor != "mlp.up_proj" || width.is_multiple_of(group);
            if begins_well && blocks_of(places, group).is_ok() {
                continue;
            }
            return Err(OpenError::CudaModel(format!(
                "model.layers.{layer}.{tensor}.weight has a scale for each block of {FP8_BLOCK} by {FP8_BLOCK}, and its \
                 part on each of {n_ranks} GPUs does not consist of whole blocks: use fewer GPUs or --device cpu"
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::super::fp8::WeightFormat;
    use super::*;
    use crate::load::ModelFolder;

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
            check(&changed, heads, &with_blocks, n_ranks).map_err(|refusal| refusal.to_string())
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
        let plain = [LayerFormats::FP8];
        assert!(check(&config, Heads::of(128).expect("128"), &plain, 3).is_ok(), "rows have scales");
    }
}
