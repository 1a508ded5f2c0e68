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
    pub(super) fn resolve(theta: Option<f32>, raw: Option<&RawRope>) -> Result<Self, String> {
        let theta = raw.and_then(|raw| raw.rope_theta).or(theta).unwrap_or(10_000.0);
        let scaling = raw.map_or(Ok(Scaling::None), Scaling::resolve)?;
        Ok(Self { theta, scaling })
    }

    /// Computes radians for each position, for each pair of a head. The arithmetic is in f32, as in
    /// `transformers`.
    pub fn frequencies(&self, head_dim: usize) -> Vec<f32> {
        let plain = (0..head_dim / 2).map(|pair| 1.0 / self.theta.powf((2 * pair) as f32 / head_dim as f32));
        plain.map(|frequency| self.scaling.scaled(frequency)).collect()
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
        let unknown = self.others.iter().find(|(key, value)| !is_neutral(key, value)).map(|(key, _)| key);
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
}

/// The supported values of `rope_type`.
const IMPLEMENTED: &[&str] = &["default", "linear", "llama3"];

impl Scaling {
    fn resolve(raw: &RawRope) -> Result<Self, String> {
        raw.check()?;
        let needed = |name: &str, value: Option<f32>| {
            value.filter(|value| *value > 0.0).ok_or_else(|| format!("rope scaling needs {name} above zero"))
        };
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
            Some(other) => Err(format!("rope_type {other:?} is not implemented")),
        }
    }

    fn scaled(&self, frequency: f32) -> f32 {
        match *self {
            Self::None => frequency,
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
        let inside = raw(r#"{"rope_type": "default", "rope_theta": 5.0}"#);
        assert_eq!(Rope::resolve(None, Some(&inside)).map(|rope| rope.theta), Ok(5.0));
        assert_eq!(Rope::resolve(Some(7.0), None).map(|rope| rope.theta), Ok(7.0));
        let both = raw(r#"{"rope_type": "linear", "type": "linear", "factor": 2.0}"#);
        assert_eq!(
            Rope::resolve(None, Some(&both)).map(|rope| rope.scaling),
            Ok(Scaling::Linear { factor: 2.0 })
        );
        let incomplete = raw(r#"{"type": "llama3", "factor": 8.0}"#);
        assert_eq!(
            Rope::resolve(None, Some(&incomplete)),
            Err("rope scaling needs low_freq_factor above zero".to_owned())
        );
    }
}
