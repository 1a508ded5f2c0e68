//! One connection between two processes of a node: messages, each after its length and its number, and heartbeats.

use std::collections::VecDeque;
use std::future::poll_fn;
use std::pin::pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker, ready};
use std::time::Duration;

use bytes::buf::Chain;
use bytes::{Buf, BufMut as _, Bytes, BytesMut};
use chassis::guards::{self, Guard};
use chassis::{StreamReader, StreamWriter};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::runtime::Handle;
use tokio::sync::{Notify, OwnedSemaphorePermit, Semaphore};
use tokio::time::timeout;

use super::error::GroupError;

/// Limit of one message. The largest one is the rows of a step, between two stages.
const MESSAGE_BYTES_MAX: usize = 1 << 30;
/// The bytes before a message: its length, and its number.
const HEADER_BYTES: usize = size_of::<u32>() + size_of::<u64>();
/// The smallest number of bytes that the buffer of received bytes grows by.
const READ_BYTES: usize = 64 << 10;
/// Limit of messages that wait to be written, whose senders wait for room.
pub(super) const QUEUED_MAX: usize = 256;
/// Limit of all messages that wait to be written. Most are about landings: a landing has at most four, and then only pages
/// that arrived wrong.
pub(super) const WAITING_MAX: usize = 64 << 10;
/// The interval of heartbeats.
const ALIVE_EVERY: Duration = Duration::from_secs(1);
/// A side that sends nothing for this long is lost, and so is one that reads nothing.
pub(super) const SILENT_MAX: Duration = Duration::from_secs(5);

/// A message, and bytes that follow it as its end, without a copy.
#[derive(Clone, Debug, Default)]
pub(super) struct Written {
    pub(super) message: Vec<u8>,
    pub(super) end: Bytes,
}

/// Sends messages. The caller writes its message to the connection itself if none waits; a [`WritingTask`] writes what is
/// left. Cheap to clone.
#[derive(Clone, Debug)]
pub(super) struct Outgoing(Arc<WritingHalf>);

/// Writes the messages that wait, and heartbeats. Dropping it ends the connection.
#[derive(Debug)]
pub(super) struct WritingTask(Outgoing);

/// The writing half of a connection.
#[derive(Debug)]
struct WritingHalf {
    /// Held for one write at most, never across an await.
    line: Mutex<Line>,
    /// Room for messages that wait. Closed at the end of the connection.
    room: Arc<Semaphore>,
    /// Notified when a message was not written by its sender, and none waited before.
    waiting: Notify,
    /// Where a thread waits for room.
    runtime: Handle,
}

/// The messages that are not written.
#[derive(Debug)]
struct Line {
    /// `None` after the end of the connection.
    half: Option<StreamWriter>,
    /// The number of the next message.
    number: u64,
    /// The first one may be written in part.
    waiting: VecDeque<WaitingMessage>,
}

#[derive(Debug)]
struct WaitingMessage {
    rest: Chain<Bytes, Bytes>,
    /// `None` if the sender may not wait for room.
    _room: Option<OwnedSemaphorePermit>,
}

/// Why a message was not accepted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum NotSent {
    /// The connection has ended.
    Ended,
    /// Too many messages wait.
    Full,
}

/// The reading half of a connection.
#[derive(Debug)]
pub(super) struct MessageReader {
    half: StreamReader,
    /// The number of the next message.
    number: u64,
    /// The bytes that have arrived and are not read yet.
    come: BytesMut,
}

impl MessageReader {
    pub(super) fn new(half: StreamReader) -> Self {
        Self { half, number: 0, come: BytesMut::new() }
    }

    /// Waits for the next message. Fails if nothing arrives for [`SILENT_MAX`], or if a message was lost or repeated.
    /// So each heartbeat proves that all messages before it have arrived. Cancel-safe. Bytes in the message are not
    /// copied.
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

    /// Takes the next message if all of it has arrived.
    fn whole_message(&mut self) -> Result<Option<Bytes>, GroupError> {
        let Some((header, _)) = self.come.split_first_chunk::<HEADER_BYTES>() else { return Ok(None) };
        let mut header = &header[..];
        let (length, number) = (header.get_u32_le() as usize, header.get_u64_le());
        if length > MESSAGE_BYTES_MAX {
            return Err(GroupError::Lost(format!(
                "a message of {length} bytes is longer than the limit of {MESSAGE_BYTES_MAX}"
            )));
        }
        if number != self.number && guards::stands(Guard::MessageNumber) {
            let expected = self.number;
            return Err(GroupError::Lost(format!("message {number} arrived instead of message {expected}")));
        }
        if self.come.len() < HEADER_BYTES + length {
            return Ok(None);
        }
        self.number += 1;
        self.come.advance(HEADER_BYTES);
        Ok(Some(self.come.split_to(length).freeze()))
    }

    async fn read_more(&mut self) -> Result<(), GroupError> {
        // The buffer grows only when it is full. It then doubles at most.
        if self.come.len() == self.come.capacity() {
            self.come.reserve(self.come.len().max(READ_BYTES));
        }
        let read = timeout(SILENT_MAX, self.half.read_buf(&mut self.come)).await;
        let silent = |_| GroupError::Lost(format!("it was silent for {} s", SILENT_MAX.as_secs()));
        match read.map_err(silent)?.map_err(|error| GroupError::lost("the connection failed", &error))? {
            0 => Err(ended()),
            _ => Ok(()),
        }
    }
}

