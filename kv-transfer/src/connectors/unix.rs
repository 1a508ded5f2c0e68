//! Unix sockets between two processes of one machine, and file descriptors passed over them.
//!
//! The socket is in a folder that both processes see. Its name is random in each life of a node, so an address of an
//! earlier life cannot be connected to. The first bytes of a stream can carry files.

use std::fs;
use std::io::{self, IoSlice, IoSliceMut};
use std::mem::MaybeUninit;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::os::unix::fs::PermissionsExt as _;
use std::path::{Path, PathBuf};

use chassis::Stream;
use rustix::net::{
    RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, SendAncillaryBuffer, SendAncillaryMessage,
    SendFlags,
};
use tokio::io::Interest;
use tokio::net::{UnixListener, UnixStream};
use types::layout::RANKS_MAX;

/// Limit of files that come with a greeting.
pub(in crate::connectors) const FILES_MAX: usize = 1 + RANKS_MAX as usize;
/// Limit of stale sockets that one start removes.
const SWEPT_MAX: usize = 1024;

/// A socket's file in the folder. The drop removes it.
#[derive(Debug)]
pub(in crate::connectors) struct Socket {
    path: PathBuf,
}

impl Socket {
    pub(in crate::connectors) fn endpoint(&self) -> String {
        self.path.display().to_string()
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // The file may have been removed already, so an error is ignored.
        let _ = fs::remove_file(&self.path);
    }
}

/// Listens under a name made from `draw`, for processes of the same user.
///
/// The socket is renamed to its final name only after it listens. So a socket with such a name is either in use or
/// left behind by a killed process.
pub(in crate::connectors) fn bind(folder: &Path, draw: u64) -> io::Result<(UnixListener, Socket)> {
    sweep(folder)?;
    let early = Socket { path: folder.join(format!(".baton-{draw:016x}")) };
    let listener = UnixListener::bind(&early.path)?;
    fs::set_permissions(&early.path, fs::Permissions::from_mode(0o600))?;
    let socket = Socket { path: folder.join(format!("baton-{draw:016x}.sock")) };
    fs::rename(&early.path, &socket.path)?;
    Ok((listener, socket))
}

/// Removes sockets without a listener.
fn sweep(folder: &Path) -> io::Result<()> {
    for entry in fs::read_dir(folder)?.flatten().take(SWEPT_MAX) {
        let name = entry.file_name();
        let is_ours = name.to_str().is_some_and(|name| name.starts_with("baton-") && name.ends_with(".sock"));
        if is_ours && is_dead(&entry.path()) {
            // Another process may have removed the file first, so an error is ignored.
            let _ = fs::remove_file(entry.path());
        }
    }
    Ok(())
}

fn is_dead(path: &Path) -> bool {
    use rustix::net::{AddressFamily, SocketAddrUnix, SocketFlags, SocketType, connect, socket_with};
    let Ok(address) = SocketAddrUnix::new(path) else { return false };
    let flags = SocketFlags::NONBLOCK | SocketFlags::CLOEXEC;
    let Ok(socket) = socket_with(AddressFamily::UNIX, SocketType::STREAM, flags, None) else { return false };
    connect(&socket, &address) == Err(rustix::io::Errno::CONNREFUSED)
}

// === the sender's side ===

/// Sends the first bytes of a connected stream, with some files.
pub(in crate::connectors) async fn greeted_by(
    stream: UnixStream,
    greeting: &[u8],
    files: &[BorrowedFd<'_>],
) -> io::Result<Stream> {
    stream.async_io(Interest::WRITABLE, || greet(&stream, greeting, files)).await?;
    Ok(Stream::other(stream))
}

fn greet(stream: &UnixStream, greeting: &[u8], files: &[BorrowedFd<'_>]) -> io::Result<()> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut attached = SendAncillaryBuffer::new(&mut space);
    if !files.is_empty() {
        assert!(attached.push(SendAncillaryMessage::ScmRights(files)), "there is space for all files");
    }
    rustix::net::sendmsg(stream, &[IoSlice::new(greeting)], &mut attached, SendFlags::NOSIGNAL)?;
    Ok(())
}

// === the receiver's side ===

/// Accepts a stream. Returns the peer's process id, for the log, and the stream.
pub(in crate::connectors) async fn accepted(listener: &UnixListener) -> io::Result<(String, UnixStream)> {
    let (stream, _) = listener.accept().await?;
    let from = stream.peer_cred().ok().and_then(|peer| peer.pid());
    Ok((from.map_or_else(|| "a process".to_owned(), |pid| format!("process {pid}")), stream))
}

/// Reads the first bytes of a stream, and the files that came with them.
pub(in crate::connectors) async fn received<const N: usize>(
    stream: &UnixStream,
) -> io::Result<([u8; N], Vec<OwnedFd>)> {
    stream.async_io(Interest::READABLE, || receive(stream)).await
}

fn receive<const N: usize>(stream: &UnixStream) -> io::Result<([u8; N], Vec<OwnedFd>)> {
    let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(FILES_MAX))];
    let mut attached = RecvAncillaryBuffer::new(&mut space);
    let mut greeting = [0; N];
    let into = &mut [IoSliceMut::new(&mut greeting)];
    let received = rustix::net::recvmsg(stream, into, &mut attached, RecvFlags::CMSG_CLOEXEC)?;
    if received.bytes == 0 {
        return Err(io::Error::other("the peer only checked whether the socket is in use"));
    }
    if received.bytes != N {
        return Err(io::Error::other("the peer does not speak this protocol"));
    }
    let files = attached.drain().filter_map(|message| match message {
        RecvAncillaryMessage::ScmRights(files) => Some(files),
        _ => None,
    });
    let files = files.flatten().collect();
    Ok((greeting, files))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn names(folder: &Path) -> Vec<String> {
        let entries = fs::read_dir(folder).expect("a folder").flatten();
        let mut names: Vec<_> = entries.map(|entry| entry.file_name().into_string().expect("text")).collect();
        names.sort();
        names
    }

    #[tokio::test]
    async fn a_start_sweeps_what_killed_processes_left() {
        let folder = tempfile::tempdir().expect("a folder");
        let folder = folder.path();
        let (_alive, living) = bind(folder, 1).expect("it listens");
        let (dead, left) = bind(folder, 2).expect("it listens");
        drop(dead);
        std::mem::forget(left);
        fs::write(folder.join("baton-notes.txt"), "another program's").expect("a file");
        let (_new, socket) = bind(folder, 3).expect("it listens");
        let expected = ["baton-0000000000000001.sock", "baton-0000000000000003.sock", "baton-notes.txt"];
        assert_eq!(names(folder), expected);
        drop((living, socket));
        assert_eq!(names(folder), ["baton-notes.txt"]);
    }

    #[tokio::test]
    async fn only_the_same_user_may_connect() {
        let folder = tempfile::tempdir().expect("a folder");
        let (_listener, socket) = bind(folder.path(), 1).expect("it listens");
        let mode = fs::metadata(&socket.path).expect("it is there").permissions().mode();
        assert_eq!(mode & 0o777, 0o600);
    }
}
