//! Downloads a model: resolves a revision, downloads the needed files, and links them into a snapshot.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use futures::stream::{self, StreamExt as _, TryStreamExt as _};
use http::header::{CONTENT_LENGTH, ETAG};
use http::{HeaderMap, StatusCode};
use serde::Deserialize;
use tracing::{info, warn};

use crate::cache::ModelCache;
use crate::client::Client;
use crate::download::{Content, download};
use crate::error::HubError;
use crate::id::{ModelId, is_commit};
use crate::needed;
use crate::progress::Progress;
use crate::settings::HubSettings;

/// The number of files that are downloaded in parallel.
const FILES_AT_ONCE: usize = 4;

/// A hub, with the cache of its downloads.
#[derive(Debug)]
pub struct Hub {
    settings: HubSettings,
    client: Client,
    judge: ConfigJudge,
}

/// Checks whether the model of a `config.json`, given by path and content, can be served. The error is the
/// reason why not.
pub type ConfigJudge = fn(&Path, &[u8]) -> Result<(), Box<dyn std::error::Error + Send + Sync>>;

/// The hub's description of a revision, as its API returns it.
#[derive(Debug, Deserialize)]
struct Revision {
    /// The current commit of the revision.
    sha: String,
    siblings: Vec<HubFile>,
}

#[derive(Debug, Deserialize)]
struct HubFile {
    rfilename: String,
}

impl Hub {
    /// Makes a hub that accepts any model.
    pub fn new(settings: HubSettings) -> Result<Self, HubError> {
        Ok(Self { client: Client::new(&settings)?, settings, judge: |_, _| Ok(()) })
    }

    /// Makes the hub download only models whose `config.json` passes `judge`; that file is downloaded first.
    #[must_use]
    pub fn judged_by(self, judge: ConfigJudge) -> Self {
        Self { judge, ..self }
    }

    /// Downloads the missing files of a model: `config.json`, tokenizer, chat template, safetensors. Returns
    /// their folder.
    ///
    /// If a commit is complete in the cache, no request is sent to the hub. A branch or tag is resolved at
    /// the hub. If the hub cannot be reached, the last known commit is used, with a warning. If the call is
    /// cancelled, the next call continues the download.
    pub async fn fetch(&self, id: &ModelId) -> Result<PathBuf, HubError> {
        let cache = ModelCache::new(&self.settings.cache, id);
        let cached = cache.complete(id.revision());
        match cached {
            Some(snapshot) if self.settings.offline || is_commit(id.revision()) => return Ok(snapshot),
            None if self.settings.offline => {
                return Err(HubError::Offline { id: id.to_string(), cache: self.settings.cache.clone() });
            }
            _ => {}
        }
        match (self.update(id, &cache).await, cached) {
            (Err(error), Some(snapshot))
                if error.may_pass() || matches!(error, HubError::Untrusted { .. }) =>
            {
                warn!(model = %id, %error, "model hub cannot be reached, using the cached model");
                Ok(snapshot)
            }
            (updated, _) => updated,
        }
    }

    async fn update(&self, id: &ModelId, cache: &ModelCache) -> Result<PathBuf, HubError> {
        let revision = self.revision(id).await?;
        let there: BTreeSet<String> =
            revision.siblings.into_iter().map(|sibling| sibling.rfilename).collect();
        let job = Download { hub: self, id, cache, commit: &revision.sha, progress: Progress::new() };
        let snapshot = cache.snapshot(&revision.sha);
        needed::check_names(&id.to_string(), &there)?;
        job.files(std::iter::once(needed::CONFIG)).await?;
        self.judge_config(id, &snapshot.join(needed::CONFIG))?;
        job.files(needed::small(&there)).await?;
        let weights = needed::weights(&snapshot, &there);
        let weights = weights.ok_or_else(|| HubError::NoWeights { id: id.to_string() })?;
        job.files(weights.iter().map(String::as_str)).await?;
        cache.refer(id.revision(), &revision.sha)?;
        info!(model = %id, commit = revision.sha, folder = %snapshot.display(), "model files are ready");
        Ok(snapshot)
    }

    /// Checks the `config.json` in `file` with the hub's judge.
    fn judge_config(&self, id: &ModelId, file: &Path) -> Result<(), HubError> {
        let config = std::fs::read(file).map_err(HubError::io(file))?;
        (self.judge)(file, &config).map_err(|source| HubError::Refused { id: id.to_string(), source })
    }

    async fn revision(&self, id: &ModelId) -> Result<Revision, HubError> {
        let path = format!("/api/models/{}/revision/{}", id.repository(), encoded(id.revision()));
        let url = self.client.url(&path)?;
        let (status, headers, body) = self.client.text(&url).await?;
        if status != StatusCode::OK {
            return Err(self.refusal(id, &url, status, &headers));
        }
        let answer = |reason: String| HubError::Answer { url: url.to_string(), reason };
        let revision: Revision = serde_json::from_slice(&body).map_err(|error| answer(error.to_string()))?;
        if is_commit(&revision.sha) { Ok(revision) } else { Err(answer("it names no commit".to_owned())) }
    }

