//! The client of the embedded registry, over gRPC.

use std::time::Duration;

use async_trait::async_trait;
use chassis::identity::ExpectedPeer;
use chassis::rpc::{RpcChannel, RpcLimits, channel};
use chassis::{Gate, World};
use futures::stream::BoxStream;
use proto::v1;
use proto::v1::bootstrap_client::BootstrapClient;
use proto::v1::watch_event::Event;
use tonic::{Code, Status, Streaming};
use tracing::warn;
use types::{NodeId, NodeInfo};

use crate::announcement::{self, Announcement, LeaseTerms, Presence, within};
use crate::error::RegistryError;
use crate::lock::{self, Entry, Lock, LockName};
use crate::memory::{TTL, terms};
use crate::open::RegistryParts;
use crate::url::{RegistryUrl, port_of};
use crate::watch::{AllNodes, Feed, RegistryMessage, follow};
use crate::{MembershipEvent, Registry};

/// The registry that the router at an address serves. A restarted router has lost its members; each member
/// notices this at its next renewal and announces itself again.
#[derive(Clone, Debug)]
pub struct EmbeddedRegistry {
    client: BootstrapClient<RpcChannel>,
    world: World,
    gate: Gate,
}

impl EmbeddedRegistry {
    /// Makes a client of the registry at `address`, the `host:port` of the router's gRPC services. Nothing is
    /// sent yet.
    pub fn new(address: &str, world: World, gate: Gate) -> Self {
        let client =
            BootstrapClient::new(channel(&world, address, ExpectedPeer::Registry, RpcLimits::default()))
                .max_decoding_message_size(proto::MESSAGE_BYTES_MAX)
                .max_encoding_message_size(proto::MESSAGE_BYTES_MAX);
        Self { client, world, gate }
    }

    /// Opens the registry at `embedded://host:port`. Nothing is sent yet.
    pub fn open(url: &RegistryUrl, parts: RegistryParts) -> Result<Self, RegistryError> {
        url.only(&[])?;
        match url.hosts.as_slice() {
            _ if url.user.is_some() => Err(url.refuse("the embedded registry has no users")),
            _ if !url.path.is_empty() => Err(url.refuse("nothing may follow the port")),
            [host] if port_of(host).is_some() => Ok(Self::new(host, parts.world, parts.gate)),
            [_] => Err(url.refuse("the port of the router's gRPC services is missing")),
            _ => Err(url.refuse("give one host: the embedded registry is on one router")),
        }
    }

    pub(crate) fn feed(&self) -> impl Feed + use<> {
        GrpcFeed { client: self.client.clone(), connection: None, life: None, ttl: TTL }
    }
}

#[async_trait]
impl Registry for EmbeddedRegistry {
    async fn announce(&self, node: NodeInfo) -> Result<Announcement, RegistryError> {
        let entry = Entry::Node(Box::new(node.clone()));
        let presence = OverGrpc { client: self.client.clone(), entry, lease: None };
        announcement::keep(&node, presence, &self.gate, self.world.clone()).await
    }

    async fn watch(&self) -> Result<BoxStream<'static, MembershipEvent>, RegistryError> {
        Ok(follow(self.feed(), self.world.clone()))
    }

    async fn lock(&self, name: LockName) -> Result<Option<Lock>, RegistryError> {
        let presence = OverGrpc { client: self.client.clone(), entry: Entry::Lock(name), lease: None };
        lock::take(name, presence, &self.gate, self.world.clone()).await
    }
}

// === OverGrpc ===

struct OverGrpc {
    client: BootstrapClient<RpcChannel>,
    entry: Entry,
    lease: Option<u64>,
}

#[async_trait]
impl Presence for OverGrpc {
    async fn announce(&mut self) -> Result<LeaseTerms, RegistryError> {
        let answer = match &self.entry {
            Entry::Node(node) => {
                self.client.announce(v1::AnnounceRequest { node: Some((&**node).into()) }).await
            }
            Entry::Lock(name) => self.client.lock(v1::LockRequest { name: name.as_str().to_owned() }).await,
        };
        let answer = answer.map_err(|status| self.refused(status))?.into_inner();
        self.lease = Some(answer.lease);
        Ok(terms(Duration::from_millis(answer.ttl_ms)))
    }

