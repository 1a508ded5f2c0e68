//! The handshake of a link: the first bytes of its first stream pass the memory of the sender's GPUs to the receiver.

use std::io;
use std::os::fd::AsFd as _;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Stream, World};
use kv_cache::KvMemory;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::{UnixListener, UnixStream};
use tokio::task::spawn_blocking;

use super::receive::{CudaIpcPath, RemoteRank};
use super::shared::{SharedFiles, StageSizes};
use crate::connectors::gpu::copy_thread::CopyThreads;
use crate::connectors::gpu::pages::card_of;
use crate::connectors::link::accept::{Handshake, Incoming, StreamAcceptor};
use crate::connectors::link::frame::FrameError;
use crate::connectors::link::kv_path::KvPath;
use crate::connectors::unix;
use crate::error::TransferError;
use crate::lanes::Lanes;

/// The first byte of a stream of a sender with one pipeline stage. The size of each GPU's memory follows; all GPUs share
/// memory of the same size. The first stream also carries a file descriptor for each GPU, in the order of the ranks.
const GREETING: u8 = b'C';
/// The first byte of the first stream of a sender with several stages. The number of stages follows. The stream carries
/// a file descriptor for each GPU: those of all ranks of the first stage, then those of the next. When both sides have
/// proved their identity, the sender sends the size of a GPU's memory for each stage, in 8 bytes each.
const GREETING_OF_STAGES: u8 = b'S';
const GREETING_BYTES: usize = 9;

/// Connects a stream, and passes the memory of all GPUs, or none, to the receiver.
pub(super) async fn connect(path: &str, world: &World, shared: Option<&SharedFiles>) -> io::Result<Stream> {
    greet(UnixStream::connect(path).await?, world, shared).await
}

async fn greet(stream: UnixStream, world: &World, shared: Option<&SharedFiles>) -> io::Result<Stream> {
    let (first, number) = match shared.map(|shared| &shared.sizes) {
        None => (GREETING, 0),
        Some(sizes) if sizes.n_stages() == 1 => (GREETING, sizes.bytes(0)),
        Some(sizes) => (GREETING_OF_STAGES, sizes.n_stages() as u64),
    };
    let mut greeting = [first; GREETING_BYTES];
    greeting[1..].copy_from_slice(&number.to_le_bytes());
    let files: Vec<_> = shared.iter().flat_map(|shared| &shared.files).map(|file| file.as_fd()).collect();
    let stream = unix::greeted_by(stream, &greeting, &files).await?;
    let mut stream = link::prove(world, stream).await?;
    if first == GREETING_OF_STAGES {
        let sizes: Vec<[u8; 8]> =
            shared.iter().flat_map(|shared| shared.sizes.all()).map(u64::to_le_bytes).collect();
        stream.write_all(sizes.as_flattened()).await?;
    }
    Ok(stream)
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
    let (stream, shared) = received(stream, &world).await?;
    let kv_path: Option<Arc<dyn KvPath>> = match shared {
        None => None,
        Some(shared) => Some(Arc::new(mapped(shared, memory, copy_threads).await?)),
    };
    Ok(Incoming { stream, kv_path, handshake_permit: None })
}

/// Receives what [`connect`] sends.
async fn received(stream: UnixStream, world: &World) -> Result<(Stream, Option<SharedFiles>), TransferError> {
    let (greeting, files) = unix::received::<GREETING_BYTES>(&stream).await.map_err(TransferError::lost)?;
    let (first, number) = greeting.split_first_chunk::<1>().expect("a greeting is longer");
    let number = u64::from_le_bytes(number.try_into().expect("eight bytes follow"));
    let n_stages = match *first {
        [GREETING] => 1,
        [GREETING_OF_STAGES] => n_stages(number, files.len())?,
        _ => return Err(FrameError::Unexpected("a greeting of another wire").into()),
    };
    let mut stream = link::admit(world, Stream::other(stream)).await.map_err(TransferError::lost)?;
    if files.is_empty() {
        return Ok((stream, None));
    }
    let mut sizes = vec![number; n_stages];
    if *first == [GREETING_OF_STAGES] {
        for size in &mut sizes {
            *size = stream.read_u64_le().await.map_err(TransferError::lost)?;
        }
    }
    Ok((stream, Some(SharedFiles { sizes: StageSizes::new(sizes)?, files })))
}

/// Checks a sender's number of stages against the number of its files.
fn n_stages(announced: u64, n_files: usize) -> Result<usize, FrameError> {
    let n_stages = usize::try_from(announced).ok().filter(|n_stages| (2..=n_files).contains(n_stages));
    n_stages
        .filter(|n_stages| n_files.is_multiple_of(*n_stages))
        .ok_or(FrameError::Body("the number of shared memories does not fit the number of stages"))
}

