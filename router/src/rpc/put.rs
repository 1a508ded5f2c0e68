//! The calls of the router to a pool node.

use std::time::Duration;

use chassis::rpc::{MESSAGE_BYTES_MAX, call};
use proto::v1;
use proto::v1::pool_client::PoolClient;
use proto::v1::put_event;
use tokio::time::Instant;
use types::{Landing, NodeInfo, Prompt, TransferId};

use super::{Failure, NodeClient, QUESTION_TIMEOUT, peer_to_wire};

impl NodeClient {
    /// Reserves room on a pool node for the prompt's KV, which `prefill` will send. Dropping the returned
    /// call releases the room.
    pub async fn put(&self, prompt: &Prompt, prefill: &NodeInfo) -> Result<PutCall, Failure> {
        let request = v1::PutRequest {
            prompt: Some(proto::prompt_to_wire(prompt, self.world.now().into_std())),
            prefill: Some(peer_to_wire(prefill)),
        };
        let mut client = PoolClient::new(self.channel.clone())
            .max_decoding_message_size(MESSAGE_BYTES_MAX)
            .max_encoding_message_size(MESSAGE_BYTES_MAX);
        let asked = self.world.now();
        let opened = tokio::time::timeout(QUESTION_TIMEOUT, client.put(call(&prompt.id, request)));
        let opened = opened.await.map_err(|_| self.silent())?;
        let events = opened.map_err(|status| self.failure(&status))?.into_inner();
        Ok(PutCall { client: self.clone(), events, asked, stored: None })
    }

    /// Asks the pool node to send stored KV to a landing. Returns when all KV has arrived; dropping the
    /// future aborts the transfer.
    pub async fn fetch(&self, prompt: &Prompt, stored: TransferId, landing: &Landing) -> Result<(), Failure> {
        let request =
            v1::DeliverRequest { transfer: proto::transfer_to_wire(stored), landing: Some(landing.into()) };
        let mut client = PoolClient::new(self.channel.clone()).max_encoding_message_size(MESSAGE_BYTES_MAX);
        let answer = client.deliver(call(&prompt.id, request)).await;
        let refused = answer.map_err(|status| self.failure(&status))?.into_inner().refused;
        refused.map_or(Ok(()), |refusal| Err(self.refused(refusal)))
    }
}

/// The call that stores a prompt's KV on a pool node. Dropping it releases the blocks that only this prompt
/// uses.
#[derive(Debug)]
pub struct PutCall {
    client: NodeClient,
    events: tonic::Streaming<v1::PutEvent>,
    asked: Instant,
    /// The time that storing took, set if the last event was read by [`PutCall::failure`].
    stored: Option<Duration>,
}

impl PutCall {
    /// Returns the first event: the landing for the prefill node's KV.
    pub async fn opening(&mut self) -> Result<Landing, Failure> {
        let client = self.client.clone();
        let first = tokio::time::timeout(QUESTION_TIMEOUT, self.receive());
        match first.await.map_err(|_| client.silent())?? {
            put_event::Event::Landing(landing) => {
                landing.try_into().map_err(|error: proto::ConvertError| client.invalid_answer(&error))
            }
            put_event::Event::Refused(_) | put_event::Event::Stored(_) => {
                Err(client.invalid_answer(&"a stream that does not begin with a landing"))
            }
        }
    }

    /// Waits until all KV is stored. Returns the time since room was requested. Cancel-safe.
    pub async fn stored(&mut self) -> Result<Duration, Failure> {
        if let Some(took) = self.stored {
            return Ok(took);
        }
        match self.receive().await? {
            put_event::Event::Stored(_) => Ok(*self.stored.insert(self.asked.elapsed())),
            put_event::Event::Landing(_) | put_event::Event::Refused(_) => {
                Err(self.client.invalid_answer(&"a second landing"))
            }
        }
    }

    /// Waits for a failure to store the KV. Waits forever if it is stored. Cancel-safe.
    pub async fn failure(&mut self) -> Failure {
        match self.stored().await {
            Ok(_) => std::future::pending().await,
            Err(failure) => failure,
        }
    }

    async fn receive(&mut self) -> Result<put_event::Event, Failure> {
        let event = self.events.message().await.map_err(|status| self.client.failure(&status))?;
        match event.and_then(|event| event.event) {
            Some(put_event::Event::Refused(refusal)) => Err(self.client.refused(refusal)),
            Some(event) => Ok(event),
            None => Err(self.client.invalid_answer(&"the end of a stream that was not finished")),
        }
    }
}
