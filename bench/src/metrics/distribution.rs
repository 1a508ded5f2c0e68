//! The distribution of a set of latencies, in a few numbers.

use serde::{Deserialize, Serialize};

/// The percentiles that every report contains.
pub const PERCENTILES: [f64; 6] = [50.0, 75.0, 90.0, 95.0, 99.0, 99.9];

/// A distribution in milliseconds. A failed request counts as infinite, and so does a percentile among
/// failures.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Distribution {
    pub count: usize,
    /// The number of infinite samples.
    pub infinite: usize,
    #[serde(with = "open_number")]
    pub mean: f64,
    #[serde(with = "open_number")]
    pub std: f64,
    #[serde(with = "open_number")]
    pub min: f64,
    #[serde(with = "open_number")]
    pub p50: f64,
    #[serde(with = "open_number")]
    pub p75: f64,
    #[serde(with = "open_number")]
    pub p90: f64,
    #[serde(with = "open_number")]
    pub p95: f64,
    #[serde(with = "open_number")]
    pub p99: f64,
    #[serde(with = "open_number")]
    pub p999: f64,
    #[serde(with = "open_number")]
    pub max: f64,
}

impl Distribution {
    pub fn of(mut samples: Vec<f64>) -> Self {
        samples.sort_unstable_by(f64::total_cmp);
        let infinite = samples.iter().rev().take_while(|sample| sample.is_infinite()).count();
        let [p50, p75, p90, p95, p99, p999] = PERCENTILES.map(|percent| percentile(&samples, percent));
        Self {
            count: samples.len(),
            infinite,
            mean: mean(&samples),
            std: deviation(&samples),
            min: samples.first().copied().unwrap_or(f64::NAN),
            p50,
            p75,
            p90,
            p95,
            p99,
            p999,
            max: samples.last().copied().unwrap_or(f64::NAN),
        }
    }
}

/// Returns a percentile, linear between the two nearest ranks, as numpy does. `sorted` is ascending. NaN
/// without samples.
pub fn percentile(sorted: &[f64], percent: f64) -> f64 {
    if sorted.is_empty() {
        return f64::NAN;
    }
    let rank = percent / 100.0 * (sorted.len() - 1) as f64;
    let (below, share) = (rank.floor() as usize, rank.fract());
    if share == 0.0 {
        return sorted[below];
    }
    // If the upper value is infinite, so is the result; the difference of two infinities would not be a
    // number.
    let (low, high) = (sorted[below], sorted[below + 1]);
    if high.is_infinite() { high } else { low + (high - low) * share }
}

pub fn mean(samples: &[f64]) -> f64 {
    samples.iter().sum::<f64>() / samples.len() as f64
}

/// Returns the standard deviation of the samples as a population, as numpy's `std` does.
pub fn deviation(samples: &[f64]) -> f64 {
    let mean = mean(samples);
    if mean.is_infinite() {
        return f64::INFINITY;
    }
    (samples.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / samples.len() as f64).sqrt()
}

/// Reads and writes numbers that may be infinite. JSON has no infinity: infinity is written as `"inf"` and NaN
/// is written as null.
pub mod open_number {
    use serde::{Deserialize, Deserializer, Serializer};

    #[derive(Deserialize)]
    #[serde(untagged)]
    enum Written {
        Number(f64),
        Text(String),
        Nothing(()),
    }

    pub fn serialize<S: Serializer>(value: &f64, serializer: S) -> Result<S::Ok, S::Error> {
        match *value {
            value if value.is_finite() => serializer.serialize_f64(value),
            value if value.is_nan() => serializer.serialize_unit(),
            _ => serializer.serialize_str("inf"),
        }
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<f64, D::Error> {
        match Written::deserialize(deserializer)? {
            Written::Number(value) => Ok(value),
            Written::Text(text) if text == "inf" => Ok(f64::INFINITY),
            Written::Text(text) => Err(serde::de::Error::custom(format!("`{text}` is not a number"))),
            Written::Nothing(()) => Ok(f64::NAN),
        }
    }
}
