//! The transfers over one connector.

use std::sync::Arc;
use std::time::Duration;

use chassis::metrics::Metrics;
use chassis::rpc::{MESSAGE_BYTES_MAX, RpcChannel, call};
use chassis::{Gate, World};
use kv_cache::{BlockLease, BlockPool, Holder, Holding, KvMemory, LayerFence};
use kv_transfer::{ConnectorParts, Faults, KvConnector, TransferError, TransferMetrics, TransferSettings};
use proto::v1;
use proto::v1::decode_client::DecodeClient;
use proto::v1::decode_event::Event;
use types::prompt::{Priority, StopRules, TokenId};
use types::step::FinishReason;
use types::{
    Destination, Handoff, KvLayout, KvSpan, Landing, NodeId, Prompt, Refusal, RefusalKind, RequestId,
    Sampling, Scheme, Step, TenantId,
};

/// The size of one transfer in bytes: enough for a rate, and small enough for any node. A node with less room
/// gets less.
const BYTES_WANTED: usize = 64 << 20;
const N_TOKENS_MAX: u32 = 8192;
const N_TRANSFERS: usize = 5;
const PROMPT_WITHIN: Duration = Duration::from_secs(10);

/// The decode node that receives the KV.
#[derive(Debug)]
pub(super) struct Peer {
    channel: RpcChannel,
    world: World,
}

/// The result of the transfers over one connector.
#[derive(Debug)]
pub(super) struct Trial {
    pub(super) bytes: u64,
    pub(super) best: Duration,
    pub(super) n_transfers: usize,
}

#[derive(Debug, thiserror::Error)]
pub(super) enum TrialError {
    #[error("the node does not answer as a decode node: {0}")]
    Peer(Box<tonic::Status>),
    #[error("no connector in common: {0}")]
    NotInCommon(Refusal),
    #[error("the node refuses: {0}")]
    Refused(Refusal),
    #[error("not available on this machine: {0}")]
    NotHere(TransferError),
    #[error("the transfer failed: {0}")]
    Transfer(#[from] TransferError),
    #[error("no memory for the KV to send: {0}")]
    Memory(String),
    #[error("the node answered with {0}, not with a landing")]
    Nonsense(String),
}

impl TrialError {
    /// Returns whether every other connector would fail with the same error.
    pub(super) fn concerns_the_peer(&self) -> bool {
        matches!(self, Self::Peer(_))
    }
}

/// Requests the node's KV layout, makes enough KV for a measurement, and sends it a few times.
pub(super) async fn run(peer: &Peer, scheme: &'static str) -> Result<Trial, TrialError> {
    let (first, _) = peer.ask(scheme, 1).await?;
    let mut n_tokens = tokens_worth(&first.layout, BYTES_WANTED);
    drop(first);
    let (landing, events) = loop {
        match peer.ask(scheme, n_tokens).await {
            Err(TrialError::Refused(refusal)) if may_be_shorter(&refusal) && n_tokens > 16 => n_tokens /= 2,
            answer => break answer?,
        }
    };
    let sender = Sender::build(peer, scheme, &landing).await?;
    let mut best = sender.send(landing, events).await?;
    for _ in 1..N_TRANSFERS {
        let (landing, events) = peer.ask(scheme, n_tokens).await?;
        best = best.min(sender.send(landing, events).await?);
    }
    Ok(Trial { bytes: sender.bytes, best, n_transfers: N_TRANSFERS })
}

fn may_be_shorter(refusal: &Refusal) -> bool {
    matches!(refusal.kind, RefusalKind::Full | RefusalKind::TooLong | RefusalKind::Invalid)
}

/// Returns the number of tokens whose KV has this many bytes: whole blocks, at least one.
fn tokens_worth(layout: &KvLayout, bytes: usize) -> u32 {
    let page_bytes = |group: &types::layout::LayerGroup| -> usize {
        group.layers.iter().map(|shape| layout.page_bytes(*shape)).sum()
    };
    let block_bytes: usize = layout.groups.iter().map(page_bytes).sum();
    let n_blocks = (bytes / block_bytes.max(1)).max(1);
    let n_tokens = n_blocks.saturating_mul(usize::from(layout.block_tokens));
    u32::try_from(n_tokens).unwrap_or(u32::MAX).min(N_TOKENS_MAX)
}

type Events = tonic::Streaming<v1::DecodeEvent>;

impl Peer {
    pub(super) fn new(channel: RpcChannel, world: World) -> Self {
        Self { channel, world }
    }

    /// Requests a landing. Dropping the returned stream releases the landing on the node.
    async fn ask(&self, scheme: &str, n_tokens: u32) -> Result<(Landing, Events), TrialError> {
        let prompt = self.prompt(n_tokens);
        let request = v1::DecodeRequest {
            prompt: Some(proto::prompt_to_wire(&prompt, self.world.now().into_std())),
            prefill: Some(v1::decode_request::Prefill::HeldBy(this_machine(scheme))),
            explain: false,
        };
        let mut client = DecodeClient::new(self.channel.clone()).max_decoding_message_size(MESSAGE_BYTES_MAX);
        let mut events = client.run(call(&prompt.id, request)).await.map_err(no_node)?.into_inner();
        match events.message().await.map_err(no_node)?.and_then(|event| event.event) {
            Some(Event::Landing(landing)) => {
                let landing: Landing = landing
                    .try_into()
                    .map_err(|error: proto::ConvertError| TrialError::Nonsense(error.to_string()))?;
                Ok((landing.opened_with(prompt.digest()), events))
            }
            Some(Event::Refused(refusal)) => Err(refused(refusal.into())),
            other => Err(TrialError::Nonsense(format!("{other:?}"))),
        }
    }

