//! The kernels that there are: their text, carried in the executable, and their names.

/// One file of `kernels/cu`, compiled as one program.
#[derive(Debug)]
pub struct Source {
    /// The file's name, as compilers' messages have it.
    pub name: &'static str,
    /// The whole program: what it begins with, then the file.
    pub text: &'static str,
    /// What can be launched from it.
    pub kernels: &'static [&'static str],
}

macro_rules! source {
    ($name:literal, [$($kernel:literal),* $(,)?] $(, $before:literal)*) => {
        Source {
            name: $name,
            text: concat!(
                include_str!("../../cu/prelude.cuh"),
                $(include_str!(concat!("../../cu/", $before)),)*
                "#line 1 \"", $name, "\"\n",
                include_str!(concat!("../../cu/", $name)),
            ),
            kernels: &[$($kernel),*],
        }
    };
}

/// Everything that is compiled for a card when it is opened.
pub const SOURCES: &[Source] = &[
    source!("embedding.cu", ["embedding"]),
    source!("norm.cu", ["rms_norm", "add_rms_norm"]),
    source!("silu.cu", ["silu_mul"]),
    source!("rope.cu", ["rope_write_kv_64", "rope_write_kv_128"], "pages.cuh"),
    source!("argmax.cu", ["argmax_parts", "argmax_rows"]),
    source!("feed.cu", ["feed_tokens", "keep_tokens"]),
    source!("bias.cu", ["add_bias"]),
    source!("dummy.cu", ["dummy_weights"]),
    source!("probe.cu", ["probe_read", "probe_copy"]),
    source!(
        "skinny.cu",
        [
            "skinny_8x1x4",
            "skinny_wide_8x1x4",
            "skinny_4x1x4",
            "skinny_wide_4x1x4",
            "skinny_16x1x2",
            "skinny_wide_16x1x2",
            "skinny_8x1x2",
            "skinny_wide_8x1x2",
        ],
        "tensor.cuh"
    ),
    source!(
        "decode_attention.cu",
        ["decode_attention_64", "decode_attention_128", "merge_parts_64", "merge_parts_128"],
        "pages.cuh",
        "tensor.cuh"
    ),
    source!(
        "prefill_attention.cu",
        ["prefill_attention_64", "prefill_attention_128"],
        "pages.cuh",
        "tensor.cuh"
    ),
];
