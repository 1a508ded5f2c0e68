//! One connection of the simulated network: two pipes, one for each direction.

use std::collections::VecDeque;
use std::io::{self, IoSlice};
use std::pin::Pin;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::task::{Context, Poll, Waker};

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::time::{Instant, Sleep};

use super::chance::Chance;
use super::log::EventLog;
use super::net::{Heard, Life, Path, Tap};

/// The capacity of a pipe. A write waits when it is full.
const PIPE_BYTES_MAX: usize = 64 << 10;

/// One connection: a pipe for each direction. The client writes pipe 0.
#[derive(Debug)]
pub struct Connection {
    id: u64,
    hosts: [String; 2],
    pipes: [Pipe; 2],
    log: EventLog,
    wires: Wires,
}

/// The properties of a connection on which its faults depend.
#[derive(Debug)]
pub struct Wires {
    /// Whether this is a connection for KV, on which a bit may be flipped.
    pub is_kv: bool,
    pub tap: Option<Tap>,
}

#[derive(Debug)]
struct Pipe {
    path: Arc<Path>,
    /// The bytes on the way. Never held across an await.
    state: Mutex<PipeState>,
}

#[derive(Debug)]
struct PipeState {
    chance: Chance,
    chunks: VecDeque<Chunk>,
    bytes: usize,
    last_due: Option<Instant>,
    /// The time at which the reader sees that the connection is broken; `None` if it is not.
    reset: Option<Instant>,
    /// Whether the reader has closed its end.
    is_abandoned: bool,
    is_finished: bool,
    cut_after: Option<u32>,
    reader: Option<Waker>,
    writer: Option<Waker>,
}

#[derive(Debug)]
struct Chunk {
    due: Instant,
    /// The bytes of a write; `None` is the end of the stream.
    bytes: Option<Vec<u8>>,
    n_read: usize,
}

impl Connection {
    pub fn new(
        id: u64,
        hosts: [String; 2],
        paths: [Arc<Path>; 2],
        cuts: [Option<u32>; 2],
        mut chance: Chance,
        log: EventLog,
        wires: Wires,
    ) -> Arc<Self> {
        let mut numbers = cuts.into_iter();
        let pipes = paths.map(|path| {
            let cut_after = numbers.next().flatten();
            Pipe { path, state: Mutex::new(PipeState::new(Chance::new(chance.draw()), cut_after)) }
        });
        Arc::new(Self { id, hosts, pipes, log, wires })
    }

    /// Copies the bytes to the tap. A tap that is full or has no reader gets nothing.
    fn overhear(&self, end: usize, bytes: &[u8]) {
        if let (0, Some(tap)) = (end, &self.wires.tap) {
            let heard = Heard { connection: self.id, to: self.hosts[1].clone(), bytes: bytes.to_vec() };
            let _ = tap.try_send(heard);
        }
    }

    pub fn has_host(&self, host: &str) -> bool {
        self.hosts.iter().any(|known| known == host)
    }

    /// Breaks both ends of the connection. Bytes on the way are lost.
    pub fn reset(&self) {
        for pipe in &self.pipes {
            let mut state = pipe.state();
            let due = pipe.path.due(&mut state.chance);
            state.reset.get_or_insert(due);
            state.wake();
        }
        self.log.trace_number("reset", self.id);
    }

    /// Cancels a planned break of the connection.
    pub fn mend(&self) {
        self.pipes.iter().for_each(|pipe| pipe.state().cut_after = None);
    }

    /// Wakes the tasks at both ends.
    pub fn wake(&self) {
        self.pipes.iter().for_each(|pipe| pipe.state().wake());
    }
}

impl Pipe {
    fn state(&self) -> MutexGuard<'_, PipeState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl PipeState {
    fn new(chance: Chance, cut_after: Option<u32>) -> Self {
        Self {
            chance,
            chunks: VecDeque::new(),
            bytes: 0,
            last_due: None,
            reset: None,
            is_abandoned: false,
            is_finished: false,
            cut_after,
            reader: None,
            writer: None,
        }
    }

    fn wake(&mut self) {
        self.reader.take().into_iter().chain(self.writer.take()).for_each(Waker::wake);
    }

    /// Adds a write and decides when it arrives. No write overtakes an earlier one.
    fn push(&mut self, path: &Path, bytes: Option<Vec<u8>>) {
        let last_due = self.last_due.map_or_else(Instant::now, |last| last + path.gap());
        let due = path.due(&mut self.chance).max(last_due);
        self.last_due = Some(due);
        self.bytes += bytes.as_ref().map_or(0, Vec::len);
        self.chunks.push_back(Chunk { due, bytes, n_read: 0 });
        if let Some(reader) = self.reader.take() {
            reader.wake();
        }
    }

    /// Returns whether the connection breaks at this write.
    fn is_cut(&mut self) -> bool {
        let Some(left) = &mut self.cut_after else { return false };
        *left = left.saturating_sub(1);
        *left == 0
    }
}

/// One end of a connection.
#[derive(Debug)]
pub struct SimStream {
    connection: Arc<Connection>,
    end: usize,
    life: Arc<Life>,
    sleep: Option<Pin<Box<Sleep>>>,
}

impl SimStream {
    pub fn new(connection: Arc<Connection>, end: usize, life: Arc<Life>) -> Self {
        Self { connection, end, life, sleep: None }
    }

    fn outgoing(&self) -> &Pipe {
        &self.connection.pipes[self.end]
    }

    fn incoming(&self) -> &Pipe {
        &self.connection.pipes[1 - self.end]
    }

