//! The events of answers.

use std::pin::Pin;
use std::time::Duration;

use futures::{Stream, StreamExt as _};
use proto::v1::generate_event::Event;
use proto::{prompt_logprobs_to_wire, v1};
use tonic::Status;
use types::{NodeId, RequestId, Usage};

use super::status;
use crate::answers::BegunAnswers;
use crate::choice::{ChoiceFinish, Delta};
use crate::requests::{Explanation, Gap, KvTransfer, PartTimes};
use crate::text::tools::CallDelta;

pub(crate) type Events = Pin<Box<dyn Stream<Item = Result<v1::GenerateEvent, Status>> + Send>>;

/// Makes the event stream of all answers: the prompt's log-probabilities if the call asks for them, one event per token,
/// and one at the end of each answer.
pub(super) fn events(answers: BegunAnswers, id: RequestId) -> Events {
    let usage = answers.usage();
    let of_prompt = answers.prompts.first().and_then(|prompt| prompt.logprobs.as_deref()).map(|logprobs| {
        let logprobs = prompt_logprobs_to_wire(logprobs).unwrap_or_default();
        Ok(event(0, Event::PromptLogprobs(logprobs)))
    });
    let events = answers.into_deltas().flat_map(move |delta| {
        let events = match delta {
            Ok(delta) => {
                let end = delta.finish.map(|finish| Ok(end(&delta, finish, usage, &id)));
                [Some(Ok(token(delta))), end]
            }
            Err(error) => [Some(Err(status::failed(&error))), None],
        };
        futures::stream::iter(events.into_iter().flatten())
    });
    futures::stream::iter(of_prompt).chain(events).boxed()
}

fn event(choice: usize, event: Event) -> v1::GenerateEvent {
    v1::GenerateEvent { event: Some(event), choice: choice as u32 }
}

fn token(delta: Delta) -> v1::GenerateEvent {
    let token = v1::GeneratedToken {
        step: Some((&delta.step).into()),
        text: delta.parts.text,
        reasoning: delta.parts.reasoning,
        tool_calls: delta.parts.calls.into_iter().map(call).collect(),
    };
    event(delta.choice, Event::Token(token))
}

fn call(delta: CallDelta) -> v1::ToolCallDelta {
    let (id, name) = delta.start.map(|start| (start.id, start.name)).unwrap_or_default();
    v1::ToolCallDelta { index: delta.index as u32, id, name, arguments: delta.arguments }
}

fn end(delta: &Delta, finish: ChoiceFinish, usage: Usage, id: &RequestId) -> v1::GenerateEvent {
    let reason = match finish {
        ChoiceFinish::Stop => v1::AnswerFinish::Stop,
        ChoiceFinish::Length => v1::AnswerFinish::Length,
        ChoiceFinish::ToolCalls => v1::AnswerFinish::ToolCalls,
    };
    let end = v1::GenerateEnd {
        reason: reason.into(),
        usage: Some(usage.into()),
        completion_tokens: delta.step.index + 1,
        request_id: id.to_string(),
        explanation: delta.explanation.as_deref().map(explained),
        stop_string: delta.stop_string.clone(),
    };
    event(delta.choice, Event::End(end))
}

fn explained(explanation: &Explanation) -> v1::Explanation {
    let node = |node: &Option<NodeId>| node.as_ref().map(ToString::to_string).unwrap_or_default();
    let transfer = |transfer: &KvTransfer| v1::Transfer {
        connector: transfer.connector.clone(),
        bytes: transfer.bytes,
        moved_us: us(transfer.moved),
    };
    v1::Explanation {
        total_us: us(explanation.total),
        first_token_us: explanation.first_token.map(us).unwrap_or_default(),
        before_first_token: parts(&explanation.before),
        after_first_token: parts(&explanation.after),
        prefill_node: node(&explanation.prefill),
        decode_node: node(&explanation.decode),
        tries: explanation.tries,
        continuations: explanation.continuations,
        transfers: explanation.transfers.iter().map(transfer).collect(),
        worst_gap: explanation.worst_gap.as_ref().map(gap),
    }
}

fn gap(gap: &Gap) -> v1::Gap {
    let of_gap =
        v1::Gap { token: gap.token, us: us(gap.took), parts: parts(&gap.parts), ..v1::Gap::default() };
    let Some(report) = gap.report else { return of_gap };
    v1::Gap {
        engine_steps: report.steps,
        prefill_tokens: report.prefill_tokens,
        rows: report.rows,
        last_step_us: us(report.took),
        preemptions: report.preemptions,
        ..of_gap
    }
}

fn parts(times: &PartTimes) -> Vec<v1::PartTime> {
    times.shown().map(|(part, took)| v1::PartTime { part: part.as_str().to_owned(), us: us(took) }).collect()
}

fn us(took: Duration) -> u64 {
    took.as_micros() as u64
}
