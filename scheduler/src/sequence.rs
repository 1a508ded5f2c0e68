//! A sequence: the state of one prompt inside one worker.

use std::time::Duration;

use chassis::guards::{Guard, stands};
use engine::{PromptTargets, Row, RowInput, SampleSpec, SampledToken, SlotId};
use grammar::Constraint;
use kv_cache::{BlockLease, Holder, Holding, LayerFence};
use tokio::time::Instant;
use tracing::{Span, trace};
use types::step::PromptLogprob;
use types::{
    BlockHash, BlockHashKey, BlockHasher, BlockIdx, FinishReason, KvLayout, KvSpan, ModelInfo, Prompt,
    PromptWork, Refusal, RefusalKind, Step, TokenId, Usage,
};

use crate::batcher::Candidate;
use crate::growth::Grower;
use crate::load::WorkDone;
use crate::precedence::{Precedence, SequenceId};
use crate::room::Room;
use crate::sink::{SequenceEnd, SinkGuard, StepTiming};
use crate::submission::{SequenceLimits, Source, Submission};

/// The state of one prompt in a worker. The sequence is *placed* if it has blocks, and waits for room if it
/// has none.
///
/// The positions of a sequence, from the first token on:
///
/// ```text
/// | 0 ..        | .. n_confirmed | .. n_computed       | .. tokens.len() | + n_pending       |
/// | cached, or  | computed by    | computed by a step  | known, not      | being sampled by  |
/// | published   | steps that are | that is in flight   | computed        | a step in flight  |
/// |             | collected      |                     |                 |                   |
/// ```
#[derive(Debug)]
pub(crate) struct Sequence {
    pub(crate) id: SequenceId,
    pub(crate) span: Span,
    prompt: Prompt,
    constraint: Option<Constraint>,
    sequence_limits: SequenceLimits,
    sink_guard: SinkGuard,
    tokens: Vec<TokenId>,
    hashes: Hashes,
    /// The largest number of blocks to publish: those within the narrowest window, or all.
    publish_max: usize,
    room: Option<Room>,
    n_computed: usize,
    n_confirmed: usize,
    /// The number of tokens that launched steps are sampling.
    n_pending: usize,
    /// The number of the sequence's rows in launched steps.
    n_rows_in_flight: usize,
    n_steps_sent: usize,
    /// The log-probabilities of the prompt's tokens from the second on, until they are sent with the first step; `None` if
    /// none are wanted any more.
    prompt_logprobs: Option<Vec<PromptLogprob>>,
    /// The number of blocks that the sink has received.
    n_blocks_sent: usize,
    /// The number of tokens that the first placement found in the cache; `None` before it.
    cached_tokens: Option<u32>,
    submitted: Instant,
    /// The time at which the sequence first had blocks.
    placed: Option<Instant>,
    started: Option<Instant>,
    /// The worker's work at the sequence's last token; `None` before the first.
    done: Option<WorkDone>,
    /// How often the sequence lost its blocks since its last token.
    preemptions: u32,
}

/// The hashes of a sequence's full blocks, computed as its tokens become known.
#[derive(Debug)]
struct Hashes {
    hasher: BlockHasher,
    block_tokens: usize,
    hashes: Vec<BlockHash>,
}

/// Whether a sequence continues after a token that was sent.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum After {
    More,
    /// The token was the last one that is wanted from this worker.
    End(Option<FinishReason>),
}

// === impl Sequence: its life ===

impl Sequence {
    /// Makes a sequence from a submission. If its KV has arrived, the sequence is placed at once.
    pub(crate) fn new(submission: Submission, layout: &KvLayout, key: &BlockHashKey) -> Self {
        let Submission { id, prompt, constraint, source, sink_guard, sequence_limits, span, submitted } =
            submission;
        let is_computed_here = source.is_fresh() && prompt.sampling.prompt_logprobs.is_some();
        let mut sequence = Self {
            id,
            span,
            sink_guard,
            tokens: prompt.tokens.to_vec(),
            hashes: Hashes::new(&prompt, key, usize::from(layout.block_tokens)),
            publish_max: layout.blocks_seen_by_all().unwrap_or(usize::MAX),
            room: None,
            n_computed: 0,
            n_confirmed: 0,
            n_pending: 0,
            n_rows_in_flight: 0,
            n_steps_sent: 0,
            prompt_logprobs: is_computed_here.then(Vec::new),
            n_blocks_sent: 0,
            cached_tokens: None,
            submitted,
            placed: None,
            started: None,
            done: None,
            preemptions: 0,
            sequence_limits,
            constraint,
            prompt,
        };
        if let Source::Arrived { lease, first } = source {
            sequence.arrive(lease, &first, layout);
        }
        sequence
    }

