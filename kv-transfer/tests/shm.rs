//! Tests of a promise of shm alone: no peer can change this side's pages.

use std::fs::File;
use std::io::{IoSlice, Read as _, Write as _};
use std::mem::MaybeUninit;
use std::os::fd::{AsFd as _, BorrowedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;
use std::time::Duration;

use baton_kv_transfer::conformance::node::{BLOCK_TOKENS, Make, Node, Pair, layout, pages, whole};
use baton_kv_transfer::connectors::link::frame::{Body, Frame, HEADER_BYTES, Header, Hello, KvPlace, Piece};
use baton_kv_transfer::{Fault, FaultKind, TransferError, build};
use device::{HostMemory, RegionShape};
use kv_cache::LayerFence;
use rustix::net::{SendAncillaryBuffer, SendAncillaryMessage, SendFlags};
use types::node::PROTOCOL;
use types::{Epoch, Landing, NodeId, WireAddress};

const N_TOKENS: u32 = 4 * BLOCK_TOKENS;
const WITHIN: Duration = Duration::from_secs(20);

async fn shm_pair() -> Pair {
    let make: Make =
        Arc::new(|parts| Box::pin(async { build("shm", parts).await.expect("a folder for sockets") }));
    Pair::new(&make).await
}

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(WITHIN, what).await.expect("in time")
}

#[tokio::test]
async fn blocks_are_free_at_once_although_the_sender_stands_still() {
    let pair = shm_pair().await;
    let from = pair.prefill.computed(N_TOKENS, 1);
    // The fault is in the KV of the second group, so that of the first group arrives.
    pair.prefill.parts.faults.inject(Fault::once(FaultKind::Stall).after(6_000).times(u32::MAX));
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in whole(&landing) {
        sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
    }
    in_time(arrival.progress(0)).await;
    drop(arrival);
    assert!(pair.decode.is_at_baseline(), "only this side writes its pages");
}

/// The sender has reused its blocks for another sequence while the receiver reads: the receiver must detect it.
#[tokio::test]
async fn pages_that_were_reused_are_never_delivered() {
    let pair = shm_pair().await;
    let from = pair.prefill.computed(N_TOKENS, 1);
    pair.prefill
        .parts
        .faults
        .inject(Fault::once(FaultKind::Delay(Duration::from_millis(50))).times(u32::MAX));
    let (landing, arrival) = pair.land(N_TOKENS);
    let mut sender = pair.open(&landing).await.expect("granted");
    for span in pages(&landing) {
        sender.send(span, Arc::clone(&from), LayerFence::open()).await.expect("room");
        if arrival_has_some(&arrival).await {
            break;
        }
    }
    drop(sender);
    pair.prefill.compute(&from, 0..4, 2);
    let error = in_time(arrival.settle()).await.expect_err("it was given up");
    assert!(matches!(error, TransferError::Cancelled), "{error}");
    drop(from);
    pair.at_baseline().await;
}

async fn arrival_has_some(arrival: &baton_kv_transfer::Arrival) -> bool {
    tokio::time::timeout(Duration::from_millis(1), arrival.progress(0)).await.is_ok()
}

#[tokio::test]
async fn an_address_of_an_earlier_life_leads_nowhere() {
    let pair = shm_pair().await;
    let mortal = pair.third(Node::parts("mortal", layout())).await;
    let address = mortal.connector.address();
    assert!(pair.prefill.connector.reaches(&address));
    let request = pair.request(mortal.room(N_TOKENS), N_TOKENS, 0);
    let (landing, _arrival) = mortal.connector.land(request).expect("a proper request");
    drop(mortal);
    assert!(!pair.prefill.connector.reaches(&address));
    let error = pair.open(&landing).await.map(|_| ()).expect_err("nothing listens");
    assert!(matches!(error, TransferError::Connect { .. }), "{error}");
}

#[tokio::test]
async fn another_wires_address_is_not_reached() {
    let pair = shm_pair().await;
    let shm = pair.decode.connector.address();
    let other = WireAddress { scheme: types::Scheme::new("tcp"), ..shm.clone() };
    assert!(pair.prefill.connector.reaches(&shm));
    assert!(!pair.prefill.connector.reaches(&other));
}

// === a fake peer that shares any memory ===

struct FakePeer(UnixStream);

