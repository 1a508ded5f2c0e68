//! Hot path.
//! Launching a step: who gets blocks, who waits, what runs.
//!
//! Asking for blocks and getting them is one call to the pool, so what is decided here is only in which order to ask,
//! how much to leave, and who gives way.

use engine::{Launched, Row, StepBatch};
use kv_cache::BlockLease;
use tokio::time::Instant;
use tracing::debug;
use types::BlockIdx;

use super::Worker;
use crate::batcher::{self, Budget, Candidate, Share};
use crate::flight::{Flight, FlightRow};
use crate::growth;
use crate::rank::{Rank, SequenceId};
use crate::sequence::Sequence;

impl Worker {
    pub(super) fn launch(&mut self, now: Instant) {
        self.has_just_launched = false;
        self.reap(now);
        if self.lost.is_some() || self.flights.len() >= self.settings.steps_in_flight_max {
            return;
        }
        let stalled = self.grow(now);
        if stalled.is_empty() {
            self.admit(now);
        }
        let shares = self.plan(now, &stalled);
        if !shares.is_empty() {
            self.start(&shares, now);
        }
    }

    fn rank(&self, sequence: &Sequence, now: Instant) -> Rank {
        sequence.rank(now, self.settings.age_bound)
    }

    /// The sequences that `wanted` picks, first in line first.
    fn line(&self, now: Instant, wanted: impl Fn(&Sequence) -> bool) -> Vec<(Rank, SequenceId)> {
        let picked = self.sequences.values().filter(|sequence| wanted(sequence));
        let mut line: Vec<_> = picked.map(|sequence| (self.rank(sequence, now), sequence.id)).collect();
        line.sort_unstable();
        line
    }
}

// === impl Worker: growth ===

impl Worker {
    /// Gets blocks for running sequences that need more. Returns those that must do without for now.
    fn grow(&mut self, now: Instant) -> Vec<SequenceId> {
        let lacks_room =
            |sequence: &Sequence| sequence.is_runnable() && sequence.blocks_missing(self.layout()) > 0;
        let line = self.line(now, lacks_room);
        let mut stalled = Vec::new();
        for (rank, id) in line {
            if !self.make_room(id, rank, now) {
                stalled.push(id);
            }
        }
        stalled
    }

    /// Ends by success, or for want of a victim: each turn takes one away.
    fn make_room(&mut self, id: SequenceId, rank: Rank, now: Instant) -> bool {
        loop {
            match self.grow_one(id) {
                Grown::Enough => return true,
                // Blocks are on their way back already; preempting more would not bring them sooner.
                Grown::NoRoom if self.flights.iter().any(|flight| !flight.held.is_empty()) => return false,
                Grown::NoRoom => match growth::victim(&self.growers(now), rank) {
                    Some(victim) => self.preempt(victim),
                    None => return false,
                },
            }
        }
    }

    fn grow_one(&mut self, id: SequenceId) -> Grown {
        let Some(sequence) = self.sequences.get_mut(&id).filter(|sequence| sequence.is_placed()) else {
            // It gave way itself meanwhile.
            return Grown::Enough;
        };
        match self.pool.reserve(sequence.blocks_missing(&self.model.layout), sequence.holder()) {
            Ok(more) => {
                sequence.grow(more);
                Grown::Enough
            }
            Err(_) => Grown::NoRoom,
        }
    }

    /// Takes a sequence's blocks away. It waits, at its old place in line, and is computed again.
    fn preempt(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        self.metrics.preemptions.inc();
        debug!(parent: &sequence.span, n_tokens = sequence.n_tokens(), "preempted");
        let room = sequence.unplace();
        if let (true, Some(flight)) = (sequence.is_in_flight(), self.flights.back_mut()) {
            flight.held.extend(room);
        }
    }
}

enum Grown {
    Enough,
    NoRoom,
}

// === impl Worker: admission ===

impl Worker {
    /// Gives blocks to waiting sequences, first in line first.
    ///
    /// Who does not fit holds up all behind it: a stream of small prompts shall not starve a large one.
    fn admit(&mut self, now: Instant) {
        let n_placed = self.sequences.values().filter(|sequence| sequence.is_placed()).count();
        if n_placed == self.sequences.len() {
            return;
        }
        let seats = self.settings.sequences_max.saturating_sub(n_placed);
        let line = self.line(now, |sequence| !sequence.is_placed());
        let _ = line.into_iter().take(seats).all(|(_, id)| self.place(id, now));
    }

