//! A step that was launched and is not collected.

use engine::Launched;
use tokio::time::Instant;

use crate::rank::SequenceId;
use crate::room::Room;

#[derive(Debug)]
pub(crate) struct Flight {
    pub(crate) launched: Launched,
    /// In the batch's order.
    pub(crate) rows: Vec<FlightRow>,
    pub(crate) launched_at: Instant,
    /// When a step that is only modelled ends.
    pub(crate) due: Option<Instant>,
    /// Blocks of sequences that ended or were preempted while this step was under way. It may still write into them,
    /// so they go back when it is collected and no sooner.
    pub(crate) held: Vec<Room>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct FlightRow {
    pub(crate) id: SequenceId,
    pub(crate) n_tokens: usize,
}

impl Flight {
    /// `after`: when the device is done with the step before.
    pub(crate) fn new(
        launched: Launched,
        rows: Vec<FlightRow>,
        now: Instant,
        after: Option<Instant>,
    ) -> Self {
        let starts_at = after.map_or(now, |after| after.max(now));
        let due = launched.modelled_cost().map(|cost| starts_at + cost);
        Self { launched, rows, launched_at: now, due, held: Vec::new() }
    }
}
