//! The follower's end of landings: receives the KV of this process's layers. The head grants the landings.

use std::sync::Arc;

use chassis::{Task, spawn_guarded};
use tracing::info;
use types::{Grant, Landing, TransferId, WireAddress};

use super::link::receiver::{Grants, Receiver};
use super::tcp::{Bound, Staged, bind};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landing::{OpenLanding, bad_request};
use crate::landings::check_held;
use crate::lanes::Lanes;
use crate::processes::{LandOrder, LandingEvent, LandingReport, QuietReport, ReportLandings};
use crate::wire_threads::WireThreads;

/// The port where a follower receives KV, and its landings. Dropping it ends all of them.
#[derive(Debug)]
pub struct FollowerLandings {
    parts: ConnectorParts,
    address: WireAddress,
    receiver: Arc<Receiver>,
    reports: Arc<dyn ReportLandings>,
    #[expect(dead_code, reason = "held for its Drop")]
    accepting: Task<()>,
}

impl FollowerLandings {
    /// Listens on the address in the settings. Links have slots if `staged` is set.
    pub(super) async fn listen(
        parts: ConnectorParts,
        staged: Option<Staged>,
        reports: Arc<dyn ReportLandings>,
    ) -> Result<Self, TransferError> {
        let Bound { port, address } = bind(&parts, staged).await?;
        info!(endpoint = address.endpoint, "process receives KV of its layers");
        let wire_threads = WireThreads::shared();
        let grants = Grants::AtHead(Arc::clone(&reports));
        let receiver = Receiver::new(parts.clone(), wire_threads.clone(), grants);
        let accepting = Arc::clone(&receiver).accept_all(Box::new(port));
        let accepting = wire_threads.at(|| spawn_guarded(&parts.gate, "kv listener", accepting));
        Ok(Self { parts, address, receiver, reports, accepting })
    }

    /// Returns the `host:port` that senders connect to.
    pub fn endpoint(&self) -> &str {
        &self.address.endpoint
    }

    /// Receives the pages of one landing, and reports what becomes of it. Never waits. Must be called within a runtime.
    pub fn land(&self, order: &LandOrder) {
        let transfer = order.transfer;
        let quiet = QuietReport { transfer, reports: Arc::clone(&self.reports) };
        match self.landing(order).and_then(|of_head| Ok((of_head, self.receiver.link(order.link)?))) {
            Ok(((landing, lanes), link)) => {
                let opener = Arc::clone(&link) as _;
                let landing = OpenLanding::of_follower(landing, lanes, opener, quiet, &self.parts);
                link.fill(&Arc::new(landing));
            }
            Err(error) => {
                self.reports.report(LandingReport { transfer, event: LandingEvent::Failed(error) });
                drop(quiet);
            }
        }
    }

    /// Ends a landing, if it has not ended. Never waits.
    pub fn end(&self, link: u64, transfer: TransferId) {
        self.receiver.end_landing(link, transfer);
    }

    /// Ends a link and its landings. Never waits.
    pub fn close_link(&self, link: u64) {
        self.receiver.close_link(link);
    }

    /// Checks an order, and returns the landing and its lanes.
    fn landing(&self, order: &LandOrder) -> Result<(Landing, Lanes), TransferError> {
        let LandOrder { transfer, from_tp, n_tokens, held_tokens, ref tables, .. } = *order;
        let (parts, layout) = (&self.parts, self.parts.memory.layout());
        let n_blocks = layout.blocks_for(n_tokens as usize);
        let is_whole = |table: &Vec<_>| table.len() == n_blocks;
        if tables.len() != layout.groups.len() || !tables.iter().all(is_whole) {
            return Err(bad_request("a landing whose tables are not those of its sequence"));
        }
        if tables.iter().flatten().any(|block| block.0 >= parts.memory.n_blocks()) {
            return Err(bad_request("a landing in blocks that this process does not have"));
        }
        check_held(held_tokens, n_tokens, layout)?;
        let lanes = Lanes::between(from_tp, layout);
        let lanes = lanes.map_err(|error| TransferError::Layout(error.to_string()))?;
        let landing = Landing {
            transfer,
            node: parts.node.clone(),
            epoch: parts.epoch,
            // The sender has shown its grant to the head.
            grant: Grant::from_bytes([0; 16]),
            bound: false,
            wire: self.address.clone(),
            n_tokens,
            held_tokens,
            tables: tables.clone(),
            layout: layout.clone(),
            fingerprint: parts.fingerprint.clone(),
        };
        Ok((landing, lanes))
    }
}

impl Drop for FollowerLandings {
    fn drop(&mut self) {
        self.receiver.close();
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use types::{BlockIdx, StageLayers};

    use super::*;
    use crate::conformance::node::{Node, spread_layout};

    /// Keeps all reports.
    #[derive(Debug, Default)]
    struct Kept(Mutex<Vec<LandingEvent>>);

    impl ReportLandings for Kept {
        fn report(&self, report: LandingReport) {
            self.0.lock().expect("no test panics with it").push(report.event);
        }
    }

    #[tokio::test]
    async fn a_landing_that_this_process_cannot_fill_is_refused() {
        let parts = Node::parts_of("decode", spread_layout(2), &StageLayers::part(3..7));
        let kept = Arc::new(Kept::default());
        let follower = FollowerLandings::listen(parts, None, Arc::clone(&kept) as _).await;
        let follower = follower.expect("a port is free");
        let order = LandOrder {
            transfer: TransferId(9),
            link: 7,
            from_tp: 1,
            n_tokens: 7,
            held_tokens: 4,
            tables: vec![vec![BlockIdx(1), BlockIdx(3)]; 3],
        };
        follower.landing(&order).expect("it can be filled");
        type Spoil = fn(&mut LandOrder);
        let cases: [(&str, Spoil); 8] = [
            ("an unknown link", |_| ()),
            ("a table too few", |order| order.tables.truncate(2)),
            ("a block too few", |order| order.tables[1].truncate(1)),
            ("a block too many", |order| order.tables[1].push(BlockIdx(0))),
            ("a block outside the memory", |order| order.tables[2][1] = BlockIdx(u32::MAX)),
            ("a part of a block held", |order| order.held_tokens = 3),
            ("more held than there is", |order| order.held_tokens = 8),
            ("ranks that cannot share the heads", |order| order.from_tp = 3),
        ];
        for (name, spoil) in cases {
            let mut wrong = order.clone();
            spoil(&mut wrong);
            follower.land(&wrong);
            let reports = std::mem::take(&mut *kept.0.lock().expect("no test panics with it"));
            let refused = matches!(reports[..], [LandingEvent::Failed(_), LandingEvent::Quiet]);
            assert!(refused, "{name}: {reports:?}");
        }
    }
}
