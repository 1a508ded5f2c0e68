//! The handshake of a link: the first bytes of its first stream pass the memory of the sender's GPUs to the receiver.

use std::io;
use std::os::fd::{AsFd as _, OwnedFd};
use std::sync::Arc;

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Stream, World};
use kv_cache::KvMemory;
use tokio::net::{UnixListener, UnixStream};
use tokio::task::spawn_blocking;

use super::receive::CudaIpcPath;
use crate::connectors::gpu::copy_thread::CopyThreads;
use crate::connectors::gpu::pages::card_of;
use crate::connectors::link::accept::{Handshake, Incoming, StreamAcceptor};
use crate::connectors::link::frame::FrameError;
use crate::connectors::link::kv_path::KvPath;
use crate::connectors::unix;
use crate::error::TransferError;
use crate::lanes::Lanes;
use crate::reshard::Lane;

/// The first byte of a stream. The size of each GPU's memory follows; all GPUs share memory of the same size.
/// The first stream also carries a file descriptor for each GPU, in the order of the ranks.
const GREETING: u8 = b'C';
const GREETING_BYTES: usize = 9;

/// Connects a stream, and passes the memory of some GPUs, or none, to the receiver.
pub(super) async fn connect(path: &str, memory: &[(OwnedFd, usize)]) -> io::Result<Stream> {
    let mut greeting = [GREETING; GREETING_BYTES];
    let bytes = memory.first().map_or(0, |(_, bytes)| *bytes);
    if memory.iter().any(|card| card.1 != bytes) {
        return Err(io::Error::other("the ranks' shares of the KV differ in size"));
    }
    greeting[1..].copy_from_slice(&(bytes as u64).to_le_bytes());
    let files: Vec<_> = memory.iter().map(|(fd, _)| fd.as_fd()).collect();
    unix::greeting(path, &greeting, &files).await
}

/// Accepts the streams of cuda-ipc links.
#[derive(Debug)]
pub(super) struct GpuAcceptor {
    pub(super) listener: UnixListener,
    pub(super) world: World,
    pub(super) memory: KvMemory,
    pub(super) copy_threads: CopyThreads,
}

#[async_trait]
impl StreamAcceptor for GpuAcceptor {
    async fn accept(&mut self) -> io::Result<(String, Handshake)> {
        let (from, stream) = unix::accepted(&self.listener).await?;
        let (world, memory, threads) = (self.world.clone(), self.memory.clone(), self.copy_threads.clone());
        Ok((from, Box::pin(greeted(stream, world, memory, threads))))
    }
}

async fn greeted(
    stream: UnixStream,
    world: World,
    memory: KvMemory,
    copy_threads: CopyThreads,
) -> Result<Incoming, TransferError> {
    let (greeting, files) = unix::received::<GREETING_BYTES>(&stream).await.map_err(TransferError::lost)?;
    let (first, bytes) = greeting.split_first_chunk::<1>().expect("a greeting is longer");
    if *first != [GREETING] {
        return Err(FrameError::Unexpected("a greeting of another wire").into());
    }
    let stream = link::admit(&world, Stream::other(stream)).await.map_err(TransferError::lost)?;
    let bytes = u64::from_le_bytes(bytes.try_into().expect("eight bytes follow"));
    let kv_path: Option<Arc<dyn KvPath>> = match files.is_empty() {
        true => None,
        false => Some(Arc::new(mapped(files, bytes, memory, copy_threads).await?)),
    };
    Ok(Incoming { stream, kv_path, handshake_permit: None })
}

/// Maps each of the sender's GPUs for the GPUs of this side that need data from it. The driver takes a while, so this
/// runs on a blocking thread.
async fn mapped(
    files: Vec<OwnedFd>,
    bytes: u64,
    memory: KvMemory,
    copy_threads: CopyThreads,
) -> Result<CudaIpcPath, TransferError> {
    let import = move || {
        let bytes =
            usize::try_from(bytes).map_err(|_| FrameError::Body("the memory size is out of range"))?;
        let lanes = Lanes::between(files.len() as u16, memory.layout());
        let lanes = lanes.map_err(|error| TransferError::Layout(error.to_string()))?;
        let import = |lane: &Lane| {
            let card = card_of(&memory, lane.to, 0)?.memory();
            let remote = card.import(&files[usize::from(lane.from)], bytes).map_err(TransferError::device)?;
            Ok((*lane, Arc::new(remote)))
        };
        Ok(CudaIpcPath::new(
            lanes.all().iter().map(import).collect::<Result<_, TransferError>>()?,
            copy_threads,
        ))
    };
    spawn_blocking(import).await.map_err(|_| TransferError::Closed)?
}