    /// Makes the error for a response by its status and the hub's error code.
    fn refusal(&self, id: &ModelId, url: &http::Uri, status: StatusCode, headers: &HeaderMap) -> HubError {
        let said = |name: &str| text_of(headers, name).unwrap_or_default();
        let (model, endpoint) = (id.repository(), self.settings.endpoint.clone());
        match (status, said("x-error-code").as_str()) {
            (_, "GatedRepo") | (StatusCode::FORBIDDEN, _) => HubError::Gated { id: model, endpoint },
            (_, "RevisionNotFound") => {
                HubError::UnknownRevision { id: model, revision: id.revision().to_owned() }
            }
            (StatusCode::UNAUTHORIZED, _) => HubError::Unauthorized { id: model, endpoint },
            (StatusCode::NOT_FOUND, _) => HubError::UnknownModel { id: model, endpoint },
            _ => HubError::Status { url: url.to_string(), status, message: said("x-error-message") },
        }
    }
}

/// The download of one commit's files.
struct Download<'a> {
    hub: &'a Hub,
    id: &'a ModelId,
    cache: &'a ModelCache,
    commit: &'a str,
    progress: Progress,
}

impl Download<'_> {
    async fn files<'n>(&self, names: impl Iterator<Item = &'n str>) -> Result<(), HubError> {
        let snapshot = self.cache.snapshot(self.commit);
        let missing: Vec<&str> = names.filter(|name| !is_there(&snapshot, name)).collect();
        let files = stream::iter(missing.into_iter().map(|name| self.file(name)));
        files.buffer_unordered(FILES_AT_ONCE).try_collect().await
    }

    async fn file(&self, name: &str) -> Result<(), HubError> {
        let content = self.content(name).await?;
        download(&self.hub.client, self.cache, &content, &self.progress).await?;
        self.cache.link(self.commit, name, &content.etag)
    }

    /// Requests the etag and length of a file from the hub.
    async fn content(&self, name: &str) -> Result<Content, HubError> {
        let name_in_path = name.split('/').map(encoded).collect::<Vec<_>>().join("/");
        let path = format!("/{}/resolve/{}/{name_in_path}", self.id.repository(), self.commit);
        let url = self.hub.client.url(&path)?;
        let (status, headers) = self.hub.client.head(&url).await?;
        if !(status.is_success() || status.is_redirection()) {
            return Err(self.hub.refusal(self.id, &url, status, &headers));
        }
        let answer = |reason: &str| HubError::Answer { url: url.to_string(), reason: reason.to_owned() };
        let etag = text_of(&headers, "x-linked-etag").or_else(|| text_of(&headers, ETAG.as_str()));
        let etag = etag.as_deref().and_then(plain_etag).ok_or_else(|| answer("it has no etag"))?;
        let size = text_of(&headers, "x-linked-size").or_else(|| text_of(&headers, CONTENT_LENGTH.as_str()));
        let n_bytes = size.and_then(|size| size.parse().ok()).ok_or_else(|| answer("it has no length"))?;
        Ok(Content { name: name.to_owned(), url, etag, n_bytes })
    }
}

fn is_there(snapshot: &Path, name: &str) -> bool {
    snapshot.join(name).exists()
}

fn text_of(headers: &HeaderMap, name: &str) -> Option<String> {
    headers.get(name)?.to_str().ok().map(str::to_owned)
}

/// Returns an etag without its quotes; `None` if it cannot be a file name.
fn plain_etag(etag: &str) -> Option<String> {
    let etag = etag.trim_start_matches("W/").trim_matches('"');
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_".contains(&byte);
    ((1..=128).contains(&etag.len()) && etag.bytes().all(plain)).then(|| etag.to_owned())
}

/// Percent-encodes the text as one segment of a path.
fn encoded(text: &str) -> String {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.~".contains(&byte);
    text.bytes()
        .map(|byte| if plain(byte) { char::from(byte).to_string() } else { format!("%{byte:02X}") })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn etags_become_names() {
        for (etag, expected) in [
            ("\"abc-1\"", Some("abc-1")),
            ("W/\"abc\"", Some("abc")),
            ("abc", Some("abc")),
            ("\"../x\"", None),
            ("\"\"", None),
        ] {
            assert_eq!(plain_etag(etag).as_deref(), expected, "{etag}");
        }
    }

    #[test]
    fn a_revision_is_one_step_of_a_path() {
        assert_eq!(encoded("refs/pr/3"), "refs%2Fpr%2F3");
        assert_eq!(encoded("v1.0-a_b~c"), "v1.0-a_b~c");
    }
}
