//! All keys with a prefix at one revision, and the changes since.

use tokio::sync::mpsc;
use tokio::time::timeout;
use tokio_stream::wrappers::ReceiverStream;
use tonic::Streaming;

use super::client::v3::watch_request::RequestUnion;
use super::client::v3::{
    RangeRequest, RangeResponse, WatchCreateRequest, WatchProgressRequest, WatchRequest, WatchResponse,
};
use super::client::{EtcdClient, PING_INTERVAL, failed, prefix_end};
use super::settings::EtcdSettings;
use crate::error::RegistryError;

/// An open watch. etcd ends it when `requests` is dropped. The connection closes with the last client.
#[derive(Debug)]
pub(super) struct PrefixWatch {
    changes: Streaming<WatchResponse>,
    requests: mpsc::Sender<WatchRequest>,
    _client: EtcdClient,
}

/// The operations that errors name.
#[derive(Clone, Copy, Debug)]
pub(super) struct Operations {
    pub(super) read: &'static str,
    pub(super) open: &'static str,
    pub(super) follow: &'static str,
}

impl PrefixWatch {
    /// Reads all keys and watches from their revision on, so the changes may begin with the last ones that were read.
    /// (etcd reports no progress of a watch that begins in the future.) If etcd compacts its history in between, the
    /// watch ends with an error, and the caller opens another.
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
        let create = WatchCreateRequest { key, range_end, start_revision: revision(&state) };
        let create = WatchRequest { request_union: Some(RequestUnion::CreateRequest(create)) };
        let (requests, queued) = mpsc::channel(1);
        requests.try_send(create).expect("the queue is new and has room for one");
        let changes = client.watch().watch(ReceiverStream::new(queued)).await;
        let changes = changes.map_err(|status| failed(operations.open, status))?.into_inner();
        Ok((state, Self { changes, requests, _client: client }))
    }

    /// Returns the next changes. After an error the watch is over. Cancel-safe.
    ///
    /// While nothing changes, etcd is asked for the progress of the watch. It closes connections with pings and no data:
    /// pings count as too many if they come faster than its `--grpc-keepalive-min-time`.
    pub(super) async fn next(&mut self, operations: Operations) -> Result<WatchResponse, RegistryError> {
        loop {
            let Ok(heard) = timeout(PING_INTERVAL, self.changes.message()).await else {
                let request_union = Some(RequestUnion::ProgressRequest(WatchProgressRequest {}));
                // If etcd has not read the last question, pings find out whether it is there.
                let _ = self.requests.try_send(WatchRequest { request_union });
                continue;
            };
            match heard.map_err(|status| failed(operations.follow, status))? {
                None => return Err(interrupted("etcd ended it".to_owned())),
                Some(heard) if heard.canceled => return Err(interrupted(cancel_reason(&heard))),
                Some(heard) if heard.events.is_empty() => {}
                Some(heard) => return Ok(heard),
            }
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
