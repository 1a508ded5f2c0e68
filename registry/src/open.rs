//! Opens a registry by its address.

use std::sync::Arc;

use chassis::{Gate, World};
use types::NodeInfo;

use crate::Registry;
use crate::embedded::EmbeddedRegistry;
use crate::error::RegistryError;
use crate::etcd::EtcdRegistry;
use crate::url::RegistryUrl;
use crate::watch::{Feed, RegistryMessage};

/// The inputs of every registry, besides its address.
#[derive(Clone, Debug)]
pub struct RegistryParts {
    pub world: World,
    /// The gate of the registry's tasks.
    pub gate: Gate,
}

type Open = fn(&RegistryUrl, RegistryParts) -> Result<OpenRegistry, RegistryError>;

/// A registry and one feed of its changes.
struct OpenRegistry {
    registry: Arc<dyn Registry>,
    feed: Box<dyn Feed>,
}

/// The constructor of each registry, by scheme. A new registry is one file and one entry here.
const REGISTRIES: [(&str, Open); 2] = [
    ("embedded", |url, parts| {
        let registry = EmbeddedRegistry::open(url, parts)?;
        Ok(OpenRegistry { feed: Box::new(registry.feed()), registry: Arc::new(registry) })
    }),
    ("etcd", |url, parts| {
        let registry = EtcdRegistry::open(url, parts)?;
        Ok(OpenRegistry { feed: Box::new(registry.feed()), registry: Arc::new(registry) })
    }),
];

/// Opens the registry at `url`: `embedded://router:50051`, or `etcd://host:2379,host:2379/cluster`.
///
/// Nothing is sent yet. An unreachable address is noticed at the first call, which is retried.
pub fn open(url: &str, parts: RegistryParts) -> Result<Arc<dyn Registry>, RegistryError> {
    Ok(opened(url, parts)?.registry)
}

/// Requests the members from the registry at `url` once. Unlike [`Registry::watch`] it fails instead of
/// retrying, for a caller that diagnoses the error ([`RegistryError::trouble`]).
pub async fn ask_once(url: &str, parts: RegistryParts) -> Result<Vec<NodeInfo>, RegistryError> {
    let news = opened(url, parts)?.feed.next().await?;
    let members = news.into_iter().flat_map(|news| match news {
        RegistryMessage::All(all) => all.nodes,
        RegistryMessage::Is(node) => vec![node],
        RegistryMessage::Gone(_) => Vec::new(),
    });
    Ok(members.collect())
}

fn opened(url: &str, parts: RegistryParts) -> Result<OpenRegistry, RegistryError> {
    let url = RegistryUrl::parse(url)?;
    match REGISTRIES.iter().find(|(name, _)| *name == url.scheme) {
        Some((_, open)) => open(&url, parts),
        None => Err(url.refuse(format!("`{}` is not a registry, only {}", url.scheme, names().join(", ")))),
    }
}

fn names() -> Vec<&'static str> {
    REGISTRIES.iter().map(|(name, _)| *name).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn registries_are_found_by_name() {
        let parts = RegistryParts { world: World::seeded(1), gate: Gate::new("test") };
        for (url, found) in
            [("embedded://127.0.0.1:1", true), ("etcd://127.0.0.1:1/c", true), ("zk://a", false)]
        {
            assert_eq!(open(url, parts.clone()).is_ok(), found, "{url}");
        }
        let error = open("zk://a", parts).expect_err("there is no such registry");
        assert_eq!(
            error.to_string(),
            "registry address zk://a/: `zk` is not a registry, only embedded, etcd"
        );
    }
}
