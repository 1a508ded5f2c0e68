//! Computes the cost of faults: lost requests, and the time until the service works as before.

use crate::metrics::Objectives;
use crate::record::RequestRecord;

/// The share of the earlier attainment from which the service counts as recovered.
const RECOVERED_SHARE: f64 = 0.95;
/// The length of the stretches over which attainment is computed, in microseconds.
const STRETCH_US: u64 = 2_000_000;

/// The cost of one fault.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Cost {
    /// The requests that were running when the fault was injected, and failed.
    pub lost: usize,
    /// The seconds until the attainment was back and stayed, up to the next fault; infinite if it did not
    /// come back.
    pub recovery_s: f64,
}

/// Returns the cost of each fault. `faults_us` are the times of injection, ascending.
pub fn costs(records: &[RequestRecord], faults_us: &[u64], objectives: &Objectives) -> Vec<Cost> {
    let sent: Vec<_> = records.iter().filter(|record| !record.is_cancelled()).collect();
    let end_us = sent.iter().map(|record| record.intended_us + 1).max().unwrap_or(0);
    let first_us = faults_us.first().copied().unwrap_or(end_us);
    let over_before: Vec<_> = sent.iter().copied().filter(|record| record.ended_at_us() < first_us).collect();
    let before = attainment(&over_before, 0, first_us, objectives).unwrap_or(1.0);
    let until = |nth: usize| faults_us.get(nth + 1).copied().unwrap_or(end_us);
    let cost = |(nth, &at_us): (usize, &u64)| Cost {
        lost: lost(&sent, at_us),
        recovery_s: recovery(&sent, at_us, until(nth), before * RECOVERED_SHARE, objectives),
    };
    faults_us.iter().enumerate().map(cost).collect()
}

fn lost(sent: &[&RequestRecord], at_us: u64) -> usize {
    let under_way = |record: &RequestRecord| record.intended_us <= at_us && at_us < record.ended_at_us();
    sent.iter().filter(|record| under_way(record) && record.failure().is_some()).count()
}

/// Returns the seconds from the fault to the last request that was not good in the last stretch with
/// attainment below `wanted`. A stretch begins at each request, so no grid affects the result. If less than a
/// stretch follows that request, the end of the recovery is not known, and the result is infinite.
fn recovery(sent: &[&RequestRecord], at_us: u64, until_us: u64, wanted: f64, objectives: &Objectives) -> f64 {
    let starts =
        sent.iter().map(|record| record.intended_us).filter(|start| (at_us..until_us).contains(start));
    let is_bad = |start: &u64| {
        let end_us = (start + STRETCH_US).min(until_us);
        attainment(sent, *start, end_us, objectives).is_some_and(|share| share < wanted)
    };
    let Some(stretch_us) = starts.filter(is_bad).max() else { return 0.0 };
    let within = sent.iter().filter(|r| (stretch_us..stretch_us + STRETCH_US).contains(&r.intended_us));
    let missed = within.filter(|record| !objectives.hold(record)).map(|record| record.intended_us);
    match missed.max() {
        Some(last_us) if last_us + STRETCH_US < until_us => (last_us - at_us) as f64 / 1e6,
        _ => f64::INFINITY,
    }
}

/// Returns the attainment of the requests due in `from_us..to_us`; `None` if there was none.
fn attainment(sent: &[&RequestRecord], from_us: u64, to_us: u64, objectives: &Objectives) -> Option<f64> {
    let due = sent.iter().filter(|record| (from_us..to_us).contains(&record.intended_us));
    let (n, good) =
        due.fold((0, 0), |(n, good), record| (n + 1, good + usize::from(objectives.hold(record))));
    (n > 0).then(|| f64::from(good as u32) / f64::from(n))
}
