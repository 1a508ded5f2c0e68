//! Rotary position embedding: the angle for each position and each pair of a head's numbers.

use std::f32::consts::PI;

use serde::Deserialize;
use serde_json::{Map, Value};

/// A model's rotary embedding.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rope {
    pub theta: f32,
    pub scaling: Scaling,
}

/// The scaling of frequencies for sequences longer than those of the initial training.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Scaling {
    None,
    /// All positions are divided by the factor.
    Linear {
        factor: f32,
    },
    /// Low frequencies are divided by the factor, high ones are unchanged, and those between are
    /// interpolated.
    Llama3 {
        factor: f32,
        low_frequency: f32,
        high_frequency: f32,
        trained_tokens: f32,
    },
    Yarn(Yarn),
}

/// YaRN: pairs that turn slowly are divided by the factor, fast ones are unchanged, and those between are interpolated by
/// their index.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Yarn {
    factor: f32,
    /// The turns within the trained tokens above which a pair is fast, and below which it is slow.
    fast_turns: f32,
    slow_turns: f32,
    trained_tokens: f32,
    /// Whether the bounds are rounded to whole pairs.
    truncates: bool,
    /// The factor of cosines and sines.
    turn_factor: f32,
    /// The factor of scores in latent attention.
    score_factor: f32,
}

/// The rotary settings as written: `rope_parameters` in newer configs, `rope_scaling` in older ones, which
/// have theta at the top level.
#[derive(Clone, Debug, Deserialize)]
pub(super) struct RawRope {
    rope_type: Option<String>,
    /// The name of `rope_type` in older configs. Some configs have both names.
    #[serde(rename = "type")]
    older_type: Option<String>,
    rope_theta: Option<f32>,
    factor: Option<f32>,
    low_freq_factor: Option<f32>,
    high_freq_factor: Option<f32>,
    original_max_position_embeddings: Option<f32>,
    #[serde(flatten)]
    others: Map<String, Value>,
}

impl Rope {
    /// `context_tokens` are the trained tokens if YaRN's settings have no number for them.
    pub(super) fn resolve(
        theta: Option<f32>,
        raw: Option<&RawRope>,
        context_tokens: usize,
    ) -> Result<Self, String> {
        let theta = raw.and_then(|raw| raw.rope_theta).or(theta).unwrap_or(10_000.0);
        let scaling = raw.map_or(Ok(Scaling::None), |raw| Scaling::resolve(raw, context_tokens))?;
        Ok(Self { theta, scaling })
    }

    /// Computes radians for each position, for each pair of a head. The arithmetic is in f32, as in
    /// `transformers`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let powers = (0..head_dim / 2).map(|pair| self.theta.powf((2 * pair) as f32 / head_dim as f32));
        match &self.scaling {
            Scaling::Yarn(yarn) => yarn.frequencies(self.theta, head_dim, powers),
            scaling => powers.map(|power| scaling.scaled(1.0 / power)).collect(),
        }
    }

    /// Returns the factor of all cosines and sines.
    pub fn turn_factor(&self) -> f32 {
        if let Scaling::Yarn(yarn) = self.scaling { yarn.turn_factor } else { 1.0 }
    }

    /// Returns the factor of scores in latent attention. Other attention has none.
    pub fn score_factor(&self) -> f32 {
        if let Scaling::Yarn(yarn) = self.scaling { yarn.score_factor } else { 1.0 }
    }

    /// Returns the longest sequence of a model with this many positions in its config. YaRN is made for a multiple of
    /// the trained tokens, which some configs do not count, as in vLLM.
    pub fn context_tokens(&self, positions: usize) -> usize {
        match self.scaling {
            Scaling::Yarn(yarn) => positions.max((yarn.trained_tokens * yarn.factor) as usize),
            _ => positions,
        }
    }

    /// Returns the settings as text, for the fingerprint.
    pub fn fingerprint(&self) -> String {
        format!("theta {}, {:?}", self.theta, self.scaling)
    }
}