    fn alive(&self) -> io::Result<()> {
        if self.life.is_over() { Err(io::ErrorKind::ConnectionAborted.into()) } else { Ok(()) }
    }

    fn finish(&self) {
        let pipe = self.outgoing();
        let mut state = pipe.state();
        if !std::mem::replace(&mut state.is_finished, true) {
            state.push(&pipe.path, None);
        }
    }

    /// Reads the bytes that have arrived, or returns the time of the next ones.
    fn read_now(&self, cx: &Context<'_>, buf: &mut ReadBuf<'_>) -> Result<Read, io::Error> {
        self.alive()?;
        let pipe = self.incoming();
        let mut state = pipe.state();
        let now = Instant::now();
        state.reader = Some(cx.waker().clone());
        if pipe.path.is_held() {
            return Ok(Read::Later);
        }
        match state.reset {
            Some(due) if due <= now => return Err(io::ErrorKind::ConnectionReset.into()),
            Some(due) => return Ok(Read::At(due)),
            None => {}
        }
        let Some(chunk) = state.chunks.front_mut() else { return Ok(Read::Later) };
        if chunk.due > now {
            return Ok(Read::At(chunk.due));
        }
        let Some(bytes) = &chunk.bytes else { return Ok(Read::Done) };
        let n = buf.remaining().min(bytes.len() - chunk.n_read);
        buf.put_slice(&bytes[chunk.n_read..chunk.n_read + n]);
        chunk.n_read += n;
        if chunk.n_read == bytes.len() {
            state.chunks.pop_front();
        }
        state.bytes -= n;
        state.writer.take().into_iter().for_each(Waker::wake);
        Ok(Read::Done)
    }

    fn write_now(&self, cx: &Context<'_>, bufs: &[IoSlice<'_>]) -> Poll<io::Result<usize>> {
        self.alive()?;
        // A reset reaches the writer on the path of the answers, so that path must not be held.
        let incoming = self.incoming();
        let knows = |due: Option<Instant>| due.is_some_and(|due| due <= Instant::now());
        if knows(incoming.state().reset) && !incoming.path.is_held() {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let pipe = self.outgoing();
        let mut state = pipe.state();
        if state.is_finished {
            return Poll::Ready(Err(io::ErrorKind::BrokenPipe.into()));
        }
        let room = PIPE_BYTES_MAX.saturating_sub(state.bytes);
        if room == 0 {
            state.writer = Some(cx.waker().clone());
            return Poll::Pending;
        }
        // On KV connections a full kernel buffer takes a part of a write, so that frames arrive in pieces.
        let room = if self.connection.wires.is_kv {
            room.min(state.chance.within(64..=2_048) as usize)
        } else {
            room
        };
        let mut bytes = joined(bufs, room);
        let n = bytes.len();
        let (is_abandoned, is_cut) = (state.is_abandoned, state.is_cut());
        if n > 0 && !is_abandoned {
            self.connection.overhear(self.end, &bytes);
            if self.connection.wires.is_kv && pipe.path.corrupts(&mut state.chance) {
                let bit = state.chance.below(n as u64 * 8) as usize;
                bytes[bit / 8] ^= 1 << (bit % 8);
            }
            state.push(&pipe.path, Some(bytes));
        }
        drop(state);
        self.connection.log.trace_number("write", self.connection.id * 2 + self.end as u64);
        if is_abandoned || is_cut {
            self.connection.reset();
        }
        Poll::Ready(Ok(n))
    }
}

enum Read {
    Done,
    At(Instant),
    Later,
}

fn joined(bufs: &[IoSlice<'_>], room: usize) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(bufs.iter().map(|buf| buf.len()).sum::<usize>().min(room));
    for buf in bufs {
        let n = buf.len().min(room - bytes.len());
        bytes.extend_from_slice(&buf[..n]);
    }
    bytes
}

impl AsyncRead for SimStream {
    fn poll_read(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        buf: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        loop {
            match self.read_now(cx, buf)? {
                Read::Done => return Poll::Ready(Ok(())),
                Read::Later => return Poll::Pending,
                Read::At(due) => {
                    let sleep = self.sleep.get_or_insert_with(|| Box::pin(tokio::time::sleep_until(due)));
                    if sleep.deadline() != due {
                        sleep.as_mut().reset(due);
                    }
                    std::task::ready!(sleep.as_mut().poll(cx));
                }
            }
        }
    }
}

impl AsyncWrite for SimStream {
    fn poll_write(self: Pin<&mut Self>, cx: &mut Context<'_>, buf: &[u8]) -> Poll<io::Result<usize>> {
        self.write_now(cx, &[IoSlice::new(buf)])
    }

    fn poll_write_vectored(
        self: Pin<&mut Self>,
        cx: &mut Context<'_>,
        bufs: &[IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        self.write_now(cx, bufs)
    }

    fn is_write_vectored(&self) -> bool {
        true
    }

    fn poll_flush(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        Poll::Ready(Ok(()))
    }

    fn poll_shutdown(self: Pin<&mut Self>, _: &mut Context<'_>) -> Poll<io::Result<()>> {
        self.finish();
        Poll::Ready(Ok(()))
    }
}

impl Drop for SimStream {
    fn drop(&mut self) {
        if self.life.is_over() {
            return;
        }
        self.finish();
        let mut state = self.incoming().state();
        state.is_abandoned = true;
        state.chunks.clear();
        state.bytes = 0;
        state.writer.take().into_iter().for_each(Waker::wake);
    }
}
