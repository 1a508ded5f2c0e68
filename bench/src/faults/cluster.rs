//! Reads the members of a cluster from the router's `/debug/cluster`.

use serde::Deserialize;

use crate::client::TargetServer;
use crate::error::{BenchError, Result};

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Cluster {
    nodes: Vec<Node>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
pub struct Node {
    pub id: String,
    pub role: String,
    pub pid: i32,
}

impl Cluster {
    pub async fn ask(target: &TargetServer) -> Result<Self> {
        let (status, body) = target.get("/debug/cluster").await?;
        match status {
            200 => serde_json::from_str(&body).map_err(|error| BenchError::target(&target.url, error)),
            _ => Err(BenchError::target(&target.url, format!("GET /debug/cluster: HTTP {status}"))),
        }
    }

    /// Returns the node at position `which` among those of a role, in the order of ids.
    pub fn find(&self, role: &str, which: usize) -> Option<&Node> {
        let mut nodes: Vec<_> = self.nodes.iter().filter(|node| node.role == role).collect();
        nodes.sort_by(|one, other| one.id.cmp(&other.id));
        nodes.get(which).copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nodes_are_found_by_role_and_order() {
        let body = r#"{"nodes":[{"id":"d1","epoch":"1","role":"decode","pid":12,"address":"x","connectors":[],"state":"up"},
            {"id":"p0","role":"prefill","pid":10},{"id":"d0","role":"decode","pid":11}]}"#;
        let cluster: Cluster = serde_json::from_str(body).expect("sound");
        assert_eq!(cluster.find("decode", 1).map(|node| node.pid), Some(12));
        assert_eq!(cluster.find("prefill", 0).map(|node| node.pid), Some(10));
        assert_eq!(cluster.find("prefill", 1), None);
    }
}