    /// Makes a prompt that ends after one token, which is sent with the KV.
    fn prompt(&self, n_tokens: u32) -> Prompt {
        Prompt {
            id: self.world.request_id(),
            tenant: TenantId::new(format!("doctor-{:016x}", self.world.draw())),
            cache_salt: types::CacheSalt::default(),
            model: types::RequestedModel::default(),
            tokens: vec![TokenId(1); n_tokens as usize].into(),
            n_generated: 0,
            sampling: Sampling::default(),
            stop: StopRules { max_tokens: 1, ..StopRules::default() },
            priority: Priority::default(),
            deadline: self.world.deadline_in(PROMPT_WITHIN),
        }
    }
}

fn no_node(status: tonic::Status) -> TrialError {
    TrialError::Peer(Box::new(status))
}

fn refused(refusal: Refusal) -> TrialError {
    match refusal.kind {
        RefusalKind::Mismatch => TrialError::NotInCommon(refusal),
        _ => TrialError::Refused(refusal),
    }
}

/// Describes this machine as a prefill node with one connector. No peer connects to its empty address.
fn this_machine(scheme: &str) -> v1::Peer {
    let wire = v1::WireAddress { scheme: scheme.to_owned(), endpoint: String::new(), within_host: false };
    v1::Peer { node: "doctor".to_owned(), host: node::host::host_id(), wires: vec![wire] }
}

/// KV to send, in the peer's layout, and the connector that sends it.
#[derive(Debug)]
struct Sender {
    connector: Arc<dyn KvConnector>,
    from: Arc<BlockLease>,
    bytes: u64,
    world: World,
}

impl Sender {
    async fn build(peer: &Peer, scheme: &'static str, landing: &Landing) -> Result<Self, TrialError> {
        let layout = &landing.layout;
        let n_blocks = landing.n_tokens.div_ceil(u32::from(layout.block_tokens));
        let n_blocks_of_all = n_blocks * layout.groups.len() as u32;
        let memory = KvMemory::host(layout.clone(), n_blocks_of_all)
            .map_err(|error| TrialError::Memory(error.to_string()))?;
        let pool = BlockPool::new(layout, n_blocks_of_all);
        let holder = Holder { what: Holding::Outbox, request: RequestId::new("doctor") };
        let from =
            pool.reserve(n_blocks as usize, holder).map_err(|error| TrialError::Memory(error.to_string()))?;
        let settings = TransferSettings::default();
        let parts = ConnectorParts {
            node: NodeId::new("doctor"),
            epoch: peer.world.epoch(),
            memory,
            fingerprint: landing.fingerprint.clone(),
            world: peer.world.clone(),
            gate: Gate::new("doctor"),
            settings,
            metrics: TransferMetrics::new(&Metrics::new("doctor")),
            faults: Faults::none(),
            processes: None,
        };
        let connector = kv_transfer::build(scheme, parts).await.map_err(TrialError::NotHere)?;
        debug_assert_eq!(connector.scheme(), Scheme::new(scheme));
        let bytes = page_bytes_sent(landing);
        Ok(Self { connector, from: Arc::new(from), bytes, world: peer.world.clone() })
    }

    /// Fills one landing, and waits until the node confirms that the KV arrived unchanged.
    async fn send(&self, landing: Landing, _events: Events) -> Result<Duration, TrialError> {
        let (transfer, n_tokens) = (landing.transfer, landing.n_tokens);
        let spans = spans(&landing);
        let start = self.world.now();
        let mut sender = self.connector.open(&Destination::Landing(landing)).await?;
        for span in spans {
            sender.send(span, self.from.clone(), LayerFence::open()).await?;
        }
        let first = Step { token: TokenId(1), index: 0, logprobs: None, finish: Some(FinishReason::Length) };
        sender.finish(Handoff { transfer, n_tokens, first }).await?;
        Ok(self.world.now() - start)
    }
}

fn page_bytes_sent(landing: &Landing) -> u64 {
    let layers = landing.layout.groups.iter().flat_map(|group| &group.layers);
    let of_a_block: usize = layers.map(|shape| landing.layout.page_bytes(*shape)).sum();
    of_a_block as u64 * landing.wanted_blocks().len() as u64
}

/// Returns the spans of a landing layer by layer, as a prefill node sends them.
fn spans(landing: &Landing) -> Vec<KvSpan> {
    let of_group = |group: types::GroupIdx| {
        let n_layers = landing.layout.group(group).layers.len() as u16;
        let blocks = landing.wanted_blocks();
        (0..n_layers).map(move |layer| KvSpan { group, blocks: blocks.clone(), layers: layer..layer + 1 })
    };
    landing.layout.group_indices().flat_map(of_group).collect()
}
