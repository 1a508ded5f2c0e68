//! Runs one session: turn after turn, until the last one or a failure.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use tokio::time::Instant;

use crate::client::exchange::{Assignment, Client};
use crate::client::recorder::{Answer, AnswerText};
use crate::clock::PreciseTimer;
use crate::load::compose::{ComposedRequest, Composer, PreparedSession, Transcript};
use crate::record::RequestRecord;
use crate::workload::Turn;

/// The state that all sessions of a run share.
#[derive(Debug)]
pub struct SessionRunner {
    pub client: Client,
    pub composer: Arc<Composer>,
    pub n_begun: AtomicU32,
    pub slice: u32,
}

impl SessionRunner {
    /// Runs the session; its first turn is due at `intended`. A failed turn ends the session. Returns the
    /// records.
    pub async fn run(self: Arc<Self>, prepared: PreparedSession, intended: Instant) -> Vec<RequestRecord> {
        let PreparedSession { session, mut transcript, first } = prepared;
        let mut turns = session.turns.into_iter().enumerate().peekable();
        let mut records = Vec::with_capacity(turns.len());
        let (mut due, mut wire) = (intended, first);
        while let Some((nth, turn)) = turns.next() {
            let next = turns.peek().map(|(_, turn)| turn.clone());
            let text = if next.is_some() { AnswerText::Keep } else { AnswerText::Discard };
            let assignment = self.assign(&transcript, nth, &turn, &wire, due, text);
            let (record, answer) = self.client.exchange(assignment, wire.bytes).await;
            let goes_on = record.is_finished();
            let n_tokens = record.output_tokens();
            records.push(record);
            let (Some(next), Some(answer), true) = (next, answer, goes_on) else { break };
            due = Instant::now() + next.think;
            let Some(composed) = self.compose(transcript, answer, n_tokens, next).await else { break };
            (transcript, wire) = composed;
            wait_until(due).await;
        }
        records
    }

    fn assign(
        &self,
        transcript: &Transcript,
        nth: usize,
        turn: &Turn,
        wire: &ComposedRequest,
        due: Instant,
        text: AnswerText,
    ) -> Assignment {
        Assignment {
            index: self.n_begun.fetch_add(1, Ordering::Relaxed),
            session: transcript.ordinal,
            turn: nth as u32,
            slice: self.slice,
            intended: due,
            prompt_tokens: wire.prompt_tokens,
            wanted_tokens: turn.output_tokens,
            cancel_after: turn.cancel_after,
            text,
        }
    }

    /// Writes the next request on another thread, during the user's think time.
    async fn compose(
        &self,
        mut transcript: Transcript,
        answer: Answer,
        n_tokens: u32,
        next: Turn,
    ) -> Option<(Transcript, ComposedRequest)> {
        let composer = Arc::clone(&self.composer);
        let write = move || {
            composer.add_answer(&mut transcript, answer, n_tokens);
            let wire = composer.compose(&mut transcript, &next);
            (transcript, wire)
        };
        tokio::task::spawn_blocking(write).await.ok()
    }
}

async fn wait_until(due: Instant) {
    match PreciseTimer::new() {
        Ok(mut timer) => timer.until(due).await,
        Err(_) => tokio::time::sleep_until(due).await,
    }
}
