//! Ranks on their own threads. They execute the same orders as the rank that runs on the caller's thread.
//!
//! Each order is answered before the next one is sent, so no rank is more than one order ahead. If a rank
//! ends, fails or does not answer in time, the model is lost: the caller gets the cause, and no further order
//! is sent.

use std::fmt;
use std::io;
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::thread::{self, JoinHandle};
use std::time::Duration;

use device::cuda::CudaError;
use tracing::error;

/// The time limit for a rank to launch a step.
pub(super) const LAUNCH_WITHIN: Duration = Duration::from_secs(30);
/// The time limit for a rank to end. A rank that takes longer is abandoned, and its resources are leaked.
const END_WITHIN: Duration = Duration::from_secs(30);

/// A rank that executes orders on its own thread.
pub(super) trait Performer: Send + Sized + 'static {
    type Order: Clone + Send + 'static;
    type Answer: Send + 'static;

    fn perform(&mut self, order: Self::Order) -> Result<Self::Answer, CudaError>;
}

/// All ranks but the one on the caller's thread.
pub(super) struct Helpers<P: Performer> {
    helpers: Vec<Helper<P>>,
    /// Set after a rank was lost: then no further order is sent.
    is_over: bool,
}

/// The handle of one rank's thread.
struct Helper<P: Performer> {
    /// The name of the rank, for errors.
    name: String,
    /// The queue of orders; `None` after the thread was told to end.
    orders: Option<SyncSender<P::Order>>,
    answers: Receiver<Result<P::Answer, CudaError>>,
    /// Returns the thread's performer if the thread ends without a panic.
    thread: Option<JoinHandle<P>>,
}

/// The result of opening a rank, sent once.
pub(super) type RankOpenResult<E> = Receiver<Result<(), E>>;

impl<P: Performer> Helpers<P> {
    /// Makes a value without other ranks.
    pub(super) fn none() -> Self {
        Self { helpers: Vec::new(), is_over: false }
    }

    /// Starts the thread of the next rank, which first opens the rank.
    pub(super) fn start<E: Send + 'static>(
        &mut self,
        name: String,
        open: impl FnOnce() -> Result<P, E> + Send + 'static,
    ) -> io::Result<RankOpenResult<E>> {
        let (orders, orders_in) = sync_channel(1);
        let (answers_out, answers) = sync_channel(1);
        let (opened_out, opened) = sync_channel(1);
        let of_thread = name.clone();
        let run = move || {
            let mut performer = match open() {
                Ok(performer) => performer,
                Err(error) => {
                    let _ = opened_out.send(Err(error));
                    // A rank that failed to open gets no orders, so this is a bug.
                    panic!("{of_thread} was not opened");
                }
            };
            let _ = opened_out.send(Ok(()));
            run(&mut performer, &orders_in, &answers_out);
            performer
        };
        let thread = thread::Builder::new().name(name.replace(' ', "-")).spawn(run)?;
        self.helpers.push(Helper { name, orders: Some(orders), answers, thread: Some(thread) });
        Ok(opened)
    }

    pub(super) fn are_there(&self) -> bool {
        !self.helpers.is_empty()
    }

    /// Returns the names of the ranks, in the order of their answers.
    pub(super) fn names(&self) -> impl Iterator<Item = &str> {
        self.helpers.iter().map(|helper| helper.name.as_str())
    }

    /// Sends an order to all ranks and does not wait.
    pub(super) fn begin(&mut self, order: &P::Order) -> Result<(), CudaError> {
        if self.is_over {
            return Err(lost("it was lost earlier".to_owned()));
        }
        for helper in &self.helpers {
            let name = &helper.name;
            let orders = helper.orders.as_ref().expect("the orders of a helper are open until the drop");
            if let Err(refused) = orders.try_send(order.clone()) {
                self.is_over = true;
                return Err(lost(match refused {
                    TrySendError::Full(_) => format!("{name} has not finished the previous order"),
                    TrySendError::Disconnected(_) => format!("{name} has ended"),
                }));
            }
        }
        Ok(())
    }

    /// Waits for the answers of all ranks to the last order.
    pub(super) fn finish(&mut self, within: Duration) -> Result<Vec<P::Answer>, CudaError> {
        let mut answers = Vec::with_capacity(self.helpers.len());
        for helper in &self.helpers {
            let name = &helper.name;
            let why = match helper.answers.recv_timeout(within) {
                Ok(Ok(answer)) => {
                    answers.push(answer);
                    continue;
                }
                Ok(Err(error)) => format!("{name}: {}", types::in_full(&error)),
                Err(RecvTimeoutError::Timeout) => {
                    format!("{name} did not answer within {} s", within.as_secs_f64())
                }
                Err(RecvTimeoutError::Disconnected) => format!("{name} has ended"),
            };
            self.is_over = true;
            return Err(lost(why));
        }
        Ok(answers)
    }

    /// Ends all ranks. Returns the performers of those that end in time.
    pub(super) fn end(&mut self) -> Vec<P> {
        self.helpers.iter_mut().for_each(|helper| helper.orders = None);
        self.helpers.drain(..).filter_map(Helper::end).collect()
    }
}

