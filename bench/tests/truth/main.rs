//! Tests of the harness against known results: a puppet's programmed delays, vLLM's arithmetic, whole commands.

mod arithmetic;
mod commands;
mod drawn;
mod faults;
mod scenarios;
mod sockets;
mod virtual_time;

use std::time::Duration;

use bench::client::exchange::Assignment;
use bench::client::reception::{Reception, ReceptionState, Timing};
use bench::client::recorder::AnswerText;
use bench::puppet::Script;
use bench::record::{Outcome, RequestRecord};
use tokio::time::Instant;

/// Makes the assignment of a request for this many tokens.
fn assignment(index: u32, wanted_tokens: u32) -> Assignment {
    Assignment {
        index,
        session: index,
        turn: 0,
        slice: 0,
        intended: Instant::now(),
        prompt_tokens: 5,
        wanted_tokens,
        cancel_after: None,
        text: AnswerText::Discard,
    }
}

/// Returns what the client records of a script whose bytes arrive exactly on time, without a socket or a
/// clock. The bytes come in pieces of `piece` bytes, as a network may cut them.
fn recorded(index: u32, intended_us: u64, script: &Script, piece: usize) -> RequestRecord {
    let wanted = script.steps.iter().map(|step| step.act.n_tokens()).sum();
    let mut reception = Reception::new(wanted, AnswerText::Discard);
    let (mut outcome, mut end_us) = (None, 0);
    for write in script.writes() {
        end_us = us(write.at);
        for bytes in write.bytes.chunks(piece) {
            if let ReceptionState::End { outcome: end, .. } = reception.feed(bytes, us(write.at)) {
                outcome = Some(end);
            }
        }
    }
    let outcome: Outcome = outcome.unwrap_or_else(|| reception.close());
    let timing = Timing { intended_us, lag_us: 0, sent_us: 0, end_us };
    reception.into_record(&assignment(index, wanted), timing, outcome)
}

fn us(span: Duration) -> u32 {
    span.as_micros() as u32
}

fn millis(ms: u64) -> Duration {
    Duration::from_millis(ms)
}
