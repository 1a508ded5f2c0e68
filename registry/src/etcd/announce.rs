//! The lease and key of one node, or of one lock, in etcd.

use std::time::Duration;

use async_trait::async_trait;
use chassis::World;
use prost::Message as _;
use proto::v1;
use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::{Code, Streaming};
use tracing::debug;

use super::client::v3::compare::{CompareResult, CompareTarget, TargetUnion};
use super::client::v3::request_op::Request;
use super::client::v3::{
    Compare, KeyValue, LeaseGrantRequest, LeaseKeepAliveRequest, LeaseKeepAliveResponse, LeaseRevokeRequest,
    PutRequest, RangeRequest, RequestOp, TxnRequest,
};
use super::client::{EtcdClient, failed, token_expired};
use super::keys::Keys;
use super::settings::EtcdSettings;
use crate::announcement::{LeaseTerms, Presence};
use crate::error::RegistryError;
use crate::lock::Entry;

/// Renewals per lease time: the lease survives two lost ones. Each renewal is two small requests.
const RENEWALS_PER_TTL: u32 = 4;
/// How often an announcement tries to write the key while other processes change it at the same time.
const PUT_ATTEMPTS: usize = 4;

pub(crate) struct EtcdAnnouncement {
    settings: EtcdSettings,
    keys: Keys,
    entry: Entry,
    world: World,
    /// The connection; `None` after an error, and the next call reconnects.
    connection: Option<EtcdClient>,
    /// The id of the lease that the key is attached to, or was attached to last.
    lease: Option<i64>,
    renewal: Option<LeaseRenewal>,
}

/// The stream that renews a lease.
struct LeaseRenewal {
    lease: i64,
    requests: mpsc::Sender<LeaseKeepAliveRequest>,
    answers: Streaming<LeaseKeepAliveResponse>,
}

impl EtcdAnnouncement {
    pub(crate) fn new(settings: EtcdSettings, entry: Entry, world: World) -> Self {
        let keys = Keys::of(&settings.cluster);
        Self { settings, keys, entry, world, connection: None, lease: None, renewal: None }
    }

    async fn client(&mut self) -> Result<EtcdClient, RegistryError> {
        if let Some(client) = &self.connection {
            return Ok(client.clone());
        }
        let client = EtcdClient::connect(&self.settings).await?;
        self.connection = Some(client.clone());
        Ok(client)
    }
}

#[async_trait]
impl Presence for EtcdAnnouncement {
    async fn announce(&mut self) -> Result<LeaseTerms, RegistryError> {
        // A call may be dropped at any await, so the connection counts as broken until the call has ended.
        let client = self.client().await?;
        self.connection = None;
        let terms = self.join(&client).await?;
        self.connection = Some(client);
        Ok(terms)
    }

    async fn keep_alive(&mut self) -> Result<(), RegistryError> {
        match self.beat().await {
            // The error has dropped the connection, so the renewal is tried once more over a new one, which
            // authenticates again.
            Err(error) if token_expired(&error) => self.beat().await,
            done => done,
        }
    }

    /// Revokes the lease. etcd then deletes only the keys attached to it, so the key of a later life stays.
    async fn withdraw(&mut self) -> Result<(), RegistryError> {
        let Some(lease) = self.lease else { return Ok(()) };
        let client = self.client().await?;
        match client.lease().lease_revoke(LeaseRevokeRequest { id: lease }).await {
            Ok(_) => Ok(()),
            Err(status) if status.code() == Code::NotFound => Ok(()),
            Err(status) => Err(failed("revoke the lease", status)),
        }
    }
}

impl EtcdAnnouncement {
    async fn beat(&mut self) -> Result<(), RegistryError> {
        let lease = self.lease.ok_or(RegistryError::LeaseLost)?;
        let client = self.client().await?;
        self.connection = None;
        let renewal = match self.renewal.take() {
            Some(renewal) => renewal.beat().await?,
            None => LeaseRenewal::start(&client, lease).await?,
        };
        self.holds_its_key(&client, lease).await?;
        self.renewal = Some(renewal);
        self.connection = Some(client);
        Ok(())
    }

    async fn join(&mut self, client: &EtcdClient) -> Result<LeaseTerms, RegistryError> {
        self.renewal = None;
        let request = LeaseGrantRequest { ttl: self.settings.ttl.as_secs() as i64 };
        let granted = client.lease().lease_grant(request).await;
        let granted = granted.map_err(|status| failed("grant a lease", status))?.into_inner();
        if let Err(error) = self.put(client, granted.id).await {
            // The revocation is best effort: the lease holds no key and would expire by itself.
            let _ = client.lease().lease_revoke(LeaseRevokeRequest { id: granted.id }).await;
            return Err(error);
        }
        let ttl = Duration::from_secs(granted.ttl.unsigned_abs());
        Ok(LeaseTerms { ttl, beat: ttl / RENEWALS_PER_TTL })
    }

    /// Writes the key under `lease`, unless a later life of the node, or another holder of the lock, has written it.
    async fn put(&mut self, client: &EtcdClient, lease: i64) -> Result<(), RegistryError> {
        for _ in 0..PUT_ATTEMPTS {
            let seen = self.read(client).await?;
            self.may_replace(seen.as_ref())?;
            // The lease is stored before the write, because the key may be attached to it even if the answer
            // is lost.
            self.lease = Some(lease);
            if self.put_over(client, lease, seen.map_or(0, |seen| seen.mod_revision)).await? {
                return Ok(());
            }
            let key = self.key();
            debug!(key, "etcd key was changed concurrently, reading it again");
        }
        Err(RegistryError::Interrupted { reason: "other processes keep changing the key".to_owned() })
    }

