//! The names of Baton's keys in etcd.

use types::NodeId;

use crate::lock::LockName;

/// The keys of one Baton cluster. All have one prefix, so that one etcd role can grant access to them.
#[derive(Clone, Debug)]
pub(crate) struct Keys {
    prefix: String,
}

/// The purpose of a key under the prefix.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Key {
    /// The key of the mark of etcd's data. If the mark has changed or is absent, the data was replaced.
    Life,
    Node(NodeId),
    /// A key that this version of Baton does not use.
    Other,
}

impl Keys {
    pub(crate) fn of(cluster: &str) -> Self {
        Self { prefix: format!("/baton/{cluster}/") }
    }

    /// Returns the prefix of all keys. It ends with a slash, so that `blue` is no prefix of the keys of
    /// `blues`.
    pub(crate) fn prefix(&self) -> &str {
        &self.prefix
    }

    pub(crate) fn life(&self) -> String {
        format!("{}life", self.prefix)
    }

    pub(crate) fn node(&self, id: &NodeId) -> String {
        format!("{}nodes/{id}", self.prefix)
    }

    pub(crate) fn lock(&self, name: LockName) -> String {
        format!("{}locks/{}", self.prefix, name.as_str())
    }

    pub(crate) fn read(&self, key: &[u8]) -> Key {
        let rest = std::str::from_utf8(key).ok().and_then(|key| key.strip_prefix(&self.prefix));
        match rest {
            Some("life") => Key::Life,
            Some(rest) => rest.strip_prefix("nodes/").map_or(Key::Other, |id| Key::Node(NodeId::new(id))),
            None => Key::Other,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn keys_are_read_back() {
        let keys = Keys::of("blue");
        let id = NodeId::new("p0");
        assert_eq!(keys.node(&id), "/baton/blue/nodes/p0");
        assert_eq!(keys.read(keys.node(&id).as_bytes()), Key::Node(id));
        assert_eq!(keys.read(keys.life().as_bytes()), Key::Life);
        for other in ["/baton/blue/nodesp0", "/baton/blues/nodes/p0", "/baton/blue/", "nodes/p0"] {
            assert_eq!(keys.read(other.as_bytes()), Key::Other, "{other}");
        }
        assert_eq!(keys.read(b"/baton/blue/nodes/\xff"), Key::Other);
    }
}
