//! Shared-memory streams: the first byte of a stream comes with the files that the sender shows.
//!
//! These are none, its stage, or its stage and the pages of each of its ranks.

use std::io;
use std::os::fd::BorrowedFd;
use std::sync::Arc;

use async_trait::async_trait;
use chassis::identity::link;
use chassis::{Stream, World};
use tokio::net::{UnixListener, UnixStream};

use super::receive::ShmPath;
use crate::connectors::link::accept::{Handshake, Incoming, StreamAcceptor};
use crate::connectors::link::frame::FrameError;
use crate::connectors::link::kv_path::KvPath;
use crate::connectors::unix::{accepted, greeted_by, received};
use crate::error::TransferError;

/// The first byte of each stream.
const GREETING: [u8; 1] = *b"B";
/// What the receiver has not read yet of one stream: the words of a few frames.
///
/// So no sender is far ahead of its receiver. What it has digested is still in a cache when it is copied, and no stream has
/// taken more frames than its receiver gets done while the others do theirs.
const UNREAD_BYTES_MAX: usize = 4096;
/// Connects, and shows `files`.
pub(super) async fn connect(path: &str, files: &[BorrowedFd<'_>]) -> io::Result<Stream> {
    let stream = UnixStream::connect(path).await?;
    rustix::net::sockopt::set_socket_send_buffer_size(&stream, UNREAD_BYTES_MAX)?;
    greeted_by(stream, &GREETING, files).await
}

/// Where streams come in.
#[derive(Debug)]
pub(super) struct ShmAcceptor {
    pub(super) listener: UnixListener,
    pub(super) world: World,
}

#[async_trait]
impl StreamAcceptor for ShmAcceptor {
    async fn accept(&mut self) -> io::Result<(String, Handshake)> {
        let (from, stream) = accepted(&self.listener).await?;
        Ok((from, Box::pin(greeted(stream, self.world.clone()))))
    }
}

async fn greeted(stream: UnixStream, world: World) -> Result<Incoming, TransferError> {
    let (greeting, files) = received(&stream).await.map_err(TransferError::lost)?;
    if greeting != GREETING {
        return Err(FrameError::Unexpected("another greeting").into());
    }
    let mut stream = Stream::other(stream);
    link::admit(&world, &mut stream).await.map_err(TransferError::lost)?;
    let kv_path = ShmPath::of(files)?.map(|path| Arc::new(path) as Arc<dyn KvPath>);
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
