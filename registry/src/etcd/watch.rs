//! The watch of the members in etcd: the state at one revision, then each change.

use std::time::Duration;

use async_trait::async_trait;
use chassis::Identity;
use prost::Message as _;
use proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;
use tracing::warn;
use types::{NodeId, NodeInfo};

use super::client::v3::event::EventType;
use super::client::v3::watch_request::RequestUnion;
use super::client::v3::{
    KeyValue, RangeRequest, RangeResponse, WatchCreateRequest, WatchRequest, WatchResponse,
};
use super::client::{EtcdClient, failed, prefix_end};
use super::keys::{Key, Keys};
use super::settings::EtcdSettings;
use crate::announcement::within;
use crate::error::RegistryError;
use crate::watch::{AllNodes, Feed, RegistryMessage};

pub(crate) struct EtcdFeed {
    settings: EtcdSettings,
    keys: Keys,
    identity: Identity,
    connection: Option<Connection>,
    heard: Option<EtcdState>,
}

/// An open watch. etcd ends it when `_requests` is dropped. The connection closes with the last client.
struct Connection {
    changes: Streaming<WatchResponse>,
    _requests: mpsc::Sender<WatchRequest>,
    _client: EtcdClient,
}

/// What etcd last reported about its data, to detect an etcd that has lost them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EtcdState {
    revision: i64,
    /// The value of the key `life`, if the key existed.
    life: Option<Vec<u8>>,
}

impl EtcdFeed {
    pub(crate) fn new(settings: EtcdSettings, identity: Identity) -> Self {
        let keys = Keys::of(&settings.cluster);
        Self { settings, keys, identity, connection: None, heard: None }
    }
}

#[async_trait]
impl Feed for EtcdFeed {
    async fn next(&mut self) -> Result<Vec<RegistryMessage>, RegistryError> {
        let Some(connection) = &mut self.connection else {
            return Ok(vec![within("watch etcd", self.connect()).await?]);
        };
        let heard = connection.changes.message().await;
        let news = heard.map_err(|status| failed("watch etcd", status)).and_then(|heard| self.read(heard));
        if news.is_err() {
            self.connection = None;
        }
        news
    }

    fn ttl(&self) -> Duration {
        self.settings.ttl
    }
}

impl EtcdFeed {
    /// Reads all keys and watches from the next revision on. If etcd compacts its history in between, the watch ends
    /// with an error, and the feed connects again.
    async fn connect(&mut self) -> Result<RegistryMessage, RegistryError> {
        let client = EtcdClient::connect(&self.settings).await?;
        let prefix = self.keys.prefix();
        let (key, range_end) = (prefix.as_bytes().to_vec(), prefix_end(prefix));
        let everything =
            RangeRequest { key: key.clone(), range_end: range_end.clone(), ..RangeRequest::default() };
        let state = client.kv().range(everything).await;
        let state = state.map_err(|status| failed("read the members", status))?.into_inner();
        let revision = state.header.map_or(0, |header| header.revision);
        let create = WatchCreateRequest { key, range_end, start_revision: revision + 1 };
        self.connection = Some(open(client, create).await?);
        Ok(self.read_state(&state, revision))
    }

    fn read_state(&mut self, state: &RangeResponse, revision: i64) -> RegistryMessage {
        let (mut nodes, mut life) = (Vec::new(), None);
        for entry in &state.kvs {
            match self.keys.read(&entry.key) {
                Key::Life => life = Some(entry.value.to_vec()),
                Key::Node(id) => nodes.extend(self.read_node(&id, entry)),
                Key::Other => {}
            }
        }
        let now = EtcdState { revision, life };
        let forgot = self.heard.as_ref().is_some_and(|before| now.forgot(before));
        self.heard = Some(now);
        RegistryMessage::All(AllNodes { nodes, forgot })
    }