    /// Takes the blocks of arrived KV and the first token. The KV counts neither as cached nor as computed
    /// here.
    fn arrive(&mut self, lease: BlockLease, first: &Step, layout: &KvLayout) {
        self.cached_tokens = Some(0);
        self.placed = Some(self.submitted);
        self.place(lease, self.prompt.tokens.len(), layout);
        self.tokens.push(first.token);
        self.publish();
    }

    /// Gives the sequence its blocks. They contain the KV of the first `n_computed` tokens.
    pub(crate) fn place(&mut self, mut lease: BlockLease, n_computed: usize, layout: &KvLayout) {
        lease.rename(self.holder());
        let n_groups = layout.groups.len();
        self.room = Some(Room::new(lease, n_groups));
        self.n_computed = n_computed;
        self.n_confirmed = n_computed;
        self.cached_tokens.get_or_insert(n_computed as u32);
        self.send_kv(&LayerFence::open(), layout);
    }

    /// Records the time at which the sequence got blocks.
    pub(crate) fn note_placed(&mut self, now: Instant) {
        self.placed.get_or_insert(now);
    }

    /// Adds blocks for further tokens at the end of the sequence's tables.
    pub(crate) fn grow(&mut self, more: BlockLease) {
        self.room = self.room.take().map(|room| room.grow(more));
    }

    /// Removes the sequence's blocks. Its tokens stay known; all KV must be computed again.
    pub(crate) fn unplace(&mut self) -> Option<Room> {
        self.n_computed = 0;
        self.n_confirmed = 0;
        self.preemptions += 1;
        self.room.take()
    }

    /// Ends the sequence and its sink. Returns its blocks, which the caller keeps until no launched step uses
    /// them.
    pub(crate) fn end(self, end: SequenceEnd) -> Option<Room> {
        self.sink_guard.end(end);
        self.room
    }

    pub(crate) fn finished(&self, finish: Option<FinishReason>) -> SequenceEnd {
        SequenceEnd::Finished { finish, usage: self.usage() }
    }
}

// === impl Sequence: its needs ===

impl Sequence {
    pub(crate) fn precedence(&self, now: Instant, bound: Duration) -> Precedence {
        Precedence::new(self.prompt.priority, self.id, self.age(now), bound)
    }

    /// Returns the end of a sequence whose first token, which arrived with its KV, was the last one.
    pub(crate) fn ended_on_arrival(&self) -> Option<SequenceEnd> {
        let is_over = self.sequence_limits.steps_max == 0;
        is_over.then(|| self.finished(self.sequence_limits.finish.or(Some(FinishReason::Length))))
    }

    /// Returns the time since the sequence's submission.
    pub(crate) fn age(&self, now: Instant) -> Duration {
        now.saturating_duration_since(self.submitted)
    }

    /// Returns how long the sequence has waited for its first step here at `at`, if its first token is from another node.
    pub(crate) fn waits_since_arrival(&self, at: Instant) -> Option<Duration> {
        let has_arrived = self.tokens.len() > self.prompt.tokens.len() && self.started.is_none();
        has_arrived.then(|| self.age(at))
    }

    /// Returns whether the sequence ever had blocks. If it has none now, it was preempted.
    pub(crate) fn has_run(&self) -> bool {
        self.cached_tokens.is_some()
    }

    pub(crate) fn is_placed(&self) -> bool {
        self.room.is_some()
    }

    pub(crate) fn is_in_flight(&self) -> bool {
        self.n_rows_in_flight > 0
    }

    pub(crate) fn deadline(&self) -> Instant {
        self.prompt.deadline.instant().into()
    }

    /// Returns whether the sequence could be in the next step: it has blocks, wants more tokens than the
    /// launched steps sample, and its sink has room.
    pub(crate) fn is_runnable(&self) -> bool {
        let wants_more = self.n_steps_sent + self.n_pending < self.sequence_limits.steps_max;
        self.is_placed() && wants_more && self.sink_guard.has_room()
    }

    /// Returns the sequence as a candidate for the next step, if it could be in it and has blocks for all its tokens. A
    /// sequence whose sink got room after blocks were given may lack one.
    pub(crate) fn candidate(&self, precedence: Precedence, layout: &KvLayout) -> Option<Candidate> {
        let (id, start, end) = (self.id, self.n_computed, self.n_known());
        let can_run = self.is_runnable() && self.blocks_missing(layout) == 0;
        can_run.then_some(Candidate { id, precedence, start, end })
    }

