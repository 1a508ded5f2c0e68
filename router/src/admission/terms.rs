//! The terms of a request for admission: its objective, its tenant's weight, and whether it may be shed.

use std::fmt;
use std::num::NonZeroU32;
use std::str::FromStr;
use std::time::Duration;

use serde::Deserialize;

use crate::error::AcceptError;

/// The header, or the metadata of a gRPC call, with the request's objective.
pub(crate) const SLO: &str = "x-baton-slo";
/// The header, or the metadata of a gRPC call, of a request that may be shed: `1`, or `0` as if absent.
pub(crate) const SHEDDABLE: &str = "x-baton-sheddable";

/// The longest time in an objective. Sums of a moment and a longer time could overflow.
const OBJECTIVE_MAX: Duration = Duration::from_secs(24 * 3600);

/// The terms on which a request waits in its model's line.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct AdmissionTerms {
    pub objective: Objective,
    pub weight: TenantWeight,
    pub shedding: Shedding,
}

/// The latency that a request must have. `None`: any.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize)]
#[serde(try_from = "String")]
pub struct Objective {
    /// The longest time from the request's arrival to its first token.
    pub first_token: Option<Duration>,
    /// The longest time from one token to the next.
    pub token_gap: Option<Duration>,
}

/// A tenant's weight: while tenants wait, each is served in proportion to its weight.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
pub struct TenantWeight(pub NonZeroU32);

/// Which waiting requests leave first when the line is full.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Shedding {
    #[default]
    Last,
    First,
}

impl AdmissionTerms {
    /// Returns these terms of a tenant with those of the request's headers.
    pub(crate) fn asked(self, slo: Option<&str>, sheddable: Option<&str>) -> Result<Self, AcceptError> {
        let objective =
            slo.map(|text| text.parse::<Objective>().map_err(|reason| AcceptError::invalid(SLO, reason)));
        let objective = objective.transpose()?.unwrap_or_default().or(self.objective);
        let shedding = match sheddable.map(str::trim) {
            None | Some("0") => Shedding::Last,
            Some("1") => Shedding::First,
            Some(other) => return Err(AcceptError::invalid(SHEDDABLE, format!("0 or 1, not `{other}`"))),
        };
        Ok(Self { objective, shedding, ..self })
    }
}

impl Default for TenantWeight {
    fn default() -> Self {
        Self(NonZeroU32::MIN)
    }
}

impl Objective {
    /// Returns this objective, with the parts that it lacks from `default`.
    #[must_use]
    pub fn or(self, default: Self) -> Self {
        Self {
            first_token: self.first_token.or(default.first_token),
            token_gap: self.token_gap.or(default.token_gap),
        }
    }
}

/// Reads `ttft=2s,tbt=50ms`, or one of the two.
impl FromStr for Objective {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let mut objective = Self::default();
        for part in text.split(',') {
            let (name, value) = part.split_once('=').ok_or_else(|| wanted(text))?;
            let value = duration(value.trim()).ok_or_else(|| wanted(text))?;
            let field = match name.trim() {
                "ttft" => &mut objective.first_token,
                "tbt" => &mut objective.token_gap,
                _ => return Err(wanted(text)),
            };
            if field.replace(value).is_some() {
                return Err(wanted(text));
            }
        }
        Ok(objective)
    }
}

impl TryFrom<String> for Objective {
    type Error = String;

    fn try_from(text: String) -> Result<Self, String> {
        text.parse()
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let part =
            |name, value: Option<Duration>| value.map(|value| format!("{name}={}ms", value.as_millis()));
        let parts = [part("ttft", self.first_token), part("tbt", self.token_gap)];
        f.write_str(&parts.into_iter().flatten().collect::<Vec<_>>().join(","))
    }
}

fn wanted(text: &str) -> String {
    format!("an objective such as `ttft=2s,tbt=50ms`, with times above zero and up to a day, not `{text}`")
}

/// Reads a positive number of seconds or milliseconds, such as `2s` or `50ms`, up to a day.
fn duration(text: &str) -> Option<Duration> {
    let (number, unit_s) = match text.strip_suffix("ms") {
        Some(number) => (number, 1e-3),
        None => (text.strip_suffix('s')?, 1.0),
    };
    let seconds = number.parse::<f64>().ok()? * unit_s;
    let is_right = |duration: &Duration| !duration.is_zero() && *duration <= OBJECTIVE_MAX;
    Duration::try_from_secs_f64(seconds).ok().filter(is_right)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn objectives_are_read() {
        let ms = |ms| Some(Duration::from_millis(ms));
        for (text, expected) in [
            ("ttft=2s,tbt=50ms", Some((ms(2_000), ms(50)))),
            (" tbt = 0.05s ", Some((None, ms(50)))),
            ("ttft=1500ms", Some((ms(1_500), None))),
            ("", None),
            ("ttft", None),
            ("ttft=2", None),
            ("ttft=0s", None),
            ("ttft=-1s", None),
            ("ttft=nans", None),
            ("ttft=86400s", Some((ms(86_400_000), None))),
            ("ttft=86401s", None),
            ("ttft=1e19s", None),
            ("e2e=3s", None),
            ("ttft=1s,ttft=2s", None),
        ] {
            let read = text.parse::<Objective>().ok();
            assert_eq!(read.map(|read| (read.first_token, read.token_gap)), expected, "`{text}`");
        }
    }

    #[test]
    fn a_default_fills_what_is_absent() {
        let read = |text: &str| text.parse::<Objective>().expect("an objective");
        assert_eq!(read("ttft=1s").or(read("ttft=2s,tbt=50ms")), read("ttft=1s,tbt=50ms"));
        assert_eq!(read("ttft=1s,tbt=50ms").to_string(), "ttft=1000ms,tbt=50ms");
    }
}
