//! The values of all keys with a prefix, for lists that other programs keep in etcd.
//!
//! A key that is put with a lease is there as long as its lease. Nothing here is signed: whoever may write the keys
//! decides the list.

use std::collections::BTreeMap;

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::client::v3::event::EventType;
use super::client::v3::watch_request::RequestUnion;
use super::client::v3::{KeyValue, RangeRequest, WatchCreateRequest, WatchRequest, WatchResponse};
use super::client::{EtcdClient, failed, prefix_end};
use super::settings::EtcdSettings;
use crate::announcement::within;
use crate::error::RegistryError;

/// Follows the values of all keys with a prefix. Dropping it ends the watch.
#[derive(Debug)]
pub struct EtcdValues {
    settings: EtcdSettings,
    prefix: String,
    connection: Option<Connection>,
    values: BTreeMap<Vec<u8>, Vec<u8>>,
}

/// An open watch. etcd ends it when `_requests` is dropped.
#[derive(Debug)]
struct Connection {
    changes: Streaming<WatchResponse>,
    _requests: mpsc::Sender<WatchRequest>,
    _client: EtcdClient,
}

impl EtcdValues {
    /// Follows the keys below `/baton/<cluster>/<name>/`, where `<cluster>` is the one of the settings. Reads the
    /// certificates, so that a missing file is reported at once.
    pub fn new(settings: EtcdSettings, name: &str) -> Result<Self, RegistryError> {
        settings.check()?;
        let prefix = format!("/baton/{}/{name}/", settings.cluster);
        Ok(Self { settings, prefix, connection: None, values: BTreeMap::new() })
    }

    /// Returns all values in the order of their keys: at once the first time and after an error, then after each change.
    ///
    /// After an error the next call connects again and reads everything. The caller waits in between.
    pub async fn next(&mut self) -> Result<Vec<Vec<u8>>, RegistryError> {
        let Some(connection) = &mut self.connection else {
            let (values, connection) = within("read the keys in etcd", self.connect()).await?;
            (self.values, self.connection) = (values, Some(connection));
            return Ok(self.values.values().cloned().collect());
        };
        let heard = connection.changes.message().await;
        let heard = heard.map_err(|status| failed("watch the keys in etcd", status)).and_then(uncancelled);
        match heard {
            Ok(heard) => self.apply(heard),
            Err(error) => {
                self.connection = None;
                return Err(error);
            }
        }
        Ok(self.values.values().cloned().collect())
    }

    /// Reads all keys and watches from the next revision on. If etcd compacts its history in between, the watch ends with
    /// an error.
    async fn connect(&self) -> Result<(BTreeMap<Vec<u8>, Vec<u8>>, Connection), RegistryError> {
        let client = EtcdClient::connect(&self.settings).await?;
        let (key, range_end) = (self.prefix.as_bytes().to_vec(), prefix_end(&self.prefix));
        let everything =
            RangeRequest { key: key.clone(), range_end: range_end.clone(), ..RangeRequest::default() };
        let state = client.kv().range(everything).await;
        let state = state.map_err(|status| failed("read the keys in etcd", status))?.into_inner();
        let start_revision = state.header.as_ref().map_or(0, |header| header.revision) + 1;
        let create = WatchCreateRequest { key, range_end, start_revision };
        let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let (requests, queued) = mpsc::channel(1);
        requests.try_send(create).expect("the queue is new and has room for one");
        let changes = client.watch().watch(ReceiverStream::new(queued)).await;
        let changes = changes.map_err(|status| failed("watch the keys in etcd", status))?.into_inner();
        let values = state.kvs.into_iter().map(|entry| (entry.key.to_vec(), entry.value.to_vec())).collect();
        Ok((values, Connection { changes, _requests: requests, _client: client }))
    }

    fn apply(&mut self, heard: WatchResponse) {
        for event in heard.events {
            let kind = event.r#type();
            let Some(KeyValue { key, value, .. }) = event.kv else { continue };
            match kind {
                EventType::Put => drop(self.values.insert(key.to_vec(), value.to_vec())),
                EventType::Delete => drop(self.values.remove(&key[..])),
            }
        }
    }
}

fn uncancelled(heard: Option<WatchResponse>) -> Result<WatchResponse, RegistryError> {
    let interrupted = |reason: String| RegistryError::Interrupted { reason };
    match heard {
        None => Err(interrupted("etcd ended the watch".to_owned())),
        Some(heard) if heard.canceled => Err(interrupted(super::watch::cancel_reason(&heard))),
        Some(heard) => Ok(heard),
    }
}
