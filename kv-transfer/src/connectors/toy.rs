//! A wire for a test: KV goes as messages through a table in this process. The test shows that a new wire is one
//! file.

use std::collections::{BTreeMap, HashMap};
use std::io;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};

use async_trait::async_trait;
use chassis::{Listener, Stream};
use kv_cache::KvMemory;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use types::{KvSpan, Scheme, WireAddress};

use super::link::accept::{Handshake, Incoming, StreamAcceptor};
use super::link::connector::{LinkAddress, LinkConnector};
use super::link::frame::{Body, Frame, FrameError, KvPlace};
use super::link::kv_path::{KvFrame, KvPath, Receipt, wrong_place};
use super::link::send_path::KvSendPath;
use super::link::span_in::{Checker, busy};
use super::link::span_out::{SpanOut, copy_out, corrupt_first};
use super::link::stream::{FrameReader, FrameWriter};
use crate::connector::{Auto, KvConnector, WireKind};
use crate::connector_parts::ConnectorParts;
use crate::digest::Digest;
use crate::error::TransferError;
use crate::faults::{FaultKind, flip};
use crate::landing::{Claim, OpenLanding};
use crate::lanes::LaneSpan;
use crate::wire_threads::WireThreads;

pub(super) const WIRE: WireKind = WireKind {
    name: "toy",
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::No,
};

/// The mailboxes of this process, by the number that each stream sends first. Held for a look-up.
static MAILBOXES: Mutex<BTreeMap<u64, Weak<Mailbox>>> = Mutex::new(BTreeMap::new());
/// The number of bytes of KV that receivers took out of mailboxes.
static BYTES_TAKEN: AtomicU64 = AtomicU64::new(0);

async fn listen(parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    let listener = parts.world.net().listen("127.0.0.1:0").await.map_err(TransferError::lost)?;
    let endpoint = listener.local_addr().map_err(TransferError::lost)?.to_string();
    let address = WireAddress { scheme: Scheme::new(WIRE.name), endpoint, within_host: true };
    Ok(LinkConnector::start(
        parts,
        WireThreads::shared(),
        LinkAddress { wire: address, socket: None },
        Box::new(Port(listener)),
        Box::new(|parts| Ok(Arc::new(ToySendPath::new(parts)) as _)),
    ))
}

/// The messages of one link that were sent and not yet received.
#[derive(Debug, Default)]
struct Mailbox {
    /// The messages by number. Held for a look-up, never across an await.
    messages: Mutex<HashMap<u64, Vec<u8>>>,
}

impl Mailbox {
    fn messages(&self) -> MutexGuard<'_, HashMap<u64, Vec<u8>>> {
        self.messages.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

fn mailboxes() -> MutexGuard<'static, BTreeMap<u64, Weak<Mailbox>>> {
    MAILBOXES.lock().unwrap_or_else(PoisonError::into_inner)
}

// === the sender's end ===

#[derive(Debug)]
struct ToySendPath {
    parts: ConnectorParts,
    id: u64,
    mailbox: Arc<Mailbox>,
    n_messages: AtomicU64,
}

impl ToySendPath {
    fn new(parts: &ConnectorParts) -> Self {
        let (id, mailbox) = (parts.world.draw(), Arc::<Mailbox>::default());
        mailboxes().insert(id, Arc::downgrade(&mailbox));
        Self { parts: parts.clone(), id, mailbox, n_messages: AtomicU64::new(0) }
    }

    async fn post(
        &self,
        writer: &mut FrameWriter,
        span: &SpanOut,
        payload: Vec<u8>,
        digests: Vec<Digest>,
    ) -> Result<(), TransferError> {
        let number = self.n_messages.fetch_add(1, Ordering::Relaxed);
        let place = KvPlace::Message { number, bytes: payload.len() as u32 };
        self.mailbox.messages().insert(number, payload);
        let body = Body::Kv { span: span.piece.span.clone(), digests: Some(digests), place };
        writer.write(&Frame::new(span.out.transfer(), body).on(span.piece.lane)).await
    }
}

impl Drop for ToySendPath {
    fn drop(&mut self) {
        mailboxes().remove(&self.id);
    }
}

#[async_trait]
impl KvSendPath for ToySendPath {
    async fn connect(&self, endpoint: &str, _stream: u16) -> io::Result<Stream> {
        let mut stream = self.parts.world.net().connect(endpoint).await?;
        stream.write_all(&self.id.to_le_bytes()).await?;
        Ok(stream)
    }