    /// Places a waiting sequence if its blocks and the reserve for growth fit.
    fn place(&mut self, id: SequenceId, now: Instant) -> bool {
        let growers = self.growers(now);
        let each = self.settings.growth_blocks;
        let layout = &self.model.layout;
        let Some(sequence) = self.sequences.get_mut(&id) else { return true };
        if sequence.is_in_flight() {
            // It was preempted, and its last token is still being sampled.
            return false;
        }
        // Where nobody else runs, what is there must do: waiting for more would be waiting for nobody.
        let reserve = match growers.is_empty() {
            true => 0,
            false => growth::reserve(&growers, each) + sequence.growth_after_placement(layout).min(each),
        };
        let holder = sequence.holder();
        let prefix = self.pool.adopt(sequence.adoptable(), holder.clone());
        let n_fresh = layout.blocks_for(sequence.n_tokens()) - prefix.n_blocks();
        let needed = (n_fresh + reserve) * layout.groups.len();
        if needed > self.pool.counts().available() as usize {
            return false;
        }
        let Ok(fresh) = self.pool.reserve(n_fresh, holder) else { return false };
        self.note_placed(id, prefix, fresh);
        true
    }

    fn note_placed(&mut self, id: SequenceId, prefix: BlockLease, fresh: BlockLease) {
        let layout = &self.model.layout;
        let n_cached = prefix.n_blocks() * usize::from(layout.block_tokens);
        self.metrics.cached_tokens.inc_by(n_cached as u64);
        if let Some(sequence) = self.sequences.get_mut(&id) {
            debug!(parent: &sequence.span, n_tokens = sequence.n_tokens(), n_cached, "placed");
            sequence.place(prefix.join(fresh), n_cached, layout);
        }
    }
}

// === impl Worker: the step ===

impl Worker {
    fn plan(&self, now: Instant, stalled: &[SequenceId]) -> Vec<Share> {
        let candidate = |sequence: &Sequence| sequence.candidate(self.rank(sequence, now));
        let candidates: Vec<Candidate> = self
            .sequences
            .values()
            .filter(|sequence| !stalled.contains(&sequence.id))
            .filter_map(candidate)
            .collect();
        let budget = Budget {
            step_tokens_max: self.settings.step_tokens_max,
            rows_max: self.settings.sequences_max,
            block_tokens: usize::from(self.layout().block_tokens),
        };
        batcher::plan(&candidates, budget)
    }

    fn start(&mut self, shares: &[Share], now: Instant) {
        let rows: Vec<FlightRow> =
            shares.iter().map(|share| FlightRow { id: share.id, n_tokens: share.n_tokens }).collect();
        match self.launch_rows(&rows) {
            Ok(launched) => self.note_launched(launched, rows, now),
            Err(error) => self.fail_step(&rows, &error),
        }
    }

    fn launch_rows(&mut self, rows: &[FlightRow]) -> Result<Launched, engine::BackendError> {
        let sharing: Vec<(&Sequence, usize)> = rows
            .iter()
            .filter_map(|row| self.sequences.get(&row.id).map(|sequence| (sequence, row.n_tokens)))
            .collect();
        let n_groups = self.model.layout.groups.len();
        let tables: Vec<&[BlockIdx]> = sharing.iter().flat_map(|(sequence, _)| sequence.tables()).collect();
        let batch: Vec<Row<'_>> = sharing
            .iter()
            .enumerate()
            .map(|(nth, (sequence, n_tokens))| {
                sequence.row(*n_tokens, &tables[nth * n_groups..(nth + 1) * n_groups])
            })
            .collect();
        self.backend.launch(StepBatch { rows: &batch })
    }

    fn note_launched(&mut self, launched: Launched, rows: Vec<FlightRow>, now: Instant) {
        for row in &rows {
            let Some(sequence) = self.sequences.get_mut(&row.id) else { continue };
            if let Some(queued) = sequence.launched(row.n_tokens, launched.fence(), &self.model.layout, now) {
                self.metrics.queue_seconds.observe(queued.as_secs_f64());
            }
        }
        let is_late = self.launch_at().is_some();
        self.flights.push_back(Flight::new(launched, rows, now, self.flights.back(), is_late));
        self.has_just_launched = true;
    }
}
