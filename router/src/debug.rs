//! Debug pages for operators: the nodes of the cluster, the state of every KV block, and requests.

mod requests;

use std::sync::Arc;

use axum::extract::{Query, State};
use axum::routing::get;
use axum::{Json, Router};
use chassis::identity::admin_key::AdminKey;
use chassis::identity::refusals::Refusals;
use chassis::metrics::Metrics;
use futures::future::join_all;
use proto::v1;
use serde::Deserialize;
use serde_json::{Map, Value, json};
use types::{BlockCounts, MissingWire, NodeId, NodeInfo};

use crate::cluster::{Cluster, Group, ModelGroups, NodeState};
use crate::pairs::pairs;
use crate::requests::Requests;
use crate::rpc::LedgerDetail;

/// What the pages show.
#[derive(Clone, Debug)]
pub struct DebugParts {
    pub cluster: Cluster,
    pub requests: Requests,
    pub metrics: Metrics,
    /// The settings in force.
    pub settings: Value,
}

/// Serves the pages under `/debug`, which require the key, `/metrics` and `/version`.
pub fn router(parts: DebugParts, key: AdminKey, refusals: Refusals) -> Router {
    let DebugParts { cluster, requests, metrics, settings } = parts;
    let of_cluster =
        Router::new().route("/debug/cluster", get(nodes)).route("/debug/kv", get(kv)).with_state(cluster);
    let of_requests = Router::new()
        .route("/debug/requests", get(requests::list))
        .route("/debug/requests/{id}", get(requests::one))
        .with_state(requests);
    let config = get(chassis::admin::config).with_state(settings);
    let pages = of_cluster.merge(of_requests).route("/debug/config", config);
    let metrics = get(chassis::admin::page).with_state(metrics);
    key.guard(pages, refusals).route("/metrics", metrics).route("/version", get(chassis::admin::version))
}

async fn nodes(State(cluster): State<Cluster>) -> Json<Value> {
    let everyone = cluster.everyone();
    let nodes: Vec<Value> = everyone.iter().map(|(info, state)| node(&cluster, info, state)).collect();
    let infos: Vec<&NodeInfo> = everyone.iter().map(|(info, _)| &**info).collect();
    let (pairs, pairs_left_out) = pairs(&infos);
    let models: Vec<Value> = cluster.groups().iter().map(model).collect();
    Json(json!({ "nodes": nodes, "models": models, "pairs": pairs, "pairs_left_out": pairs_left_out }))
}

fn node(cluster: &Cluster, info: &NodeInfo, state: &NodeState) -> Value {
    let connectors: Vec<&str> = info.wires.iter().map(|wire| wire.scheme.as_str()).collect();
    let without: Vec<Value> = info.without.iter().map(missing).collect();
    let cache = cluster.cache(&info.id);
    let mut node = json!({
        "id": info.id.as_str(),
        "epoch": info.epoch.to_string(),
        "role": info.role.as_str(),
        "pid": info.pid,
        "address": info.address,
        "admin": info.admin,
        "connectors": connectors,
        "connectors_out": without,
        "model": info.model.name,
        "fingerprint": info.model.fingerprint.digest().to_string(),
        "state": state.as_str(),
        "waiting": cluster.n_waiting(&info.id),
        "known_from": if cluster.is_old(&info.id) { "file" } else { "registry" },
        "cached_blocks": cache.as_ref().and_then(|cache| cache.n_cached()),
        "cache": cache.as_ref().map(|cache| cache.knowledge().as_str()),
    });
    if let Some(reason) = state.reason() {
        node["reason"] = json!(reason);
    }
    node
}

/// Returns a model's groups of nodes as JSON, with the serving group and the reason for its choice.
fn model(model: &ModelGroups) -> Value {
    let group = |group: &Group| {
        let parts: Map<String, Value> = group
            .model
            .model
            .fingerprint
            .parts()
            .map(|(name, value)| (name.to_owned(), value.into()))
            .collect();
        json!({
            "fingerprint": group.fingerprint.to_string(),
            "parts": parts,
            "in_force": model.in_force == Some(group.fingerprint),
            "can_decode": group.can_decode,
            "nodes": group.nodes.iter().map(NodeId::as_str).collect::<Vec<_>>(),
        })
    };
    json!({
        "name": model.name,
        "in_force": model.in_force.map(|digest| digest.to_string()),
        "why": model.why,
        "groups": model.groups.iter().map(group).collect::<Vec<_>>(),
    })
}

fn missing(missing: &MissingWire) -> Value {
    json!({ "connector": missing.scheme.as_str(), "why": missing.why })
}

#[derive(Debug, Deserialize)]
struct KvQuery {
    /// If 1, the answer lists every block.
    #[serde(default)]
    blocks: u8,
}

/// Requests the block list of every node now, because an operator who looks for a leak needs the current
/// state.
async fn kv(State(cluster): State<Cluster>, Query(query): Query<KvQuery>) -> Json<Value> {
    let detail = if query.blocks == 0 { LedgerDetail::Counts } else { LedgerDetail::Blocks };
    let asked = cluster.everyone().into_iter().map(|(info, _)| ledger(cluster.clone(), info, detail));
    Json(json!({ "nodes": join_all(asked).await }))
}

async fn ledger(cluster: Cluster, info: Arc<NodeInfo>, detail: LedgerDetail) -> Value {
    let mut node = json!({ "id": info.id.as_str(), "role": info.role.as_str() });
    let Some(client) = cluster.client(&info.id) else {
        node["error"] = json!("the node has left");
        return node;
    };
    match client.ledger(detail).await {
        Ok((counts, listed)) => {
            add_counts(&mut node, counts);
            if detail == LedgerDetail::Blocks {
                node["blocks"] = listed.iter().map(block).collect();
            }
        }
        Err(failure) => node["error"] = json!(failure.refusal.to_string()),
    }
    node
}

fn add_counts(node: &mut Value, counts: BlockCounts) {
    let BlockCounts { total, free, leased, cached, quarantined } = counts;
    for (name, count) in [
        ("total", total),
        ("free", free),
        ("leased", leased),
        ("cached", cached),
        ("quarantined", quarantined),
    ] {
        node[name] = json!(count);
    }
}

fn block(block: &v1::LedgerBlock) -> Value {
    json!({
        "index": block.index,
        "state": block.state,
        "holder": block.holder,
        "readers": block.readers,
        "hash": block.hash,
        "age_ms": block.age_ms,
    })
}
