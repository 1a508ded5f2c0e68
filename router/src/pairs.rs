//! For operators: the connectors that each pair of nodes could use, and the reasons against the other
//! connectors.
//!
//! The page is derived from announcements only. The receiving node makes the choice, and also checks whether
//! it reaches the sender; a warning in its log reports a difference.

use serde_json::{Value, json};
use types::{NodeInfo, Scheme};

/// The largest number of listed pairs, enough for a dozen nodes of each role. Further pairs are probably
/// similar, so they are only counted.
const PAIRS_MAX: usize = 256;

/// Returns all pairs that transfer KV, with the sender first, and the number of pairs that are not listed.
pub(crate) fn pairs(nodes: &[&NodeInfo]) -> (Vec<Value>, usize) {
    let senders = nodes.iter().copied();
    let all = senders.flat_map(|from| nodes.iter().copied().map(move |to| (from, to)));
    let pairs: Vec<(&NodeInfo, &NodeInfo)> = all.filter(|(from, to)| sends(from, to)).collect();
    let told = pairs.iter().take(PAIRS_MAX).map(|(from, to)| pair(from, to)).collect();
    (told, pairs.len().saturating_sub(PAIRS_MAX))
}

/// Returns whether the roles allow KV to be sent from `from` to `to`.
fn sends(from: &NodeInfo, to: &NodeInfo) -> bool {
    let prefill_to = from.role.prefills() && !from.role.decodes();
    let decode_to = to.role.decodes() && !to.role.prefills();
    (prefill_to && (decode_to || to.role.pools())) || (from.role.pools() && decode_to)
}

fn pair(from: &NodeInfo, to: &NodeInfo) -> Value {
    let mut used = None;
    let mut out = Vec::new();
    for scheme in schemes(from, to) {
        match why_not(from, to, &scheme) {
            None => used = used.or(Some(scheme)),
            Some(why) => out.push(json!({ "connector": scheme.as_str(), "why": why })),
        }
    }
    json!({
        "from": from.id.as_str(),
        "to": to.id.as_str(),
        "connector": used.as_ref().map(Scheme::as_str),
        "out": out,
    })
}

/// Returns all connectors that one of the nodes names, in the order in which the receiving node prefers them.
fn schemes(from: &NodeInfo, to: &NodeInfo) -> Vec<Scheme> {
    let wires = |node: &NodeInfo| node.wires.iter().map(|wire| wire.scheme.clone()).collect::<Vec<_>>();
    let without = |node: &NodeInfo| node.without.iter().map(|out| out.scheme.clone()).collect::<Vec<_>>();
    let mut schemes = Vec::new();
    for scheme in [wires(to), wires(from), without(to), without(from)].concat() {
        if !schemes.contains(&scheme) {
            schemes.push(scheme);
        }
    }
    schemes
}

fn why_not(from: &NodeInfo, to: &NodeInfo, scheme: &Scheme) -> Option<String> {
    let lacking = [from, to].into_iter().find(|node| !node.wires.iter().any(|wire| wire.scheme == *scheme));
    if let Some(node) = lacking {
        let reason = node.without.iter().find(|missing| missing.scheme == *scheme);
        let why = reason.map_or("this connector is unknown to the node", |missing| &missing.why);
        return Some(format!("{}: {why}", node.id));
    }
    let is_near = from.host == to.host;
    let within_host = to.wires.iter().any(|wire| wire.scheme == *scheme && wire.within_host);
    (within_host && !is_near).then(|| "the nodes are on different hosts, or do not share /dev/shm".to_owned())
}

#[cfg(test)]
mod tests {
    use types::{MissingWire, Role, WireAddress};

    use super::*;
    use crate::fake_node::info;

    fn node(id: &str, role: Role, host: &str, wires: &[&str], without: &[(&str, &str)]) -> NodeInfo {
        let wire = |name: &&str| WireAddress {
            scheme: Scheme::new(*name),
            endpoint: String::new(),
            within_host: *name == "shm",
        };
        let missing =
            |(name, why): &(&str, &str)| MissingWire { scheme: Scheme::new(*name), why: (*why).to_owned() };
        NodeInfo {
            host: host.to_owned(),
            wires: wires.iter().map(wire).collect(),
            without: without.iter().map(missing).collect(),
            keeps_role: false,
            ..info(id, role)
        }
    }

    #[test]
    fn what_is_out_is_said_with_its_reason() {
        let p = node("p", Role::Prefill, "here", &["shm", "tcp"], &[("cuda-ipc", "its KV is not on a GPU")]);
        let near = node("d", Role::Decode, "here", &["cuda-ipc", "shm", "tcp"], &[]);
        let (pairs, more) = pairs(&[&p, &near]);
        assert_eq!((pairs.len(), more), (1, 0));
        let out = json!([{ "connector": "cuda-ipc", "why": "p: its KV is not on a GPU" }]);
        assert_eq!(pairs[0], json!({ "from": "p", "to": "d", "connector": "shm", "out": out }));
    }

    #[test]
    fn memory_is_not_shared_between_hosts() {
        let p = node("p", Role::Prefill, "here", &["shm", "tcp"], &[]);
        let far = node("k", Role::Pool, "there", &["shm", "tcp"], &[]);
        let (pairs, _) = pairs(&[&p, &far]);
        assert_eq!(pairs[0]["connector"], "tcp");
        assert_eq!(pairs[0]["out"][0]["connector"], "shm");
        assert!(pairs[0]["out"][0]["why"].as_str().is_some_and(|why| why.contains("different hosts")));
    }

    #[test]
    fn nothing_in_common_is_said_too() {
        let p = node("p", Role::Prefill, "here", &["shm"], &[("tcp", "transfer.connectors is shm")]);
        let d = node("d", Role::Decode, "here", &["tcp"], &[]);
        let (pairs, _) = pairs(&[&p, &d]);
        assert_eq!(pairs[0]["connector"], Value::Null);
        assert_eq!(pairs[0]["out"][0]["why"], "p: transfer.connectors is shm");
        assert_eq!(pairs[0]["out"][1]["why"], "d: this connector is unknown to the node");
    }

    #[test]
    fn kv_goes_from_prefill_to_pool_to_decode() {
        let of = |id: &str, role| node(id, role, "here", &["tcp"], &[]);
        let nodes = [of("p", Role::Prefill), of("d", Role::Decode), of("k", Role::Pool), of("b", Role::Both)];
        let nodes: Vec<&NodeInfo> = nodes.iter().collect();
        let (pairs, _) = pairs(&nodes);
        let ends: Vec<String> = pairs.iter().map(|pair| format!("{} {}", pair["from"], pair["to"])).collect();
        assert_eq!(ends, ["\"p\" \"d\"", "\"p\" \"k\"", "\"k\" \"d\""]);
    }
}
