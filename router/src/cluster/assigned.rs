//! Prompts that were assigned to a node and that the node's load reports do not include yet.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chassis::guards::{Guard, stands};
use tokio::time::Instant;
use types::PromptWork;

/// The work assigned to one node. The node's member and the requests share it.
#[derive(Debug, Default)]
pub(super) struct AssignedWork {
    shares: Mutex<Shares>,
}

#[derive(Debug, Default)]
struct Shares {
    /// The prompts that no report includes, in order of assignment.
    unreported: BTreeMap<u64, Share>,
    n_made: u64,
    sum: Unreported,
    /// The end times of streams that the last report may still include.
    ended: Vec<Instant>,
}

#[derive(Clone, Copy, Debug)]
struct Share {
    work: PromptWork,
    /// The time at which the node was called; `None` before the call.
    sent: Option<Instant>,
}

/// The changes since a node's last report: prompts that it does not include, their tokens to compute, and
/// streams that have ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct Unreported {
    pub(super) n_prompts: u32,
    pub(super) work: PromptWork,
    /// The streams of this router that have ended since the last report was made.
    pub(super) n_ended: u32,
}

/// A stream on a decode node. Its drop records in the view of the node that the stream has ended.
#[derive(Debug)]
pub struct RunningStream {
    work: Arc<AssignedWork>,
}

/// One prompt's work on the nodes of its route. It counts until the node's reports include it. Dropping it
/// returns what still counts: the request drops it at the first token, or when the attempt fails.
#[derive(Debug)]
pub struct Assignment {
    pub(super) prefill: Option<NodeAssignment>,
    pub(super) decode: Option<NodeAssignment>,
}

/// One prompt's work on one node.
#[derive(Debug)]
pub(super) struct NodeAssignment {
    work: Arc<AssignedWork>,
    id: u64,
}

impl Assignment {
    /// Records that the prefill node is called now.
    pub(crate) fn prefill_called(&self, now: Instant) {
        self.prefill.iter().for_each(|share| share.sent(now));
    }

    /// Ends the assignment at the first token. The answer's other tokens are a stream on the decode node.
    pub(crate) fn into_stream(self) -> Option<RunningStream> {
        self.decode.map(|share| RunningStream { work: Arc::clone(&share.work) })
    }

    /// Records that the decode node is called now.
    pub(crate) fn decode_called(&self, now: Instant) {
        self.decode.iter().for_each(|share| share.sent(now));
    }
}

impl AssignedWork {
    pub(super) fn assign(self: &Arc<Self>, work: PromptWork) -> NodeAssignment {
        let mut shares = self.shares();
        shares.n_made += 1;
        let id = shares.n_made;
        shares.unreported.insert(id, Share { work, sent: None });
        shares.sum.n_prompts += 1;
        shares.sum.work += work;
        NodeAssignment { work: Arc::clone(self), id }
    }

    pub(super) fn unreported(&self) -> Unreported {
        let shares = self.shares();
        Unreported { n_ended: shares.ended.len() as u32, ..shares.sum }
    }

    /// Applies a report that was made at `made`, and includes all prompts that were sent to the node up to
    /// `includes`.
    pub(super) fn reported(&self, made: Instant, includes: Instant) {
        let mut shares = self.shares();
        shares.ended.retain(|ended| *ended > made);
        let is_included = |share: &Share| share.sent.is_some_and(|sent| sent <= includes);
        let included: Vec<u64> =
            shares.unreported.iter().filter(|(_, share)| is_included(share)).map(|(id, _)| *id).collect();
        included.into_iter().for_each(|id| shares.remove(id));
    }