impl RawRope {
    fn kind(&self) -> Option<&str> {
        self.rope_type.as_deref().or(self.older_type.as_deref())
    }

    /// Rejects settings that would be ignored: those of another type, and all settings without a type.
    fn check(&self) -> Result<(), String> {
        let scaling = [
            ("factor", self.factor),
            ("low_freq_factor", self.low_freq_factor),
            ("high_freq_factor", self.high_freq_factor),
            ("original_max_position_embeddings", self.original_max_position_embeddings),
        ];
        let is_neutral = |key: &str, value: &Value| {
            value.is_null() || (key == "partial_rotary_factor" && value.as_f64() == Some(1.0))
        };
        let is_known = |key: &str| self.kind() == Some("yarn") && YARN_KEYS.contains(&key);
        let unknown = self.others.iter().find(|(key, value)| !is_neutral(key, value) && !is_known(key));
        let unknown = unknown.map(|(key, _)| key);
        match (self.kind(), unknown) {
            (Some(kind), Some(key)) if IMPLEMENTED.contains(&kind) => {
                Err(format!("rope_type {kind:?} with {key} is not implemented"))
            }
            (Some(_), _) => Ok(()),
            (None, unknown) => {
                let set = scaling.into_iter().find(|(_, value)| value.is_some()).map(|(key, _)| key);
                match set.or(unknown.map(String::as_str)) {
                    Some(key) => Err(format!("rope settings with {key} name no rope_type")),
                    None => Ok(()),
                }
            }
        }
    }

    /// Returns the settings with the trained tokens that stand beside them in a config. They have priority, as in
    /// `transformers`.
    pub(super) fn with_trained_tokens(&self, tokens: Option<f32>) -> Self {
        let has_them = self.kind().is_some_and(|kind| ["llama3", "yarn"].contains(&kind));
        let tokens = tokens.filter(|_| has_them).or(self.original_max_position_embeddings);
        Self { original_max_position_embeddings: tokens, ..self.clone() }
    }

    /// Returns the keys that change numbers in other servers and are not read here, for the log.
    pub(super) fn ignored_keys(&self) -> impl Iterator<Item = &str> {
        self.others.keys().map(String::as_str).filter(|key| *key == ATTN_FACTOR)
    }

    /// Returns a number that only one type has; `None` if it is missing, null or zero.
    fn number(&self, key: &str) -> Result<Option<f32>, String> {
        let Some(value) = self.others.get(key).filter(|value| !value.is_null()) else { return Ok(None) };
        match value.as_f64() {
            Some(number) if number >= 0.0 => Ok(Some(number as f32).filter(|number| *number > 0.0)),
            _ => Err(format!("rope settings: {key} is {value}")),
        }
    }
}

/// The supported values of `rope_type`.
const IMPLEMENTED: &[&str] = &["default", "linear", "llama3", "yarn"];
/// The keys that only YaRN has. `finetuned` is about the training.
const YARN_KEYS: &[&str] = &[
    ATTN_FACTOR,
    "attention_factor",
    "beta_fast",
    "beta_slow",
    "finetuned",
    "mscale",
    "mscale_all_dim",
    "truncate",
];
/// A factor of cosines and sines in vLLM. `transformers` does not read it, and has `attention_factor` instead.
const ATTN_FACTOR: &str = "attn_factor";

fn needed(name: &str, value: Option<f32>) -> Result<f32, String> {
    value.filter(|value| *value > 0.0).ok_or_else(|| format!("rope scaling needs {name} above zero"))
}

