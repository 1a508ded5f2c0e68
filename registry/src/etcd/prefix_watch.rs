//! All keys with a prefix at one revision, and the changes since.

use tokio::sync::mpsc;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::client::v3::watch_request::RequestUnion;
use super::client::v3::{RangeRequest, RangeResponse, WatchCreateRequest, WatchRequest, WatchResponse};
use super::client::{EtcdClient, failed, prefix_end};
use super::settings::EtcdSettings;
use crate::error::RegistryError;

/// An open watch. etcd ends it when `_requests` is dropped. The connection closes with the last client.
#[derive(Debug)]
pub(super) struct PrefixWatch {
    changes: Streaming<WatchResponse>,
    _requests: mpsc::Sender<WatchRequest>,
    _client: EtcdClient,
}

/// What errors say that the process was doing.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operations {
    pub(super) read: &'static str,
    pub(super) open: &'static str,
    pub(super) follow: &'static str,
}

impl PrefixWatch {
    /// Reads all keys and watches from the next revision on. If etcd compacts its history in between, the watch ends
    /// with an error, and the caller opens another.
    pub(super) async fn open(
        settings: &EtcdSettings,
        prefix: &str,
        operations: Operations,
    ) -> Result<(RangeResponse, Self), RegistryError> {
        let client = EtcdClient::connect(settings).await?;
        let (key, range_end) = (prefix.as_bytes().to_vec(), prefix_end(prefix));
        let everything =
            RangeRequest { key: key.clone(), range_end: range_end.clone(), ..RangeRequest::default() };
        let state = client.kv().range(everything).await;
        let state = state.map_err(|status| failed(operations.read, status))?.into_inner();
        let start_revision = revision(&state) + 1;
        let create = WatchCreateRequest { key, range_end, start_revision };
        let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let (requests, queued) = mpsc::channel(1);
        requests.try_send(create).expect("the queue is new and has room for one");
        let changes = client.watch().watch(ReceiverStream::new(queued)).await;
        let changes = changes.map_err(|status| failed(operations.open, status))?.into_inner();
        Ok((state, Self { changes, _requests: requests, _client: client }))
    }

    /// Returns the next changes. After an error the watch is over.
    pub(super) async fn next(&mut self, operations: Operations) -> Result<WatchResponse, RegistryError> {
        let heard = self.changes.message().await.map_err(|status| failed(operations.follow, status))?;
        match heard {
            None => Err(interrupted("etcd ended it".to_owned())),
            Some(heard) if heard.canceled => Err(interrupted(cancel_reason(&heard))),
            Some(heard) => Ok(heard),
        }
    }
}

/// Returns etcd's revision at which the keys were read.
pub(super) fn revision(state: &RangeResponse) -> i64 {
    state.header.as_ref().map_or(0, |header| header.revision)
}

fn cancel_reason(heard: &WatchResponse) -> String {
    match heard.compact_revision {
        0 => format!("etcd cancelled it: {}", heard.cancel_reason),
        revision => format!("etcd has compacted its history up to revision {revision}"),
    }
}

fn interrupted(reason: String) -> RegistryError {
    RegistryError::Interrupted { reason }
}
