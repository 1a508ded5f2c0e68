//! Summaries of layout and fingerprint, eight bytes each, to refuse a sender with other values.
//!
//! The landing carries both in full, so that its sender can report the exact difference. The summaries let the
//! receiver check that the sender compared them. The number of ranks is not part of the summary, because each side
//! has its own.

use std::fmt::Write;

use twox_hash::XxHash3_64;
use types::{Fingerprint, KvLayout};

pub(crate) fn layout(layout: &KvLayout) -> u64 {
    let shard = layout.shard;
    let mut text = format!("{} {} {}/{}", layout.block_tokens, layout.dtype, shard.stage, shard.n_stages);
    for group in &layout.groups {
        write!(text, ";{:?}", group.attention).expect("a string takes all that is written");
        for shape in &group.layers {
            write!(text, " {}:{}x{}", shape.layer, shape.n_kv_heads, shape.head_dim)
                .expect("a string takes all that is written");
        }
    }
    XxHash3_64::oneshot(text.as_bytes())
}

pub(crate) fn fingerprint(fingerprint: &Fingerprint) -> u64 {
    let mut text = String::new();
    for (name, value) in fingerprint.parts() {
        write!(text, "{name}={value}\0").expect("a string takes all that is written");
    }
    XxHash3_64::oneshot(text.as_bytes())
}

#[cfg(test)]
mod tests {
    use types::KvDtype;

    use super::*;

    #[test]
    fn anything_that_moves_bytes_changes_the_summary() {
        let base = KvLayout::uniform(16, KvDtype::Bf16, 4, 2, 8);
        let variants = [
            KvLayout::uniform(32, KvDtype::Bf16, 4, 2, 8),
            KvLayout::uniform(16, KvDtype::F16, 4, 2, 8),
            KvLayout::uniform(16, KvDtype::Bf16, 5, 2, 8),
            KvLayout::uniform(16, KvDtype::Bf16, 4, 4, 8),
            KvLayout::uniform(16, KvDtype::Bf16, 4, 2, 4),
            KvLayout { shard: types::layout::Shard { stage: 1, ..base.shard }, ..base.clone() },
        ];
        assert_eq!(layout(&base), layout(&base.clone()));
        assert_eq!(layout(&base), layout(&base.clone().over_ranks(2).expect("two heads do")));
        for variant in &variants {
            assert_ne!(layout(&base), layout(variant), "{variant:?}");
        }
    }

    #[test]
    fn names_and_values_do_not_run_together() {
        let of =
            |name: &str, value: &str| fingerprint(&Fingerprint::new([(name.to_owned(), value.to_owned())]));
        assert_ne!(of("a", "bc"), of("ab", "c"));
        assert_eq!(of("a", "b"), of("a", "b"));
    }
}
