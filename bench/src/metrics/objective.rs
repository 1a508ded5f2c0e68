//! Service level objectives of a request.

use std::fmt;
use std::str::FromStr;

use crate::metrics::distribution::{mean, percentile};
use crate::metrics::metric::{delivery_gaps, ms, tpot};
use crate::record::RequestRecord;
use crate::span::{parse_span, show_ms};

/// The objectives of a good request: all of them must hold. Without objectives, every finished request is
/// good.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Objectives {
    list: Vec<Objective>,
    /// The text of the flag `--slo`; empty if it is not given.
    text: String,
}

/// An objective: a bound on one number of a request.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Objective {
    of: ObjectiveMetric,
    limit_ms: f64,
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum ObjectiveMetric {
    Ttft,
    SecondToken,
    Handover,
    Tpot,
    E2el,
    /// A statistic of the gaps between the request's own chunks with tokens.
    Tbt(Statistic),
}

#[derive(Clone, Copy, Debug, PartialEq)]
enum Statistic {
    Mean,
    Max,
    Percentile(f64),
}

/// The number of sent requests that held each objective, and of those that held all.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Attainment {
    /// The number of sent requests, without those that the workload itself cancelled.
    pub sent: usize,
    pub good: usize,
    /// The number of requests that held each objective, in the order of the objectives.
    pub held: Vec<(String, usize)>,
}

// === impl Objectives ===

impl Objectives {
    pub fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    /// Returns the text of the flag, which a report contains and from which the objectives can be parsed
    /// again.
    pub fn as_typed(&self) -> &str {
        &self.text
    }

    /// Returns whether a request has finished and is within every bound.
    pub fn hold(&self, record: &RequestRecord) -> bool {
        record.is_finished() && self.list.iter().all(|objective| objective.holds(record))
    }

    /// Counts the *sent* requests that held the objectives. Late requests that are dropped cannot raise the
    /// share.
    pub fn attainment<'a>(&self, records: impl Iterator<Item = &'a RequestRecord>) -> Attainment {
        let mut held: Vec<_> = self.list.iter().map(|objective| (objective.to_string(), 0)).collect();
        let (mut sent, mut good) = (0, 0);
        for record in records.filter(|record| !record.is_cancelled()) {
            sent += 1;
            good += usize::from(self.hold(record));
            for (objective, (_, n_held)) in self.list.iter().zip(&mut held) {
                *n_held += usize::from(record.is_finished() && objective.holds(record));
            }
        }
        Attainment { sent, good, held }
    }
}

impl Attainment {
    /// Returns good ÷ sent requests; 0 if none was sent, because nothing was attained.
    pub fn share(&self) -> f64 {
        if self.sent == 0 { 0.0 } else { self.good as f64 / self.sent as f64 }
    }
}

impl Objective {
    /// Returns whether the objective holds for a request. A bound on a number that the request does not have
    /// (the second token of one) always holds.
    fn holds(&self, record: &RequestRecord) -> bool {
        self.of.value(record).is_none_or(|value| value <= self.limit_ms)
    }
}

impl ObjectiveMetric {
    fn value(self, record: &RequestRecord) -> Option<f64> {
        match self {
            ObjectiveMetric::Ttft => record.token_us(0).map(ms),
            ObjectiveMetric::SecondToken => record.token_us(1).map(ms),
            ObjectiveMetric::Handover => Some(ms(record.token_us(1)? - record.token_us(0)?)),
            ObjectiveMetric::Tpot => tpot(record),
            ObjectiveMetric::E2el => record.last_token_us().map(ms),
            ObjectiveMetric::Tbt(statistic) => statistic.of(delivery_gaps(record).collect()),
        }
    }
}

