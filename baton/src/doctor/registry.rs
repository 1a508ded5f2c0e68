//! Whether the registry answers, and who is in it.

use std::time::Duration;

use chassis::{Gate, World};
use futures::StreamExt as _;
use registry::{MembershipEvent, RegistryError, RegistryParts};
use types::{MissingWire, NodeInfo, Role};

use crate::process_file::ProcessFile;

use super::finding::Finding;

const GROUP: &str = "registry";
/// A registry that takes longer is of no use at start either.
const ANSWER_WITHIN: Duration = Duration::from_secs(5);

pub(super) async fn look(process: &ProcessFile) -> Vec<Finding> {
    let Some(url) = process.registry_url() else {
        return vec![Finding::ok(GROUP, "embedded: this router is the registry")];
    };
    let shown = registry::url::RegistryUrl::parse(url).map_or_else(|_| url.to_owned(), |url| url.to_string());
    match tokio::time::timeout(ANSWER_WITHIN, members(url)).await {
        Ok(Ok(members)) => {
            let answers = Finding::ok(GROUP, format!("{shown}: answers; {}", who(&members)));
            std::iter::once(answers).chain(members.iter().flat_map(goes_without)).collect()
        }
        Ok(Err(error)) => vec![Finding::bad(GROUP, format!("{shown}: {error}"), advice(url))],
        Err(_) => {
            vec![Finding::bad(GROUP, format!("{shown}: no answer within {ANSWER_WITHIN:?}"), advice(url))]
        }
    }
}

/// The first thing that a watch says, as a router hears it.
async fn members(url: &str) -> Result<Vec<NodeInfo>, RegistryError> {
    let registry = registry::open(url, RegistryParts { world: World::real(), gate: Gate::new("doctor") })?;
    let mut events = registry.watch().await?;
    match events.next().await {
        Some(MembershipEvent::Snapshot(members)) => Ok(members),
        // A watch begins with a snapshot and never ends.
        Some(_) | None => Ok(Vec::new()),
    }
}

fn who(members: &[NodeInfo]) -> String {
    let count = |is: fn(Role) -> bool| members.iter().filter(|node| is(node.role)).count();
    let pool = match count(Role::pools) {
        0 => "no pool".to_owned(),
        n => format!("{n} pool nodes"),
    };
    let (prefill, decode) = (count(Role::prefills), count(Role::decodes));
    format!("{prefill} prefill and {decode} decode nodes and {pool} are in it")
}

/// What a node that is there has said it goes without.
fn goes_without(node: &NodeInfo) -> Vec<Finding> {
    let note = |missing: &MissingWire| {
        let found = format!("{} goes without {}: {}", node.id, missing.scheme, missing.why);
        Finding::note(
            GROUP,
            found,
            "nothing, if others carry its KV: /debug/cluster of the router says which",
        )
    };
    node.without.iter().map(note).collect()
}

fn advice(url: &str) -> String {
    let who = if url.starts_with("etcd") {
        "etcd runs (`etcdctl endpoint health`)"
    } else {
        "the router runs, and that this is its gRPC port"
    };
    format!("see that {who}, that registry.url names it, and that no firewall or NetworkPolicy is between")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test]
    async fn a_registry_that_nobody_is_at_is_found_out() {
        let free = std::net::TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
        let url = format!("embedded://{free}");
        let answer = tokio::time::timeout(Duration::from_millis(300), members(&url)).await;
        assert!(!matches!(answer, Ok(Ok(_))), "{answer:?}");
    }
}
