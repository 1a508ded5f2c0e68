//! A KV receiver with one landing, and a client that connects and sends the messages that the bytes describe.

use std::sync::Arc;
use std::time::Duration;

use chassis::net::MemoryNet;
use chassis::{Gate, Stream, World};
use kv_cache::{BlockPool, Holder, Holding, KvMemory};
use kv_transfer::connectors::tcp;
use kv_transfer::connectors::tcp::frame::{Body, Frame, HEADER_BYTES, Hello};
use kv_transfer::landing::Credentials;
use kv_transfer::{
    ArrivalStatus, ConnectorParts, Faults, KvConnector as _, LandRequest, TransferMetrics, TransferSettings,
};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use types::layout::KvDtype;
use types::node::PROTOCOL;
use types::{Epoch, Fingerprint, Grant, KvLayout, Landing, NodeId, RequestId};

use super::Script;
use super::frames::seal;

const BLOCKS: u32 = 8;
const TOKENS: u32 = 14;
/// The stall time of the receiver, on a paused clock.
const STALL_MS: u64 = 500;
/// The time limit of the test, longer than any wait of the receiver.
const PATIENCE: Duration = Duration::from_secs(30);

/// Lets a client send the messages that the bytes describe. For all bytes there is no panic, KV arrives only
/// after the right grant, and every block comes back.
pub fn kv_receiver(bytes: &[u8]) {
    super::in_paused_time(async {
        let parts = parts();
        let pool = BlockPool::new(parts.memory.layout(), BLOCKS);
        let net = Arc::clone(parts.world.net());
        let gate = parts.gate.clone();
        let tcp = tcp::listen(parts.clone()).await.expect("a port of its own");
        let (landing, mut arrival) = tcp.land(request(&parts, &pool)).expect("there is room");
        let mut stream = net.connect(&landing.wire.endpoint).await.expect("it listens");
        let mut visitor = Visitor { landing, parts, has_shown_the_grant: false };
        let spoken = tokio::time::timeout(PATIENCE, visitor.speak(&mut stream, Script(bytes))).await;
        spoken.expect("a receiver that takes nothing closes the stream");
        let _ = stream.shutdown().await;
        let heard = tokio::time::timeout(PATIENCE, stream.read_to_end(&mut Vec::new())).await;
        let _ = heard.expect("a stream that has ended is closed");
        if let ArrivalStatus::Arrived(_) = arrival.poll() {
            assert!(visitor.has_shown_the_grant, "KV arrived without the grant");
        }
        drop((arrival, stream, tcp));
        gate.close(PATIENCE).await.expect("its tasks end");
        assert_eq!(pool.counts().leased + pool.counts().quarantined, 0, "{:?}", pool.ledger());
        pool.integrity().expect("the integrity check passes");
    });
}

fn parts() -> ConnectorParts {
    let layout = KvLayout::uniform(4, KvDtype::F32, 2, 1, 2);
    let world = World::seeded(1).with_net(Arc::new(MemoryNet::new()));
    ConnectorParts {
        node: NodeId::new("receiver"),
        epoch: world.epoch(),
        memory: KvMemory::host(layout, BLOCKS).expect("a few hundred bytes"),
        fingerprint: Fingerprint::default(),
        world,
        gate: Gate::new("receiver"),
        settings: TransferSettings { stall_ms: STALL_MS, ..TransferSettings::default() },
        metrics: TransferMetrics::default(),
        faults: Faults::none(),
        processes: None,
    }
}

fn request(parts: &ConnectorParts, pool: &BlockPool) -> LandRequest {
    let holder = Holder { what: Holding::Landing, request: RequestId::new("fuzz") };
    LandRequest {
        transfer: parts.world.transfer_id(),
        lease: pool.reserve(BLOCKS as usize / 2, holder).expect("there is room"),
        n_tokens: TOKENS,
        held_tokens: 0,
        deadline: parts.world.deadline_in(PATIENCE * 2),
    }
}

/// A client that knows the landing and follows its script.
struct Visitor {
    landing: Landing,
    parts: ConnectorParts,
    has_shown_the_grant: bool,
}

impl Visitor {
    /// Follows the script until it ends or the receiver closes the stream.
    async fn speak(&mut self, stream: &mut Stream, mut script: Script<'_>) {
        let mut words = Vec::new();
        if !script.byte().is_multiple_of(8) {
            self.hello().encode(&mut words);
        }
        loop {
            if stream.write_all(&words).await.is_err() || script.is_over() {
                return;
            }
            words = self.next(&mut script);
        }
    }

    fn next(&mut self, script: &mut Script<'_>) -> Vec<u8> {
        let mut words = Vec::new();
        match script.byte() % 6 {
            0 => {
                let n = usize::from(script.byte());
                words.extend_from_slice(script.take(n));
            }
            1 => self.open(script).encode(&mut words),
            2 => self.hello().encode(&mut words),
            3 => {
                // Sends KV bytes, as the last span has announced.
                let n = usize::from(script.byte()) * 16;
                words.resize(n, script.byte());
            }
            _ => self.sealed(script, &mut words),
        }
        words
    }

    fn hello(&self) -> Frame {
        let node = NodeId::new("visitor");
        Frame::of_link(Body::Hello(Hello { protocol: PROTOCOL, node, epoch: Epoch(1), link: 7, stream: 0 }))
    }

    /// Makes the frame that opens the landing, with its owner's credential, unless the script changes that.
    fn open(&mut self, script: &mut Script<'_>) -> Frame {
        let mut shown = Credentials::new(&self.landing, self.parts.memory.layout(), &self.parts.fingerprint);
        match script.byte() % 8 {
            0 => shown.grant = Grant::from_bytes([script.byte(); 16]),
            1 => shown.epoch = Epoch(u64::from(script.byte())),
            2 => shown.n_tokens = script.number(),
            3 => shown.held_tokens = script.number(),
            4 => shown.layout ^= 1,
            5 => shown.fingerprint ^= 1,
            _ => self.has_shown_the_grant = true,
        }
        Frame::new(self.landing.transfer, Body::Open(shown))
    }

    /// Writes a frame of the landing's transfer, of any kind and with any body, with correct lengths and
    /// checksum.
    fn sealed(&self, script: &mut Script<'_>, words: &mut Vec<u8>) {
        let (kind, payload, n_body) = (script.byte() % 21, script.byte(), usize::from(script.byte()));
        Frame::new(self.landing.transfer, Body::Alive).encode(words);
        words.truncate(HEADER_BYTES);
        words[4] = kind;
        words[12..16].copy_from_slice(&(u32::from(payload) * 16).to_le_bytes());
        words.extend_from_slice(script.take(n_body));
        seal(words);
    }
}
