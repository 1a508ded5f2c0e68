//! Hot path. Launches a step: chooses the sequences that get blocks, that wait, and that run.
//!
//! One call to the pool requests blocks and gets them. This file decides only the order of the calls, the
//! blocks to leave free, and the sequence to preempt.

use std::time::Duration;

use engine::{PendingStep, Row, StepBatch};
use kv_cache::BlockLease;
use tokio::time::Instant;
use tracing::debug;
use types::BlockIdx;

use super::Worker;
use crate::batcher::{self, Budget, Candidate, Share};
use crate::growth;
use crate::launched_step::{LaunchTiming, LaunchedStep, StepRow};
use crate::precedence::{Precedence, SequenceId, Turn};
use crate::sequence::Sequence;

/// The share of the longest gap that steps are planned to take. Some take longer than planned.
const GAP_SHARE: f64 = 0.75;
/// The time by which KV may arrive earlier than expected.
const EARLY_ARRIVAL_MS: f64 = 2.0;

/// When KV of other nodes arrives, as a step that is planned sees it.
#[derive(Clone, Copy, Debug, Default)]
pub(super) struct ArrivalTimes {
    /// The longest wait of a sequence whose KV has arrived, until the step begins.
    waited_ms: f64,
    /// The time from the step's begin to the next expected arrival, negative before the begin; `None`: none is expected.
    next_ms: Option<f64>,
}

impl Worker {
    pub(super) fn launch(&mut self, timing: LaunchTiming, now: Instant) {
        self.has_just_launched = false;
        self.reap(now);
        if self.lost.is_some() || self.flights.len() >= self.steps_in_flight_max {
            return;
        }
        if self.grow(now) {
            self.admit(now);
        }
        let shares = self.plan(now);
        if !shares.is_empty() {
            self.start(&shares, timing, now);
        }
    }

    fn precedence(&self, sequence: &Sequence, now: Instant) -> Precedence {
        sequence.precedence(now, self.settings.age_bound)
    }

    /// Returns the sequences for which `wanted` is true, in order of precedence.
    fn line(&self, now: Instant, wanted: impl Fn(&Sequence) -> bool) -> Vec<(Precedence, SequenceId)> {
        let picked = self.sequences.values().filter(|sequence| wanted(sequence));
        let mut line: Vec<_> = picked.map(|sequence| (self.precedence(sequence, now), sequence.id)).collect();
        line.sort_unstable();
        line
    }
}

// === impl Worker: growth ===

impl Worker {
    /// Gets blocks for running sequences that need more. Returns whether all of them got some.
    fn grow(&mut self, now: Instant) -> bool {
        let lacks_room =
            |sequence: &Sequence| sequence.is_runnable() && sequence.blocks_missing(self.layout()) > 0;
        let line = self.line(now, lacks_room);
        let mut all_got_some = true;
        for (precedence, id) in line {
            all_got_some &= self.make_room(id, precedence, now);
        }
        all_got_some
    }

    /// Gets blocks for one sequence. Preempts other sequences until it has them; returns false if none can be
    /// preempted.
    fn make_room(&mut self, id: SequenceId, precedence: Precedence, now: Instant) -> bool {
        loop {
            match self.grow_one(id) {
                GrowthResult::Enough => return true,
                // No further sequence is preempted: running steps already hold blocks that will be released,
                // and more would not come sooner.
                GrowthResult::NoRoom if self.flights.iter().any(|flight| !flight.held.is_empty()) => {
                    return false;
                }
                GrowthResult::NoRoom => match growth::victim(&self.growers(now), precedence) {
                    Some(victim) => self.preempt(victim),
                    None => return false,
                },
            }
        }
    }

    fn grow_one(&mut self, id: SequenceId) -> GrowthResult {
        let Some(sequence) = self.sequences.get_mut(&id).filter(|sequence| sequence.is_placed()) else {
            // The sequence was preempted itself meanwhile, so it needs no blocks now.
            return GrowthResult::Enough;
        };
        match self.pool.reserve(sequence.blocks_missing(&self.model.layout), sequence.holder()) {
            Ok(more) => {
                sequence.grow(more);
                GrowthResult::Enough
            }
            Err(_) => GrowthResult::NoRoom,
        }
    }

