//! One connection between two processes of a node: messages, each after its length and its number, and heartbeats.

use std::time::Duration;

use chassis::guards::{self, Guard};
use chassis::{StreamReader, StreamWriter};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::error::GroupError;

/// Limit of one message. The largest one is the rows of a step, between two stages.
const MESSAGE_BYTES_MAX: usize = 1 << 30;
/// The most bytes for which memory is taken before they have come.
const READ_BYTES: usize = 4 << 20;
/// Limit of messages that wait to be written.
pub(super) const QUEUED_MAX: usize = 256;
/// The interval of heartbeats.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// A side that sends nothing for this long is lost, and so is one that reads nothing.
pub(super) const SILENT_MAX: Duration = Duration::from_secs(5);

/// Messages that wait to be written. Cheap to clone.
pub(super) type Outgoing = mpsc::Sender<Vec<u8>>;

/// Makes the queue of messages of a connection.
pub(super) fn outgoing() -> (Outgoing, mpsc::Receiver<Vec<u8>>) {
    mpsc::channel(QUEUED_MAX)
}

/// The reading half of a connection.
#[derive(Debug)]
pub(super) struct MessageReader {
    half: StreamReader,
    /// The number of the next message.
    number: u64,
    body: Vec<u8>,
}

/// The writing half of a connection.
#[derive(Debug)]
pub(super) struct MessageWriter {
    half: StreamWriter,
    /// The number of the next message.
    number: u64,
}

impl MessageReader {
    pub(super) fn new(half: StreamReader) -> Self {
        Self { half, number: 0, body: Vec::new() }
    }

    /// Waits for the next message. Fails if nothing comes for [`SILENT_MAX`], or if a message was lost or comes twice. So
    /// each heartbeat proves that all messages before it have come. Not cancel-safe.
    pub(super) async fn next<M: proto::Message + Default>(&mut self) -> Result<M, GroupError> {
        let (mut length, mut number) = ([0; 4], [0; 8]);
        self.fill(&mut length).await?;
        self.fill(&mut number).await?;
        let (length, number) = (u32::from_le_bytes(length) as usize, u64::from_le_bytes(number));
        if length > MESSAGE_BYTES_MAX {
            return Err(GroupError::Lost(format!("a message of {length} bytes is longer than any may be")));
        }
        if number != self.number && guards::stands(Guard::MessageNumber) {
            let expected = self.number;
            return Err(GroupError::Lost(format!("message {number} has come instead of message {expected}")));
        }
        self.number += 1;
        let mut body = std::mem::take(&mut self.body);
        body.clear();
        while body.len() < length {
            let start = body.len();
            body.resize(length.min(start + READ_BYTES), 0);
            self.fill(&mut body[start..]).await?;
        }
        let message = proto::decode(&body);
        self.body = body;
        message.map_err(|error| GroupError::Lost(format!("a message cannot be read: {error}")))
    }

    async fn fill(&mut self, mut into: &mut [u8]) -> Result<(), GroupError> {
        while !into.is_empty() {
            let read = timeout(SILENT_MAX, self.half.read(into)).await;
            let silent = |_| GroupError::Lost(format!("it was silent for {} s", SILENT_MAX.as_secs()));
            match read.map_err(silent)?.map_err(|error| GroupError::lost("the connection failed", &error))? {
                0 => return Err(GroupError::Lost("it has closed the connection".to_owned())),
                n => into = &mut into[n..],
            }
        }
        Ok(())
    }
}

impl MessageWriter {
    pub(super) fn new(half: StreamWriter) -> Self {
        Self { half, number: 0 }
    }

    /// Writes one message.
    pub(super) async fn write(&mut self, message: &[u8]) -> Result<(), GroupError> {
        let (length, number) = ((message.len() as u32).to_le_bytes(), self.number.to_le_bytes());
        for part in [&length[..], &number, message] {
            self.write_part(part).await?;
        }
        self.number += 1;
        Ok(())
    }

    async fn write_part(&mut self, mut part: &[u8]) -> Result<(), GroupError> {
        while !part.is_empty() {
            let late = |_| GroupError::Lost(format!("it has read nothing for {} s", SILENT_MAX.as_secs()));
            let written = timeout(SILENT_MAX, self.half.write(part)).await.map_err(late)?;
            match written.map_err(|error| GroupError::lost("the connection failed", &error))? {
                0 => return Err(GroupError::Lost("it has closed the connection".to_owned())),
                n => part = &part[n..],
            }
        }
        Ok(())
    }

    /// Writes the messages of a queue, and `alive` whenever none is queued for a second, until the queue's senders are
    /// dropped.
    pub(super) async fn write_all(
        mut self,
        mut queue: mpsc::Receiver<Vec<u8>>,
        alive: Vec<u8>,
    ) -> Result<(), GroupError> {
        loop {
            match timeout(ALIVE_EVERY, queue.recv()).await {
                Ok(None) => return Ok(()),
                Ok(Some(message)) => self.write(&message).await?,
                Err(_) => self.write(&alive).await?,
            }
        }
    }
}
