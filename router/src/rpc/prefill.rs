//! The call of a prefill node that holds or sends KV.

use std::future::poll_fn;
use std::pin::Pin;
use std::sync::Arc;
use std::task::{Context, Poll, ready};

use futures::StreamExt as _;
use proto::v1;
use tokio::time::{Sleep, sleep_until};
use types::NodeInfo;

use super::end::let_end;
use super::{ARRIVAL_GRACE, Failure, NodeClient};

/// A prefill call after its first token. It lasts while the node holds or sends the KV.
#[derive(Debug)]
pub struct PrefillCall {
    client: NodeClient,
    answers: tonic::Streaming<v1::PrefillAnswer>,
    state: PrefillState,
}

#[derive(Debug)]
enum PrefillState {
    Open,
    /// The node has sent all KV.
    Ended,
    /// The stream broke with this error. After `grace` the KV counts as lost.
    Broken {
        failure: Failure,
        grace: Pin<Box<Sleep>>,
    },
}

impl PrefillCall {
    /// Makes the call from its stream, after the first token.
    pub(super) fn new(client: NodeClient, answers: tonic::Streaming<v1::PrefillAnswer>) -> Self {
        Self { client, answers, state: PrefillState::Open }
    }

    pub(super) fn node(&self) -> &Arc<NodeInfo> {
        &self.client.info
    }

    /// Lets the call end after the KV has arrived.
    pub(super) fn let_end(self) {
        if matches!(self.state, PrefillState::Open) {
            let_end(&self.client.gate, self.answers);
        }
    }

    /// Waits for a sign that the KV will not arrive. Waits forever if it arrives. Cancel-safe.
    ///
    /// The decode node may not detect the loss: the connection may break before the transfer has begun there.
    /// The sender detects and reports it. If the sender is unreachable, the decode node has one second to
    /// report that the KV has arrived.
    pub async fn loss(&mut self) -> Failure {
        poll_fn(|cx| self.poll_loss(cx)).await
    }

    /// Polls [`loss`](Self::loss).
    pub(super) fn poll_loss(&mut self, cx: &mut Context<'_>) -> Poll<Failure> {
        loop {
            match &mut self.state {
                PrefillState::Ended => return Poll::Pending,
                PrefillState::Broken { failure, grace } => {
                    ready!(grace.as_mut().poll(cx));
                    return Poll::Ready(failure.clone());
                }
                PrefillState::Open => match ready!(self.answers.poll_next_unpin(cx)) {
                    Some(Ok(answer)) => return Poll::Ready(self.refusal_in(answer)),
                    None => self.state = PrefillState::Ended,
                    Some(Err(status)) => {
                        let grace = Box::pin(sleep_until(self.client.world.now() + ARRIVAL_GRACE));
                        self.state = PrefillState::Broken { failure: self.client.failure(&status), grace };
                    }
                },
            }
        }
    }

    fn refusal_in(&self, answer: v1::PrefillAnswer) -> Failure {
        match answer.answer {
            Some(v1::prefill_answer::Answer::Refused(refusal)) => self.client.refused(refusal),
            Some(v1::prefill_answer::Answer::Prefilled(_)) | None => {
                self.client.invalid_answer(&"something else than an end after the first token")
            }
        }
    }
}