    /// Returns the blocks per group that are missing for the tokens that are known or being sampled.
    pub(crate) fn blocks_missing(&self, layout: &KvLayout) -> usize {
        layout.blocks_for(self.n_known()).saturating_sub(self.n_blocks())
    }

    /// Returns the facts that decisions about block growth need, if the sequence has blocks.
    pub(crate) fn grower(&self, precedence: Precedence, layout: &KvLayout) -> Option<Grower> {
        let at_most = layout.blocks_held_at_most().unwrap_or(usize::MAX);
        self.room.as_ref().map(|room| Grower {
            id: self.id,
            precedence,
            blocks_left: layout
                .blocks_for(self.sequence_limits.tokens_max)
                .saturating_sub(room.n_blocks())
                .min(at_most),
            is_shared: room.is_shared(),
        })
    }

    /// Returns the blocks per group that the sequence may need after its placement.
    pub(crate) fn growth_after_placement(&self, layout: &KvLayout) -> usize {
        layout
            .blocks_for(self.sequence_limits.tokens_max)
            .saturating_sub(layout.blocks_for(self.tokens.len()))
    }

    /// Returns the hashes of all blocks that may be taken from the cache. The last token is always computed,
    /// because the next token is sampled from that computation. Log-probabilities of the prompt that are missing are
    /// computed too.
    pub(crate) fn adoptable(&mut self) -> &[BlockHash] {
        let n_blocks = self.n_adoptable();
        &self.hashes.of(&self.tokens)[..n_blocks]
    }

    fn n_adoptable(&self) -> usize {
        let n_computed = usize::from(stands(Guard::LastToken));
        let n_known = self.prompt_logprobs.as_ref().map_or(usize::MAX, Vec::len);
        (self.tokens.len() - n_computed).min(n_known) / self.hashes.block_tokens
    }

    /// Returns whether the sequence will soon publish more of its prompt's blocks.
    pub(crate) fn computes_prompt(&self) -> bool {
        let is_prompt = self.n_confirmed < self.prompt.tokens.len();
        is_prompt && self.is_placed() && (self.is_runnable() || self.is_in_flight())
    }

    /// Returns whether tokens of the prompt are in no launched step yet.
    pub(crate) fn lacks_prompt(&self) -> bool {
        self.n_computed < self.prompt.tokens.len()
    }

    /// Returns whether blocks that `earlier` will publish spare this sequence at least half of its tokens, without those that
    /// `earlier` found in the cache. The hashes of both are known: see [`adoptable`](Self::adoptable).
    pub(crate) fn gains_by_waiting_for(&self, earlier: &Self) -> bool {
        let block_tokens = self.hashes.block_tokens;
        let n_blocks = self.n_adoptable().min(earlier.publish_max);
        let both = self.hashes.hashes.iter().zip(&earlier.hashes.hashes).take(n_blocks);
        let n_common = both.take_while(|(own, other)| own == other).count() * block_tokens;
        let n_cached = earlier.cached_tokens.unwrap_or(0) as usize;
        let n_spared = n_common.saturating_sub(n_cached);
        n_common > earlier.n_confirmed && 2 * n_spared >= self.tokens.len() - n_cached.min(n_common)
    }

    pub(crate) fn n_tokens(&self) -> usize {
        self.tokens.len()
    }

    /// Returns the prompt tokens that are not computed yet; a running sequence has none.
    pub(crate) fn queued(&self) -> PromptWork {
        match self.n_known() - self.n_computed {
            1 if self.is_placed() => PromptWork::default(),
            _ => PromptWork::of(self.n_computed as u64..self.n_known() as u64),
        }
    }

    pub(crate) fn holder(&self) -> Holder {
        Holder { what: Holding::Sequence, request: self.prompt.id.clone() }
    }

    /// Returns the number of tokens that are known, or will be when the launched steps are collected.
    fn n_known(&self) -> usize {
        self.tokens.len() + self.n_pending
    }

    fn n_blocks(&self) -> usize {
        self.room.as_ref().map_or(0, Room::n_blocks)
    }
}

// === impl Sequence: its rows ===

impl Sequence {
    /// Returns the sequence's blocks, one table per group; none if it is not placed.
    pub(crate) fn tables(&self) -> impl Iterator<Item = &[BlockIdx]> {
        self.room.iter().flat_map(Room::tables)
    }

