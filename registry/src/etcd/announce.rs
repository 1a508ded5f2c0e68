//! One node's lease and key in etcd.

use std::time::Duration;

use async_trait::async_trait;
use chassis::World;
use etcd_client::{
    Client, Compare, CompareOp, Error, KeyValue, LeaseKeepAliveStream, LeaseKeeper, PutOptions, Txn, TxnOp,
};
use prost::Message as _;
use proto::v1;
use tracing::debug;
use types::NodeInfo;

use super::connection::{connect, refused};
use super::keys::Keys;
use super::settings::EtcdSettings;
use crate::announcement::{LeaseTerms, Presence};
use crate::error::RegistryError;

/// Signs of life per lease: one may be lost, and another, without the lease lapsing. Each is two small requests.
const BEATS_PER_TTL: u32 = 4;
/// A key that changes under our hands this often is fought over.
const PUT_ATTEMPTS: usize = 4;

pub(crate) struct InEtcd {
    settings: EtcdSettings,
    keys: Keys,
    node: NodeInfo,
    world: World,
    /// `None` after anything went wrong: the next call connects anew.
    connection: Option<Client>,
    /// The lease that the node's key is, or was last, attached to.
    lease: Option<i64>,
    pulse: Option<Pulse>,
}

/// The stream over which a lease is kept alive.
struct Pulse {
    requests: LeaseKeeper,
    answers: LeaseKeepAliveStream,
}

impl InEtcd {
    pub(crate) fn new(settings: EtcdSettings, node: NodeInfo, world: World) -> Self {
        let keys = Keys::of(&settings.cluster);
        Self { settings, keys, node, world, connection: None, lease: None, pulse: None }
    }

    async fn client(&mut self) -> Result<Client, RegistryError> {
        if let Some(client) = &self.connection {
            return Ok(client.clone());
        }
        let client = connect(&self.settings).await?;
        self.connection = Some(client.clone());
        Ok(client)
    }
}

#[async_trait]
impl Presence for InEtcd {
    async fn announce(&mut self) -> Result<LeaseTerms, RegistryError> {
        // A call may be dropped at any await, so the connection counts as broken until the end says otherwise.
        let mut client = self.client().await?;
        self.connection = None;
        let terms = self.join(&mut client).await?;
        self.connection = Some(client);
        Ok(terms)
    }

    async fn keep_alive(&mut self) -> Result<(), RegistryError> {
        let lease = self.lease.ok_or(RegistryError::LeaseLost)?;
        let mut client = self.client().await?;
        self.connection = None;
        let pulse = match self.pulse.take() {
            Some(pulse) => pulse.beat().await?,
            None => Pulse::start(&mut client, lease).await?,
        };
        self.holds_its_key(&mut client, lease).await?;
        self.pulse = Some(pulse);
        self.connection = Some(client);
        Ok(())
    }

    /// Revoking a lease deletes the keys that are attached to it, so the key of a later life stays.
    async fn withdraw(&mut self) -> Result<(), RegistryError> {
        let Some(lease) = self.lease else { return Ok(()) };
        let mut client = self.client().await?;
        match client.lease_revoke(lease).await {
            Ok(_) => Ok(()),
            Err(Error::GRpcStatus(status)) if status.code() == tonic::Code::NotFound => Ok(()),
            Err(error) => Err(refused("revoke the lease", error)),
        }
    }
}

impl InEtcd {
    async fn join(&mut self, client: &mut Client) -> Result<LeaseTerms, RegistryError> {
        self.pulse = None;
        let granted = client.lease_grant(self.settings.ttl.as_secs() as i64, None).await;
        let granted = granted.map_err(|error| refused("grant a lease", error))?;
        let lease = granted.id();
        if let Err(error) = self.put(client, lease).await {
            // It holds nothing; without this it would lapse by itself.
            let _ = client.lease_revoke(lease).await;
            return Err(error);
        }
        let ttl = Duration::from_secs(granted.ttl().unsigned_abs());
        Ok(LeaseTerms { ttl, beat: ttl / BEATS_PER_TTL })
    }

