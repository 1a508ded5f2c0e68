use std::time::Duration;

use async_trait::async_trait;
use chassis::Gate;
use device::cuda::{CudaError, PageDigests};
use tokio::sync::watch;
use tokio::time::timeout;
use types::{BlockIdx, Epoch, GroupIdx, NodeId, StageLayers};

use super::*;
use crate::conformance::node::{Node, here, spread_layout};
use crate::connectors::gpu::staging::{Gathering, InSlot, PageMover, SlotMemory};
use crate::digest::Digest;
use crate::landing::OpenLanding;
use crate::lanes::LaneSpan;
use crate::processes::an_order;
use crate::settings::HostSlots;

/// Returns the follower with layers 3 to 6 of the suite's layout, and an order that it accepts.
async fn follower() -> (FollowerStreams, PutOrder) {
    let (parts, order) = parts();
    (FollowerStreams::start(parts).await.expect("host memory"), order)
}

fn parts() -> (ConnectorParts, PutOrder) {
    let parts = Node::parts_of("prefill", spread_layout(2), &StageLayers::part(3..7));
    let order = PutOrder { node: parts.node.clone(), epoch: parts.epoch, ..an_order() };
    (parts, order)
}

#[tokio::test]
async fn an_order_that_this_process_cannot_serve_is_refused() {
    let (follower, order) = follower().await;
    follower.check(&order).expect("it can be served");
    type Spoil = fn(&mut PutOrder);
    let cases: [(&str, Spoil); 16] = [
        ("another node", |order| order.node = NodeId::new("other")),
        ("another life", |order| order.epoch = Epoch(order.epoch.0 ^ 1)),
        ("stream 0", |order| order.stream = 0),
        ("a stream too far", |order| order.stream = STREAMS_MAX),
        ("an unknown group", |order| order.piece.span.group = GroupIdx(3)),
        ("a layer too far", |order| order.piece.span.layers = 1..3),
        ("another process's layers", |order| order.piece.span.group = GroupIdx(0)),
        ("a block too few", |order| order.blocks.truncate(2)),
        ("a block too many", |order| order.blocks.push(BlockIdx(5))),
        ("a block outside the memory", |order| order.blocks[2] = BlockIdx(u32::MAX)),
        ("a block behind the sequence", |order| order.n_tokens = 24),
        ("an empty sequence", |order| order.n_tokens = 0),
        ("an unknown lane", |order| order.piece.lane.to = 1),
        ("an unknown rank", |order| order.piece.lane.from = 2),
        ("no ranks", |order| order.peer_tp_size = 0),
        ("ranks that cannot share the heads", |order| order.peer_tp_size = 3),
    ];
    for (name, spoil) in cases {
        let mut wrong = order.clone();
        spoil(&mut wrong);
        let error = follower.put(wrong).await.expect_err(name);
        assert!(matches!(error, TransferError::BadRequest(_) | TransferError::Layout(_)), "{name}: {error}");
    }
    let mut large = order.clone();
    large.piece.span.blocks = 0..1000;
    (large.blocks, large.n_tokens) = (vec![BlockIdx(3); 1000], 4_000);
    let error = follower.put(large).await.expect_err("2000 pages");
    assert!(error.to_string().contains("more pages than a frame may have"), "{error}");
    assert!(follower.links.open().is_empty(), "no link was made for a refused order");
}

#[tokio::test]
async fn a_stream_that_cannot_be_connected_leaves_nothing() {
    let (follower, order) = follower().await;
    let error = follower.put(order).await.expect_err("nothing listens");
    assert!(matches!(error, TransferError::Connect { .. }), "{error}");
    assert!(follower.links.open().is_empty());
}

#[tokio::test]
async fn links_are_bounded() {
    let (follower, order) = follower().await;
    for id in 100..100 + LINKS_MAX as u64 {
        follower.link(&PutOrder { link: id, ..order.clone() }).expect("there is room");
    }
    let error = follower.put(order.clone()).await.expect_err("too many");
    assert!(matches!(error, TransferError::TooMany), "{error}");
    follower.close_link(100);
    follower.link(&PutOrder { link: 7, ..order.clone() }).expect("there is room again");
}

// === slots ===

/// How the gathers of a [`HeldUpGpu`] go on after their copy job has started.
#[derive(Clone, Copy, Debug)]
enum Gathers {
    WaitForCopyJob,
    Fail,
}

/// A GPU whose copy jobs end when the test lets them.
#[derive(Debug)]
struct HeldUpGpu {
    gate: Gate,
    gathers: Gathers,
    n_started: watch::Sender<usize>,
    may_end: watch::Sender<bool>,
}

/// The handle that the follower has of a [`HeldUpGpu`].
#[derive(Clone, Debug)]
struct GpuHandle(Arc<HeldUpGpu>);

impl HeldUpGpu {
    async fn started(&self, n_jobs: usize) {
        let mut n_started = self.n_started.subscribe();
        let started = timeout(here(Duration::from_secs(5)), n_started.wait_for(|n| *n >= n_jobs)).await;
        started.expect("the copy jobs start").expect("the test has the sender");
    }

