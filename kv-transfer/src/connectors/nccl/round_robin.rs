//! Hot path. The queues of one end of a pair, used in turn: the next message starts while the previous one ends.
//!
//! One thread makes the calls of all queues, each after the previous call has settled. So the messages of both ends
//! reach their GPUs in one order, and the oldest unfinished message is at the front on both GPUs. NCCL guarantees no
//! more for communicators on one GPU, whose streams may share a hardware queue.

use std::collections::VecDeque;
use std::thread::Builder;

use device::cuda::CopyDone;

use super::backend::Communicator;
use crate::error::TransferError;

/// The queues of one end of a pair. The methods correspond to those of one queue.
#[derive(Debug)]
pub(super) struct RoundRobin {
    queues: Vec<QueueState>,
    /// The index of the next queue to use.
    next: usize,
    /// For each message in progress, the index of its queue.
    under_way: VecDeque<usize>,
}

/// One queue, and the number of its finished messages that wait for an earlier message of another queue.
#[derive(Debug)]
struct QueueState {
    queue: Box<dyn Communicator>,
    n_done: usize,
}

impl RoundRobin {
    /// Uses `queues` in turn, beginning with the first.
    ///
    /// # Panics
    /// If `queues` is empty.
    pub(super) fn new(queues: Vec<Box<dyn Communicator>>) -> Self {
        assert!(!queues.is_empty(), "a pair has a queue");
        let queues = queues.into_iter().map(|queue| QueueState { queue, n_done: 0 }).collect();
        Self { queues, next: 0, under_way: VecDeque::new() }
    }

    pub(super) fn n_queues(&self) -> usize {
        self.queues.len()
    }