    /// Writes the node's key under `lease`, unless a later life has written it.
    async fn put(&mut self, client: &mut Client, lease: i64) -> Result<(), RegistryError> {
        for _ in 0..PUT_ATTEMPTS {
            let seen = self.read(client).await?;
            self.refuse_later_life(seen.as_ref())?;
            // From here on the key may be ours, even if the answer is lost.
            self.lease = Some(lease);
            if self.put_over(client, lease, seen.map_or(0, |seen| seen.mod_revision())).await? {
                return Ok(());
            }
            debug!(node = %self.node.id, "another life was faster, reading again");
        }
        Err(RegistryError::Interrupted { reason: "the node's key is being fought over".to_owned() })
    }

    async fn read(&self, client: &mut Client) -> Result<Option<KeyValue>, RegistryError> {
        let answer = client.get(self.keys.node(&self.node.id), None).await;
        Ok(answer.map_err(|error| refused("read the node's key", error))?.take_kvs().pop())
    }

    fn refuse_later_life(&self, seen: Option<&KeyValue>) -> Result<(), RegistryError> {
        // What cannot be read is nobody's life.
        let seen = seen.and_then(|seen| v1::NodeInfo::decode(seen.value()).ok());
        match seen {
            Some(seen) if seen.epoch > self.node.epoch.0 => {
                Err(RegistryError::Superseded { id: self.node.id.clone(), epoch: self.node.epoch })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Writes only over what was seen (0: nothing). Also leaves the mark of this etcd's data if it has none.
    async fn put_over(&self, client: &mut Client, lease: i64, seen: i64) -> Result<bool, RegistryError> {
        let key = self.keys.node(&self.node.id);
        let value = v1::NodeInfo::from(&self.node).encode_to_vec();
        let put = TxnOp::put(key.clone(), value, Some(PutOptions::new().with_lease(lease)));
        let unchanged = Compare::mod_revision(key, CompareOp::Equal, seen);
        let transaction = Txn::new().when([unchanged]).and_then([TxnOp::txn(self.mark()), put]);
        let answer = client.txn(transaction).await.map_err(|error| refused("write the node's key", error))?;
        Ok(answer.succeeded())
    }

    fn mark(&self) -> Txn {
        let key = self.keys.life();
        let life = format!("{:016x}", self.world.draw());
        let absent = Compare::create_revision(key.clone(), CompareOp::Equal, 0);
        Txn::new().when([absent]).and_then([TxnOp::put(key, life, None)])
    }

    /// A lease can live while its key is gone: deleted by hand, or lost in a restored backup.
    async fn holds_its_key(&self, client: &mut Client, lease: i64) -> Result<(), RegistryError> {
        match self.read(client).await? {
            Some(seen) if seen.lease() == lease => Ok(()),
            Some(_) | None => Err(RegistryError::LeaseLost),
        }
    }
}

// === Pulse ===

impl Pulse {
    /// Opens the stream, with a first sign of life in it.
    async fn start(client: &mut Client, lease: i64) -> Result<Self, RegistryError> {
        match client.lease_keep_alive(lease).await {
            Ok((requests, answers)) => Ok(Self { requests, answers }),
            // The one thing that this variant says of a lease that was asked for.
            Err(Error::LeaseKeepAliveError(_)) => Err(RegistryError::LeaseLost),
            Err(error) => Err(refused("keep the lease alive", error)),
        }
    }

    async fn beat(mut self) -> Result<Self, RegistryError> {
        let broken = |error| refused("keep the lease alive", error);
        self.requests.keep_alive().await.map_err(broken)?;
        match self.answers.message().await.map_err(broken)? {
            Some(answer) if answer.ttl() > 0 => Ok(self),
            Some(_) => Err(RegistryError::LeaseLost),
            None => Err(RegistryError::Interrupted { reason: "etcd ended the keep-alive".to_owned() }),
        }
    }
}
