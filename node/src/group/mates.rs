//! The columns that the ranks of one stage exchange, if they are in several processes. They pass the head.

use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TryRecvError, TrySendError, sync_channel};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};
use std::time::Duration;

use bytes::Bytes;
use engine::remote::{StageLost, StageMates};
use proto::v1;

use super::connection::{NotSent, Outgoing};
use super::error::GroupError;
use super::messages::{OfFollower, OfHead, from_follower, from_head};

/// The time for which ranks wait for the columns of another process. They have equal work.
const COLUMNS_WITHIN: Duration = Duration::from_secs(60);
/// Limit of unread columns of one process. A process is at most one exchange ahead of another.
const COLUMNS_MAX: usize = 2;

/// Takes the columns of the other processes of a stage to the ranks of this one.
#[derive(Debug)]
pub(super) struct ColumnsIn {
    /// For each process of the stage, in the order of their ranks; `None` for this one, and after a process was lost. Locked
    /// for short accesses.
    queues: Mutex<Vec<Option<SyncSender<Bytes>>>>,
}

/// Where the columns of this process go to.
#[derive(Debug)]
enum ColumnsOut {
    /// From a follower: the head passes them on.
    Head(Outgoing),
    /// From the head, which is the process `from` of its stage.
    Followers { from: usize, followers: Vec<Outgoing> },
}

/// The other processes of this process's stage.
#[derive(Debug)]
struct Mates {
    out: ColumnsOut,
    /// Read by the rank that comes last.
    queues: Mutex<Vec<Receiver<Bytes>>>,
}

impl ColumnsIn {
    /// Takes the columns of a process of the stage. Never waits.
    pub(super) fn take(&self, from: usize, columns: Bytes) -> Result<(), GroupError> {
        let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let queue = queues.get(from).and_then(Option::as_ref);
        let queue = queue.ok_or_else(|| lost("columns of a process that its stage does not have"))?;
        match queue.try_send(columns) {
            // Without a reader, this process has stopped computing.
            Ok(()) | Err(TrySendError::Disconnected(_)) => Ok(()),
            Err(TrySendError::Full(_)) => Err(lost("columns that no rank waits for")),
        }
    }

    /// Ends the wait for a process, which is lost.
    fn end(&self, from: usize) {
        if let Some(queue) = self.queues.lock().unwrap_or_else(PoisonError::into_inner).get_mut(from) {
            *queue = None;
        }
    }
}

/// Makes both ends of the exchange for process `here` of a stage with `n_processes`.
fn exchange(n_processes: usize, here: usize, out: ColumnsOut) -> (ColumnsIn, Arc<dyn StageMates>) {
    let (mut queues, mut receivers) = (Vec::new(), Vec::new());
    for process in 0..n_processes {
        let queue = (process != here).then(|| sync_channel(COLUMNS_MAX));
        let (sender, receiver) = queue.unzip();
        queues.push(sender);
        receivers.extend(receiver);
    }
    (ColumnsIn { queues: Mutex::new(queues) }, Arc::new(Mates { out, queues: Mutex::new(receivers) }))
}

/// Makes the exchange of a follower.
pub(super) fn of_follower(
    n_processes: usize,
    here: usize,
    head: Outgoing,
) -> (ColumnsIn, Arc<dyn StageMates>) {
    exchange(n_processes, here, ColumnsOut::Head(head))
}

impl StageMates for Mates {
    fn exchange(&self, mine: Bytes) -> Result<Vec<Bytes>, StageLost> {
        self.out.send(&mine)?;
        let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        let receive = |queue: &Receiver<Bytes>| {
            queue.recv_timeout(COLUMNS_WITHIN).map_err(|error| match error {
                RecvTimeoutError::Disconnected => {
                    StageLost("another process of this stage is lost".to_owned())
                }
                RecvTimeoutError::Timeout => {
                    let limit = COLUMNS_WITHIN.as_secs();
                    StageLost(format!("another process of this stage has sent no columns for {limit} s"))
                }
            })
        };
        queues.iter().map(receive).collect()
    }

    fn is_lost(&self) -> bool {
        let queues = self.queues.lock().unwrap_or_else(PoisonError::into_inner);
        queues.iter().any(|queue| queue.try_recv() == Err(TryRecvError::Disconnected))
    }
}

impl ColumnsOut {
    fn send(&self, columns: &Bytes) -> Result<(), StageLost> {
        let sent = match self {
            Self::Head(head) => head.blocking_send(from_follower(OfFollower::Columns(columns.clone()))),
            Self::Followers { from, followers } => followers.iter().try_for_each(|follower| {
                follower.blocking_send(from_head(columns_of(*from, columns.clone())))
            }),
        };
        sent.map_err(|_| StageLost("another process of this node is lost".to_owned()))
    }
}

