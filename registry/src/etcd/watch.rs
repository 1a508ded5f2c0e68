//! The watch of the members in etcd: the state at one revision, then each change.

use std::time::Duration;

use async_trait::async_trait;
use chassis::Identity;
use chassis::telemetry::RareLines;
use prost::Message as _;
use proto::v1;
use tracing::warn;
use types::{NodeId, NodeInfo};

use super::client::v3::event::EventType;
use super::client::v3::{KeyValue, RangeResponse, WatchResponse};
use super::keys::{Key, Keys};
use super::prefix_watch::{self, Operations, PrefixWatch};
use super::settings::EtcdSettings;
use crate::announcement::within;
use crate::error::RegistryError;
use crate::watch::{AllNodes, Feed, RegistryMessage};

const OPERATIONS: Operations =
    Operations { read: "read the members", open: "watch the members", follow: "watch etcd" };

/// The log lines about ignored members. A process that can write to etcd could cause a line with every write.
static IGNORED: RareLines = RareLines::new();

pub(crate) struct EtcdFeed {
    settings: EtcdSettings,
    keys: Keys,
    identity: Identity,
    watch: Option<PrefixWatch>,
    heard: Option<EtcdState>,
}

/// The last report of etcd about its data, to detect an etcd that has lost them.
#[derive(Clone, Debug, PartialEq, Eq)]
struct EtcdState {
    revision: i64,
    /// The value of the key `life`, if the key existed.
    life: Option<Vec<u8>>,
}

impl EtcdFeed {
    pub(crate) fn new(settings: EtcdSettings, identity: Identity) -> Self {
        let keys = Keys::of(&settings.cluster);
        Self { settings, keys, identity, watch: None, heard: None }
    }
}

#[async_trait]
impl Feed for EtcdFeed {
    async fn next(&mut self) -> Result<Vec<RegistryMessage>, RegistryError> {
        let Some(watch) = &mut self.watch else {
            return Ok(vec![within(OPERATIONS.follow, self.connect()).await?]);
        };
        match watch.next(OPERATIONS).await {
            Ok(heard) => Ok(self.read(&heard)),
            Err(error) => {
                self.watch = None;
                Err(error)
            }
        }
    }

    fn ttl(&self) -> Duration {
        self.settings.ttl
    }
}

impl EtcdFeed {
    /// Reads all members and watches them from then on.
    async fn connect(&mut self) -> Result<RegistryMessage, RegistryError> {
        let (state, watch) = PrefixWatch::open(&self.settings, self.keys.prefix(), OPERATIONS).await?;
        self.watch = Some(watch);
        Ok(self.read_state(&state))
    }

    fn read_state(&mut self, state: &RangeResponse) -> RegistryMessage {
        let (mut nodes, mut life) = (Vec::new(), None);
        for entry in &state.kvs {
            match self.keys.read(&entry.key) {
                Key::Life => life = Some(entry.value.to_vec()),
                Key::Node(id) => nodes.extend(self.read_node(&id, entry)),
                Key::Other => {}
            }
        }
        let now = EtcdState { revision: prefix_watch::revision(state), life };
        let forgot = self.heard.as_ref().is_some_and(|before| now.forgot(before));
        self.heard = Some(now);
        RegistryMessage::All(AllNodes { nodes, forgot })
    }

    fn read(&mut self, heard: &WatchResponse) -> Vec<RegistryMessage> {
        if let (Some(before), Some(header)) = (&mut self.heard, &heard.header) {
            before.revision = before.revision.max(header.revision);
        }
        let mut news = Vec::new();
        for event in &heard.events {
            if let Some(entry) = &event.kv {
                news.extend(self.read_event(event.r#type(), entry));
            }
        }
        news
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

    /// Reads a member's entry. Ignores an entry that lacks the cluster's signature or that cannot be decoded.
    fn read_node(&self, id: &NodeId, entry: &KeyValue) -> Option<NodeInfo> {
        let checked = self.identity.check_entry(&entry.key, &entry.value).map_err(|error| error.to_string());
        let node = checked.and_then(|()| decode_node(id, &entry.value));
        node.inspect_err(|error| {
            if let Some(left_out) = IGNORED.line(&format!("{id}: {error}")) {
                warn!(key = %id, error, left_out, "member ignored: its record is refused");
            }
        })
        .ok()
    }
}

impl EtcdState {
    /// Returns whether etcd has lost its data since `before`. Otherwise the revision only grows and the mark
    /// does not change. (A restored backup has the same mark and an older revision.)
    fn forgot(&self, before: &Self) -> bool {
        self.revision < before.revision || self.life != before.life
    }
}

/// Decodes a member's record. A newer version or an operator may have written another format.
fn decode_node(id: &NodeId, record: &[u8]) -> Result<NodeInfo, String> {
    let node = v1::NodeInfo::decode(record).map_err(|error| error.to_string())?;
    let node = NodeInfo::try_from(node).map_err(|error| error.to_string())?;
    match node.id == *id {
        true => Ok(node),
        false => Err(format!("it is the record of {}", node.id)),
    }
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
