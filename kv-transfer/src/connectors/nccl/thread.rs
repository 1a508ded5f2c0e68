//! Hot path. Who looks after a communicator: a thread, because it wants its calls one at a time and has to be asked how it
//! is.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{debug, info};
use types::in_full;

use super::cable::{Slot, Standing};
use super::fabric::{Communicator, End, PairId, Stage};
use crate::error::TransferError;

/// Joining takes the library some seconds the first time. Whoever waits has a deadline of his own, and may wait again.
const JOIN_WITHIN: Duration = Duration::from_secs(60);
/// A peer that has gone away takes no part in a good end.
const END_WITHIN: Duration = Duration::from_millis(500);
/// The first message of every pair: the way between the two is made when it is first needed.
const GREETING_BYTES: usize = 16;
/// Looks that the thread takes without a pause: some hundred microseconds on a card, longer than it takes one message to follow
/// another.
const LOOKS_MAX: u32 = 300;
const PAUSE: Duration = Duration::from_micros(50);

/// One message to be sent or received.
#[derive(Debug)]
pub(super) struct Job {
    pub(super) slot: Arc<Slot>,
    pub(super) bytes: usize,
    pub(super) done: oneshot::Sender<Result<(), TransferError>>,
}

/// What the thread is given.
#[derive(Debug)]
pub(super) struct PairThread {
    pub(super) stage: Arc<dyn Stage>,
    pub(super) id: PairId,
    pub(super) end: End,
    pub(super) stall: Duration,
    pub(super) queue: mpsc::Receiver<Job>,
}

/// A communicator, and what it has under way.
struct Pair {
    communicator: Box<dyn Communicator>,
    end: End,
    stall: Duration,
    queue: mpsc::Receiver<Job>,
    under_way: VecDeque<Job>,
    /// When something was last done, or begun with nothing before it.
    moved: Instant,
    /// Nobody puts messages here any more.
    closed_since: Option<Instant>,
    n_looks: u32,
}

impl PairThread {
    /// Until the cable is dropped or the pair is lost. Whoever waits for a message then hears so.
    pub(super) fn run(self, tell: &watch::Sender<Standing>) {
        let end = self.end;
        let ended = self.joined().and_then(|mut pair| {
            tell.send_replace(Standing::Ready);
            pair.serve().map(|()| pair.end_well())
        });
        match &ended {
            Ok(()) => debug!(?end, "pair ended"),
            // Nobody is left who would be told.
            Err(error) if tell.is_closed() => debug!(?end, error = in_full(error), "pair given up"),
            Err(error) => info!(?end, error = in_full(error), "pair lost"),
        }
        tell.send_replace(Standing::Lost(ended.err().unwrap_or(TransferError::Closed)));
    }

    fn joined(self) -> Result<Pair, TransferError> {
        let Self { stage, id, end, stall, queue } = self;
        let communicator = stage.join(id, end)?;
        let moved = Instant::now();
        let mut pair = Pair {
            communicator,
            end,
            stall: JOIN_WITHIN,
            queue,
            under_way: VecDeque::new(),
            moved,
            closed_since: None,
            n_looks: 0,
        };
        pair.settle()?;
        pair.greet()?;
        pair.stall = stall;
        Ok(pair)
    }
}

impl Pair {
    /// The first slot is nobody's before the pair is ready.
    fn greet(&mut self) -> Result<(), TransferError> {
        self.begin(0, GREETING_BYTES)?;
        while self.communicator.n_done()? == 0 {
            self.look_again()?;
        }
        Ok(())
    }

    fn serve(&mut self) -> Result<(), TransferError> {
        while let Some(job) = self.next()? {
            if self.under_way.is_empty() {
                self.moved = Instant::now();
            }
            let (slot, bytes) = (job.slot.nth, job.bytes);
            self.under_way.push_back(job);
            self.begin(slot, bytes)?;
        }
        Ok(())
    }

    /// The next message; `None` where there will be none. Sees to those under way meanwhile.
    fn next(&mut self) -> Result<Option<Job>, TransferError> {
        loop {
            if self.under_way.is_empty() {
                return Ok(self.queue.blocking_recv());
            }
            match self.queue.try_recv() {
                Ok(job) => return Ok(Some(job)),
                Err(_) => self.look_again()?,
            }
        }
    }

    fn begin(&mut self, slot: usize, bytes: usize) -> Result<(), TransferError> {
        match self.end {
            End::Sender => self.communicator.send(slot, bytes)?,
            End::Receiver => self.communicator.receive(slot, bytes)?,
        }
        self.settle()
    }

    fn settle(&mut self) -> Result<(), TransferError> {
        while !self.communicator.is_settled()? {
            self.look_again()?;
        }
        Ok(())
    }

    /// Passes on what is done. Fails where nothing has been for too long, or nobody wants it any more.
    fn look_again(&mut self) -> Result<(), TransferError> {
        if !self.under_way.is_empty() {
            let n_done = self.communicator.n_done()?;
            for job in self.under_way.drain(..n_done) {
                // Whoever waited may have gone away with the landing.
                let _ = job.done.send(Ok(()));
            }
            if n_done > 0 {
                (self.moved, self.n_looks) = (Instant::now(), 0);
                return Ok(());
            }
        }
        if self.queue.is_closed() && self.queue.is_empty() {
            // The peer may have heard of the last message's end a moment before.
            let since = *self.closed_since.get_or_insert_with(Instant::now);
            if since.elapsed() > END_WITHIN {
                return Err(TransferError::Closed);
            }
        }
        if self.moved.elapsed() > self.stall {
            return Err(TransferError::Stalled { what: "a message of the pair", after: self.stall });
        }
        self.rest();
        Ok(())
    }

    fn rest(&mut self) {
        self.n_looks = self.n_looks.saturating_add(1);
        if self.n_looks < LOOKS_MAX { std::thread::yield_now() } else { std::thread::sleep(PAUSE) }
    }

    /// A peer that does not come along is not waited for: then the communicator is given up.
    fn end_well(mut self) {
        let began = Instant::now();
        let mut finalized = self.communicator.finalize().is_ok();
        while finalized && !self.communicator.is_settled().unwrap_or(true) {
            finalized = began.elapsed() < END_WITHIN;
            std::thread::sleep(PAUSE);
        }
        if finalized {
            self.communicator.destroy();
        }
    }
}