fn columns_of(from: usize, columns: Bytes) -> OfHead {
    OfHead::Columns(v1::Columns { from: from as u32, columns })
}

/// Passes the columns of one follower on to the other processes of its stage.
#[derive(Debug, Default)]
pub(super) struct Relay(OnceLock<RelayTargets>);

#[derive(Debug)]
struct RelayTargets {
    /// The follower's place among the processes of its stage.
    from: usize,
    followers: Vec<Outgoing>,
    /// The ranks of the head, if it is in the same stage.
    head: Option<Arc<ColumnsIn>>,
}

impl Relay {
    /// Passes columns on. Never waits.
    pub(super) fn pass(&self, columns: &Bytes) -> Result<(), GroupError> {
        let targets = self.0.get().ok_or_else(|| lost("columns before its stage has begun"))?;
        for follower in &targets.followers {
            // A follower that is lost is reported as such.
            if follower.send_now(from_head(columns_of(targets.from, columns.clone()))) == Err(NotSent::Full) {
                return Err(lost("columns that another process of its stage does not take"));
            }
        }
        match &targets.head {
            Some(head) => head.take(targets.from, columns.clone()),
            None => Ok(()),
        }
    }

    /// Ends the wait of the head's ranks for the follower, which is lost.
    pub(super) fn end(&self) {
        if let Some(RelayTargets { from, head: Some(head), .. }) = self.0.get() {
            head.end(*from);
        }
    }
}

/// One process of a stage, for [`connect`]: `None` for the head.
pub(super) type Member<'a> = Option<(&'a Outgoing, &'a Relay)>;

/// Connects the processes of one stage, in the order of their ranks. Returns the exchange of the head, if it is one of them.
pub(super) fn connect(members: &[Member<'_>]) -> Option<Arc<dyn StageMates>> {
    let all_but = |here: usize| {
        let others = members.iter().enumerate().filter(move |(nth, _)| *nth != here);
        others.filter_map(|(_, member)| member.map(|(out, _)| out.clone())).collect::<Vec<_>>()
    };
    let of_head = members.iter().position(Option::is_none).map(|from| {
        let followers = all_but(from);
        exchange(members.len(), from, ColumnsOut::Followers { from, followers })
    });
    let (columns_in, mates) = of_head.unzip();
    let columns_in = columns_in.map(Arc::new);
    for (from, member) in members.iter().enumerate() {
        if let Some((_, relay)) = member {
            let targets = RelayTargets { from, followers: all_but(from), head: columns_in.clone() };
            relay.0.set(targets).expect("a process has one stage");
        }
    }
    mates
}

fn lost(what: &str) -> GroupError {
    GroupError::Lost(format!("it has sent {what}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Returns both ends at the second of three processes, whose own columns go nowhere.
    fn second_of_three() -> (ColumnsIn, Arc<dyn StageMates>) {
        exchange(3, 1, ColumnsOut::Followers { from: 1, followers: Vec::new() })
    }

    fn columns(text: &'static str) -> Bytes {
        Bytes::from_static(text.as_bytes())
    }

    #[test]
    fn columns_are_in_the_order_of_the_ranks() {
        let (columns_in, mates) = second_of_three();
        for (from, text) in [(2, "third"), (0, "first"), (2, "third again"), (0, "first again")] {
            columns_in.take(from, columns(text)).expect("there is room");
        }
        for expected in [["first", "third"], ["first again", "third again"]] {
            assert_eq!(mates.exchange(columns("second")), Ok(expected.map(columns).to_vec()));
        }
    }

    #[test]
    fn columns_that_nothing_waits_for_are_refused() {
        let (columns_in, _mates) = second_of_three();
        for from in [1, 3] {
            let error = columns_in.take(from, columns("x")).expect_err("no such process");
            assert_eq!(error.to_string(), "it has sent columns of a process that its stage does not have");
        }
        (0..COLUMNS_MAX).for_each(|_| columns_in.take(0, columns("x")).expect("there is room"));
        let error = columns_in.take(0, columns("x")).expect_err("one too many");
        assert_eq!(error.to_string(), "it has sent columns that no rank waits for");
    }

    #[test]
    fn a_lost_process_ends_the_wait_for_it() {
        let (columns_in, mates) = second_of_three();
        assert!(!mates.is_lost());
        columns_in.take(0, columns("first")).expect("there is room");
        columns_in.end(2);
        let error = mates.exchange(columns("second")).expect_err("the third is lost");
        assert_eq!(error.to_string(), "another process of this stage is lost");
        assert!(mates.is_lost());
    }
}
