//! The last known members in a small file, for a router that starts while its registry is unreachable.

use std::fs::File;
use std::io::{self, Write as _};
use std::path::PathBuf;
use std::time::Duration;

use prost::Message as _;
use proto::v1;
use types::NodeInfo;

/// The file of a router's last known members. They may be outdated, so a node is contacted before it is used.
#[derive(Clone, Debug)]
pub struct MembersFile {
    path: PathBuf,
}

/// The members that the file contains, and its age.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OldMembers {
    pub nodes: Vec<NodeInfo>,
    /// The time at which the file was written, since 1970.
    pub written: Duration,
}

impl MembersFile {
    pub fn new(path: PathBuf) -> Self {
        Self { path }
    }

    /// Reads the members from the file. Returns `None` if the file does not exist.
    pub fn read(&self) -> io::Result<Option<OldMembers>> {
        let bytes = match std::fs::read(&self.path) {
            Ok(bytes) => bytes,
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(error),
        };
        let members = v1::OldMembers::decode(&*bytes).map_err(invalid)?;
        let nodes = members.nodes.into_iter().map(|node| NodeInfo::try_from(node).map_err(invalid));
        let nodes = nodes.collect::<io::Result<_>>()?;
        Ok(Some(OldMembers { nodes, written: Duration::from_millis(members.written_unix_ms) }))
    }

    /// Replaces the file atomically: a reader finds either the old members or the new ones.
    pub fn write(&self, members: &OldMembers) -> io::Result<()> {
        let nodes = members.nodes.iter().map(v1::NodeInfo::from).collect();
        let members = v1::OldMembers { nodes, written_unix_ms: members.written.as_millis() as u64 };
        let new = self.path.with_added_extension("new");
        let mut file = File::create(&new)?;
        file.write_all(&members.encode_to_vec())?;
        file.sync_all()?;
        std::fs::rename(new, &self.path)
    }
}

fn invalid(error: impl std::error::Error + Send + Sync + 'static) -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, error)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::node;

    #[test]
    fn what_was_written_is_read() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = MembersFile::new(folder.path().join("members"));
        assert_eq!(file.read().expect("no file is no error"), None);
        for nodes in [vec![node("a", 1), node("b", 2)], vec![]] {
            let members = OldMembers { nodes, written: Duration::from_millis(1_700_000_000_123) };
            file.write(&members).expect("written");
            let read = file.read().expect("read").expect("there");
            assert_eq!(read, members);
        }
    }

    #[test]
    fn a_spoilt_file_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("members");
        std::fs::write(&path, [0xff; 40]).expect("written");
        let error = MembersFile::new(path).read().expect_err("it is no list of members");
        assert_eq!(error.kind(), io::ErrorKind::InvalidData);
    }

    #[test]
    fn a_file_that_cannot_be_written_is_an_error() {
        let folder = tempfile::tempdir().expect("a folder");
        let file = MembersFile::new(folder.path().join("absent/members"));
        assert!(file.write(&OldMembers { nodes: vec![], written: Duration::ZERO }).is_err());
    }
}