    /// Releases a sequence's blocks. The sequence waits for room with its old precedence, and is computed again.
    fn preempt(&mut self, id: SequenceId) {
        let Some(sequence) = self.sequences.get_mut(&id) else { return };
        self.metrics.preemptions.inc();
        debug!(parent: &sequence.span, n_tokens = sequence.n_tokens(), "sequence preempted");
        let room = sequence.unplace();
        if let (true, Some(flight)) = (sequence.is_in_flight(), self.flights.back_mut()) {
            flight.held.extend(room);
        }
    }
}

enum GrowthResult {
    Enough,
    NoRoom,
}

// === impl Worker: admission ===

impl Worker {
    /// Gives blocks to waiting sequences and to requests for room, in the order of their turns.
    ///
    /// The first one that does not fit blocks all later ones, so that a stream of small prompts does not
    /// starve a large one. A sequence that waits for the blocks of another sequence blocks no later one.
    fn admit(&mut self, now: Instant) {
        let n_placed = self.sequences.values().filter(|sequence| sequence.is_placed()).count();
        if n_placed == self.sequences.len() && self.waiters.is_empty() {
            return;
        }
        let mut seats = self.settings.sequences_max.saturating_sub(n_placed);
        let computing = self.sequences.values().filter(|sequence| sequence.computes_prompt());
        let mut computing: Vec<SequenceId> = computing.map(|sequence| sequence.id).collect();
        for (_, id) in self.admission_line(now) {
            if seats > 0 && self.waits_for_blocks(id, &computing, now) {
                continue;
            }
            let has_room = match (self.waiters.contains_key(&id), seats) {
                (true, _) => self.grant_room(id, now),
                (false, 0) => false,
                (false, _) => self.place(id, now),
            };
            if !has_room {
                return;
            }
            if let Some(placed) = self.sequences.get(&id) {
                seats = seats.saturating_sub(1);
                computing.extend(placed.computes_prompt().then_some(id));
            }
        }
    }

    /// Returns all sequences and requests that wait for room, in the order of their turns.
    fn admission_line(&self, now: Instant) -> Vec<(Turn, SequenceId)> {
        let unplaced = self.sequences.values().filter(|sequence| !sequence.is_placed());
        let of_sequences = unplaced.map(|sequence| {
            let turn = if sequence.has_run() { Turn::of_preempted } else { Turn::of_new };
            (turn(self.precedence(sequence, now)), sequence.id)
        });
        let of_waiters = self
            .waiters
            .values()
            .map(|waiter| (Turn::of_new(waiter.precedence(now, &self.settings)), waiter.id));
        let mut line: Vec<_> = of_sequences.chain(of_waiters).collect();
        line.sort_unstable();
        line
    }

    /// Returns whether a waiting sequence needs blocks that one before it computes, so that several answers to one prompt cost
    /// one computation. `computing` are the sequences that compute their prompts.
    fn waits_for_blocks(&mut self, id: SequenceId, computing: &[SequenceId], now: Instant) -> bool {
        if computing.is_empty() {
            return false;
        }
        let Some(sequence) = self.sequences.get_mut(&id) else { return false };
        sequence.adoptable(); // computes the hashes
        let Some(sequence) = self.sequences.get(&id) else { return false };
        let precedence = self.precedence(sequence, now);
        let is_before = |other: &&Sequence| self.precedence(other, now) < precedence;
        let mut earlier = computing.iter().filter_map(|id| self.sequences.get(id)).filter(is_before);
        earlier.any(|earlier| sequence.gains_by_waiting_for(earlier))
    }

