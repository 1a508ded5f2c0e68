//! One model's folder in the cache, in the layout of `huggingface_hub`, so that each tool finds the downloads of the
//! other.
//!
//! ```text
//! models--org--name/blobs/<etag>                   contents, each once
//! models--org--name/blobs/<etag>.incomplete        an unfinished download
//! models--org--name/refs/<revision>                the last known commit of a branch or tag
//! models--org--name/snapshots/<commit>/<file>      links to the contents
//! .locks/models--org--name/<etag>.lock             held while that content is downloaded
//! ```

use std::fs::{self, File, TryLockError};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use tracing::info;

use crate::error::HubError;
use crate::id::{ModelId, is_commit};
use crate::needed;

/// The longest wait for another process that downloads the same file. After it that process counts as stuck.
const LOCK_WITHIN: Duration = Duration::from_secs(3600);
const LOOK_EVERY: Duration = Duration::from_millis(100);

/// The cache folder of one model.
#[derive(Clone, Debug)]
pub struct ModelCache {
    folder: PathBuf,
    locks: PathBuf,
}

/// The lock on one file's download. Dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct Lock(#[expect(dead_code, reason = "closing the file unlocks it")] File);

impl ModelCache {
    pub fn new(cache: &Path, id: &ModelId) -> Self {
        Self { folder: cache.join(id.folder()), locks: cache.join(".locks").join(id.folder()) }
    }

    /// Returns the folder that has the files of a commit.
    pub fn snapshot(&self, commit: &str) -> PathBuf {
        self.folder.join("snapshots").join(commit)
    }

    /// Returns the commit of a revision when it was last resolved at the hub.
    pub fn commit(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        let commit = fs::read_to_string(self.reference(revision)).ok()?;
        Some(commit.trim().to_owned()).filter(|commit| is_commit(commit))
    }

    /// Returns the snapshot folder of a revision, if the folder has all needed files.
    pub fn complete(&self, revision: &str) -> Option<PathBuf> {
        let snapshot = self.snapshot(&self.commit(revision)?);
        needed::is_complete(&snapshot).then_some(snapshot)
    }

    /// Records the commit that a branch or tag has now.
    pub(crate) fn refer(&self, revision: &str, commit: &str) -> Result<(), HubError> {
        if is_commit(revision) {
            return Ok(());
        }
        let reference = self.reference(revision);
        let temporary = self.folder.join("refs").join(format!(".{}.tmp", std::process::id()));
        make_parent(&reference)?;
        fs::write(&temporary, commit).map_err(HubError::io(&temporary))?;
        fs::rename(&temporary, &reference).map_err(HubError::io(&reference))
    }

    fn reference(&self, revision: &str) -> PathBuf {
        self.folder.join("refs").join(revision)
    }

    pub(crate) fn blob(&self, etag: &str) -> PathBuf {
        self.folder.join("blobs").join(etag)
    }

    pub(crate) fn partial(&self, etag: &str) -> Result<PathBuf, HubError> {
        let partial = self.folder.join("blobs").join(format!("{etag}.incomplete"));
        make_parent(&partial)?;
        Ok(partial)
    }

    /// Links `file` of the commit's snapshot to the content with the etag `etag`.
    pub(crate) fn link(&self, commit: &str, file: &str, etag: &str) -> Result<(), HubError> {
        let link = self.snapshot(commit).join(file);
        make_parent(&link)?;
        let root = "../".repeat(2 + file.matches('/').count());
        match std::os::unix::fs::symlink(Path::new(&root).join("blobs").join(etag), &link) {
            Err(error) if error.kind() != io::ErrorKind::AlreadyExists => Err(HubError::io(&link)(error)),
            Ok(()) | Err(_) => Ok(()),
        }
    }

    /// Waits until no other process downloads the content with this etag, and locks it.
    pub(crate) async fn lock(&self, etag: &str) -> Result<Lock, HubError> {
        let path = self.locks.join(format!("{etag}.lock"));
        make_parent(&path)?;
        let file = File::options().create(true).truncate(false).write(true).open(&path);
        let file = file.map_err(HubError::io(&path))?;
        let locked = tokio::time::timeout(LOCK_WITHIN, locked(&file, &path)).await;
        locked.map_err(|_| HubError::Locked { path, waited: LOCK_WITHIN })??;
        Ok(Lock(file))
    }
}

async fn locked(file: &File, path: &Path) -> Result<(), HubError> {
    let mut said = false;
    loop {
        match file.try_lock() {
            Ok(()) => return Ok(()),
            Err(TryLockError::Error(error)) => return Err(HubError::io(path)(error)),
            Err(TryLockError::WouldBlock) if !said => {
                info!(lock = %path.display(), "another process is downloading the model file, waiting for it");
                said = true;
            }
            Err(TryLockError::WouldBlock) => {}
        }
        tokio::time::sleep(LOOK_EVERY).await;
    }
}

fn make_parent(path: &Path) -> Result<(), HubError> {
    let parent = path.parent().expect("every path here lies in the cache");
    fs::create_dir_all(parent).map_err(HubError::io(parent))
}
