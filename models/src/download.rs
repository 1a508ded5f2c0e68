//! Downloads one file: continues an earlier partial download to the end, and verifies it.

use std::fs::{self, File};
use std::io::{self, BufReader, Read as _, Seek as _, Write as _};
use std::path::{Path, PathBuf};
use std::time::Duration;

use http::header::CONTENT_RANGE;
use http::{StatusCode, Uri};
use http_body_util::BodyExt as _;
use hyper::Response;
use hyper::body::Incoming;
use tracing::warn;

use crate::cache::ModelCache;
use crate::client::{Client, SILENT_MAX, shown, silent, unreachable};
use crate::digest::Digest;
use crate::error::HubError;
use crate::progress::{Meter, Progress};

/// The number of consecutive failed attempts, without a byte received, after which the download fails.
const TRIES_MAX: u32 = 5;
/// The pause after the first failed attempt; it doubles with each attempt.
const PAUSE: Duration = Duration::from_millis(500);

/// A file of a model on the hub: where it is, and how to verify it.
#[derive(Clone, Debug)]
pub(crate) struct Content {
    /// The file's name, for messages.
    pub(crate) name: String,
    pub(crate) url: Uri,
    /// The id of the content in the cache, usually its digest.
    pub(crate) etag: String,
    pub(crate) n_bytes: u64,
}

/// Downloads a file into the cache, unless it is there. Other tasks that need the file wait for this
/// download.
pub(crate) async fn download(
    client: &Client,
    cache: &ModelCache,
    content: &Content,
    progress: &Progress,
) -> Result<(), HubError> {
    let blob = cache.blob(&content.etag);
    if blob.exists() {
        return Ok(());
    }
    let _lock = cache.lock(&content.etag).await?;
    if blob.exists() {
        return Ok(());
    }
    let path = cache.partial(&content.etag)?;
    let whole = match complete(client, content, &path, progress).await {
        // The download starts again once, because the damaged part may come from an earlier process.
        Err(HubError::Damaged { file }) => {
            warn!(file, "downloaded file is damaged, starting again from the first byte");
            complete(client, content, &path, progress).await
        }
        whole => whole,
    };
    whole?;
    fs::rename(&path, &blob).map_err(HubError::io(&blob))
}

/// Downloads the missing part of a file, over several connections if necessary, and verifies it.
async fn complete(
    client: &Client,
    content: &Content,
    path: &Path,
    progress: &Progress,
) -> Result<(), HubError> {
    let mut partial = Partial::open(path, content)?;
    let meter = progress.file(&content.name, content.n_bytes, partial.n_bytes);
    let (mut tries, mut pause) = (0, PAUSE);
    while partial.n_bytes < content.n_bytes {
        let before = partial.n_bytes;
        match partial.append(client, content, &meter).await {
            Ok(()) => {}
            Err(error) if error.may_pass() && tries < TRIES_MAX => {
                warn!(file = content.name, %error, "download of a model file was interrupted, trying again");
            }
            Err(error) => return Err(error),
        }
        (tries, pause) = if partial.n_bytes > before { (0, PAUSE) } else { (tries + 1, pause * 2) };
        if partial.n_bytes < content.n_bytes {
            tokio::time::sleep(pause).await;
        }
    }
    partial.checked(content)
}

/// A partially downloaded file. Dropping it keeps the bytes for the next attempt.
struct Partial {
    path: PathBuf,
    file: File,
    n_bytes: u64,
    digest: Digest,
}

impl Partial {
    /// Opens the file and digests the bytes of an earlier attempt.
    fn open(path: &Path, content: &Content) -> Result<Self, HubError> {
        let file = File::options().create(true).read(true).append(true).open(path);
        let file = file.map_err(HubError::io(path))?;
        let digest = Digest::of(&content.etag, content.n_bytes);
        let mut partial = Self { path: path.to_owned(), file, n_bytes: 0, digest };
        partial.read_again().map_err(HubError::io(path))?;
        if partial.n_bytes > content.n_bytes {
            partial.restart(content)?;
        }
        Ok(partial)
    }

    fn read_again(&mut self) -> io::Result<()> {
        let mut reader = BufReader::with_capacity(1 << 20, &self.file);
        let mut piece = vec![0; 1 << 16];
        loop {
            let n = reader.read(&mut piece)?;
            if n == 0 {
                return Ok(());
            }
            self.digest.update(&piece[..n]);
            self.n_bytes += n as u64;
        }
    }

    fn restart(&mut self, content: &Content) -> Result<(), HubError> {
        self.file.set_len(0).and_then(|()| self.file.rewind()).map_err(HubError::io(&self.path))?;
        self.digest = Digest::of(&content.etag, content.n_bytes);
        self.n_bytes = 0;
        Ok(())
    }

    /// Downloads until the connection ends, and appends the bytes.
    async fn append(&mut self, client: &Client, content: &Content, meter: &Meter) -> Result<(), HubError> {
        let (url, response) = client.content(&content.url, self.n_bytes).await?;
        match response.status() {
            StatusCode::PARTIAL_CONTENT if starts_at(&response, self.n_bytes) => {}
            // The file starts again, because the server does not support ranges, or the bytes here are no
            // prefix of its content.
            StatusCode::OK | StatusCode::PARTIAL_CONTENT | StatusCode::RANGE_NOT_SATISFIABLE
                if self.n_bytes > 0 =>
            {
                self.restart(content)?;
                if response.status() != StatusCode::OK {
                    return Ok(());
                }
            }
            StatusCode::OK => {}
            status => {
                return Err(HubError::Status { url: shown(&url), status, message: String::new() });
            }
        }
        self.take(&url, response.into_body(), content, meter).await
    }

    async fn take(
        &mut self,
        url: &Uri,
        mut body: Incoming,
        content: &Content,
        meter: &Meter,
    ) -> Result<(), HubError> {
        while let Some(frame) =
            tokio::time::timeout(SILENT_MAX, body.frame()).await.map_err(|_| silent(url))?
        {
            let frame = frame.map_err(|error| unreachable(url, error))?;
            let Ok(data) = frame.into_data() else { continue };
            if self.n_bytes + data.len() as u64 > content.n_bytes {
                return Err(self.damaged(content));
            }
            self.file.write_all(&data).map_err(HubError::io(&self.path))?;
            self.digest.update(&data);
            self.n_bytes += data.len() as u64;
            meter.at(self.n_bytes);
        }
        Ok(())
    }

    /// Checks that the file is complete, on disk and equal to the hub's digest. A damaged file is removed.
    fn checked(mut self, content: &Content) -> Result<(), HubError> {
        let digest = std::mem::replace(&mut self.digest, Digest::of("", 0));
        if !digest.is(&content.etag) {
            return Err(self.damaged(content));
        }
        self.file.sync_all().map_err(HubError::io(&self.path))
    }

    fn damaged(&self, content: &Content) -> HubError {
        // A failure to remove the file is ignored: the next attempt finds it damaged again.
        let _ = fs::remove_file(&self.path);
        HubError::Damaged { file: content.name.clone() }
    }
}

/// Returns whether a partial response starts at byte `first`.
fn starts_at(response: &Response<Incoming>, first: u64) -> bool {
    let range = response.headers().get(CONTENT_RANGE).and_then(|range| range.to_str().ok());
    let start = range.and_then(|range| range.strip_prefix("bytes ")?.split_once('-')?.0.parse::<u64>().ok());
    start == Some(first)
}
