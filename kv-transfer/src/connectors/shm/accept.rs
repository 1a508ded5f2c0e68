//! Shared-memory streams: the first byte of a stream carries the file descriptors of the sender's memory.
//!
//! A stream carries no files, or the stage, or the stage and the pages of each rank.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Stream, World};
use tokio::net::{UnixListener, UnixStream};

use super::receive::ShmPath;
use crate::connectors::gpu::staging::HostStaging;
use crate::connectors::link::accept::{Handshake, Incoming, StreamAcceptor};
use crate::connectors::link::frame::FrameError;
use crate::connectors::link::kv_path::KvPath;
use crate::connectors::unix::{accepted, greeted_by, received};
use crate::error::TransferError;

/// The first byte of each stream.
const GREETING: [u8; 1] = *b"B";
/// The size of a stream's send buffer: room for a few frames, because they carry no KV. The buffer is small,
/// so no sender is far ahead of its receiver. KV that was digested is still in a cache when it is copied, and
/// frames are spread over the streams as their receivers finish them.
const UNREAD_BYTES_MAX: usize = 4096;
/// Connects a stream, and passes `files` to the receiver.
pub(super) async fn connect(path: &str, files: &[BorrowedFd<'_>]) -> io::Result<Stream> {
    let stream = UnixStream::connect(path).await?;
    rustix::net::sockopt::set_socket_send_buffer_size(&stream, UNREAD_BYTES_MAX)?;
    greeted_by(stream, &GREETING, files).await
}

/// Accepts the streams of shm links.
#[derive(Debug)]
pub(super) struct ShmAcceptor {
    pub(super) listener: UnixListener,
    pub(super) world: World,
    /// Lets this side's GPUs read the sender's stage.
    pub(super) staging: Option<Arc<dyn HostStaging>>,
}

#[async_trait]
impl StreamAcceptor for ShmAcceptor {
    async fn accept(&mut self) -> io::Result<(String, Handshake)> {
        let (from, stream) = accepted(&self.listener).await?;
        Ok((from, Box::pin(greeted(stream, self.world.clone(), self.staging.clone()))))
    }
}

async fn greeted(
    stream: UnixStream,
    world: World,
    staging: Option<Arc<dyn HostStaging>>,
) -> Result<Incoming, TransferError> {
    let (greeting, files) = received(&stream).await.map_err(TransferError::lost)?;
    if greeting != GREETING {
        return Err(FrameError::Unexpected("a greeting of another wire").into());
    }
    let stream = link::admit(&world, Stream::other(stream)).await.map_err(TransferError::lost)?;
    let kv_path = ShmPath::of(files, staging)?.map(|path| Arc::new(path) as Arc<dyn KvPath>);
    Ok(Incoming { stream, kv_path, handshake_permit: None })
}

#[cfg(test)]
mod tests {
    use std::pin::pin;
    use std::task::Poll;

    use futures::poll;
    use tokio::io::AsyncWriteExt as _;

    use super::*;
    use crate::connectors::unix::bind;

    #[tokio::test]
    async fn a_stream_holds_a_few_words_that_nobody_reads() {
        let folder = tempfile::tempdir().expect("a folder");
        let (_listener, socket) = bind(folder.path(), 1).expect("it listens");
        let (_reader, mut writer) = connect(&socket.endpoint(), &[]).await.expect("it listens").into_split();
        let mut n_written = 0;
        while let Poll::Ready(written) = poll!(pin!(writer.write(&[0; 1024]))) {
            n_written += written.expect("the listener is there");
        }
        assert!((2 << 10..=16 << 10).contains(&n_written), "{n_written} bytes");
    }
}
