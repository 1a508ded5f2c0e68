//! The messages about landings that pass the relay: the head's orders, and the followers' reports.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use kv_transfer::{LandOrder, LandingEvent, LandingReport};
use proto::v1;
use proto::v1::from_follower::Message as OfFollower;
use proto::v1::from_head::Message as OfHead;
use types::TransferId;

use super::plan::Direction;

/// The orders and reports of all landings. Clones are handles to the same ones.
#[derive(Clone, Debug, Default)]
pub struct LandingReports {
    /// By transfer and follower. Never held across an await.
    of_followers: Arc<Mutex<BTreeMap<(TransferId, usize), FollowerReport>>>,
}

/// The state of one follower's part of one landing.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
struct FollowerReport {
    /// Whether the head knows that the follower has verified its pages.
    has_landed: bool,
    /// Whether the head knows that the follower writes no more pages.
    is_quiet: bool,
}

impl LandingReports {
    /// Records the messages that have entered the relay.
    pub fn sent(&self, follower: usize, direction: Direction, body: &[u8]) {
        let Direction::ToFollower = direction else { return };
        let Ok(v1::FromHead { message: Some(OfHead::LandKv(v1::LandKv { order })) }) = proto::decode(body)
        else {
            return;
        };
        let order = LandOrder::decode(&order).expect("the head writes whole orders");
        self.of_followers().entry((order.transfer(), follower)).or_default();
    }

    /// Records the messages that have left the relay.
    pub fn arrived(&self, follower: usize, direction: Direction, body: &[u8]) {
        let Direction::ToHead = direction else { return };
        let Ok(v1::FromFollower { message: Some(OfFollower::KvReport(v1::KvReport { report })) }) =
            proto::decode(body)
        else {
            return;
        };
        let LandingReport { transfer, event } =
            LandingReport::decode(&report).expect("followers write whole reports");
        let mut of_followers = self.of_followers();
        let known = of_followers.entry((transfer, follower)).or_default();
        known.has_landed |= matches!(event, LandingEvent::Landed(_));
        known.is_quiet |= matches!(event, LandingEvent::Quiet);
    }

    pub fn has_landed(&self, transfer: TransferId, follower: usize) -> bool {
        self.of_followers().get(&(transfer, follower)).is_some_and(|known| known.has_landed)
    }

    /// Returns whether the follower may still write pages of the landing, as far as the head can know.
    pub fn may_write(&self, transfer: TransferId, follower: usize) -> bool {
        let of_followers = self.of_followers();
        of_followers.get(&(transfer, follower)).is_some_and(|known| !known.has_landed && !known.is_quiet)
    }

    /// Returns the followers whose last report of a landing has not come.
    pub fn open(&self) -> Vec<(TransferId, usize)> {
        let of_followers = self.of_followers();
        let open = of_followers.iter().filter(|(_, known)| !known.is_quiet);
        open.map(|(of, _)| *of).collect()
    }

    fn of_followers(&self) -> MutexGuard<'_, BTreeMap<(TransferId, usize), FollowerReport>> {
        self.of_followers.lock().unwrap_or_else(PoisonError::into_inner)
    }
}
