//! The measured part of a run.

use serde::{Deserialize, Serialize};

use crate::record::RequestRecord;

/// The window of a run that is measured, from `start_us` to `end_us`. A request belongs to the window in
/// which it should have been sent; a token counts where it arrives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Window {
    pub start_us: u64,
    pub end_us: u64,
    /// Whether ramp, warm-up or cool-down were cut off. If false, the window is the whole run to its last
    /// token.
    pub is_cut: bool,
}

impl Window {
    /// Returns the window of the whole run, from its start to its last event.
    pub fn whole(records: &[RequestRecord]) -> Self {
        let end_us = records.iter().map(RequestRecord::ended_at_us).max().unwrap_or(0);
        Self { start_us: 0, end_us, is_cut: false }
    }

    /// Returns the window from the end of ramp and warm-up until `cooldown_us` before the last request was
    /// due.
    pub fn steady(records: &[RequestRecord], skip_us: u64, cooldown_us: u64) -> Self {
        if skip_us == 0 && cooldown_us == 0 {
            return Self::whole(records);
        }
        let last_us = records.iter().map(|record| record.intended_us).max().unwrap_or(0);
        let end_us = (last_us + 1).saturating_sub(cooldown_us).max(skip_us);
        Self { start_us: skip_us, end_us, is_cut: true }
    }

    pub fn seconds(&self) -> f64 {
        (self.end_us - self.start_us) as f64 / 1e6
    }

    pub fn contains(&self, at_us: u64) -> bool {
        if self.is_cut { (self.start_us..self.end_us).contains(&at_us) } else { at_us <= self.end_us }
    }

    /// Returns the requests that belong to the window.
    pub fn of<'a>(&self, records: &'a [RequestRecord]) -> Vec<&'a RequestRecord> {
        records.iter().filter(|record| self.contains(record.intended_us)).collect()
    }
}