impl Scaling {
    fn resolve(raw: &RawRope, context_tokens: usize) -> Result<Self, String> {
        raw.check()?;
        match raw.kind() {
            None | Some("default") => Ok(Self::None),
            Some("linear") => Ok(Self::Linear { factor: needed("factor", raw.factor)? }),
            Some("llama3") => Ok(Self::Llama3 {
                factor: needed("factor", raw.factor)?,
                low_frequency: needed("low_freq_factor", raw.low_freq_factor)?,
                high_frequency: needed("high_freq_factor", raw.high_freq_factor)?,
                trained_tokens: needed(
                    "original_max_position_embeddings",
                    raw.original_max_position_embeddings,
                )?,
            }),
            Some("yarn") => Yarn::resolve(raw, context_tokens).map(Self::Yarn),
            Some(other) => Err(format!("rope_type {other:?} is not implemented")),
        }
    }

    fn scaled(&self, frequency: f32) -> f32 {
        match *self {
            Self::None | Self::Yarn(_) => frequency,
            Self::Linear { factor } => frequency / factor,
            Self::Llama3 { factor, low_frequency, high_frequency, trained_tokens } => {
                let wavelength = 2.0 * PI / frequency;
                if wavelength > trained_tokens / low_frequency {
                    frequency / factor
                } else if wavelength < trained_tokens / high_frequency {
                    frequency
                } else {
                    let fast =
                        (trained_tokens / wavelength - low_frequency) / (high_frequency - low_frequency);
                    (1.0 - fast) * frequency / factor + fast * frequency
                }
            }
        }
    }
}

impl Yarn {
    fn resolve(raw: &RawRope, context_tokens: usize) -> Result<Self, String> {
        let factor = needed("factor", raw.factor)?;
        let (of_turns, of_all) = (raw.number("mscale")?, raw.number("mscale_all_dim")?);
        let from_factor = match (of_turns, of_all) {
            (Some(of_turns), Some(of_all)) => mscale(factor, of_turns) / mscale(factor, of_all),
            _ => mscale(factor, 1.0),
        };
        let truncates = match raw.others.get("truncate") {
            None => true,
            Some(Value::Bool(truncates)) => *truncates,
            Some(value) => return Err(format!("rope settings: truncate is {value}")),
        };
        Ok(Self {
            factor,
            fast_turns: raw.number("beta_fast")?.unwrap_or(32.0),
            slow_turns: raw.number("beta_slow")?.unwrap_or(1.0),
            trained_tokens: raw.original_max_position_embeddings.unwrap_or(context_tokens as f32),
            truncates,
            turn_factor: raw.number("attention_factor")?.unwrap_or(from_factor),
            score_factor: of_all.map_or(1.0, |of_all| mscale(factor, of_all).powi(2)),
        })
    }

    /// `powers` are the powers of `theta` for each pair: the reciprocals of the unscaled frequencies.
    fn frequencies(&self, theta: f32, head_dim: usize, powers: impl Iterator<Item = f32>) -> Vec<f32> {
        let (first, last) = self.interpolated_pairs(f64::from(theta), head_dim as f64);
        let frequency = |(pair, power): (usize, f32)| {
            let slow = ((pair as f32 - first) / (last - first)).clamp(0.0, 1.0);
            let fast = 1.0 - slow;
            1.0 / (self.factor * power) * (1.0 - fast) + 1.0 / power * fast
        };
        powers.enumerate().map(frequency).collect()
    }

    /// Returns the last fast and the first slow pair.
    fn interpolated_pairs(&self, theta: f64, head_dim: f64) -> (f32, f32) {
        let pair_with = |turns: f32| {
            let tokens = f64::from(self.trained_tokens) / (f64::from(turns) * 2.0 * std::f64::consts::PI);
            head_dim * tokens.ln() / (2.0 * theta.ln())
        };
        let (first, last) = (pair_with(self.fast_turns), pair_with(self.slow_turns));
        let (first, last) = if self.truncates { (first.floor(), last.ceil()) } else { (first, last) };
        let (first, last) = (first.max(0.0), last.min(head_dim - 1.0));
        (first as f32, if first == last { last + 0.001 } else { last } as f32)
    }
}

