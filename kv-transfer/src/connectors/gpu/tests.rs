//! The setting of the number of slots, over a double of a GPU whose copies end when the test lets them.

use std::collections::BTreeSet;
use std::sync::Arc;
use std::time::Duration;

use async_trait::async_trait;
use device::cuda::{CudaError, PageDigests};
use tokio::sync::watch;
use tokio::time::timeout;
use types::in_full;

use super::double::DoubleMover;
use super::staging::{Gathering, HostStaging, InSlot, PageMover, SlotMemory};
use crate::conformance::node::{Make, Node, Pair, here, layout};
use crate::connector::KvConnector;
use crate::connector_parts::ConnectorParts;
use crate::connectors::link::connector::LinkConnector;
use crate::connectors::link::span_out::PagesOut;
use crate::connectors::{shm, tcp};
use crate::digest::Digest;
use crate::error::TransferError;
use crate::landing::OpenLanding;
use crate::lanes::LaneSpan;
use crate::settings::HostSlots;

/// Some hundred frames, many more than slots.
const N_TOKENS: u32 = 1024;

/// A slot and an offset.
type Places = BTreeSet<(usize, usize)>;

/// The places that copies have used, and the permission of copies out of slots to end.
#[derive(Debug, Default)]
struct Copies {
    gathered: watch::Sender<Places>,
    scattered: watch::Sender<Places>,
    may_end: watch::Sender<bool>,
}

#[derive(Debug)]
struct WatchedStaging {
    parts: ConnectorParts,
    copies: Arc<Copies>,
}

#[derive(Debug)]
struct WatchedMover {
    inner: DoubleMover,
    copies: Arc<Copies>,
}

impl HostStaging for WatchedStaging {
    fn mover(&self, slots: &SlotMemory) -> Result<Arc<dyn PageMover>, TransferError> {
        let inner = DoubleMover::new(self.parts.memory.clone(), slots.clone());
        Ok(Arc::new(WatchedMover { inner, copies: Arc::clone(&self.copies) }))
    }
}

fn note(places: &watch::Sender<Places>, at: &InSlot) {
    places.send_if_modified(|places| places.insert((at.slot, at.offset)));
}

#[async_trait]
impl PageMover for WatchedMover {
    async fn gather(
        &self,
        to: InSlot,
        pages: PagesOut<'_>,
        digests: PageDigests,
    ) -> Result<Gathering, TransferError> {
        note(&self.copies.gathered, &to);
        self.inner.gather(to, pages, digests).await
    }

    async fn scatter(
        &self,
        from: InSlot,
        landing: &OpenLanding,
        span: &LaneSpan,
        digests: PageDigests,
    ) -> Result<Option<Vec<Digest>>, TransferError> {
        note(&self.copies.scattered, &from);
        self.copies.may_end.subscribe().wait_for(|may_end| *may_end).await.expect("the test holds it");
        self.inner.scatter(from, landing, span, digests).await
    }
}

async fn connector(
    name: &str,
    mut parts: ConnectorParts,
    staging: Arc<dyn HostStaging>,
) -> Result<Arc<LinkConnector>, TransferError> {
    // Frames of GPUs are larger than the setting.
    parts.settings.frame_bytes = 128;
    match name {
        "shm" => shm::over_gpus(parts, staging).await,
        _ => tcp::listen_with(parts, Some(staging)).await,
    }
}

/// Makes a pair whose copies the test watches.
async fn pair(name: &'static str, n_slots: u16, copies: &Arc<Copies>) -> Pair {
    let copies = Arc::clone(copies);
    let make: Make = Arc::new(move |mut parts: ConnectorParts| {
        parts.settings.host_slots = HostSlots::try_from(n_slots).expect("it is allowed");
        let staging = Arc::new(WatchedStaging { parts: parts.clone(), copies: Arc::clone(&copies) });
        Box::pin(
            async move { connector(name, parts, staging).await.expect("it starts") as Arc<dyn KvConnector> },
        )
    });
    Pair::new(&make).await
}

async fn reach(places: &watch::Sender<Places>, n_places: usize) {
    let mut places = places.subscribe();
    let reached = timeout(here(Duration::from_secs(5)), places.wait_for(|at| at.len() >= n_places));
    let n_reached = reached.await.is_ok();
    assert!(n_reached, "{n_places} slots in flight: {:?}", places.borrow());
}

/// While no copy of the receiver ends, the sender of shm fills all slots. A tcp link's receiver has up to eight copies
/// under way, in slots of its own. In the end each end has used all its slots and no more.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_setting_is_the_number_of_slots_in_flight() {
    for (name, n_slots) in [("shm", 1), ("shm", 3), ("shm", 20), ("tcp", 1), ("tcp", 3), ("tcp", 20)] {
        let copies = Arc::new(Copies::default());
        let pair = pair(name, n_slots, &copies).await;
        let transfer = pair.transfer(N_TOKENS, 1);
        let watch = async {
            match name {
                "shm" => reach(&copies.gathered, n_slots.into()).await,
                _ => reach(&copies.scattered, usize::from(n_slots).min(8)).await,
            }
            copies.may_end.send_replace(true);
        };
        tokio::join!(transfer, watch);
        for used in [&copies.gathered, &copies.scattered] {
            assert_eq!(used.borrow().len(), usize::from(n_slots), "{name}: {:?}", used.borrow());
        }
        pair.at_baseline().await;
        pair.ends().await;
    }
}

/// A GPU that cannot access host memory.
#[derive(Debug)]
struct NoStaging;

impl HostStaging for NoStaging {
    fn mover(&self, _slots: &SlotMemory) -> Result<Arc<dyn PageMover>, TransferError> {
        Err(TransferError::device(CudaError::NoDevice))
    }
}

#[tokio::test]
async fn slots_that_cannot_be_page_locked_are_refused_at_the_start_with_their_sum() {
    for (name, slot, all) in [("shm", "1KiB", "16KiB"), ("tcp", "768", "12KiB")] {
        let parts = Node::parts("near", layout());
        let error = connector(name, parts, Arc::new(NoStaging)).await.expect_err("nothing is page-locked");
        let expected = format!(
            "no room for 16 slots of {slot} = {all} of page-locked host memory for each peer of {name} (set \
             expert.transfer.host_slots lower): the GPU operation failed: "
        );
        assert!(in_full(&error).starts_with(&expected), "{}", in_full(&error));
    }
}

#[test]
fn a_number_of_slots_outside_of_the_bounds_is_refused() {
    for (n_slots, is_allowed) in [(0, false), (1, true), (64, true), (65, false)] {
        assert_eq!(HostSlots::try_from(n_slots).is_ok(), is_allowed, "{n_slots}");
    }
    let error = HostSlots::try_from(0).expect_err("no slot");
    assert_eq!(error.to_string(), "0 slots, 1 to 64 are allowed");
}