    /// Grants a request its room, if all of it is available beside the blocks that running sequences still
    /// need.
    fn grant_room(&mut self, id: SequenceId, now: Instant) -> bool {
        let n_groups = self.layout().groups.len();
        let kept = growth::lasting_reserve(&self.growers(now), self.settings.growth_blocks) * n_groups;
        let Some(waiter) = self.waiters.get(&id) else { return true };
        let Some(room) = waiter.request.grant(&self.pool, n_groups, kept) else { return false };
        self.metrics.room_wait_seconds.observe(now.saturating_duration_since(waiter.submitted).as_secs_f64());
        if let Some(waiter) = self.waiters.remove(&id) {
            waiter.answer(Ok(room));
        }
        true
    }

    /// Gives a waiting sequence its blocks, if they fit beside the reserve for growth.
    fn place(&mut self, id: SequenceId, now: Instant) -> bool {
        let growers = self.growers(now);
        let each = self.settings.growth_blocks;
        let layout = &self.model.layout;
        let Some(sequence) = self.sequences.get_mut(&id) else { return true };
        if sequence.is_in_flight() {
            // The sequence was preempted, and its last token is still being sampled, so it waits.
            return false;
        }
        // No reserve is kept if no other sequence runs, because none would free blocks.
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
        self.note_placed(id, prefix, fresh, now);
        true
    }

    fn note_placed(&mut self, id: SequenceId, prefix: BlockLease, fresh: BlockLease, now: Instant) {
        let layout = &self.model.layout;
        let n_cached = prefix.n_blocks() * usize::from(layout.block_tokens);
        self.metrics.cached_tokens.inc_by(n_cached as u64);
        if let Some(sequence) = self.sequences.get_mut(&id) {
            debug!(parent: &sequence.span, n_tokens = sequence.n_tokens(), n_cached, "KV blocks reserved for the sequence");
            if !sequence.has_run() {
                self.metrics.room_wait_seconds.observe(sequence.age(now).as_secs_f64());
            }
            sequence.note_placed(now);
            sequence.place(prefix.join(fresh), n_cached, layout);
        }
    }
}

// === impl Worker: the step ===

impl Worker {
    fn plan(&self, now: Instant) -> Vec<Share> {
        let candidate =
            |sequence: &Sequence| sequence.candidate(self.precedence(sequence, now), self.layout());
        let mut candidates: Vec<Candidate> = self.sequences.values().filter_map(candidate).collect();
        let n_running = candidates.iter().filter(|candidate| candidate.is_running()).count();
        let running_max = n_running.div_ceil(self.n_parts());
        candidates.retain(|candidate| !(candidate.is_running() && self.is_in_another_part(candidate.id)));
        let prompts = candidates.iter().filter(|candidate| !candidate.is_running());
        let n_before = prompts.min_by_key(|prompt| prompt.precedence).map_or(0, |first| first.start);
        let budget = Budget {
            step_tokens_max: self.step_tokens(running_max, self.arrival_times(now), n_before),
            rows_max: self.settings.sequences_max,
            running_max,
            block_tokens: usize::from(self.layout().block_tokens),
        };
        batcher::plan(&candidates, budget)
    }

    /// Returns whether a sequence that generates must wait for a later step, because the stages before it would wait for
    /// its token: it is in one of the last launched steps.
    fn is_in_another_part(&self, id: SequenceId) -> bool {
        let last = self.flights.iter().rev().take(self.n_parts() - 1);
        last.flat_map(|flight| &flight.rows).any(|row| row.id == id)
    }

    /// Returns when KV has arrived or is expected to arrive, as the step that is planned now sees it.
    fn arrival_times(&self, now: Instant) -> ArrivalTimes {
        let begins = self.flights.front().map_or(now, |flight| self.end_of(flight).unwrap_or(now).max(now));
        let ms = |duration: Duration| duration.as_secs_f64() * 1e3;
        let next = self.arrivals.next().map(|at| ms(at.saturating_duration_since(now)));
        let next_ms = next.map(|next_ms| next_ms - ms(begins - now));
        ArrivalTimes { waited_ms: ms(self.longest_wait(begins)), next_ms }
    }

