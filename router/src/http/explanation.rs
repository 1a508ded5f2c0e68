//! The JSON form of an explanation, for answers and for `/debug/requests`.

use std::time::Duration;

use serde_json::{Map, Value, json};

use crate::policy::{Arm, Candidate, Decision, Route, Terms};
use crate::requests::{Explanation, Gap, KvTransfer, Part, PartTimes};

/// Returns the explanation of one choice.
pub(crate) fn explained(choice: usize, explanation: &Explanation) -> Value {
    let node = |node: &Option<types::NodeId>| node.as_ref().map(|node| node.as_str().to_owned());
    let waited = explanation.before.of(Part::Transfer) + explanation.after.of(Part::Transfer);
    json!({
        "index": choice,
        "total_ms": ms(explanation.total),
        "first_token_ms": explanation.first_token.map(ms),
        "before_first_token_ms": parts_ms(&explanation.before),
        "after_first_token_ms": parts_ms(&explanation.after),
        "largest": explanation.largest.map(Part::as_str),
        "largest_before_first_token": explanation.before.largest().map(Part::as_str),
        "prefill_node": node(&explanation.prefill),
        "decode_node": node(&explanation.decode),
        "route": explanation.decision.as_deref().map(route),
        "prompt_tokens": explanation.prompt_tokens,
        "cached_tokens": explanation.cached_tokens,
        "output_tokens": explanation.output_tokens,
        "tries": explanation.tries,
        "continuations": explanation.continuations,
        "transfers": explanation.transfers.iter().map(transfer).collect::<Vec<_>>(),
        "transfer_hidden": hidden(&explanation.transfers, waited),
        "worst_gap": explanation.worst_gap.as_ref().map(worst_gap),
    })
}

/// Returns the time in each part that has any.
pub(crate) fn parts_ms(times: &PartTimes) -> Value {
    times
        .shown()
        .map(|(part, took)| (part.as_str().to_owned(), json!(ms(took))))
        .collect::<Map<_, _>>()
        .into()
}

/// Returns the decision for a route, with the routes that were compared.
pub(crate) fn route(decision: &Decision) -> Value {
    let mut chosen = candidate(&decision.route, decision.arm, &decision.terms);
    chosen["choice"] = json!(decision.choice.as_str());
    chosen["regret_ms"] = json!(rounded(decision.regret_ms));
    let shown = |one: &Candidate| candidate(&one.route, one.arm, &one.terms);
    chosen["candidates"] = decision.candidates.iter().map(shown).collect();
    chosen
}

fn candidate(route: &Route, arm: Arm, terms: &Terms) -> Value {
    json!({
        "arm": arm.as_str(),
        "prefill_node": route.prefill.as_ref().map(|node| node.id.as_str()),
        "decode_node": route.decode.id.as_str(),
        "cost_ms": rounded(terms.cost_ms()),
        "first_token_ms": rounded(terms.first_token_ms()),
        "gap_ms": rounded(terms.gap_ms),
        "terms": {
            "cached_tokens": terms.cached_tokens,
            "queue_ms": rounded(terms.queue_ms),
            "compute_ms": rounded(terms.compute_ms),
            "calls_ms": rounded(terms.calls_ms),
            "transfer_ms": rounded(terms.transfer_ms),
            "first_step_ms": rounded(terms.first_step_ms),
            "streams_ms": rounded(terms.streams_ms),
        },
    })
}

pub(crate) fn worst_gap(gap: &Gap) -> Value {
    let step = gap.report.map(|report| {
        json!({
            "ms": ms(report.took),
            "steps": report.steps,
            "rows": report.rows,
            "prefill_tokens": report.prefill_tokens,
            "preemptions": report.preemptions,
        })
    });
    json!({
        "token": gap.token,
        "ms": ms(gap.took),
        "parts_ms": parts_ms(&gap.parts),
        "largest": gap.parts.largest().map(Part::as_str),
        "step": step,
    })
}

fn transfer(transfer: &KvTransfer) -> Value {
    json!({
        "connector": transfer.connector,
        "bytes": transfer.bytes,
        "ms": ms(transfer.moved),
        "bytes_per_second": transfer.rate().map(f64::round),
    })
}

/// Returns the share of the transfers' time in which the answer did not wait for them; `None` without
/// transfers.
fn hidden(transfers: &[KvTransfer], waited: Duration) -> Option<f64> {
    let moved: f64 = transfers.iter().map(|transfer| transfer.moved.as_secs_f64()).sum();
    (moved > 0.0).then(|| (1.0 - waited.as_secs_f64() / moved).clamp(0.0, 1.0))
}

/// Returns milliseconds to the microsecond.
fn rounded(ms: f64) -> f64 {
    (ms * 1e3).round() / 1e3
}

/// Returns milliseconds, to the microsecond.
pub(crate) fn ms(duration: Duration) -> f64 {
    duration.as_micros() as f64 / 1000.0
}