/// Maps each of the sender's GPUs for the GPUs of this side that need data from it. The driver takes a while, so this
/// runs on a blocking thread.
async fn mapped(
    shared: SharedFiles,
    memory: KvMemory,
    copy_threads: CopyThreads,
) -> Result<CudaIpcPath, TransferError> {
    let import = move || {
        let lanes = Lanes::between(shared.n_ranks() as u16, memory.layout());
        let lanes = lanes.map_err(|error| TransferError::Layout(error.to_string()))?;
        let mut remotes = Vec::new();
        for lane in lanes.all() {
            for stage in 0..memory.n_stages() {
                let card = card_of(&memory, lane.to, stage)?.memory();
                let import = |from| {
                    let bytes = shared.sizes.bytes(from) as usize;
                    card.import(shared.file(lane.from, from), bytes).map(Arc::new)
                };
                let of_stages = (0..shared.sizes.n_stages()).map(import).collect::<Result<_, _>>();
                remotes.push(RemoteRank {
                    lane: *lane,
                    stage,
                    of_stages: of_stages.map_err(TransferError::device)?,
                });
            }
        }
        Ok(CudaIpcPath::new(remotes, shared.sizes, copy_threads))
    };
    spawn_blocking(import).await.map_err(|_| TransferError::Closed)?
}

#[cfg(test)]
mod tests {
    use std::fs::File;
    use std::os::fd::OwnedFd;

    use super::*;

    fn files(n_files: usize) -> Vec<OwnedFd> {
        (0..n_files).map(|_| File::open("/dev/null").expect("it is there").into()).collect()
    }

    /// Sends a greeting and the bytes after it, and returns the receiver's result.
    async fn told(
        greeting: &[u8; GREETING_BYTES],
        n_files: usize,
        rest: &[u8],
    ) -> Result<Option<SharedFiles>, TransferError> {
        let (near, far) = UnixStream::pair().expect("two sockets");
        let files = files(n_files);
        let files: Vec<_> = files.iter().map(|file| file.as_fd()).collect();
        let mut near = unix::greeted_by(near, greeting, &files).await.expect("the other end is here");
        near.write_all(rest).await.expect("the other end is here");
        drop(near);
        received(far, &World::real()).await.map(|(_, shared)| shared)
    }

    fn greeting(first: u8, number: u64) -> [u8; GREETING_BYTES] {
        let mut greeting = [first; GREETING_BYTES];
        greeting[1..].copy_from_slice(&number.to_le_bytes());
        greeting
    }

    #[tokio::test]
    async fn a_receiver_learns_the_memories_of_all_stages_and_ranks() {
        for (sizes, n_ranks) in [(&[64][..], 1), (&[64], 4), (&[64, 32], 1), (&[64, 32], 2), (&[8, 8, 16], 3)]
        {
            let (near, far) = UnixStream::pair().expect("two sockets");
            let stage_sizes = StageSizes::new(sizes.iter().copied()).expect("small");
            let shared = SharedFiles { sizes: stage_sizes.clone(), files: files(sizes.len() * n_ranks) };
            let world = World::real();
            let (sent, received) = tokio::join!(greet(near, &world, Some(&shared)), received(far, &world));
            let (_sent, (_stream, received)) = (sent.expect("sent"), received.expect("received"));
            let received = received.expect("files came");
            assert_eq!((received.sizes, received.files.len()), (stage_sizes, shared.files.len()));
            assert_eq!(shared.n_ranks(), n_ranks, "{sizes:?}");
        }
    }

    /// A node of one stage sends the bytes that nodes of the version before send and understand.
    #[tokio::test]
    async fn one_stage_is_greeted_as_before_there_were_stages() {
        let (near, far) = UnixStream::pair().expect("two sockets");
        let sizes = StageSizes::new([5 << 20]).expect("small");
        let shared = SharedFiles { sizes, files: files(2) };
        drop(greet(near, &World::real(), Some(&shared)).await.expect("the other end is here"));
        let (bytes, files) = unix::received::<GREETING_BYTES>(&far).await.expect("it was sent");
        assert_eq!((bytes, files.len()), ([b'C', 0, 0, 0x50, 0, 0, 0, 0, 0], 2));
        let rest = Stream::other(far).read_u8().await;
        assert_eq!(rest.expect_err("nothing follows").kind(), io::ErrorKind::UnexpectedEof);
        let told = told(&greeting(b'C', 0), 0, &[]).await.expect("a later stream has no memory");
        assert!(told.is_none());
    }

    #[tokio::test]
    async fn memories_that_do_not_fit_the_stages_are_refused() {
        let numbers = "the number of shared memories does not fit the number of stages";
        let range = "a size of shared GPU memory is out of range";
        let sizes = |all: &[u64]| all.iter().flat_map(|size| size.to_le_bytes()).collect::<Vec<u8>>();
        for (first, number, n_files, rest, expected) in [
            (b'X', 1, 1, vec![], "a greeting of another wire"),
            (b'S', 2, 3, sizes(&[8, 8]), numbers),
            (b'S', 2, 1, sizes(&[8, 8]), numbers),
            (b'S', 1, 2, sizes(&[8]), numbers),
            (b'S', 0, 2, vec![], numbers),
            (b'S', 2, 0, sizes(&[8, 8]), numbers),
            (b'S', u64::MAX, 2, vec![], numbers),
            (b'S', 2, 4, sizes(&[8]), "unexpected end of file"),
            (b'S', 2, 4, sizes(&[8, 0]), range),
            (b'S', 2, 4, sizes(&[8, u64::MAX]), range),
            (b'C', 0, 1, vec![], range),
        ] {
            let error = told(&greeting(first, number), n_files, &rest).await.expect_err("it does not fit");
            let error = types::in_full(&error);
            assert!(error.contains(expected), "{number} stages, {n_files} files, {rest:?}: {error}");
        }
    }
}