// === impl Outgoing ===

/// Makes the sending end of a connection, on the runtime of the caller.
pub(super) fn outgoing(half: StreamWriter) -> (Outgoing, WritingTask) {
    let line = Line { half: Some(half), number: 0, waiting: VecDeque::new() };
    let outgoing = Outgoing(Arc::new(WritingHalf {
        line: Mutex::new(line),
        room: Arc::new(Semaphore::new(QUEUED_MAX)),
        waiting: Notify::new(),
        runtime: Handle::current(),
    }));
    (outgoing.clone(), WritingTask(outgoing))
}

impl Outgoing {
    /// Sends a message. Waits for room while too many wait.
    pub(super) async fn send(&self, message: Written) -> Result<(), NotSent> {
        let room = Arc::clone(&self.0.room).acquire_owned().await;
        self.put(message, Some(room.map_err(|_| NotSent::Ended)?))
    }

    /// Like [`send`](Self::send), for threads.
    pub(super) fn blocking_send(&self, message: Written) -> Result<(), NotSent> {
        match Arc::clone(&self.0.room).try_acquire_owned() {
            Ok(room) => self.put(message, Some(room)),
            Err(_) => self.0.runtime.block_on(self.send(message)),
        }
    }

    /// Sends a message for a caller that may not wait. A long queue holds such messages.
    pub(super) fn send_now(&self, message: Written) -> Result<(), NotSent> {
        self.put(message, None)
    }

    /// Takes a message, and writes it if none waits before it. An error is left to the writing task, which gets it
    /// too.
    fn put(&self, message: Written, room: Option<OwnedSemaphorePermit>) -> Result<(), NotSent> {
        let mut line = self.line();
        let is_first = line.waiting.is_empty();
        line.push(message, room)?;
        if is_first {
            let _ = line.poll_write(&mut Context::from_waker(Waker::noop()));
            if !line.waiting.is_empty() {
                self.0.waiting.notify_one();
            }
        }
        Ok(())
    }

    fn line(&self) -> MutexGuard<'_, Line> {
        self.0.line.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

// === impl WritingTask ===

impl WritingTask {
    /// Writes the messages that wait, and `alive` whenever none has waited for a second. Returns why the connection has
    /// ended: it fails if the other side reads nothing for [`SILENT_MAX`].
    pub(super) async fn write_all(self, alive: Written) -> GroupError {
        loop {
            if let Err(error) = self.write_waiting().await {
                return error;
            }
            let is_idle = timeout(ALIVE_EVERY, self.0.0.waiting.notified()).await.is_err();
            if is_idle && self.0.send_now(alive.clone()).is_err() {
                return ended();
            }
        }
    }

    /// Writes the messages that wait.
    pub(super) async fn write_waiting(&self) -> Result<(), GroupError> {
        while !self.0.line().waiting.is_empty() {
            let late = |_| GroupError::Lost(format!("it has read nothing for {} s", SILENT_MAX.as_secs()));
            let write = poll_fn(|cx| self.0.line().poll_write(cx));
            timeout(SILENT_MAX, write).await.map_err(late)??;
        }
        Ok(())
    }
}

impl Drop for WritingTask {
    fn drop(&mut self) {
        self.0.0.room.close();
        let mut line = self.0.line();
        line.half = None;
        line.waiting.clear();
    }
}

// === impl Line ===

impl Line {
    /// Gives a message its number, and puts it behind the others.
    fn push(&mut self, written: Written, room: Option<OwnedSemaphorePermit>) -> Result<(), NotSent> {
        if self.half.is_none() {
            return Err(NotSent::Ended);
        }
        if self.waiting.len() >= WAITING_MAX {
            return Err(NotSent::Full);
        }
        let Written { message, end } = written;
        let mut begin = Vec::with_capacity(HEADER_BYTES + message.len());
        begin.put_u32_le((message.len() + end.len()) as u32);
        begin.put_u64_le(self.number);
        begin.put_slice(&message);
        self.number += 1;
        self.waiting.push_back(WaitingMessage { rest: Bytes::from(begin).chain(end), _room: room });
        Ok(())
    }

    /// Writes once, from the first message.
    fn poll_write(&mut self, cx: &mut Context<'_>) -> Poll<Result<(), GroupError>> {
        let (Some(half), Some(first)) = (&mut self.half, self.waiting.front_mut()) else {
            return Poll::Ready(Ok(()));
        };
        let n_written = ready!(pin!(half.write_buf(&mut first.rest)).poll(cx))
            .map_err(|error| GroupError::lost("the connection failed", &error))?;
        if !first.rest.has_remaining() {
            self.waiting.pop_front();
        }
        Poll::Ready(if n_written == 0 { Err(ended()) } else { Ok(()) })
    }
}

fn ended() -> GroupError {
    GroupError::Lost("it has closed the connection".to_owned())
}