    fn read(&mut self, heard: Option<WatchResponse>) -> Result<Vec<RegistryMessage>, RegistryError> {
        let heard = heard.ok_or_else(|| interrupted("etcd ended it"))?;
        if heard.canceled {
            return Err(interrupted(&cancel_reason(&heard)));
        }
        if let (Some(before), Some(header)) = (&mut self.heard, &heard.header) {
            before.revision = before.revision.max(header.revision);
        }
        let mut news = Vec::new();
        for event in &heard.events {
            if let Some(entry) = &event.kv {
                news.extend(self.read_event(event.r#type(), entry));
            }
        }
        Ok(news)
    }

    fn read_event(&mut self, event: EventType, entry: &KeyValue) -> Option<RegistryMessage> {
        match (self.keys.read(&entry.key), event) {
            (Key::Node(id), EventType::Put) => self.read_node(&id, entry).map(RegistryMessage::Is),
            (Key::Node(id), EventType::Delete) => Some(RegistryMessage::Gone(id)),
            (Key::Life, _) => {
                if let Some(heard) = &mut self.heard {
                    heard.life = (event == EventType::Put).then(|| entry.value.to_vec());
                }
                None
            }
            (Key::Other, _) => None,
        }
    }

    /// Reads a member's entry. An entry without the cluster's signature is ignored.
    fn read_node(&self, id: &NodeId, entry: &KeyValue) -> Option<NodeInfo> {
        if let Err(refused) = self.identity.check_entry(&entry.key, &entry.value) {
            warn!(key = %id, error = %refused, "member ignored: its record is refused");
            return None;
        }
        read_node(id, entry)
    }
}

impl EtcdState {
    /// Returns whether etcd has lost its data since `before`. Otherwise the revision only grows and the mark
    /// does not change. (A restored backup has the same mark and an older revision.)
    fn forgot(&self, before: &Self) -> bool {
        self.revision < before.revision || self.life != before.life
    }
}

/// Opens a watch of etcd's keys and waits for its confirmation, a message without events.
async fn open(client: EtcdClient, create: WatchCreateRequest) -> Result<Connection, RegistryError> {
    let refused = |status| failed("watch the members", status);
    let (requests, queued) = mpsc::channel(1);
    let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
    requests.try_send(create).expect("the queue is new and has room for one");
    let changes = client.watch().watch(ReceiverStream::new(queued)).await;
    let changes = changes.map_err(refused)?.into_inner();
    Ok(Connection { changes, _requests: requests, _client: client })
}

/// Decodes a member's entry. An entry that cannot be decoded, written by a newer version or by hand, is
/// ignored.
fn read_node(id: &NodeId, entry: &KeyValue) -> Option<NodeInfo> {
    let node = v1::NodeInfo::decode(&*entry.value).map_err(|error| error.to_string());
    let node = node.and_then(|node| NodeInfo::try_from(node).map_err(|error| error.to_string()));
    match node {
        Ok(node) if node.id == *id => return Some(node),
        Ok(node) => warn!(key = %id, node = %node.id, "member ignored: its key names another node"),
        Err(error) => warn!(key = %id, error, "member ignored: its record cannot be read"),
    }
    None
}

pub(super) fn cancel_reason(heard: &WatchResponse) -> String {
    match heard.compact_revision {
        0 => format!("etcd cancelled it: {}", heard.cancel_reason),
        revision => format!("etcd has compacted its history up to revision {revision}"),
    }
}

fn interrupted(reason: &str) -> RegistryError {
    RegistryError::Interrupted { reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn data_is_the_same_or_lost() {
        let heard = |revision, life: Option<&str>| EtcdState {
            revision,
            life: life.map(|life| life.as_bytes().to_vec()),
        };
        let before = heard(7, Some("x"));
        for (now, forgot, why) in [
            (heard(7, Some("x")), false, "nothing happened"),
            (heard(9, Some("x")), false, "something happened"),
            (heard(1, None), true, "empty"),
            (heard(3, Some("y")), true, "empty, and a node has come back"),
            (heard(9, Some("y")), true, "empty, and much has happened since"),
            (heard(9, None), true, "the mark is gone"),
            (heard(5, Some("x")), true, "a backup was restored"),
        ] {
            assert_eq!(now.forgot(&before), forgot, "{why}");
        }
    }
}
