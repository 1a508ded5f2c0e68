//! Decides when the members file is read and written.

use std::time::Duration;

use registry::{MembersFile, OldMembers};
use tokio::task::spawn_blocking;
use tokio::time::Instant;
use tracing::warn;

/// The wait for the registry's first answer after the start. If none comes, the file is read.
const SILENT_FOR: Duration = Duration::from_secs(1);
/// The delay between a change and the write: a start or a rollout changes the members many times.
const WRITE_AFTER: Duration = Duration::from_secs(1);

/// The members file, with the time of its next read or write.
#[derive(Debug)]
pub(super) struct MembersFileTask {
    file: MembersFile,
    heard_registry: bool,
    /// The time of the next read or write; `None` if there is nothing to do.
    due: Option<Instant>,
}

/// Waits until the file is to be read or written. Waits forever if there is no file.
pub(super) async fn due(members_file: &Option<MembersFileTask>) {
    match members_file.as_ref().and_then(|members_file| members_file.due) {
        Some(due) => tokio::time::sleep_until(due).await,
        None => std::future::pending().await,
    }
}

impl MembersFileTask {
    pub(super) fn new(file: MembersFile) -> Self {
        Self { file, heard_registry: false, due: Some(Instant::now() + SILENT_FOR) }
    }

    /// Schedules a write, because the registry has reported a change.
    pub(super) fn changed(&mut self) {
        if !self.heard_registry {
            self.heard_registry = true;
            self.due = None;
        }
        self.due.get_or_insert(Instant::now() + WRITE_AFTER);
    }

    pub(super) fn heard_registry(&self) -> bool {
        self.heard_registry
    }

    /// Returns the last known members; `None` if there is no file or it cannot be read.
    pub(super) async fn read(&mut self) -> Option<OldMembers> {
        self.due = None;
        let file = self.file.clone();
        match spawn_blocking(move || file.read()).await {
            Ok(Ok(members)) => members,
            Ok(Err(error)) => {
                warn!(%error, "members file cannot be read");
                None
            }
            Err(error) => {
                warn!(%error, "members file was not read");
                None
            }
        }
    }

    pub(super) async fn write(&mut self, members: OldMembers) {
        self.due = None;
        let file = self.file.clone();
        match spawn_blocking(move || file.write(&members)).await {
            Ok(Ok(())) => {}
            Ok(Err(error)) => warn!(%error, "members file cannot be written"),
            Err(error) => warn!(%error, "members file was not written"),
        }
    }
}
