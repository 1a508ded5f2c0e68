//! Hot path. The thread of a pair's communicators, which accept one call at a time and must be polled.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

use device::cuda::CopyDone;
use tokio::sync::mpsc::error::TryRecvError;
use tokio::sync::{mpsc, oneshot, watch};
use tokio::time::Instant;
use tracing::{debug, info, trace};
use types::in_full;

use super::backend::{End, PairId, Stage};
use super::pair_queue::PairState;
use super::round_robin::RoundRobin;
use crate::connectors::gpu::free_slots::LentSlot;
use crate::error::TransferError;

/// The deadline for joining a pair. The library takes some seconds the first time. Callers have their own
/// deadlines and may wait again.
const JOIN_WITHIN: Duration = Duration::from_secs(60);
/// The deadline for an orderly end, in which a peer that is gone does not take part.
const END_WITHIN: Duration = Duration::from_millis(500);
/// The size of the first message of every queue. It is sent because NCCL connects only when a message needs
/// it.
const GREETING_BYTES: usize = 16;
/// How long the thread polls messages in progress without a pause: longer than the time between two messages.
const LOOKS_FOR: Duration = Duration::from_micros(500);
const PAUSE: Duration = Duration::from_micros(50);

#[derive(Debug)]
pub(super) enum PairJob {
    /// Tells the thread to spin, because a message follows soon.
    Wake,
    Message(Message),
}

/// One message to be sent or received.
#[derive(Debug)]
pub(super) struct Message {
    pub(super) slot: Arc<LentSlot>,
    pub(super) bytes: usize,
    /// The copy jobs that must end before the message is sent.
    pub(super) before: Vec<CopyDone>,
    pub(super) done: oneshot::Sender<Result<(), TransferError>>,
}

/// The thread of one pair's end, before it runs.
#[derive(Debug)]
pub(super) struct PairThread {
    pub(super) stage: Arc<dyn Stage>,
    pub(super) id: PairId,
    pub(super) end: End,
    pub(super) stall: Duration,
    /// The time for which the thread spins for the next message before it sleeps.
    pub(super) awake: Duration,
    pub(super) queue: mpsc::Receiver<PairJob>,
}

/// The queues of a pair, and their messages in progress.
struct Pair {
    round_robin: RoundRobin,
    end: End,
    stall: Duration,
    awake: Duration,
    queue: mpsc::Receiver<PairJob>,
    under_way: VecDeque<Message>,
    /// The last time at which a message was done, or was started while no other was in progress.
    moved: Instant,
    /// The last time at which a message was announced.
    roused: Instant,
    /// The time at which the queue of messages was found closed.
    closed_since: Option<Instant>,
}

impl PairThread {
    /// Runs until the pair queue is dropped or the pair is lost. Tasks that wait for a message then get the
    /// error.
    pub(super) fn run(self, tell: &watch::Sender<PairState>) {
        let end = self.end;
        let ended = self.joined().and_then(|mut pair| {
            tell.send_replace(PairState::Ready);
            pair.serve().map(|()| pair.end_well())
        });
        match &ended {
            Ok(()) => debug!(?end, "NCCL connection to peer ended without error"),
            // The pair queue is dropped, so its users do not need the reason, and the log level is debug.
            Err(error) if tell.is_closed() => {
                debug!(?end, error = in_full(error), "NCCL connection to peer aborted: it is no longer used")
            }
            Err(error) => info!(?end, error = in_full(error), "NCCL connection to peer lost"),
        }
        tell.send_replace(PairState::Lost(ended.err().unwrap_or(TransferError::Closed)));
    }

    fn joined(self) -> Result<Pair, TransferError> {
        let Self { stage, id, end, stall, awake, queue } = self;
        let queues = id.into_iter().map(|id| Arc::clone(&stage).join(id, end)).collect::<Result<_, _>>()?;
        let moved = Instant::now();
        let mut pair = Pair {
            round_robin: RoundRobin::new(queues),
            end,
            stall: JOIN_WITHIN,
            awake,
            queue,
            under_way: VecDeque::new(),
            moved,
            roused: moved,
            closed_since: None,
        };
        pair.settle()?;
        pair.greet()?;
        pair.stall = stall;
        Ok(pair)
    }
}