    /// Returns the row that computes the sequence's next `n_tokens`.
    pub(crate) fn row<'a>(&'a self, n_tokens: usize, tables: &'a [&'a [BlockIdx]]) -> Row<'a> {
        let start = self.n_computed;
        let input = match self.tokens.get(start..start + n_tokens) {
            Some(tokens) => RowInput::Tokens(tokens),
            None => RowInput::Previous,
        };
        let sample = self.samples(n_tokens).then(|| self.sample_spec());
        Row {
            slot: SlotId(self.id.0),
            input,
            start,
            tables,
            prompt_logprobs: self.prompt_targets(n_tokens),
            sample,
        }
    }

    /// Returns the prompt tokens that follow the next `n_tokens`, if their log-probabilities are wanted.
    fn prompt_targets(&self, n_tokens: usize) -> Option<PromptTargets<'_>> {
        let (n_top, prompt) = (self.prompt.sampling.prompt_logprobs?, &self.prompt.tokens);
        let end = (self.n_computed + n_tokens + 1).min(prompt.len());
        let tokens = prompt.get(self.n_computed + 1..end)?;
        (self.prompt_logprobs.is_some() && !tokens.is_empty()).then_some(PromptTargets { tokens, n_top })
    }

    /// Returns whether the next `n_tokens` end at the last known token, so that a new token is sampled.
    fn samples(&self, n_tokens: usize) -> bool {
        self.n_computed + n_tokens == self.n_known()
    }

    fn sample_spec(&self) -> SampleSpec<'_> {
        SampleSpec {
            sampling: &self.prompt.sampling,
            stop: &self.prompt.stop,
            history: &self.tokens,
            n_prompt: self.prompt.tokens.len() - self.prompt.n_generated,
            index: self.next_index() + self.n_pending as u32,
            constraint: self.constraint.as_ref(),
        }
    }

    /// Records a launched row. For the sequence's first row, returns the time since the submission.
    pub(crate) fn launched(
        &mut self,
        n_tokens: usize,
        fence: &LayerFence,
        layout: &KvLayout,
        now: Instant,
    ) -> Option<Duration> {
        let queued = self.started.is_none().then(|| now.saturating_duration_since(self.submitted));
        if queued.is_some() {
            trace!(target: "walk", request = %self.prompt.id, n_tokens, "first engine step of the sequence launched");
        }
        self.started.get_or_insert(now);
        if self.samples(n_tokens) {
            self.n_pending += 1;
        }
        self.n_computed += n_tokens;
        self.n_rows_in_flight += 1;
        self.send_kv(fence, layout);
        queued
    }

    /// Records that a row of the sequence was collected, successful or not.
    pub(crate) fn row_collected(&mut self) {
        self.n_rows_in_flight -= 1;
    }

    /// Records that the KV of the next `n_tokens` is in place, unless the sequence's blocks were removed
    /// meanwhile.
    pub(crate) fn confirm(&mut self, n_tokens: usize, layout: &KvLayout) {
        if self.is_placed() {
            self.n_confirmed += n_tokens;
            self.publish();
            self.give_back(layout);
        }
    }

    /// Takes the log-probabilities of a collected row whose first token is at `start`. A sequence that lost its blocks
    /// computes some of them again.
    pub(crate) fn note_prompt_logprobs(&mut self, start: usize, of_row: Vec<PromptLogprob>) {
        if let Some(known) = &mut self.prompt_logprobs {
            let n_again = known.len().saturating_sub(start);
            known.extend(of_row.into_iter().skip(n_again));
        }
    }

    /// Takes the token that a collected row has sampled, and sends it to the sink.
    ///
    /// `done` is the worker's work up to the end of that row's step.
    pub(crate) fn accept(
        &mut self,
        sampled: SampledToken,
        model: &ModelInfo,
        done: WorkDone,
        now: Instant,
    ) -> After {
        let index = self.next_index();
        let SampledToken { token, logprobs } = sampled;
        self.n_pending -= 1;
        self.n_steps_sent += 1;
        self.tokens.push(token);
        trace!(target: "walk", request = %self.prompt.id, index, "token sampled");
        let finish = self.finish_of(token, index, model);
        let timing = self.timing(done, now);
        (self.done, self.preemptions) = (Some(done), 0);
        if let Some(logprobs) = self.prompt_logprobs.take() {
            self.sink_guard.prompt_logprobs(logprobs);
        }
        self.sink_guard.step(Step { token, index, logprobs, finish }, timing);
        let is_last_here = self.n_steps_sent == self.sequence_limits.steps_max;
        if finish.is_some() || is_last_here { After::End(finish) } else { After::More }
    }

    fn finish_of(&self, token: TokenId, index: u32, model: &ModelInfo) -> Option<FinishReason> {
        let stop = &self.prompt.stop;
        let is_eos = !stop.ignore_eos && model.eos_tokens.contains(&token);
        let may_stop = index >= stop.min_tokens;
        if may_stop && (is_eos || stop.stop_tokens.contains(&token)) {
            return Some(FinishReason::Stop);
        }
        let is_full = self.tokens.len() >= model.context_tokens as usize;
        (is_full || index + 1 >= stop.max_tokens).then_some(FinishReason::Length)
    }

    /// Returns the index of the next step that the sink gets.
    fn next_index(&self) -> u32 {
        self.sequence_limits.first_index + self.n_steps_sent as u32
    }

    fn timing(&self, done: WorkDone, now: Instant) -> StepTiming {
        let started = self.started.unwrap_or(now);
        let placed = self.placed.unwrap_or(started);
        StepTiming {
            usage: self.usage(),
            work: done.since(self.done, self.preemptions),
            room: placed.saturating_duration_since(self.submitted),
            queued: started.saturating_duration_since(self.submitted),
            computed: now.saturating_duration_since(started),
        }
    }

    fn usage(&self) -> Usage {
        Usage {
            prompt_tokens: (self.prompt.tokens.len() - self.prompt.n_generated) as u32,
            cached_tokens: self.cached_tokens.unwrap_or(0),
        }
    }
}