    /// Returns the longest wait of a sequence whose KV has arrived, until the step that is planned now `begins`. It
    /// counts only after a step with prompts. So at least every second step may have prompts, and prompts do not
    /// starve.
    fn longest_wait(&self, begins: Instant) -> Duration {
        let has_prompts = |flight: &LaunchedStep| flight.rows.iter().any(StepRow::is_chunk);
        if !self.flights.front().is_some_and(has_prompts) {
            return Duration::ZERO;
        }
        let waits = self.sequences.values().filter_map(|sequence| sequence.waits_since_arrival(begins));
        waits.max().unwrap_or_default()
    }

    /// Returns the largest number of tokens in a step with this number of running sequences, such that no sequence has a
    /// longer gap than the setting. A sequence whose KV has arrived has waited already, and the prompts may get no tokens
    /// then. A sequence whose KV arrives during the step waits for its end, and for one step without prompts. The first prompt
    /// in the step has `n_before` tokens before its chunk.
    pub(super) fn step_tokens(&self, n_running: usize, arrivals: ArrivalTimes, n_before: usize) -> usize {
        let (settings, block_tokens) = (&self.settings, usize::from(self.layout().block_tokens));
        if settings.gap_ms_max == 0.0 {
            return settings.step_tokens_max;
        }
        let ArrivalTimes { waited_ms, next_ms } = arrivals;
        let longest_ms = settings.gap_ms_max * GAP_SHARE;
        let next_ms = next_ms.map_or(0.0, |next_ms| {
            (self.costs.running_ms(n_running + 1) + EARLY_ARRIVAL_MS - next_ms).max(0.0)
        });
        let within_ms = longest_ms - waited_ms.max(next_ms);
        let n_prompt = self.costs.prompt_tokens_within(within_ms, n_running, n_before);
        let n_prompt = if waited_ms > 0.0 { n_prompt } else { n_prompt.max(block_tokens) };
        let n_tokens = settings.step_tokens_max.min(n_running.saturating_add(n_prompt));
        // The learned times are linear, but the time of a step grows with each group of rows. A few tokens take as long
        // as a whole group, so the step after a wait has whole groups only.
        let in_whole_groups =
            (n_tokens - n_tokens % self.backend.rows_together()).max(n_running.min(n_tokens));
        let n_prompt = n_tokens.saturating_sub(n_running);
        let leaves_half = in_whole_groups >= n_running.saturating_add(n_prompt.div_ceil(2));
        if leaves_half || waited_ms > 0.0 { in_whole_groups } else { n_tokens }
    }

    fn start(&mut self, shares: &[Share], timing: LaunchTiming, now: Instant) {
        let row = |share: &Share| StepRow { id: share.id, n_tokens: share.n_tokens, n_before: share.start };
        let rows: Vec<StepRow> = shares.iter().map(row).collect();
        match self.launch_rows(&rows) {
            Ok(launched) => {
                self.note_launched(&launched, &rows, now);
                let has_prompts = rows.iter().any(StepRow::is_chunk);
                if has_prompts {
                    self.prompt_launch.learn(self.world.now().saturating_duration_since(now));
                }
                let timing = if has_prompts { LaunchTiming::Usual } else { timing };
                let launched = LaunchedStep::new(launched, rows, now, self.flights.back(), timing);
                self.flights.push_back(launched);
            }
            Err(error) => self.fail_step(&rows, &error),
        }
    }

    fn launch_rows(&mut self, rows: &[StepRow]) -> Result<PendingStep, engine::BackendError> {
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

    fn note_launched(&mut self, launched: &PendingStep, rows: &[StepRow], now: Instant) {
        for row in rows {
            let Some(sequence) = self.sequences.get_mut(&row.id) else { continue };
            if let Some(queued) = sequence.launched(row.n_tokens, launched.fence(), &self.model.layout, now) {
                self.metrics.queue_seconds.observe(queued.as_secs_f64());
            }
        }
        self.has_just_launched = true;
    }
}
