//! Lists of servers that Kubernetes keeps: the EndpointSlices of a Service, listed and then watched.
//!
//! Suggested reading order: the URL of a Service ([`url`]); its slices ([`slices`]); the calls to the API server
//! ([`api`]); the answer of a watch ([`events`]); and the list that follows from them (this file).
//!
//! One resource needs two calls, so they are made here, without the crate `kube` and its many dependencies.

mod api;
mod events;
mod slices;
mod url;

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use tokio::time::{Instant, timeout};
use tracing::warn;

use self::api::{ApiServer, whole};
use self::events::{WatchEvent, WatchLines};
use self::slices::{EndpointSlice, Slices};
pub use self::url::ServiceUrl;
use super::settings::MemberAddress;

/// The folder with the credentials of a pod's service account.
pub(super) const SERVICE_ACCOUNT: &str = "/var/run/secrets/kubernetes.io/serviceaccount";

/// The longest time of a call, for a watch until its answer begins.
const CALL_WITHIN: Duration = Duration::from_secs(10);
/// How long the API server keeps a watch open. It then ends it, after a bookmark.
const WATCH_FOR: Duration = Duration::from_secs(60);
/// How much later a watch that the API server has not ended is given up: its connection is dead.
const WATCH_GRACE: Duration = Duration::from_secs(5);
/// A watch that ends earlier, or a list that expires earlier, is a failure, so that calls do not follow each other
/// without a pause.
const WATCH_LEAST: Duration = Duration::from_secs(1);
/// The slices of one page of a list. A slice has at most 1,000 endpoints.
const PAGE_SLICES: usize = 32;

/// Follows the servers of a Service. Dropping it ends the watch.
#[derive(Debug)]
pub(super) struct ServiceWatch {
    api: ApiServer,
    service: ServiceUrl,
    namespace: String,
    slices: Slices,
    /// The version of the cluster up to which `slices` has all changes; `None`: they must be listed.
    version: Option<String>,
    /// When the slices were listed.
    listed: Instant,
    watch: Option<WatchLines>,
}

#[derive(Debug, Deserialize)]
struct SliceList {
    metadata: ListMeta,
    items: Vec<EndpointSlice>,
}

#[derive(Debug, Deserialize)]
#[serde(rename_all = "camelCase")]
struct ListMeta {
    resource_version: String,
    /// Names the next page; empty after the last one.
    #[serde(default)]
    r#continue: String,
}

impl ServiceWatch {
    /// Reads the credentials in `folder`, so that a missing file is reported at once.
    pub(super) fn new(service: ServiceUrl, folder: &Path) -> Result<Self, String> {
        let variable = |name: &str| std::env::var(name).ok().filter(|value| !value.is_empty());
        let api = ApiServer::new(folder, variable)?;
        let namespace = match &service.namespace {
            Some(named) => named.clone(),
            None => api.own_namespace()?,
        };
        let (slices, listed) = (Slices::default(), Instant::now());
        Ok(Self { api, service, namespace, slices, version: None, listed, watch: None })
    }

    /// Returns all servers: at once the first time and after an error, then after each change.
    ///
    /// After an error the next call lists everything again. The caller waits in between.
    pub(super) async fn next(&mut self) -> Result<Vec<MemberAddress>, String> {
        if let Err(reason) = self.advance().await {
            (self.version, self.watch) = (None, None);
            return Err(reason);
        }
        Ok(self.slices.addresses(self.service.bootstrap_port))
    }

    /// Returns after the list, or after the next change.
    async fn advance(&mut self) -> Result<(), String> {
        loop {
            let Some(watch) = &mut self.watch else {
                let is_listed = self.version.is_some();
                if !is_listed {
                    self.version = Some(self.list().await?);
                }
                self.open_watch().await?;
                if !is_listed {
                    return Ok(());
                }
                continue;
            };
            let opened = watch.opened();
            match watch.next().await? {
                Some(WatchEvent::Put(slice)) => {
                    self.version = Some(slice.metadata.resource_version.clone());
                    return self.slices.put(slice, &self.service.port);
                }
                Some(WatchEvent::Removed(metadata)) => {
                    self.slices.remove(&metadata.name);
                    self.version = Some(metadata.resource_version);
                    return Ok(());
                }
                Some(WatchEvent::Bookmark(metadata)) => self.version = Some(metadata.resource_version),
                Some(WatchEvent::Gone) => self.end_watch(self.listed, None)?,
                None => self.end_watch(opened, self.version.clone())?,
            }
        }
    }

    /// Ends the watch. The next one begins at `version`; `None`: the slices are listed first.
    fn end_watch(&mut self, began: Instant, version: Option<String>) -> Result<(), String> {
        if began.elapsed() < WATCH_LEAST {
            return Err("the API server ended the watch too soon".to_owned());
        }
        (self.version, self.watch) = (version, None);
        Ok(())
    }

    /// Reads all slices. Returns their version.
    async fn list(&mut self) -> Result<String, String> {
        let (mut found, mut next) = (Slices::default(), String::new());
        loop {
            let mut target = format!("{}&limit={PAGE_SLICES}", self.target());
            if !next.is_empty() {
                target = format!("{target}&continue={}", url::query_value(&next));
            }
            let page = timeout(CALL_WITHIN, async { whole(self.api.get(&target).await?).await });
            let body = page.await.map_err(|_| no_answer())??;
            let page: SliceList = serde_json::from_slice(&body)
                .map_err(|error| format!("the list of EndpointSlices cannot be read: {error}"))?;
            page.items.into_iter().try_for_each(|slice| found.put(slice, &self.service.port))?;
            next = page.metadata.r#continue;
            if next.is_empty() {
                (self.slices, self.listed) = (found, Instant::now());
                if self.slices.is_empty() {
                    let ServiceUrl { service, .. } = &self.service;
                    warn!(
                        service,
                        namespace = self.namespace,
                        "no EndpointSlices found: does the Service exist?"
                    );
                }
                return Ok(page.metadata.resource_version);
            }
        }
    }

    async fn open_watch(&mut self) -> Result<(), String> {
        let version = self.version.as_deref().unwrap_or_default();
        let (target, seconds) = (self.target(), WATCH_FOR.as_secs());
        let target = format!(
            "{target}&watch=true&allowWatchBookmarks=true&timeoutSeconds={seconds}&resourceVersion={version}"
        );
        let opening = timeout(CALL_WITHIN, self.api.get(&target));
        let body = opening.await.map_err(|_| no_answer())??;
        self.watch = Some(WatchLines::new(body, WATCH_FOR + WATCH_GRACE));
        Ok(())
    }

    /// The path of the Service's slices, with the query that selects them.
    fn target(&self) -> String {
        let Self { namespace, service: ServiceUrl { service, .. }, .. } = self;
        format!(
            "/apis/discovery.k8s.io/v1/namespaces/{namespace}/endpointslices?labelSelector=kubernetes.io%2Fservice-name%3D{service}"
        )
    }
}

fn no_answer() -> String {
    format!("the API server gave no answer within {CALL_WITHIN:?}")
}