impl Pair {
    /// Sends a first message on each queue, through slot 0. The slot is free, because no other message uses
    /// it before the pair is ready.
    fn greet(&mut self) -> Result<(), TransferError> {
        for _ in 0..self.round_robin.n_queues() {
            self.begin(0, GREETING_BYTES, &[])?;
            while self.round_robin.n_done()? == 0 {
                self.look_again()?;
            }
        }
        Ok(())
    }

    fn serve(&mut self) -> Result<(), TransferError> {
        while let Some(mut message) = self.next()? {
            if self.under_way.is_empty() {
                self.moved = Instant::now();
            }
            let (slot, bytes, before) =
                (message.slot.nth, message.bytes, std::mem::take(&mut message.before));
            self.under_way.push_back(message);
            trace!(target: "walk", end = ?self.end, bytes, "NCCL message begins");
            self.begin(slot, bytes, &before)?;
        }
        Ok(())
    }

    /// Returns the next message; `None` if there will be none. Polls the messages in progress meanwhile.
    fn next(&mut self) -> Result<Option<Message>, TransferError> {
        loop {
            match self.queue.try_recv() {
                Ok(PairJob::Message(message)) => return Ok(Some(message)),
                Ok(PairJob::Wake) => self.roused = Instant::now(),
                Err(_) if !self.under_way.is_empty() => self.look_again()?,
                Err(TryRecvError::Empty) if self.is_awake() => std::thread::yield_now(),
                Err(_) => match self.queue.blocking_recv() {
                    None => return Ok(None),
                    Some(PairJob::Message(message)) => return Ok(Some(message)),
                    Some(PairJob::Wake) => self.roused = Instant::now(),
                },
            }
        }
    }

    fn is_awake(&self) -> bool {
        self.moved.max(self.roused).elapsed() < self.awake
    }

    fn begin(&mut self, slot: usize, bytes: usize, before: &[CopyDone]) -> Result<(), TransferError> {
        match self.end {
            End::Sender => self.round_robin.send(slot, bytes, before)?,
            End::Receiver => self.round_robin.receive(slot, bytes)?,
        }
        self.settle()
    }

    fn settle(&mut self) -> Result<(), TransferError> {
        while !self.round_robin.is_settled()? {
            self.look_again()?;
        }
        Ok(())
    }

    /// Reports messages that are done. Fails if none was done for the stall time, or if the pair queue is dropped.
    fn look_again(&mut self) -> Result<(), TransferError> {
        if !self.under_way.is_empty() {
            let n_done = self.round_robin.n_done()?;
            for job in self.under_way.drain(..n_done) {
                trace!(target: "walk", end = ?self.end, "NCCL message finished");
                // The receiver of the report may have ended with the landing, so a failed send is ignored.
                let _ = job.done.send(Ok(()));
            }
            if n_done > 0 {
                self.moved = Instant::now();
                return Ok(());
            }
        }
        if self.queue.is_closed() && self.queue.is_empty() {
            // This end waits briefly, because the peer may have learned the end of the last message a moment
            // earlier.
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

    fn rest(&self) {
        match self.moved.elapsed() < LOOKS_FOR.max(self.awake) {
            true => std::hint::spin_loop(),
            false => std::thread::sleep(PAUSE),
        }
    }

    /// Ends the communicators in good order. If the peer does not take part in time, they are aborted.
    fn end_well(mut self) {
        let began = Instant::now();
        let mut finalized = self.round_robin.finalize().is_ok();
        while finalized && !self.round_robin.is_settled().unwrap_or(true) {
            finalized = began.elapsed() < END_WITHIN;
            std::thread::sleep(PAUSE);
        }
        if finalized {
            self.round_robin.destroy();
        }
    }
}