impl FakePeer {
    /// Connects and passes these files. Blocks, so call it only on a thread that may block.
    fn connect(endpoint: &str, greeting: u8, files: &[BorrowedFd<'_>]) -> Self {
        let stream = UnixStream::connect(endpoint).expect("the socket is open");
        stream.set_read_timeout(Some(WITHIN)).expect("a timeout");
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(2))];
        let mut attached = SendAncillaryBuffer::new(&mut space);
        assert!(attached.push(SendAncillaryMessage::ScmRights(files)));
        rustix::net::sendmsg(&stream, &[IoSlice::new(&[greeting])], &mut attached, SendFlags::empty())
            .expect("it is sent");
        Self(stream)
    }

    fn say(&mut self, frame: &Frame) {
        let mut bytes = Vec::new();
        frame.encode(&mut bytes);
        self.0.write_all(&bytes).expect("it is read");
    }

    fn hear(&mut self) -> Option<Body> {
        loop {
            let mut header = [0; HEADER_BYTES];
            self.0.read_exact(&mut header).ok()?;
            let header = Header::parse(&header).expect("a frame");
            let mut body = vec![0; header.body_bytes];
            self.0.read_exact(&mut body).ok()?;
            match header.frame(&body).expect("a frame").body {
                Body::Alive => {}
                body => return Some(body),
            }
        }
    }

    /// Opens a landing as its sender does.
    fn open(&mut self, landing: &Landing) {
        let hello =
            Hello { protocol: PROTOCOL, node: NodeId::new("peer"), epoch: Epoch(1), link: 77, stream: 0 };
        self.say(&Frame::of_link(Body::Hello(hello)));
        assert!(matches!(self.hear(), Some(Body::Welcome { .. })));
        let shown =
            baton_kv_transfer::landing::Credentials::new(landing, &landing.layout, &landing.fingerprint);
        self.say(&Frame::new(landing.transfer, Body::Open(shown)));
        assert_eq!(self.hear(), Some(Body::Accepted));
    }
}

fn shared(bytes: usize) -> HostMemory {
    HostMemory::shared(&[RegionShape { page_bytes: bytes, n_pages: 1 }]).expect("a few bytes can be shared")
}

/// Lets a fake peer act on a thread of its own, and waits for it.
async fn peer<T: Send + 'static>(act: impl FnOnce() -> T + Send + 'static) -> T {
    in_time(tokio::task::spawn_blocking(act)).await.expect("the peer plays its part")
}

async fn still_serves(pair: &Pair) {
    pair.transfer(N_TOKENS, 9).await;
    pair.at_baseline().await;
}

#[tokio::test]
async fn kv_outside_of_what_is_shown_loses_the_link() {
    let pair = shm_pair().await;
    for (slot, offset) in [(None, 1 << 20), (None, u64::MAX - 5000), (Some(3), 1 << 20), (None, 4096 - 8)] {
        let (landing, arrival) = pair.land(N_TOKENS);
        let endpoint = landing.wire.endpoint.clone();
        peer(move || {
            let (stage, kv) = (shared(4096), shared(4096));
            let files = [stage.file().expect("shared"), kv.file().expect("shared")];
            let mut peer = FakePeer::connect(&endpoint, b'B', &files);
            peer.open(&landing);
            let span = pages(&landing).swap_remove(0);
            let shape = baton_kv_transfer::digest::PageShape::new(&landing.layout, span.group, 0);
            let mut digests = Vec::new();
            shape.digest_page(&vec![0; shape.page_bytes()], 4, &mut digests);
            let piece = Piece { offset, bytes: shape.page_bytes() as u32 };
            let in_slot = |slot| KvPlace::Slot { slot, piece };
            let place = slot.map_or(KvPlace::Pieces(vec![piece]), in_slot);
            let body = Body::Kv { span, digests: Some(digests), place };
            peer.say(&Frame::new(landing.transfer, body));
            assert_eq!(peer.hear(), None, "the link is gone");
        })
        .await;
        let error = in_time(arrival.settle()).await.expect_err("its link is gone");
        assert!(matches!(error, TransferError::ConnectionLost { .. }), "{error}");
        still_serves(&pair).await;
    }
}

#[tokio::test]
async fn memory_that_could_vanish_is_refused() {
    let pair = shm_pair().await;
    let endpoint = pair.decode.connector.address().endpoint;
    peer(move || {
        let file = tempfile_of(4096);
        let mut peer = FakePeer::connect(&endpoint, b'B', &[file.as_fd()]);
        assert_eq!(peer.hear(), None, "memory that may shrink is not mapped");
    })
    .await;
    still_serves(&pair).await;
}

fn tempfile_of(bytes: u64) -> File {
    let file = tempfile::tempfile().expect("a file");
    file.set_len(bytes).expect("it grows");
    file
}

#[tokio::test]
async fn a_stranger_is_not_listened_to() {
    let pair = shm_pair().await;
    let endpoint = pair.decode.connector.address().endpoint;
    peer(move || {
        let memory = shared(4096);
        let mut peer = FakePeer::connect(&endpoint, b'x', &[memory.file().expect("shared")]);
        assert_eq!(peer.hear(), None);
    })
    .await;
    still_serves(&pair).await;
}
