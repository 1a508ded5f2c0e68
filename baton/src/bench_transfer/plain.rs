//! Moves the same bytes without a connector, to measure the path itself with the same number of streams.
//!
//! The comparison for tcp is a vectored send and receive over the same number of sockets. For all other
//! connectors in host memory, the same number of threads copy from page to page. Between GPUs, all bytes are copied by
//! the copy engines, whatever the places of the blocks: at once, or for shm through page-locked host memory. The
//! comparison for tcp are sockets between pages in host memory.

use std::collections::VecDeque;
use std::io::{self, IoSlice, IoSliceMut};
use std::sync::Arc;

use kv_cache::{BlockLease, KvMemory, PageMut, PageRef};
use tokio::io::AsyncWriteExt as _;
use tokio::net::{TcpListener, TcpStream};
use tokio::task::JoinSet;

use crate::bench_transfer::cards::PlainCopy;
use crate::bench_transfer::case::{Case, Memory};
use crate::bench_transfer::ends::{Ends, GROUP, Run, failed, not_moved};
use crate::exit::CommandError;

/// The largest number of slices in one system call.
const SLICES: usize = 64;
/// The size of the slices of a contiguous run, small enough that both ends of a socket are busy.
const SLICE_BYTES: usize = 64 << 10;

/// The plain copy that a connector is compared with.
#[derive(Debug)]
pub enum Plain {
    Sockets(Sockets),
    Threads { streams: u16 },
    Cards(Box<PlainCopy>),
}

/// The sockets of the plain copy. They are connected once, because connection setup is not measured.
#[derive(Debug)]
pub struct Sockets {
    pairs: Vec<(TcpStream, TcpStream)>,
    /// Host memory in place of that of the two nodes, if theirs is on GPUs.
    memories: Option<[KvMemory; 2]>,
}

impl Plain {
    pub async fn of(case: &Case, ends: &Ends) -> Result<Self, CommandError> {
        let (near, far) = ends.memories();
        match (case.memory, case.connector.as_str()) {
            (Memory::Gpus, "tcp") => {
                let host = |memory: &KvMemory| {
                    KvMemory::host(memory.layout().clone(), memory.n_blocks()).map_err(failed)
                };
                Self::sockets(case.streams, Some([host(near)?, host(far)?])).await
            }
            (Memory::Gpus, "shm") => Ok(Self::Cards(Box::new(PlainCopy::through_host(near, far)?))),
            (Memory::Gpus, _) => Ok(Self::Cards(Box::new(PlainCopy::between(near, far)?))),
            (Memory::Host, "tcp") => Self::sockets(case.streams, None).await,
            (Memory::Host, _) => Ok(Self::Threads { streams: case.streams }),
        }
    }

    async fn sockets(streams: u16, memories: Option<[KvMemory; 2]>) -> Result<Self, CommandError> {
        let listener = TcpListener::bind("127.0.0.1:0").await.map_err(CommandError::work)?;
        let addr = listener.local_addr().map_err(CommandError::work)?;
        let mut pairs = Vec::new();
        for _ in 0..streams {
            let (near, far) = tokio::join!(TcpStream::connect(addr), listener.accept());
            let (near, (far, _)) = (near.map_err(CommandError::work)?, far.map_err(CommandError::work)?);
            near.set_nodelay(true).map_err(CommandError::work)?;
            pairs.push((near, far));
        }
        Ok(Self::Sockets(Sockets { pairs, memories }))
    }

    /// Copies all bytes of the runs once.
    pub async fn copy(
        &mut self,
        ends: &Ends,
        runs: &Arc<[Run]>,
        _room: &BlockLease,
    ) -> Result<(), CommandError> {
        match self {
            Self::Threads { streams } => copy_by_threads(ends, runs, usize::from(*streams)),
            Self::Sockets(sockets) => sockets.copy(ends, runs).await,
            Self::Cards(plain) => {
                let (near, far) = ends.memories();
                plain.copy(near, far, ends.bytes())
            }
        }
    }
}

/// Returns the runs of stream `nth` of `n_streams`.
fn share(runs: &[Run], nth: usize, n_streams: usize) -> impl Iterator<Item = &Run> {
    runs.iter().skip(nth).step_by(n_streams)
}

fn copy_by_threads(ends: &Ends, runs: &[Run], n_streams: usize) -> Result<(), CommandError> {
    let (near, far) = ends.memories();
    let copy = |nth: usize| -> Result<(), CommandError> {
        for run in share(runs, nth, n_streams) {
            let source = near.read(GROUP, run.layer, run.near.clone()).map_err(failed)?;
            let mut target = far.write(GROUP, run.layer, run.far.clone()).map_err(failed)?;
            target.copy_from_slice(&source);
        }
        Ok(())
    };
    std::thread::scope(|scope| {
        let others: Vec<_> = (1..n_streams).map(|nth| scope.spawn(move || copy(nth))).collect();
        let own = copy(0);
        others.into_iter().map(|thread| thread.join().expect("a copy does not panic")).fold(own, Result::and)
    })
}

