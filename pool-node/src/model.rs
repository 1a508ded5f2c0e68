//! Chooses the model whose KV is kept. The registry describes the model, so a pool node reads no model files.

use futures::StreamExt as _;
use registry::{MembershipEvent, Registry, RegistryError};
use types::layout::Shard;
use types::{BlockHashKey, KvLayout, ModelInfo, NodeInfo};

/// Waits for a node that computes KV of the model `name`, or of any model if it is `None`, and hashes blocks
/// with `key`. Returns the node's model. Cancel-safe.
pub(crate) async fn kept_model(
    registry: &dyn Registry,
    name: Option<&str>,
    key: &BlockHashKey,
) -> Result<ModelInfo, RegistryError> {
    let mut events = registry.watch().await?;
    while let Some(event) = events.next().await {
        let nodes = match event {
            MembershipEvent::Snapshot(nodes) => nodes,
            MembershipEvent::Joined(node) => vec![node],
            MembershipEvent::Left { .. } => continue,
        };
        if let Some(node) = nodes.into_iter().find(|node| makes_kv(node, name, key)) {
            return Ok(ModelInfo { layout: whole(node.model.layout), ..node.model });
        }
    }
    // The stream of events never ends, so this line is not reached.
    std::future::pending().await
}

fn makes_kv(node: &NodeInfo, name: Option<&str>, key: &BlockHashKey) -> bool {
    let model = &node.model;
    let is_wanted = name.is_none_or(|name| model.name == name);
    !node.role.pools() && is_wanted && model.fingerprint.agree_on_key(key).is_ok()
}

/// Returns the layout with all heads in one memory, whatever the number of ranks of the nodes that compute.
fn whole(layout: KvLayout) -> KvLayout {
    KvLayout { shard: Shard { tp_size: 1, ..layout.shard }, ..layout }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use chassis::{Gate, World};
    use registry::MemoryRegistry;
    use registry::conformance::node as any_node;
    use registry::memory::TTL;
    use types::{Fingerprint, KvDtype, Role};

    use super::*;

    fn node(id: &str, role: Role, model: &str) -> NodeInfo {
        let any = any_node(id, 1);
        let fingerprint = Fingerprint::default().hashed_with(&BlockHashKey::default());
        let model = ModelInfo { name: model.to_owned(), fingerprint, ..any.model };
        NodeInfo { role, model, ..any }
    }

    #[tokio::test(start_paused = true)]
    async fn the_first_node_that_makes_kv_says_whose() {
        let registry = MemoryRegistry::new(TTL, World::seeded(1), Gate::new("test"));
        let key = BlockHashKey::default();
        let mut waiting = Box::pin(kept_model(&registry, Some("wanted"), &key));
        let none = tokio::time::timeout(Duration::from_secs(60), &mut waiting).await;
        assert!(none.is_err(), "no node is there");
        let mut announced = Vec::new();
        let mut other_key = node("prefill-1", Role::Prefill, "wanted");
        other_key.model.fingerprint = Fingerprint::default().hashed_with(&BlockHashKey::new([1; 32]));
        announced.push(registry.announce(other_key).await.expect("announced"));
        for (id, role, model) in [
            ("pool-0", Role::Pool, "wanted"),
            ("decode-0", Role::Decode, "other"),
            ("prefill-0", Role::Prefill, "wanted"),
        ] {
            announced.push(registry.announce(node(id, role, model)).await.expect("announced"));
        }
        let found = waiting.await.expect("found");
        assert_eq!((found.name.as_str(), found.fingerprint.agree_on_key(&key)), ("wanted", Ok(())));
    }

    #[test]
    fn ranks_share_one_memory() {
        let layout = KvLayout::uniform(16, KvDtype::F32, 2, 8, 4);
        assert_eq!(whole(layout.clone().over_ranks(4).expect("8 is a multiple of 4")), layout);
    }
}
