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
/// The delay between a failed write and the next one.
const WRITE_AGAIN: Duration = Duration::from_secs(30);

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
            Ok(Ok(())) => return,
            Ok(Err(error)) => warn!(%error, "members file cannot be written, trying again"),
            Err(error) => warn!(%error, "members file was not written, trying again"),
        }
        self.due = Some(Instant::now() + WRITE_AGAIN);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_failed_write_is_tried_again() {
        let folder = tempfile::tempdir().expect("a folder");
        let disk = folder.path().join("disk");
        let mut members_file = MembersFileTask::new(MembersFile::new(disk.join("members")));
        members_file.changed();
        let none = || OldMembers { nodes: Vec::new(), written: Duration::ZERO };
        members_file.write(none()).await;
        assert!(members_file.due.is_some());
        std::fs::create_dir(&disk).expect("a folder");
        members_file.write(none()).await;
        assert_eq!(members_file.due, None);
        assert_eq!(members_file.read().await, Some(none()));
    }
}
