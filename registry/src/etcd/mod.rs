//! The registry in etcd: one lease per node, one key per node, and a watch over them.
//!
//! | key | value | lives |
//! |---|---|---|
//! | `/baton/<cluster>/nodes/<id>` | `baton.v1.NodeInfo`, protobuf, signed | as long as its node's lease |
//! | `/baton/<cluster>/locks/<name>` | empty | as long as the lease of the process that has the lock |
//! | `/baton/<cluster>/life` | a random number | forever; the first node that finds it absent writes it |
//!
//! Other programs write `/baton/<cluster>/upstream/prefill/…` and `…/decode/…`: see [`EtcdValues`].
//!
//! The key `life` tells watchers whether an etcd without members has lost its data. Only this module uses
//! etcd's API. See `docs/decisions/0001-etcd-api-from-our-own-protos.md`.

mod announce;
pub mod client;
mod keys;
mod prefix_watch;
mod settings;
mod values;
mod watch;

use async_trait::async_trait;
use chassis::{Gate, World};
use futures::stream::BoxStream;
use types::NodeInfo;

pub use client::EtcdClient;
pub use settings::{EtcdSettings, TlsFiles};
pub use values::EtcdValues;

use crate::announcement::{self, Announcement};
use crate::error::RegistryError;
use crate::lock::{self, Entry, Lock, LockName};
use crate::open::RegistryParts;
use crate::url::RegistryUrl;
use crate::watch::{Feed, follow};
use crate::{MembershipEvent, Registry};

/// The registry in etcd. Every announcement and watch has its own connection, so that a stuck one blocks no other.
#[derive(Clone, Debug)]
pub struct EtcdRegistry {
    settings: EtcdSettings,
    world: World,
    gate: Gate,
}

impl EtcdRegistry {
    /// Makes a registry and reads the certificates, so that a missing file is reported at once. Nothing is
    /// sent yet.
    pub fn new(settings: EtcdSettings, parts: RegistryParts) -> Result<Self, RegistryError> {
        settings.check()?;
        Ok(Self { settings, world: parts.world, gate: parts.gate })
    }

    /// Opens the registry at `etcd://user:password@host:port,host:port/cluster?ca=…`; see
    /// [`EtcdSettings::from_url`].
    pub fn open(url: &RegistryUrl, parts: RegistryParts) -> Result<Self, RegistryError> {
        Self::new(EtcdSettings::from_url(url)?, parts)
    }

    pub(crate) fn feed(&self) -> impl Feed + use<> {
        watch::EtcdFeed::new(self.settings.clone(), self.world.identity().clone())
    }
}

#[async_trait]
impl Registry for EtcdRegistry {
    async fn announce(&self, node: NodeInfo) -> Result<Announcement, RegistryError> {
        let presence = announce::EtcdAnnouncement::new(
            self.settings.clone(),
            Entry::Node(Box::new(node.clone())),
            self.world.clone(),
        );
        announcement::keep(&node, presence, &self.gate, self.world.clone()).await
    }

    async fn watch(&self) -> Result<BoxStream<'static, MembershipEvent>, RegistryError> {
        Ok(follow(self.feed(), self.world.clone()))
    }

    async fn lock(&self, name: LockName) -> Result<Option<Lock>, RegistryError> {
        let presence =
            announce::EtcdAnnouncement::new(self.settings.clone(), Entry::Lock(name), self.world.clone());
        lock::take(name, presence, &self.gate, self.world.clone()).await
    }
}
