//! Latent attention as a config describes it: the widths of its latents and heads.

use serde::Deserialize;

/// The epsilon of the norms of latents. `transformers` does not read it from a config.
pub const NORM_EPSILON: f32 = 1e-6;

/// The latent attention of a model. All heads share one latent vector for each token: a compressed key and value, then a
/// rotated key. KV holds this vector.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LatentShape {
    /// The width of the latent of q; `None`: q is computed without one.
    pub q_rank: Option<usize>,
    /// The width of the compressed key and value.
    pub kv_rank: usize,
    /// The numbers of a head of q that are not rotated.
    pub unrotated: usize,
    /// The numbers of a head of q that are rotated.
    pub rotated: usize,
    /// The numbers of a head's value.
    pub value: usize,
    pub pairs: RotatedPairs,
}

/// Which two numbers of a head are rotated together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RotatedPairs {
    Neighbours,
    /// Those with the same place in the two halves.
    Halves,
}

/// The keys of `config.json` that describe latent attention.
#[derive(Debug, Deserialize)]
pub(super) struct RawLatent {
    q_lora_rank: Option<usize>,
    kv_lora_rank: Option<usize>,
    qk_nope_head_dim: Option<usize>,
    qk_rope_head_dim: Option<usize>,
    /// The sum of the two above, in configs of newer versions of `transformers`.
    qk_head_dim: Option<usize>,
    v_head_dim: Option<usize>,
    rope_interleave: Option<bool>,
}

impl LatentShape {
    pub(super) fn resolve(raw: &RawLatent) -> Result<Self, String> {
        let width = |name: &str, width: Option<usize>| {
            let width = width.unwrap_or(0);
            let is_usable = width > 0 && u16::try_from(width).is_ok();
            if is_usable { Ok(width) } else { Err(format!("{name} is {width}")) }
        };
        let shape = Self {
            q_rank: raw.q_lora_rank.map(|rank| width("q_lora_rank", Some(rank))).transpose()?,
            kv_rank: width("kv_lora_rank", raw.kv_lora_rank)?,
            unrotated: width("qk_nope_head_dim", raw.qk_nope_head_dim)?,
            rotated: width("qk_rope_head_dim", raw.qk_rope_head_dim)?,
            value: width("v_head_dim", raw.v_head_dim)?,
            pairs: match raw.rope_interleave {
                Some(true) => RotatedPairs::Neighbours,
                Some(false) | None => RotatedPairs::Halves,
            },
        };
        if !shape.rotated.is_multiple_of(2) {
            return Err(format!("qk_rope_head_dim {} is odd: rotary embedding needs pairs", shape.rotated));
        }
        if u16::try_from(shape.width()).is_err() {
            return Err(format!("kv_lora_rank and qk_rope_head_dim are {} together", shape.width()));
        }
        match raw.qk_head_dim {
            Some(sum) if sum != shape.q_head() => Err(format!(
                "qk_head_dim is {sum}, but qk_nope_head_dim and qk_rope_head_dim are {} together",
                shape.q_head()
            )),
            _ => Ok(shape),
        }
    }

    /// Returns the numbers of KV for each token and layer.
    pub fn width(&self) -> usize {
        self.kv_rank + self.rotated
    }

    /// Returns the numbers of a head of q.
    pub fn q_head(&self) -> usize {
        self.unrotated + self.rotated
    }

    /// Returns the rows of the matrix that makes keys and values of a latent, for each head.
    pub fn kv_head(&self) -> usize {
        self.unrotated + self.value
    }

    /// Returns the settings as text, for the fingerprint.
    pub(super) fn fingerprint(&self) -> String {
        let Self { q_rank, kv_rank, unrotated, rotated, value, pairs } = self;
        let q_rank = q_rank.map_or("none".to_owned(), |rank| rank.to_string());
        format!(
            "q rank {q_rank}, kv rank {kv_rank}, heads {unrotated} and {rotated} rotated by {pairs:?}, values {value}, \
             epsilon {NORM_EPSILON}"
        )
    }
}