impl<P: Performer> Helper<P> {
    fn end(mut self) -> Option<P> {
        loop {
            // Answers to orders that were not waited for come first, and are dropped.
            match self.answers.recv_timeout(END_WITHIN) {
                Ok(_) => {}
                Err(RecvTimeoutError::Disconnected) => break,
                Err(RecvTimeoutError::Timeout) => {
                    error!(rank = self.name, "thread of a GPU rank did not end in time and is abandoned");
                    return None;
                }
            }
        }
        // If the thread panicked, the panic is logged, and there is no performer to return.
        self.thread.take()?.join().ok()
    }
}

fn run<P: Performer>(
    performer: &mut P,
    orders: &Receiver<P::Order>,
    answers: &SyncSender<Result<P::Answer, CudaError>>,
) {
    while let Ok(order) = orders.recv() {
        if answers.send(performer.perform(order)).is_err() {
            return;
        }
    }
}

fn lost(why: String) -> CudaError {
    CudaError::PeerLost { why }
}

impl<P: Performer> Drop for Helpers<P> {
    fn drop(&mut self) {
        drop(self.end());
    }
}

impl<P: Performer> fmt::Debug for Helpers<P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Helpers({}, lost: {})", self.helpers.len(), self.is_over)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::{Arc, Condvar, Mutex};

    use super::*;

    const SOON: Duration = Duration::from_secs(20);

    /// A rank that records its orders, and fails at some of them.
    #[derive(Debug)]
    struct FakeRank {
        nth: usize,
        orders: Vec<u32>,
        /// Blocks the rank's thread until a test sets it.
        door: Arc<(Mutex<bool>, Condvar)>,
    }

    const FAIL: u32 = 100;
    const DIE: u32 = 101;
    const STAND_STILL: u32 = 102;

    impl Performer for FakeRank {
        type Order = u32;
        type Answer = (usize, u32);

        fn perform(&mut self, order: u32) -> Result<(usize, u32), CudaError> {
            // Only the last rank fails, so that the others must be ended by the first one.
            match order {
                FAIL if self.nth == 2 => return Err(CudaError::NoDevice),
                DIE if self.nth == 2 => panic!("the test makes this rank panic"),
                STAND_STILL if self.nth == 2 => {
                    let (is_open, opened) = &*self.door;
                    drop(opened.wait_while(is_open.lock().unwrap(), |is_open| !*is_open).unwrap());
                }
                _ => {}
            }
            self.orders.push(order);
            Ok((self.nth, order))
        }
    }

    fn two() -> (Helpers<FakeRank>, Arc<(Mutex<bool>, Condvar)>) {
        let (mut helpers, door) = (Helpers::none(), Arc::default());
        for nth in [1, 2] {
            let door = Arc::clone(&door);
            let open = move || Ok::<_, CudaError>(FakeRank { nth, orders: vec![], door });
            let opened = helpers.start(format!("rank {nth}"), open).expect("a thread");
            opened.recv_timeout(SOON).expect("it answers").expect("it opens");
        }
        (helpers, door)
    }

    fn told(
        helpers: &mut Helpers<FakeRank>,
        order: u32,
        within: Duration,
    ) -> Result<Vec<(usize, u32)>, String> {
        let answered = helpers.begin(&order).and_then(|()| helpers.finish(within));
        answered.map_err(|error| error.to_string())
    }

    #[test]
    fn all_ranks_do_the_same_things_in_the_same_order() {
        let (mut helpers, _door) = two();
        for order in 0..50 {
            assert_eq!(told(&mut helpers, order, SOON), Ok(vec![(1, order), (2, order)]));
        }
        let owned = helpers.end();
        assert_eq!(owned.len(), 2);
        assert!(owned.iter().all(|puppet| puppet.orders == (0..50).collect::<Vec<_>>()));
    }

    #[test]
    fn a_rank_that_fails_or_dies_is_named_and_nothing_is_asked_of_the_others_any_more() {
        for (order, why) in [
            (FAIL, "rank 2: a CUDA driver is here, but it finds no GPU (is one visible to this process?)"),
            (DIE, "rank 2 has ended"),
        ] {
            let (mut helpers, _door) = two();
            told(&mut helpers, 1, SOON).expect("all is well");
            let error = told(&mut helpers, order, SOON).expect_err("one is lost");
            assert_eq!(error, format!("one of the GPUs that share the model is lost: {why}"));
            let error = told(&mut helpers, 2, SOON).expect_err("it stays so");
            assert!(error.ends_with("it was lost earlier"), "{error}");
        }
    }

    #[test]
    fn a_rank_that_stands_still_holds_nobody_up_for_ever() {
        let (mut helpers, door) = two();
        let error = told(&mut helpers, STAND_STILL, Duration::from_millis(20)).expect_err("it does not come");
        assert!(error.ends_with("rank 2 did not answer within 0.02 s"), "{error}");
        *door.0.lock().unwrap() = true;
        door.1.notify_all();
        assert_eq!(helpers.end().len(), 2, "late, but both end");
    }

    #[test]
    fn a_rank_that_cannot_be_opened_says_why() {
        let mut helpers = Helpers::<FakeRank>::none();
        let opened = helpers.start("rank 1".to_owned(), || Err(CudaError::NoNccl)).expect("a thread");
        let refused = opened.recv_timeout(SOON).expect("it answers").expect_err("it cannot");
        assert!(matches!(refused, CudaError::NoNccl));
        assert!(helpers.end().is_empty());
    }
}