    async fn read(&self, client: &EtcdClient) -> Result<Option<KeyValue>, RegistryError> {
        let key = self.key().into_bytes();
        let answer = client.kv().range(RangeRequest { key, ..RangeRequest::default() }).await;
        Ok(answer.map_err(|status| failed("read the key", status))?.into_inner().kvs.pop())
    }

    fn key(&self) -> String {
        match &self.entry {
            Entry::Node(node) => self.keys.node(&node.id),
            Entry::Lock(name) => self.keys.lock(*name),
        }
    }

    /// Returns an error if the key belongs to a later life of the node, or to another holder of the lock.
    fn may_replace(&self, seen: Option<&KeyValue>) -> Result<(), RegistryError> {
        let node = match &self.entry {
            Entry::Node(node) => node,
            Entry::Lock(_) if seen.is_some() => return Err(RegistryError::LockHeld),
            Entry::Lock(_) => return Ok(()),
        };
        // A value that cannot be decoded, or that has no valid signature of the cluster, belongs to no node
        // and may be replaced.
        let identity = self.world.identity();
        let seen = seen.filter(|seen| identity.check_entry(&seen.key, &seen.value).is_ok());
        let seen = seen.and_then(|seen| v1::NodeInfo::decode(&*seen.value).ok());
        match seen {
            Some(seen) if seen.epoch > node.epoch.0 => {
                Err(RegistryError::Superseded { id: node.id.clone(), epoch: node.epoch })
            }
            Some(_) | None => Ok(()),
        }
    }

    /// Writes the key if its revision is still `seen` (0: absent), and the mark of etcd's data if it is
    /// absent. Returns whether the key was written.
    async fn put_over(&self, client: &EtcdClient, lease: i64, seen: i64) -> Result<bool, RegistryError> {
        let key = self.key().into_bytes();
        let value = match &self.entry {
            Entry::Node(node) => v1::NodeInfo::from(&**node).encode_to_vec(),
            Entry::Lock(_) => Vec::new(),
        };
        let value = self.world.identity().sign_entry(&key, value);
        let unchanged = equal(key.clone(), CompareTarget::Mod, TargetUnion::ModRevision(seen));
        let put = Request::RequestPut(PutRequest { key, value, lease });
        let transaction = transaction(unchanged, [Request::RequestTxn(self.mark()), put]);
        let answer = client.kv().txn(transaction).await;
        Ok(answer.map_err(|status| failed("write the key", status))?.into_inner().succeeded)
    }

    fn mark(&self) -> TxnRequest {
        let key = self.keys.life().into_bytes();
        let value = format!("{:016x}", self.world.draw()).into_bytes();
        let absent = equal(key.clone(), CompareTarget::Create, TargetUnion::CreateRevision(0));
        transaction(absent, [Request::RequestPut(PutRequest { key, value, lease: 0 })])
    }

    /// Checks that the key is attached to the lease. An operator may have deleted it, or a restored backup
    /// may lack it.
    async fn holds_its_key(&self, client: &EtcdClient, lease: i64) -> Result<(), RegistryError> {
        match self.read(client).await? {
            Some(seen) if seen.lease == lease => Ok(()),
            Some(_) | None => Err(RegistryError::LeaseLost),
        }
    }
}

fn equal(key: Vec<u8>, target: CompareTarget, value: TargetUnion) -> Compare {
    Compare { result: CompareResult::Equal.into(), target: target.into(), key, target_union: Some(value) }
}

/// Makes a transaction that does all of `success` if `condition` holds, and nothing otherwise.
fn transaction(condition: Compare, success: impl IntoIterator<Item = Request>) -> TxnRequest {
    let success = success.into_iter().map(|request| RequestOp { request: Some(request) }).collect();
    TxnRequest { compare: vec![condition], success }
}

// === LeaseRenewal ===

impl LeaseRenewal {
    /// Opens the stream of renewals and sends the first one.
    async fn start(client: &EtcdClient, lease: i64) -> Result<Self, RegistryError> {
        let (requests, queued) = mpsc::channel(1);
        requests
            .try_send(LeaseKeepAliveRequest { id: lease })
            .expect("the queue is new and has room for one");
        let answers = client.lease().lease_keep_alive(ReceiverStream::new(queued)).await;
        let answers = answers.map_err(|status| failed("keep the lease alive", status))?.into_inner();
        Self { lease, requests, answers }.answered().await
    }

    async fn beat(self) -> Result<Self, RegistryError> {
        let request = LeaseKeepAliveRequest { id: self.lease };
        self.requests.send(request).await.map_err(|_closed| ended())?;
        self.answered().await
    }

    async fn answered(mut self) -> Result<Self, RegistryError> {
        let answer = self.answers.message().await;
        match answer.map_err(|status| failed("keep the lease alive", status))? {
            Some(answer) if answer.ttl > 0 => Ok(self),
            Some(_) => Err(RegistryError::LeaseLost),
            None => Err(ended()),
        }
    }
}

fn ended() -> RegistryError {
    RegistryError::Interrupted { reason: "etcd ended the keep-alive".to_owned() }
}