// === impl Sequence: its KV ===

impl Sequence {
    /// Passes the prompt's blocks that are computed, or will be when `fence` opens, to the sink, each block
    /// once.
    ///
    /// A preemption in between does not repeat a block: KV that was sent from the earlier blocks stays valid,
    /// and the sender holds those blocks.
    fn send_kv(&mut self, fence: &LayerFence, layout: &KvLayout) {
        let goal = self.sequence_limits.kv_tokens;
        let is_whole = self.n_computed >= goal;
        let n_blocks = if is_whole {
            layout.blocks_for(goal)
        } else {
            self.n_computed / usize::from(layout.block_tokens)
        };
        let (Some(room), true) = (&self.room, n_blocks > self.n_blocks_sent) else { return };
        for group in layout.group_indices() {
            let blocks = self.n_blocks_sent as u32..n_blocks as u32;
            let layers = 0..layout.group(group).layers.len() as u16;
            self.sink_guard.kv(KvSpan { group, blocks, layers }, room.lease(), fence);
        }
        self.n_blocks_sent = n_blocks;
    }

    /// Publishes the blocks that are full and in place, and that no group's window has passed.
    ///
    /// No block past the narrowest window is published, because blocks before it would be missing in the
    /// cache.
    fn publish(&mut self) {
        let n_full = (self.n_confirmed / self.hashes.block_tokens).min(self.publish_max);
        if let Some(room) = &mut self.room {
            room.publish(&self.hashes.of(&self.tokens)[..n_full]);
        }
    }

    /// Returns to the pool the blocks that no step reads any more. Launched steps start after the confirmed
    /// positions.
    fn give_back(&mut self, layout: &KvLayout) {
        let (Some(room), true) = (&mut self.room, self.publish_max < usize::MAX) else { return };
        room.give_back(|group| layout.first_block_seen(group, self.n_confirmed));
    }
}

/// Returns the end of a sequence whose deadline has passed.
pub(crate) fn deadline_passed() -> SequenceEnd {
    SequenceEnd::Failed(Refusal::new(RefusalKind::Deadline, "the deadline passed"))
}

// === impl Hashes ===

impl Hashes {
    fn new(prompt: &Prompt, key: &BlockHashKey, block_tokens: usize) -> Self {
        Self { hasher: prompt.hasher(key, block_tokens), block_tokens, hashes: Vec::new() }
    }

    /// Returns the hashes of all full blocks of `tokens`. `tokens` must begin with the tokens of the last
    /// call.
    fn of(&mut self, tokens: &[TokenId]) -> &[BlockHash] {
        for block in tokens.chunks_exact(self.block_tokens).skip(self.hashes.len()) {
            self.hashes.push(self.hasher.next(block));
        }
        &self.hashes
    }
}
