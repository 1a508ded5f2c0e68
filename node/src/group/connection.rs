//! One connection between two processes of a node: messages, each after its length and its number, and heartbeats.

use std::time::Duration;

use bytes::{Buf, Bytes, BytesMut};
use chassis::guards::{self, Guard};
use chassis::{Gate, StreamReader, StreamWriter, spawn_guarded};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::sync::mpsc;
use tokio::time::timeout;

use super::error::GroupError;

/// Limit of one message. The largest one is the rows of a step, between two stages.
const MESSAGE_BYTES_MAX: usize = 1 << 30;
/// The bytes before a message: its length, and its number.
const HEADER_BYTES: usize = size_of::<u32>() + size_of::<u64>();
/// The least bytes for which memory is taken before they have come.
const READ_BYTES: usize = 64 << 10;
/// Limit of messages that wait to be written.
pub(super) const QUEUED_MAX: usize = 256;
/// Limit of messages about landings that wait to be queued: a landing has at most four, and then only pages that arrived
/// wrong.
const ABOUT_LANDINGS_MAX: usize = 64 << 10;
/// The interval of heartbeats.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// A side that sends nothing for this long is lost, and so is one that reads nothing.
pub(super) const SILENT_MAX: Duration = Duration::from_secs(5);

/// A message, and bytes that belong to its end and are not copied.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    pub(super) message: Vec<u8>,
    pub(super) end: Bytes,
}

/// Messages that wait to be written. Cheap to clone.
pub(super) type Outgoing = mpsc::Sender<Written>;

/// Makes the queue of messages of a connection.
pub(super) fn outgoing() -> (Outgoing, mpsc::Receiver<Written>) {
    mpsc::channel(QUEUED_MAX)
}

/// Makes a long queue in front of a connection's, for those who may not wait. Its messages keep their order.
pub(super) fn in_front(out: Outgoing, gate: &Gate) -> Outgoing {
    let (front, mut queue) = mpsc::channel(ABOUT_LANDINGS_MAX);
    let forward = async move {
        while let Some(message) = queue.recv().await {
            if out.send(message).await.is_err() {
                return;
            }
        }
    };
    spawn_guarded(gate, "messages about landings", forward).detach();
    front
}

/// The reading half of a connection.
#[derive(Debug)]
pub(super) struct MessageReader {
    half: StreamReader,
    /// The number of the next message.
    number: u64,
    /// What has come and is not read yet.
    come: BytesMut,
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
        Self { half, number: 0, come: BytesMut::new() }
    }

    /// Waits for the next message. Fails if nothing comes for [`SILENT_MAX`], or if a message was lost or comes twice. So
    /// each heartbeat proves that all messages before it have come. Cancel-safe. Bytes in the message are not copied.
    pub(super) async fn next<M: proto::Message + Default>(&mut self) -> Result<M, GroupError> {
        loop {
            if let Some(body) = self.whole_message()? {
                let message = proto::decode(body);
                return message
                    .map_err(|error| GroupError::Lost(format!("a message cannot be read: {error}")));
            }
            self.read_more().await?;
        }
    }

    /// Takes the next message if all of it has come.
    fn whole_message(&mut self) -> Result<Option<Bytes>, GroupError> {
        let Some((header, _)) = self.come.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let mut header = &header[..];
        let (length, number) = (header.get_u32_le() as usize, header.get_u64_le());
        if length > MESSAGE_BYTES_MAX {
            return Err(GroupError::Lost(format!("a message of {length} bytes is longer than any may be")));
        }
        if number != self.number && guards::stands(Guard::MessageNumber) {
            let expected = self.number;
            return Err(GroupError::Lost(format!("message {number} has come instead of message {expected}")));
        }
        if self.come.len() < HEADER_BYTES + length {
            return Ok(None);
        }
        self.number += 1;
        self.come.advance(HEADER_BYTES);
        Ok(Some(self.come.split_to(length).freeze()))
    }

    async fn read_more(&mut self) -> Result<(), GroupError> {
        // More memory is taken only when what there is has been filled: as much as has come.
        if self.come.len() == self.come.capacity() {
            self.come.reserve(self.come.len().max(READ_BYTES));
        }
        let read = timeout(SILENT_MAX, self.half.read_buf(&mut self.come)).await;
        let silent = |_| GroupError::Lost(format!("it was silent for {} s", SILENT_MAX.as_secs()));
        match read.map_err(silent)?.map_err(|error| GroupError::lost("the connection failed", &error))? {
            0 => Err(GroupError::Lost("it has closed the connection".to_owned())),
            _ => Ok(()),
        }
    }
}

impl MessageWriter {
    pub(super) fn new(half: StreamWriter) -> Self {
        Self { half, number: 0 }
    }

    /// Writes one message.
    pub(super) async fn write(&mut self, written: &Written) -> Result<(), GroupError> {
        let Written { message, end } = written;
        let mut header = [0; HEADER_BYTES];
        let (length, number) = header.split_at_mut(size_of::<u32>());
        length.copy_from_slice(&((message.len() + end.len()) as u32).to_le_bytes());
        number.copy_from_slice(&self.number.to_le_bytes());
        let mut rest = Buf::chain(Buf::chain(&header[..], &message[..]), &end[..]);
        while rest.has_remaining() {
            let late = |_| GroupError::Lost(format!("it has read nothing for {} s", SILENT_MAX.as_secs()));
            let written = timeout(SILENT_MAX, self.half.write_buf(&mut rest)).await.map_err(late)?;
            if written.map_err(|error| GroupError::lost("the connection failed", &error))? == 0 {
                return Err(GroupError::Lost("it has closed the connection".to_owned()));
            }
        }
        self.number += 1;
        Ok(())
    }

    /// Writes the messages of a queue, and `alive` whenever none is queued for a second, until the queue's senders are
    /// dropped.
    pub(super) async fn write_all(
        mut self,
        mut queue: mpsc::Receiver<Written>,
        alive: Written,
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