    async fn keep_alive(&mut self) -> Result<(), RegistryError> {
        let lease = self.lease.ok_or(RegistryError::LeaseLost)?;
        let answer = self.client.keep_alive(v1::KeepAliveRequest { lease }).await;
        answer.map(drop).map_err(|status| self.refused(status))
    }

    async fn withdraw(&mut self) -> Result<(), RegistryError> {
        let Some(lease) = self.lease else { return Ok(()) };
        let answer = self.client.withdraw(v1::WithdrawRequest { lease }).await;
        answer.map(drop).map_err(|status| self.refused(status))
    }
}

impl OverGrpc {
    /// Converts a gRPC status to the error that the server's `status` function encoded.
    fn refused(&self, status: Status) -> RegistryError {
        match status.code() {
            Code::NotFound => RegistryError::LeaseLost,
            Code::AlreadyExists => match &self.entry {
                Entry::Node(node) => RegistryError::Superseded { id: node.id.clone(), epoch: node.epoch },
                Entry::Lock(_) => RegistryError::LockHeld,
            },
            _ => error_from("call the embedded registry", status),
        }
    }
}

fn error_from(operation: &'static str, status: Status) -> RegistryError {
    let source = Box::new(status.clone());
    match status.code() {
        Code::InvalidArgument
        | Code::FailedPrecondition
        | Code::PermissionDenied
        | Code::Unauthenticated
        | Code::Unimplemented => RegistryError::Denied { operation, source },
        _ => RegistryError::Unreachable { operation, source },
    }
}

// === GrpcFeed ===

const WATCH: &str = "watch the embedded registry";

struct GrpcFeed {
    client: BootstrapClient<RpcChannel>,
    connection: Option<Streaming<v1::WatchEvent>>,
    /// The number of the registry's life in the last snapshot. A new number means that its members were lost.
    life: Option<u64>,
    ttl: Duration,
}

#[async_trait]
impl Feed for GrpcFeed {
    async fn next(&mut self) -> Result<Vec<RegistryMessage>, RegistryError> {
        if self.connection.is_none() {
            self.connection = Some(self.connect().await?);
        }
        let heard = match &mut self.connection {
            Some(connection) => connection.message().await,
            None => Ok(None),
        };
        match heard {
            Ok(Some(event)) => Ok(self.read(event)),
            Ok(None) => Err(self.interrupted(ended())),
            Err(status) => Err(self.interrupted(error_from(WATCH, status))),
        }
    }

    fn ttl(&self) -> Duration {
        self.ttl
    }
}

impl GrpcFeed {
    async fn connect(&mut self) -> Result<Streaming<v1::WatchEvent>, RegistryError> {
        let answer = async {
            self.client.watch(v1::WatchRequest {}).await.map_err(|status| error_from(WATCH, status))
        };
        Ok(within(WATCH, answer).await?.into_inner())
    }

    fn interrupted(&mut self, error: RegistryError) -> RegistryError {
        self.connection = None;
        error
    }

    /// Converts an event of the router. Events that cannot be decoded come from a newer version and are
    /// ignored.
    fn read(&mut self, event: v1::WatchEvent) -> Vec<RegistryMessage> {
        match event.event {
            Some(Event::Snapshot(snapshot)) => vec![self.read_snapshot(snapshot)],
            Some(Event::Joined(node)) => read_node(node).map(RegistryMessage::Is).into_iter().collect(),
            Some(Event::Left(left)) => vec![RegistryMessage::Gone(NodeId::new(left.id))],
            None => Vec::new(),
        }
    }

    fn read_snapshot(&mut self, snapshot: v1::Snapshot) -> RegistryMessage {
        let forgot = self.life.is_some_and(|life| life != snapshot.life);
        self.life = Some(snapshot.life);
        self.ttl = Duration::from_millis(snapshot.ttl_ms);
        let nodes = snapshot.nodes.into_iter().filter_map(read_node).collect();
        RegistryMessage::All(AllNodes { nodes, forgot })
    }
}

fn read_node(node: v1::NodeInfo) -> Option<NodeInfo> {
    let id = node.id.clone();
    let node = NodeInfo::try_from(node);
    node.inspect_err(|error| warn!(node = id, %error, "member ignored: its record cannot be read")).ok()
}

fn ended() -> RegistryError {
    RegistryError::Interrupted { reason: "the registry ended it".to_owned() }
}
