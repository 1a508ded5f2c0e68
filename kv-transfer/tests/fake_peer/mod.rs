//! A peer that speaks the tcp connector's protocol under the control of a test.
#![allow(dead_code, reason = "each test file uses its own part of the fake peer")]

use std::sync::Arc;
use std::time::Duration;

use baton_kv_transfer::conformance::node::{Make, Node, Pair, fingerprint, handoff};
use baton_kv_transfer::connectors::tcp::frame::{Body, Frame, HEADER_BYTES, Header, Hello, KvPlace};
use baton_kv_transfer::digest::PageShape;
use baton_kv_transfer::landing::{Credentials, PageAt};
use baton_kv_transfer::{ConnectorParts, TransferSettings, build};
use kv_cache::BlockLease;
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;
use types::node::ProtocolRange;
use types::{Epoch, KvSpan, Landing, NodeId, TransferId};

/// The deadline of every wait in these tests.
pub const WITHIN: Duration = Duration::from_secs(20);

pub async fn in_time<T>(future: impl Future<Output = T>) -> T {
    tokio::time::timeout(WITHIN, future).await.expect("in time")
}

pub fn make_tcp() -> Make {
    Arc::new(|parts| Box::pin(async { build("tcp", parts).await.expect("a free port") }))
}

/// Makes tcp connectors with the stall time `stall_ms`.
pub fn make_tcp_with_stall(stall_ms: u64) -> Make {
    Arc::new(move |parts: ConnectorParts| {
        let settings = TransferSettings { stall_ms, ..parts.settings.clone() };
        Box::pin(
            async move { build("tcp", ConnectorParts { settings, ..parts }).await.expect("a free port") },
        )
    })
}

pub async fn tcp_pair() -> Pair {
    Pair::new(&make_tcp()).await
}

/// One stream of the fake peer, from either side.
pub struct FakePeer {
    pub socket: TcpStream,
}

impl FakePeer {
    pub async fn connect(node: &Node) -> Self {
        let endpoint = node.connector.address().endpoint;
        Self { socket: in_time(TcpStream::connect(endpoint)).await.expect("it listens") }
    }

    /// Connects stream 0 of a new link, whose hello the node accepts.
    pub async fn linked(node: &Node) -> Self {
        let mut peer = Self::connect(node).await;
        peer.say(Body::Hello(hello(3, 3))).await;
        assert!(matches!(peer.hear().await, Some(Body::Welcome { version: 3, .. })));
        peer
    }

    pub async fn say(&mut self, body: Body) {
        self.say_of(TransferId(0), body).await;
    }

    pub async fn say_of(&mut self, transfer: TransferId, body: Body) {
        self.write(&encoded(&Frame::new(transfer, body))).await;
    }

    pub async fn write(&mut self, bytes: &[u8]) {
        in_time(self.socket.write_all(bytes)).await.expect("the peer reads");
    }

    /// Returns the peer's next frame other than a heartbeat; `None` once it has closed the connection.
    pub async fn hear(&mut self) -> Option<Body> {
        loop {
            match in_time(self.next()).await? {
                Body::Alive => {}
                body => return Some(body),
            }
        }
    }

    async fn next(&mut self) -> Option<Body> {
        let mut header = [0; HEADER_BYTES];
        self.socket.read_exact(&mut header).await.ok()?;
        let header = Header::parse(&header).expect("the peer speaks properly");
        let mut body = vec![0; header.body_bytes];
        self.socket.read_exact(&mut body).await.ok()?;
        let frame = header.frame(&body).expect("the peer speaks properly");
        let mut payload = vec![0; frame.payload_bytes];
        self.socket.read_exact(&mut payload).await.ok()?;
        Some(frame.body)
    }

    pub async fn open(&mut self, landing: &Landing) -> Option<Body> {
        self.say_of(landing.transfer, Body::Open(credentials(landing))).await;
        self.hear().await
    }

    /// Sends pages as a proper sender does.
    pub async fn send(&mut self, landing: &Landing, span: KvSpan, node: &Node, from: &BlockLease) {
        self.write(&span_frame(landing, span, node, from)).await;
    }

    pub async fn hand_off(&mut self, landing: &Landing) {
        self.say_of(landing.transfer, Body::Handoff(handoff(landing))).await;
    }
}

pub fn hello(min: u16, max: u16) -> Hello {
    let protocol = ProtocolRange { min, max };
    // The link number is random, because tests of one process must not share a link.
    let link = chassis::World::real().draw();
    Hello { protocol, node: NodeId::new("peer"), epoch: Epoch(1), link, stream: 0 }
}

pub fn credentials(landing: &Landing) -> Credentials {
    Credentials::new(landing, &landing.layout, &fingerprint())
}

pub fn encoded(frame: &Frame) -> Vec<u8> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    bytes
}

/// Encodes a frame of some pages: header, body and KV, with the right digests.
pub fn span_frame(landing: &Landing, span: KvSpan, node: &Node, from: &BlockLease) -> Vec<u8> {
    let (mut digests, mut payload) = (Vec::new(), Vec::new());
    for page in PageAt::all(&span) {
        let place = from.table(page.group)[page.block as usize].0;
        let bytes = node
            .parts
            .memory
            .read(page.group, page.layer_pos, place..place + 1)
            .expect("no write is under way");
        let shape = PageShape::new(&landing.layout, page.group, page.layer_pos);
        shape.digest_page(&bytes, landing.valid_tokens(page.block), &mut digests);
        payload.extend_from_slice(&bytes);
    }
    let body = Body::Kv { span, digests: Some(digests), place: KvPlace::Inline };
    let mut bytes = encoded(&Frame { payload_bytes: payload.len(), ..Frame::new(landing.transfer, body) });
    bytes.extend_from_slice(&payload);
    bytes
}