impl Sockets {
    async fn copy(&mut self, ends: &Ends, runs: &Arc<[Run]>) -> Result<(), CommandError> {
        let n_streams = self.pairs.len();
        let (near, far) = match &self.memories {
            Some([near, far]) => (near, far),
            None => ends.memories(),
        };
        let mut tasks = JoinSet::new();
        for (nth, (out, into)) in self.pairs.drain(..).enumerate() {
            let (memory, share_of) = (near.clone(), Arc::clone(runs));
            tasks.spawn(async move { send(out, &memory, &share_of, nth, n_streams).await.map(Half::Out) });
            let (memory, share_of) = (far.clone(), Arc::clone(runs));
            tasks.spawn(async move { receive(into, &memory, &share_of, nth, n_streams).await.map(Half::In) });
        }
        let (mut outs, mut ins) = (Vec::new(), Vec::new());
        while let Some(half) = tasks.join_next().await {
            match half.expect("a copy does not panic")? {
                Half::Out(half) => outs.push(half),
                Half::In(half) => ins.push(half),
            }
        }
        self.pair_up(outs, ins)
    }

    /// Pairs outgoing and accepted connections by their addresses, because they are accepted in any order.
    fn pair_up(&mut self, outs: Vec<TcpStream>, mut ins: Vec<TcpStream>) -> Result<(), CommandError> {
        for out in outs {
            let addr = out.local_addr().map_err(CommandError::work)?;
            let at = ins.iter().position(|half| half.peer_addr().is_ok_and(|peer| peer == addr));
            self.pairs
                .push((out, ins.swap_remove(at.expect("each outgoing connection has an incoming one"))));
        }
        Ok(())
    }
}

enum Half {
    Out(TcpStream),
    In(TcpStream),
}

async fn send(
    mut socket: TcpStream,
    memory: &KvMemory,
    runs: &[Run],
    nth: usize,
    n: usize,
) -> Result<TcpStream, CommandError> {
    let mut rest: VecDeque<PageRef<'_>> = VecDeque::new();
    let mut runs = share(runs, nth, n);
    let mut done = 0;
    loop {
        while rest.len() < SLICES {
            let Some(run) = runs.next() else { break };
            rest.push_back(memory.read(GROUP, run.layer, run.near.clone()).map_err(failed)?);
        }
        if rest.is_empty() {
            return Ok(socket);
        }
        let slices: Vec<_> = sliced(rest.iter().map(|page| &page[..]), done).map(IoSlice::new).collect();
        let written = socket.write_vectored(&slices).await.map_err(lost)?;
        drop(slices);
        done = advance(&mut rest, done + written, |page| page.len());
    }
}

async fn receive(
    socket: TcpStream,
    memory: &KvMemory,
    runs: &[Run],
    nth: usize,
    n: usize,
) -> Result<TcpStream, CommandError> {
    let mut rest: VecDeque<PageMut<'_>> = VecDeque::new();
    let mut runs = share(runs, nth, n);
    let mut done = 0;
    loop {
        while rest.len() < SLICES {
            let Some(run) = runs.next() else { break };
            rest.push_back(memory.write(GROUP, run.layer, run.far.clone()).map_err(failed)?);
        }
        if rest.is_empty() {
            return Ok(socket);
        }
        socket.readable().await.map_err(lost)?;
        let mut slices = sliced_mut(&mut rest, done);
        let read = match socket.try_read_vectored(&mut slices) {
            Ok(0) => return Err(lost(io::ErrorKind::UnexpectedEof.into())),
            Ok(read) => read,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => 0,
            Err(error) => return Err(lost(error)),
        };
        drop(slices);
        done = advance(&mut rest, done + read, |page| page.len());
    }
}

/// Returns at most [`SLICES`] slices of the pages, after the first `done` bytes.
fn sliced<'a>(pages: impl Iterator<Item = &'a [u8]>, done: usize) -> impl Iterator<Item = &'a [u8]> {
    let rest = pages.enumerate().map(move |(nth, page)| &page[if nth == 0 { done } else { 0 }..]);
    rest.flat_map(|page| page.chunks(SLICE_BYTES)).take(SLICES)
}

fn sliced_mut<'a>(pages: &'a mut VecDeque<PageMut<'_>>, done: usize) -> Vec<IoSliceMut<'a>> {
    let rest = pages.iter_mut().enumerate().map(|(nth, page)| &mut page[if nth == 0 { done } else { 0 }..]);
    rest.flat_map(|page| page.chunks_mut(SLICE_BYTES)).take(SLICES).map(IoSliceMut::new).collect()
}

/// Removes the pages that are copied completely. Returns the number of copied bytes of the first remaining
/// page.
fn advance<P>(pages: &mut VecDeque<P>, mut done: usize, len: impl Fn(&P) -> usize) -> usize {
    while let Some(first) = pages.front().map(&len).filter(|len| *len <= done) {
        done -= first;
        pages.pop_front();
    }
    done
}

fn lost(error: io::Error) -> CommandError {
    not_moved(format!("a plain socket: {error}"))
}