    /// Returns whether all queues have settled.
    pub(super) fn is_settled(&mut self) -> Result<bool, TransferError> {
        for turn in &mut self.queues {
            if !turn.queue.is_settled()? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    pub(super) fn send(
        &mut self,
        slot: usize,
        bytes: usize,
        before: &[CopyDone],
    ) -> Result<(), TransferError> {
        self.take_turn().send(slot, bytes, before)
    }

    pub(super) fn receive(&mut self, slot: usize, bytes: usize) -> Result<(), TransferError> {
        self.take_turn().receive(slot, bytes)
    }

    fn take_turn(&mut self) -> &mut dyn Communicator {
        let nth = self.next;
        self.next = (nth + 1) % self.queues.len();
        self.under_way.push_back(nth);
        &mut *self.queues[nth].queue
    }

    /// Returns the number of finished messages, in the order of all queues.
    pub(super) fn n_done(&mut self) -> Result<usize, TransferError> {
        for turn in &mut self.queues {
            turn.n_done += turn.queue.n_done()?;
        }
        let mut n_done = 0;
        while let Some(first) = self.under_way.front()
            && self.queues[*first].n_done > 0
        {
            self.queues[*first].n_done -= 1;
            self.under_way.pop_front();
            n_done += 1;
        }
        Ok(n_done)
    }

    pub(super) fn finalize(&mut self) -> Result<(), TransferError> {
        self.queues.iter_mut().try_for_each(|turn| turn.queue.finalize())
    }

    pub(super) fn destroy(mut self) {
        self.queues.drain(..).for_each(|turn| turn.queue.destroy());
    }
}

impl Drop for RoundRobin {
    /// Drops all queues at the same time, because a message of one may wait on the GPU behind a message of another.
    fn drop(&mut self) {
        std::thread::scope(|scope| {
            for turn in self.queues.drain(..) {
                let dropped = Builder::new().name("kv pair ends".to_owned());
                // If no thread can be started, this thread drops the queue, one after the other.
                let _ = dropped.spawn_scoped(scope, move || drop(turn));
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Condvar, Mutex};
    use std::time::Duration;

    use super::*;

    /// The calls to the two queues, and the state of both.
    #[derive(Debug, Default)]
    struct Log {
        calls: Vec<(usize, usize)>,
        queues: [PairState; 2],
        n_dropping: usize,
        dropped_together: Vec<bool>,
    }

    #[derive(Debug, Default)]
    struct PairState {
        unsettled: bool,
        fails: bool,
        /// The number of messages that are done and not yet counted.
        n_done: usize,
    }

    #[derive(Debug)]
    struct Fake {
        nth: usize,
        log: Arc<(Mutex<Log>, Condvar)>,
        is_over: bool,
    }

    impl Fake {
        fn pair_state<T>(&self, of: impl FnOnce(&mut PairState) -> T) -> T {
            of(&mut self.log.0.lock().unwrap().queues[self.nth])
        }
    }

    impl Communicator for Fake {
        fn is_settled(&mut self) -> Result<bool, TransferError> {
            self.pair_state(|it| if it.fails { Err(TransferError::Closed) } else { Ok(!it.unsettled) })
        }

        fn send(&mut self, slot: usize, _bytes: usize, _before: &[CopyDone]) -> Result<(), TransferError> {
            self.log.0.lock().unwrap().calls.push((self.nth, slot));
            self.pair_state(|it| it.unsettled = true);
            Ok(())
        }

        fn receive(&mut self, slot: usize, bytes: usize) -> Result<(), TransferError> {
            self.send(slot, bytes, &[])
        }

        fn n_done(&mut self) -> Result<usize, TransferError> {
            self.is_settled()?;
            Ok(self.pair_state(|it| std::mem::take(&mut it.n_done)))
        }

        fn finalize(&mut self) -> Result<(), TransferError> {
            self.pair_state(|it| it.unsettled = true);
            Ok(())
        }

        fn destroy(mut self: Box<Self>) {
            self.is_over = true;
        }
    }

    impl Drop for Fake {
        /// Waits until the pair's second queue is dropped as well.
        fn drop(&mut self) {
            let (log, changed) = &*self.log;
            let mut log = log.lock().unwrap();
            if !self.is_over {
                log.n_dropping += 1;
                changed.notify_all();
                let (mut log, late) = changed
                    .wait_timeout_while(log, Duration::from_secs(10), |log| log.n_dropping < 2)
                    .unwrap();
                log.dropped_together.push(!late.timed_out());
            }
        }
    }

    fn two() -> (RoundRobin, Arc<(Mutex<Log>, Condvar)>) {
        let log = Arc::new((Mutex::new(Log::default()), Condvar::new()));
        let fake =
            |nth| Box::new(Fake { nth, log: Arc::clone(&log), is_over: false }) as Box<dyn Communicator>;
        (RoundRobin::new(vec![fake(0), fake(1)]), log)
    }

    fn change(log: &(Mutex<Log>, Condvar), nth: usize, change: impl FnOnce(&mut PairState)) {
        change(&mut log.0.lock().unwrap().queues[nth]);
    }

    #[test]
    fn queues_take_turns_and_each_call_waits_for_the_one_before() {
        let (mut round_robin, log) = two();
        for (slot, queue) in [(7, 0), (8, 1), (9, 0)] {
            round_robin.send(slot, 1, &[]).unwrap();
            assert!(!round_robin.is_settled().unwrap(), "slot {slot}");
            change(&log, queue, |it| it.unsettled = false);
            assert!(round_robin.is_settled().unwrap(), "slot {slot}");
        }
        assert_eq!(log.0.lock().unwrap().calls, [(0, 7), (1, 8), (0, 9)]);
        round_robin.destroy();
    }

    #[test]
    fn messages_are_done_in_the_order_of_all() {
        let (mut round_robin, log) = two();
        for slot in 0..5 {
            round_robin.receive(slot, 1).unwrap();
        }
        for (more, expected) in [([0, 1], 0), ([1, 0], 2), ([0, 0], 0), ([0, 1], 0), ([2, 0], 3)] {
            more.into_iter().enumerate().for_each(|(nth, more)| change(&log, nth, |it| it.n_done = more));
            assert_eq!(round_robin.n_done().unwrap(), expected, "{more:?} more");
        }
        round_robin.destroy();
    }

    #[test]
    fn each_queue_fails_for_all() {
        for nth in [0, 1] {
            let (mut round_robin, log) = two();
            change(&log, nth, |it| it.fails = true);
            round_robin.is_settled().unwrap_err();
            round_robin.n_done().unwrap_err();
            round_robin.destroy();
        }
    }

    #[test]
    fn the_end_has_settled_when_that_of_all_has() {
        let (mut round_robin, log) = two();
        round_robin.finalize().unwrap();
        for nth in [1, 0] {
            assert!(!round_robin.is_settled().unwrap());
            change(&log, nth, |it| it.unsettled = false);
        }
        assert!(round_robin.is_settled().unwrap());
        round_robin.destroy();
        assert!(log.0.lock().unwrap().dropped_together.is_empty(), "none was given up");
    }

    #[test]
    fn queues_that_are_given_up_do_not_wait_for_each_other() {
        let (round_robin, log) = two();
        drop(round_robin);
        assert_eq!(log.0.lock().unwrap().dropped_together, [true, true]);
    }
}