    fn shares(&self) -> MutexGuard<'_, Shares> {
        self.shares.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Shares {
    fn remove(&mut self, id: u64) {
        if let Some(share) = self.unreported.remove(&id) {
            self.sum.n_prompts -= 1;
            self.sum.work -= share.work;
        }
    }
}

impl NodeAssignment {
    fn sent(&self, now: Instant) {
        if let Some(share) = self.work.shares().unreported.get_mut(&self.id) {
            share.sent.get_or_insert(now);
        }
    }
}

impl Drop for NodeAssignment {
    fn drop(&mut self) {
        if stands(Guard::Assignment) {
            self.work.shares().remove(self.id);
        }
    }
}

impl Drop for RunningStream {
    fn drop(&mut self) {
        self.work.shares().ended.push(Instant::now());
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    enum Event {
        Assign(u64),
        /// Calls the node for the nth prompt, at this millisecond.
        Send(usize, u64),
        /// Applies a report that was made at this millisecond.
        Report(u64),
        /// Drops the nth prompt's assignment.
        Drop(usize),
    }

    /// Returns the prompts and tokens that count after the events.
    fn left(events: Vec<Event>) -> (u32, u64) {
        let (start, work) = (Instant::now(), Arc::new(AssignedWork::default()));
        let mut assigned: Vec<Option<NodeAssignment>> = Vec::new();
        for event in events {
            let at = |ms| start + Duration::from_millis(ms);
            match event {
                Event::Assign(n_tokens) => assigned.push(Some(work.assign(PromptWork::of(0..n_tokens)))),
                Event::Send(nth, ms) => assigned[nth].as_ref().expect("assigned").sent(at(ms)),
                Event::Report(ms) => work.reported(at(ms), at(ms)),
                Event::Drop(nth) => drop(assigned[nth].take()),
            }
        }
        let Unreported { n_prompts, work, .. } = work.unreported();
        (n_prompts, work.n_tokens)
    }

    #[test]
    fn assigned_work_counts_until_a_report_includes_it_or_it_is_dropped() {
        use Event::{Assign, Drop, Report, Send};
        for (what, events, expected) in [
            ("nothing", vec![], (0, 0)),
            ("two prompts", vec![Assign(9), Assign(5)], (2, 14)),
            (
                "a report does not include a prompt that waits for room elsewhere",
                vec![Assign(9), Report(900)],
                (1, 9),
            ),
            ("nor does a report from before the call", vec![Assign(9), Send(0, 100), Report(99)], (1, 9)),
            (
                "the report of the step that it begins includes it",
                vec![Assign(9), Send(0, 100), Report(101)],
                (0, 0),
            ),
            (
                "each prompt for itself",
                vec![Assign(9), Assign(5), Send(0, 0), Send(1, 101), Report(100)],
                (1, 5),
            ),
            (
                "a second call is no later than the first",
                vec![Assign(9), Send(0, 0), Send(0, 90), Report(50)],
                (0, 0),
            ),
            ("the first token drops it", vec![Assign(9), Assign(5), Send(0, 0), Drop(0)], (1, 5)),
            ("once only", vec![Assign(9), Assign(5), Send(0, 0), Report(100), Drop(0)], (1, 5)),
        ] {
            assert_eq!(left(events), expected, "{what}");
        }
    }

    #[tokio::test(start_paused = true)]
    async fn streams_that_end_count_until_a_report_that_was_made_later() {
        let work = Arc::new(AssignedWork::default());
        let stream =
            || Assignment { prefill: None, decode: Some(work.assign(PromptWork::of(0..9))) }.into_stream();
        let n_ended_after_report = |made| {
            work.reported(made, made);
            work.unreported().n_ended
        };
        let (first, second) = (stream(), stream());
        assert_eq!(work.unreported(), Unreported::default());
        let before = Instant::now();
        tokio::time::advance(Duration::from_millis(1)).await;
        drop(first);
        assert_eq!(n_ended_after_report(before), 1, "the report was on its way");
        tokio::time::advance(Duration::from_millis(1)).await;
        drop(second);
        assert_eq!(n_ended_after_report(before + Duration::from_millis(1)), 1);
        assert_eq!(n_ended_after_report(Instant::now()), 0);
    }
}