    async fn write_span(
        &self,
        writer: &mut FrameWriter,
        parts: &ConnectorParts,
        span: SpanOut,
    ) -> Result<(), TransferError> {
        if span.out.is_over() {
            return Ok(());
        }
        let (runs, mut digests) = (span.runs(parts), span.digests(parts)?);
        let mut payload = vec![0; runs.bytes()];
        copy_out(&parts.memory, &runs, &mut payload)?;
        match parts.faults.next(payload.len()) {
            None => {}
            Some(FaultKind::Lose) => return Err(TransferError::lost_because("a fault was injected")),
            Some(FaultKind::Stall) => return std::future::pending().await,
            Some(FaultKind::Delay(by)) => tokio::time::sleep(by).await,
            Some(FaultKind::Duplicate) => {
                self.post(writer, &span, payload.clone(), digests.clone()).await?;
            }
            Some(FaultKind::FlipBit(bit)) => flip(&mut payload, bit),
            Some(FaultKind::WrongDigest) => corrupt_first(&mut digests),
        }
        self.post(writer, &span, payload, digests).await
    }
}

// === the receiver's end ===

#[derive(Debug)]
struct Port(Box<dyn Listener>);

#[async_trait]
impl StreamAcceptor for Port {
    async fn accept(&mut self) -> io::Result<(String, Handshake)> {
        let (mut stream, from) = self.0.accept().await?;
        let greeted = async move {
            let mut id = [0; 8];
            stream.read_exact(&mut id).await.map_err(TransferError::lost)?;
            let mailbox = mailboxes().get(&u64::from_le_bytes(id)).and_then(Weak::upgrade);
            let mailbox = mailbox.ok_or(FrameError::Unexpected("an unknown mailbox number"))?;
            Ok(Incoming { stream, kv_path: Some(Arc::new(ToyPath(mailbox))), handshake_permit: None })
        };
        Ok((from.to_string(), Box::pin(greeted)))
    }
}

#[derive(Debug)]
struct ToyPath(Arc<Mailbox>);

#[async_trait]
impl KvPath for ToyPath {
    async fn receive(
        self: Arc<Self>,
        frame: KvFrame,
        landing: Option<Arc<OpenLanding>>,
        _reader: &mut FrameReader,
    ) -> Result<Receipt, TransferError> {
        let KvFrame { span, digests, place: KvPlace::Message { number, .. }, .. } = frame else {
            return Err(wrong_place());
        };
        let message = self.0.messages().remove(&number);
        let message = message.ok_or(FrameError::Unexpected("an unknown message number"))?;
        BYTES_TAKEN.fetch_add(message.len() as u64, Ordering::Relaxed);
        let Some(landing) = landing else { return Ok(Receipt::dropped()) };
        lay_in(&landing, &span, &message, &digests.here()?).map(Receipt::Done)
    }
}

/// Copies a message into the landing's pages. Returns the pages that failed verification.
fn lay_in(
    landing: &OpenLanding,
    span: &LaneSpan,
    message: &[u8],
    digests: &[Digest],
) -> Result<Vec<KvSpan>, TransferError> {
    let (claim, runs) = (landing.claim(span, digests.len())?, landing.runs(span));
    if runs.bytes() != message.len() {
        return Err(FrameError::Body("the message does not have the length of its span").into());
    }
    if claim == Claim::Skip {
        return Ok(Vec::new());
    }
    let (mut checker, mut offset) = (Checker::new(span, digests), 0);
    while offset < message.len() {
        let copied = landing.while_open(|memory: &KvMemory| {
            let mut pages = runs.write(memory, offset)?;
            for mut slice in pages.slices() {
                let end = offset + slice.len();
                slice.copy_from_slice(&message[offset..end]);
                offset = end;
            }
            drop(pages);
            checker.check_until(offset, landing, memory)
        });
        match copied {
            None => return Ok(Vec::new()),
            Some(copied) => copied.map_err(busy)?,
        }
    }
    let wrong = checker.wrong;
    Ok(landing.arrived(span, offset, &wrong).map(|()| wrong).unwrap_or_default())
}

// === tests ===

async fn built(parts: ConnectorParts) -> Arc<dyn KvConnector> {
    super::build(WIRE.name, parts).await.expect("a free port")
}

#[tokio::test]
async fn a_new_wire_passes_the_suite() {
    crate::conformance::conformance(built).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_new_wire_passes_the_suite_between_ranks() {
    use crate::conformance::{conformance_between, of_one_stage};
    conformance_between(&[of_one_stage(2, 1), of_one_stage(1, 2)], built).await;
}

#[tokio::test]
async fn kv_goes_over_the_new_wire_and_arrives_equal() {
    let make: crate::conformance::node::Make = Arc::new(|parts| Box::pin(built(parts)));
    let pair = crate::conformance::node::Pair::new(&make).await;
    let before = BYTES_TAKEN.load(Ordering::Relaxed);
    let n_tokens = 4 * crate::conformance::node::BLOCK_TOKENS;
    pair.transfer(n_tokens, 1).await;
    let layout = pair.decode.parts.memory.layout();
    let kv_bytes: usize = layout.group_indices().map(|group| 4 * layout.block_bytes(group)).sum();
    // Other tests of this process may send KV meanwhile.
    let taken = BYTES_TAKEN.load(Ordering::Relaxed) - before;
    assert!(taken >= kv_bytes as u64, "{taken} bytes of {kv_bytes}");
    pair.at_baseline().await;
    pair.ends().await;
}