    async fn ended(&self) {
        let mut may_end = self.may_end.subscribe();
        may_end.wait_for(|may_end| *may_end).await.expect("the test has the sender");
    }
}

impl HostStaging for GpuHandle {
    fn mover(&self, _slots: &SlotMemory) -> Result<Arc<dyn PageMover>, TransferError> {
        Ok(Arc::new(self.clone()))
    }
}

#[async_trait]
impl PageMover for GpuHandle {
    async fn gather(
        &self,
        to: InSlot,
        _pages: PagesOut<'_>,
        _digests: PageDigests,
    ) -> Result<Gathering, TransferError> {
        let gpu = Arc::clone(&self.0);
        let copy_job = async move {
            gpu.ended().await;
            drop(to);
        };
        spawn_guarded(&self.0.gate, "copy job", copy_job).detach();
        self.0.n_started.send_modify(|n| *n += 1);
        match self.0.gathers {
            Gathers::Fail => return Err(TransferError::device(CudaError::NoDevice)),
            Gathers::WaitForCopyJob => self.0.ended().await,
        }
        Ok(Gathering::Done(Vec::new()))
    }

    async fn scatter(
        &self,
        _from: InSlot,
        _landing: &OpenLanding,
        _span: &LaneSpan,
        _digests: PageDigests,
    ) -> Result<Option<Vec<Digest>>, TransferError> {
        unreachable!("followers only send")
    }
}

/// Returns a follower with `n_slots` slots for each link, its GPU, and an order that it accepts.
async fn follower_with(n_slots: u16, gathers: Gathers) -> (FollowerStreams, Arc<HeldUpGpu>, PutOrder) {
    let (mut parts, order) = parts();
    parts.settings.host_slots = HostSlots::try_from(n_slots).expect("it is allowed");
    parts.settings.stall_ms = 200;
    let (n_started, may_end) = Default::default();
    let gpu = Arc::new(HeldUpGpu { gate: parts.gate.clone(), gathers, n_started, may_end });
    let staging = Arc::new(GpuHandle(Arc::clone(&gpu)));
    (FollowerStreams::start_with(parts, Some(staging)).await.expect("there is room"), gpu, order)
}

/// Fills all `n_slots` slots of a link.
async fn fill_all(follower: &FollowerStreams, link: &FollowerLink, order: &PutOrder, n_slots: usize) {
    let (lanes, reads) = (follower.check(order).expect("it can be served"), Arc::default());
    let mut filled = Vec::new();
    while filled.len() < n_slots {
        let gathered = link.sockets.gather(&follower.parts, order.pages(&lanes), &reads).await;
        filled.push(gathered.expect("no slot is lost").expect("the pages fit into a slot"));
    }
}

#[tokio::test]
async fn a_put_outlasts_the_copy_job_that_reads_its_pages() {
    for gathers in [Gathers::WaitForCopyJob, Gathers::Fail] {
        let (follower, gpu, order) = follower_with(2, gathers).await;
        let link = follower.link(&order).expect("there is room");
        let mut put = Box::pin(follower.put(order.clone()));
        let ends = async {
            gpu.started(1).await;
            follower.close_link(order.link);
            tokio::time::sleep(Duration::from_millis(50)).await;
        };
        tokio::select! {
            biased;
            put = &mut put => panic!("the copy job has not ended, and the put has: {put:?}, {gathers:?}"),
            () = ends => {}
        }
        gpu.may_end.send_replace(true);
        let error =
            timeout(here(Duration::from_secs(5)), put).await.expect("in time").expect_err("it failed");
        match gathers {
            Gathers::WaitForCopyJob => {
                assert!(matches!(error, TransferError::Closed), "{error}");
                fill_all(&follower, &link, &order, 2).await;
            }
            Gathers::Fail => assert!(!matches!(error, TransferError::Closed), "{error}"),
        }
        assert!(follower.links.open().is_empty(), "the link is closed");
    }
}

#[tokio::test]
async fn a_put_waits_for_a_slot_of_its_link_at_most_for_the_stall_time() {
    let (follower, gpu, order) = follower_with(1, Gathers::WaitForCopyJob).await;
    let first = follower.put(order.clone());
    let others = async {
        gpu.started(1).await;
        let error = follower.put(order.clone()).await.expect_err("the only slot is in use");
        assert!(matches!(error, TransferError::Stalled { what: "waiting for a slot", .. }), "{error}");
        let of_another_link = follower.put(PutOrder { link: 8, ..order.clone() });
        let let_end = async {
            gpu.started(2).await;
            gpu.may_end.send_replace(true);
        };
        let (put, ()) = tokio::join!(of_another_link, let_end);
        let error = put.expect_err("nothing listens");
        assert!(matches!(error, TransferError::Connect { .. }), "{error}");
    };
    let (first, ()) = tokio::join!(first, others);
    first.expect_err("the link was lost");
}
