//! The text and names of all kernels. The executable contains them.

use device::cuda::source::Source;

/// The number of letters of a digest; enough to distinguish releases.
const DIGEST_LETTERS: usize = 16;

/// Returns a digest that identifies this version of the kernels. Measurements of one version are not valid
/// for another.
pub fn digest() -> String {
    let mut hasher = blake3::Hasher::new();
    SOURCES.iter().for_each(|source| {
        hasher.update(source.text.as_bytes());
    });
    hasher.finalize().to_hex()[..DIGEST_LETTERS].to_owned()
}

macro_rules! source {
    ($name:literal, [$($kernel:literal),* $(,)?] $(, $before:literal)*) => {
        Source {
            name: $name,
            text: concat!(
                include_str!("../../../device/cu/prelude.cuh"),
                $(include_str!(concat!("../../cu/", $before)),)*
                "#line 1 \"", $name, "\"\n",
                include_str!(concat!("../../cu/", $name)),
            ),
            kernels: &[$($kernel),*],
            only_on: None,
        }
    };
}

/// The programs that a [`ComputeCard`](super::ComputeCard) compiles when it is opened, if they are for its
/// architecture.
pub const SOURCES: &[Source] = &[
    source!("embedding.cu", ["embedding"]),
    source!("norm.cu", ["rms_norm", "add_rms_norm", "add_choices_rms_norm"], "choice_sums.cuh", "norm.cuh"),
    source!("silu.cu", ["silu_mul"]),
    source!(
        "rope.cu",
        ["rope_write_kv_64", "rope_write_kv_128", "rope_write_kv_fp8_64", "rope_write_kv_fp8_128"],
        "pages.cuh"
    ),
    source!("argmax.cu", ["argmax_parts", "argmax_rows"]),
    source!("feed.cu", ["feed_tokens", "keep_tokens"]),
    source!("sample.cu", ["sample_tokens"]),
    source!("better.cu", ["count_better"]),
    source!("bias.cu", ["add_bias"]),
    source!("ranks.cu", ["sum_few_rows", "sum_many_rows", "gather_columns"], "ranks.cuh"),
    source!("dummy.cu", ["dummy_weights", "dummy_fp8"], "pages.cuh"),
    source!("widen_fp8.cu", ["widen_fp8", "widen_fp8_blocks"]),
    source!("round_fp8.cu", ["round_rows"], "rounding.cuh"),
    source!("probe.cu", ["probe_read", "probe_copy"]),
    source!(
        "skinny.cu",
        [
            "skinny_16x2",
            "skinny_wide_16x2",
            "skinny_gated_16x2",
            "skinny_added_16x2",
            "skinny_joined_16x2",
            "skinny_heads_16x2",
            "skinny_8x4",
            "skinny_wide_8x4",
            "skinny_gated_8x4",
            "skinny_added_8x4",
            "skinny_joined_8x4",
            "skinny_heads_8x4",
            "skinny_4x4",
            "skinny_wide_4x4",
            "skinny_gated_4x4",
            "skinny_added_4x4",
            "skinny_joined_4x4",
            "skinny_heads_4x4",
            "skinny_8x2",
            "skinny_wide_8x2",
            "skinny_gated_8x2",
            "skinny_added_8x2",
            "skinny_joined_8x2",
            "skinny_heads_8x2",
        ],
        "pages.cuh",
        "tensor.cuh",
        "ranks.cuh",
        "endings.cuh"
    ),
    source!(
        "decode_attention.cu",
        [
            "decode_attention_64",
            "decode_attention_128",
            "decode_attention_fp8_64",
            "decode_attention_fp8_128",
            "merge_parts_64",
            "merge_parts_128",
        ],
        "pages.cuh",
        "tensor.cuh"
    ),
    source!(
        "prefill_attention.cu",
        [
            "prefill_attention_64",
            "prefill_attention_128",
            "prefill_attention_fp8_64",
            "prefill_attention_fp8_128",
        ],
        "pages.cuh",
        "tensor.cuh"
    ),
    source!(
        "few_rows.cu",
        [
            "few_rows_8",
            "few_rows_wide_8",
            "few_rows_gated_8",
            "few_rows_added_8",
            "few_rows_joined_8",
            "few_rows_heads_8",
            "few_rows_16",
            "few_rows_wide_16",
            "few_rows_gated_16",
            "few_rows_added_16",
            "few_rows_joined_16",
            "few_rows_heads_16",
            "few_rows_32",
            "few_rows_wide_32",
            "few_rows_gated_32",
            "few_rows_added_32",
            "few_rows_joined_32",
            "few_rows_heads_32",
            "few_rows_64",
            "few_rows_wide_64",
            "few_rows_gated_64",
            "few_rows_added_64",
            "few_rows_joined_64",
            "few_rows_heads_64",
            "few_rows_128",
            "few_rows_wide_128",
            "few_rows_gated_128",
            "few_rows_added_128",
            "few_rows_joined_128",
            "few_rows_heads_128",
        ],
        "pages.cuh",
        "tensor.cuh",
        "hopper.cuh",
        "ranks.cuh",
        "endings.cuh",
        "few_rows.cuh"
    )
    .on_hopper(),
    source!(
        "few_rows_even.cu",
        [
            "few_rows_even_8",
            "few_rows_even_wide_8",
            "few_rows_even_gated_8",
            "few_rows_even_added_8",
            "few_rows_even_heads_8",
            "few_rows_even_16",
            "few_rows_even_wide_16",
            "few_rows_even_gated_16",
            "few_rows_even_added_16",
            "few_rows_even_heads_16",
            "few_rows_even_32",
            "few_rows_even_wide_32",
            "few_rows_even_gated_32",
            "few_rows_even_added_32",
            "few_rows_even_heads_32",
            "few_rows_even_64",
            "few_rows_even_wide_64",
            "few_rows_even_gated_64",
            "few_rows_even_added_64",
            "few_rows_even_heads_64",
        ],
        "pages.cuh",
        "tensor.cuh",
        "hopper.cuh",
        "ranks.cuh",
        "endings.cuh",
        "few_rows.cuh"
    )
    .on_hopper(),
    source!(
        "few_rows_fp8.cu",
        [
            "few_rows_fp8_8",
            "few_rows_fp8_gated_8",
            "few_rows_fp8_added_8",
            "few_rows_fp8_joined_8",
            "few_rows_fp8_heads_8",
            "few_rows_fp8_16",
            "few_rows_fp8_gated_16",
            "few_rows_fp8_added_16",
            "few_rows_fp8_joined_16",
            "few_rows_fp8_heads_16",
            "few_rows_fp8_32",
            "few_rows_fp8_gated_32",
            "few_rows_fp8_added_32",
            "few_rows_fp8_joined_32",
            "few_rows_fp8_heads_32",
            "few_rows_fp8_64",
            "few_rows_fp8_gated_64",
            "few_rows_fp8_added_64",
            "few_rows_fp8_joined_64",
            "few_rows_fp8_heads_64",
            "few_rows_fp8_128",
            "few_rows_fp8_gated_128",
            "few_rows_fp8_added_128",
            "few_rows_fp8_joined_128",
            "few_rows_fp8_heads_128",
        ],
        "pages.cuh",
        "tensor.cuh",
        "hopper.cuh",
        "ranks.cuh",
        "endings.cuh",
        "few_rows.cuh",
        "few_rows_fp8.cuh"
    )
    .on_hopper(),
    source!(
        "few_rows_blocks.cu",
        [
            "few_rows_blocks_8",
            "few_rows_blocks_gated_8",
            "few_rows_blocks_added_8",
            "few_rows_blocks_joined_8",
            "few_rows_blocks_heads_8",
            "few_rows_blocks_16",
            "few_rows_blocks_gated_16",
            "few_rows_blocks_added_16",
            "few_rows_blocks_joined_16",
            "few_rows_blocks_heads_16",
            "few_rows_blocks_32",
            "few_rows_blocks_gated_32",
            "few_rows_blocks_added_32",
            "few_rows_blocks_joined_32",
            "few_rows_blocks_heads_32",
            "few_rows_blocks_64",
            "few_rows_blocks_gated_64",
            "few_rows_blocks_added_64",
            "few_rows_blocks_joined_64",
            "few_rows_blocks_heads_64",
            "few_rows_blocks_128",
            "few_rows_blocks_gated_128",
            "few_rows_blocks_added_128",
            "few_rows_blocks_joined_128",
            "few_rows_blocks_heads_128",
        ],
        "pages.cuh",
        "tensor.cuh",
        "hopper.cuh",
        "ranks.cuh",
        "endings.cuh",
        "few_rows.cuh",
        "few_rows_fp8.cuh"
    )
    .on_hopper(),
    source!(
        "many_rows.cu",
        ["many_rows", "many_rows_added", "many_rows_gated"],
        "tensor.cuh",
        "hopper.cuh",
        "many_rows.cuh",
        "many_tiles.cuh"
    )
    .on_hopper(),
    source!(
        "many_rows_fp8.cu",
        [
            "many_rows_fp8",
            "many_rows_fp8_added",
            "many_rows_fp8_gated",
            "many_rows_fp8_narrow",
            "many_rows_fp8_narrow_added",
            "many_rows_fp8_split",
            "many_rows_fp8_split_added",
            "quantize_rows",
        ],
        "tensor.cuh",
        "hopper.cuh",
        "many_rows.cuh",
        "many_tiles.cuh",
        "many_eights.cuh",
        "many_rows_fp8.cuh",
        "rounding.cuh",
        "quantize.cuh"
    )
    .on_hopper(),
    source!(
        "many_rows_blocks.cu",
        [
            "many_rows_blocks",
            "many_rows_blocks_added",
            "many_rows_blocks_gated",
            "many_rows_blocks_narrow",
            "many_rows_blocks_narrow_added",
            "many_rows_blocks_split",
            "many_rows_blocks_split_added",
        ],
        "tensor.cuh",
        "hopper.cuh",
        "many_rows.cuh",
        "many_tiles.cuh",
        "many_eights.cuh",
        "many_rows_fp8.cuh"
    )
    .on_hopper(),
    source!(
        "experts.cu",
        [
            "choose_experts",
            "choose_experts_of_many",
            "place_choices",
            "experts_gated_8",
            "experts_gated_32",
            "experts_summed_8",
            "experts_summed_32",
            "gather_choices",
            "sum_choices",
            "place_and_order",
        ],
        "choice_sums.cuh",
        "tensor.cuh",
        "rounding.cuh",
        "expert_rows.cuh",
        "expert_choice.cuh",
        "expert_places.cuh",
        "expert_units.cuh"
    ),
    source!(
        "experts_fp8.cu",
        [
            "experts_fp8_gated_8",
            "experts_fp8_gated_32",
            "experts_fp8_summed_8",
            "experts_fp8_summed_32",
            "experts_blocks_gated_8",
            "experts_blocks_gated_32",
            "experts_blocks_summed_8",
            "experts_blocks_summed_32",
        ],
        "tensor.cuh",
        "expert_rows.cuh",
        "expert_units.cuh"
    ),
    source!(
        "experts_few.cu",
        ["choose_few"],
        "tensor.cuh",
        "hopper.cuh",
        "rounding.cuh",
        "quantize.cuh",
        "norm.cuh",
        "expert_rows.cuh",
        "expert_choice.cuh",
        "expert_places.cuh"
    )
    .on_hopper(),
    source!(
        "experts_ring.cu",
        ["experts_ring_gated", "experts_ring_summed"],
        "tensor.cuh",
        "hopper.cuh",
        "expert_rows.cuh",
        "expert_ring.cuh"
    )
    .on_hopper(),
    source!(
        "experts_ring_fp8.cu",
        [
            "experts_ring_fp8_gated",
            "experts_ring_fp8_summed",
            "experts_ring_blocks_gated",
            "experts_ring_blocks_summed",
            "place_and_quantize",
        ],
        "tensor.cuh",
        "hopper.cuh",
        "rounding.cuh",
        "quantize.cuh",
        "expert_rows.cuh",
        "expert_places.cuh",
        "expert_ring.cuh"
    )
    .on_hopper(),
    source!(
        "grouped_rows.cu",
        ["grouped_rows", "grouped_rows_gated"],
        "tensor.cuh",
        "hopper.cuh",
        "many_rows.cuh",
        "grouped_tiles.cuh"
    )
    .on_hopper(),
    source!(
        "grouped_rows_fp8.cu",
        [
            "grouped_rows_fp8",
            "grouped_rows_fp8_gated",
            "grouped_rows_blocks",
            "grouped_rows_blocks_gated",
            "gather_quantized",
        ],
        "tensor.cuh",
        "hopper.cuh",
        "many_rows.cuh",
        "grouped_tiles.cuh",
        "many_eights.cuh"
    )
    .on_hopper(),
    source!(
        "latent.cu",
        [
            "attend_latents_16",
            "attend_latents_fp8_16",
            "merge_latents",
            "write_latents",
            "write_latents_fp8",
            "turn_queries",
            "multiply_keys",
            "multiply_keys_few",
            "multiply_values",
            "multiply_values_few",
        ],
        "pages.cuh",
        "tensor.cuh",
        "latent.cuh"
    ),
    source!(
        "latent_many.cu",
        ["attend_latents_64", "attend_latents_fp8_64"],
        "pages.cuh",
        "tensor.cuh",
        "latent.cuh"
    )
    .on_hopper(),
    source!("expand_latents.cu", ["expand_latents"], "pages.cuh", "tensor.cuh").on_hopper(),
    source!(
        "decode_attention_hopper.cu",
        [
            "decode_attention_hopper_64",
            "decode_attention_hopper_128",
            "decode_attention_hopper_many_64",
            "decode_attention_hopper_many_128",
            "decode_attention_hopper_fp8_128",
            "decode_attention_hopper_many_fp8_128",
        ],
        "pages.cuh",
        "tensor.cuh",
        "hopper.cuh"
    )
    .on_hopper(),
    source!("widen_pages.cu", ["widen_pages"], "pages.cuh").on_hopper(),
    source!(
        "prefill_attention_hopper.cu",
        ["prefill_attention_hopper", "prefill_attention_expanded"],
        "pages.cuh",
        "tensor.cuh",
        "hopper.cuh"
    )
    .on_hopper(),
];