/// Returns by how much YaRN lengthens vectors.
fn mscale(factor: f32, scale: f32) -> f32 {
    if factor <= 1.0 { 1.0 } else { 0.1 * scale * factor.ln() + 1.0 }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_pair_turns_slower_than_the_one_before() {
        let rope = Rope { theta: 10_000.0, scaling: Scaling::None };
        assert_eq!(rope.frequencies(4), [1.0, 0.01]);
        let rope = Rope { theta: 10_000.0, scaling: Scaling::Linear { factor: 4.0 } };
        assert_eq!(rope.frequencies(4), [0.25, 0.0025]);
    }

    #[test]
    fn llama_3_leaves_fast_turns_alone() {
        let scaling =
            Scaling::Llama3 { factor: 8.0, low_frequency: 1.0, high_frequency: 4.0, trained_tokens: 8192.0 };
        let rope = Rope { theta: 500_000.0, scaling };
        let (scaled, plain) =
            (rope.frequencies(128), Rope { scaling: Scaling::None, ..rope }.frequencies(128));
        assert_eq!(scaled[..20], plain[..20]);
        assert_eq!(scaled[63], plain[63] / 8.0);
        assert!(plain.iter().zip(&scaled).all(|(plain, scaled)| *scaled <= *plain && *scaled >= plain / 8.0));
    }

    #[test]
    fn theta_stands_inside_or_outside() {
        let raw = |json: &str| serde_json::from_str::<RawRope>(json).expect("JSON");
        let resolve = |theta, raw: Option<&RawRope>| Rope::resolve(theta, raw, 64);
        let inside = raw(r#"{"rope_type": "default", "rope_theta": 5.0}"#);
        assert_eq!(resolve(None, Some(&inside)).map(|rope| rope.theta), Ok(5.0));
        assert_eq!(resolve(Some(7.0), None).map(|rope| rope.theta), Ok(7.0));
        let both = raw(r#"{"rope_type": "linear", "type": "linear", "factor": 2.0}"#);
        assert_eq!(resolve(None, Some(&both)).map(|rope| rope.scaling), Ok(Scaling::Linear { factor: 2.0 }));
        let incomplete = raw(r#"{"type": "llama3", "factor": 8.0}"#);
        assert_eq!(
            resolve(None, Some(&incomplete)),
            Err("rope scaling needs low_freq_factor above zero".to_owned())
        );
    }

    /// The expected numbers are those of `transformers`.
    #[test]
    fn yarn_is_as_in_transformers() {
        let rope =
            |json: &str| Rope::resolve(None, Some(&serde_json::from_str::<RawRope>(json).expect("JSON")), 64);
        let both = r#"{"type": "yarn", "factor": 40, "mscale": 1.0, "mscale_all_dim": 0.707,
            "original_max_position_embeddings": 4096, "beta_fast": 32, "beta_slow": 1}"#;
        let both = rope(both).expect("settings");
        let near = |one: f32, other: f32| (one - other).abs() <= 1e-6 * other;
        assert!(near(both.turn_factor(), 1.085_726_4), "{}", both.turn_factor());
        assert!(near(both.score_factor(), 1.589_626_2), "{}", both.score_factor());
        let found = both.frequencies(64);
        for (pair, expected) in [
            (0, 1.0),
            (10, 0.056_234_13),
            (11, 0.039_006_927),
            (20, 7.905_694e-4),
            (22, 1.778_279_4e-4),
            (23, 3.333_803_4e-5),
            (31, 3.333_803_5e-6),
        ] {
            assert!(near(found[pair], expected), "{pair}: {}, not {expected}", found[pair]);
        }
        let one = rope(r#"{"rope_type": "yarn", "factor": 8.0}"#).expect("settings");
        assert!(near(one.turn_factor(), 0.1 * 8f32.ln() + 1.0) && one.score_factor() == 1.0);
        let set = rope(r#"{"rope_type": "yarn", "factor": 8.0, "attention_factor": 1.5, "truncate": false}"#);
        assert_eq!(set.map(|rope| rope.turn_factor()), Ok(1.5));
    }
}
