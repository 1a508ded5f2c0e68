//! How a receiver comes by the memory of a sender's card: with the first bytes of a link's first stream.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use async_trait::async_trait;
use chassis::Stream;
use kv_cache::KvMemory;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::spawn_blocking;

use super::carrier::Carrier;
use super::on_card;
use super::pulled::Pulled;
use crate::connectors::link::frame::FrameError;
use crate::connectors::link::medium::Apart;
use crate::connectors::link::receiver::{Arriving, Door, Incoming};
use crate::connectors::shm::door;
use crate::error::TransferError;

/// What a stream begins with. The number of bytes that come with the descriptor, if one does, follows.
const GREETING: u8 = b'C';
const GREETING_BYTES: usize = 9;

/// Connects, and shows so many bytes of a card's memory, or none.
pub(super) async fn connect(path: &str, memory: Option<&(OwnedFd, usize)>) -> io::Result<Stream> {
    let mut greeting = [GREETING; GREETING_BYTES];
    let bytes = memory.map_or(0, |(_, bytes)| *bytes as u64);
    greeting[1..].copy_from_slice(&bytes.to_le_bytes());
    let files: Vec<_> = memory.iter().map(|(fd, _)| fd.as_fd()).collect();
    door::greeting(path, &greeting, &files).await
}

/// Where streams come in.
#[derive(Debug)]
pub(super) struct CardDoor {
    pub(super) listener: UnixListener,
    pub(super) memory: KvMemory,
    pub(super) carrier: Arc<Carrier>,
}

#[async_trait]
impl Door for CardDoor {
    async fn accept(&mut self) -> io::Result<(String, Arriving)> {
        let (from, stream) = door::accepted(&self.listener).await?;
        Ok((from, Box::pin(greeted(stream, self.memory.clone(), Arc::clone(&self.carrier)))))
    }
}

async fn greeted(
    stream: UnixStream,
    memory: KvMemory,
    carrier: Arc<Carrier>,
) -> Result<Incoming, TransferError> {
    let (greeting, files) = door::received::<GREETING_BYTES>(&stream).await.map_err(TransferError::lost)?;
    let (first, bytes) = greeting.split_first_chunk::<1>().expect("a greeting is longer");
    if *first != [GREETING] {
        return Err(FrameError::Unexpected("another greeting").into());
    }
    let bytes = u64::from_le_bytes(bytes.try_into().expect("eight bytes follow"));
    let elsewhere = match files.into_iter().next() {
        None => None,
        Some(fd) => Some(Apart::Card(Arc::new(mapped(fd, bytes, memory, carrier).await?))),
    };
    Ok(Incoming { stream: Stream::other(stream), elsewhere })
}

/// Mapping takes the driver its time: on a thread that may wait.
async fn mapped(
    fd: OwnedFd,
    bytes: u64,
    memory: KvMemory,
    carrier: Arc<Carrier>,
) -> Result<Pulled, TransferError> {
    let import = move || {
        let bytes = usize::try_from(bytes).map_err(|_| FrameError::Body("more memory than there can be"))?;
        let remote = on_card(&memory)?.memory().import(&fd, bytes).map_err(TransferError::device)?;
        Ok(Pulled::new(Arc::new(remote), carrier))
    };
    spawn_blocking(import).await.map_err(|_| TransferError::Closed)?
}