impl Statistic {
    /// Returns the statistic of these gaps. Percentiles are by nearest rank: with fewer than a hundred gaps
    /// the 99th is the largest.
    fn of(self, mut gaps: Vec<f64>) -> Option<f64> {
        if gaps.is_empty() {
            return None;
        }
        gaps.sort_unstable_by(f64::total_cmp);
        Some(match self {
            Statistic::Mean => mean(&gaps),
            Statistic::Max => percentile(&gaps, 100.0),
            Statistic::Percentile(percent) => {
                let rank = (percent / 100.0 * gaps.len() as f64).ceil() as usize;
                gaps[rank.clamp(1, gaps.len()) - 1]
            }
        })
    }
}

// === reading and writing ===

impl FromStr for Objectives {
    type Err = String;

    /// Parses `ttft=2s,tbt=25ms`. `tbt` means `tbt.p99`; others are `tbt.mean`, `tbt.p95` and `tbt.max`.
    fn from_str(text: &str) -> Result<Self, String> {
        if text.trim().is_empty() {
            return Ok(Self::default());
        }
        let list = text.split(',').map(|part| part.trim().parse()).collect::<Result<_, _>>()?;
        Ok(Self { list, text: text.to_owned() })
    }
}

impl FromStr for Objective {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let (name, limit) = text.split_once('=').ok_or_else(|| format!("`{text}` is not NAME=SPAN"))?;
        let limit_ms = parse_span(limit)?.as_secs_f64() * 1e3;
        Ok(Self { of: parse_bounded(name)?, limit_ms })
    }
}

fn parse_bounded(name: &str) -> Result<ObjectiveMetric, String> {
    match name {
        "ttft" => Ok(ObjectiveMetric::Ttft),
        "second_token" => Ok(ObjectiveMetric::SecondToken),
        "handover" => Ok(ObjectiveMetric::Handover),
        "tpot" => Ok(ObjectiveMetric::Tpot),
        "e2el" => Ok(ObjectiveMetric::E2el),
        "tbt" => Ok(ObjectiveMetric::Tbt(Statistic::Percentile(99.0))),
        _ => match name.strip_prefix("tbt.") {
            Some(statistic) => parse_statistic(statistic).map(ObjectiveMetric::Tbt),
            None => Err(format!(
                "`{name}` is none of ttft, second_token, handover, tpot, tbt[.mean|.pN|.max], e2el"
            )),
        },
    }
}

fn parse_statistic(name: &str) -> Result<Statistic, String> {
    match name {
        "mean" => Ok(Statistic::Mean),
        "max" => Ok(Statistic::Max),
        _ => name
            .strip_prefix('p')
            .and_then(|percent| percent.parse().ok())
            .filter(|percent| (0.0..=100.0).contains(percent))
            .map(Statistic::Percentile)
            .ok_or_else(|| format!("`tbt.{name}`: the statistic is mean, max or a percentile as p99")),
    }
}

impl fmt::Display for Objectives {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (nth, objective) in self.list.iter().enumerate() {
            write!(f, "{}{objective}", if nth == 0 { "" } else { ", " })?;
        }
        Ok(())
    }
}

impl fmt::Display for Objective {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let limit = show_ms(self.limit_ms);
        match self.of {
            ObjectiveMetric::Ttft => write!(f, "ttft ≤ {limit}"),
            ObjectiveMetric::SecondToken => write!(f, "second_token ≤ {limit}"),
            ObjectiveMetric::Handover => write!(f, "handover ≤ {limit}"),
            ObjectiveMetric::Tpot => write!(f, "tpot ≤ {limit}"),
            ObjectiveMetric::E2el => write!(f, "e2el ≤ {limit}"),
            ObjectiveMetric::Tbt(Statistic::Mean) => write!(f, "tbt.mean ≤ {limit}"),
            ObjectiveMetric::Tbt(Statistic::Max) => write!(f, "tbt.max ≤ {limit}"),
            ObjectiveMetric::Tbt(Statistic::Percentile(percent)) => write!(f, "tbt.p{percent} ≤ {limit}"),
        }
    }
}
