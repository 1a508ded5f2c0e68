//! Debug pages for operators: the nodes of the cluster, the state of every KV block, requests, and
//! the live page.

mod live;
mod requests;

use std::sync::Arc;

use axum::extract::rejection::QueryRejection;
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
use tokio::time::Instant;
use types::{BlockCounts, MissingWire, NodeId, NodeInfo, NodeLoad, Scheme};

use crate::admission::{Admission, ShownLine};
use crate::balance::BalanceReport;
use crate::breaker::{Breaker, BreakerState, Breakers};
use crate::cluster::{Cluster, Group, ModelGroups, NodeState};
use crate::http::HttpError;
use crate::pairs::pairs;
use crate::policy::{Arm, CallTime, ConnectorCosts, RouteCosts};
use crate::requests::Requests;
use crate::rpc::LedgerDetail;
use crate::upstream::{LegRole, MemberStatus, SourceState, Upstream};

/// The parts that the pages show.
#[derive(Clone, Debug)]
pub struct DebugParts {
    pub cluster: Cluster,
    pub breakers: Breakers,
    pub requests: Requests,
    pub admission: Admission,
    /// The report of the controller of roles; `None`: nodes are not moved.
    pub balance: Option<BalanceReport>,
    pub metrics: Metrics,
    /// The settings in force.
    pub settings: Value,
    /// The pools of another engine; `None`: Baton's nodes serve.
    pub upstream: Option<Upstream>,
}

/// Serves the pages under `/debug`, which require the key, `/metrics` and `/version`.
pub fn router(parts: DebugParts, key: AdminKey, refusals: Refusals) -> Router {
    let DebugParts { cluster, breakers, requests, admission, balance, metrics, settings, upstream } = parts;
    let nodes =
        get(nodes).with_state(ClusterParts { cluster: cluster.clone(), breakers, admission, balance });
    let of_cluster =
        Router::new().route("/debug/cluster", nodes).route("/debug/kv", get(kv)).with_state(cluster);
    let of_requests = Router::new()
        .route("/debug/requests", get(requests::list))
        .route("/debug/requests/{id}", get(requests::one))
        .with_state(requests);
    let config = get(chassis::admin::config).with_state(settings);
    let pages = of_cluster.merge(of_requests).route("/debug/config", config);
    let pages = match upstream {
        None => pages,
        Some(upstream) => {
            pages.merge(Router::new().route("/debug/upstream", get(servers)).with_state(upstream))
        }
    };
    let metrics = get(chassis::admin::page).with_state(metrics);
    key.guard(pages, refusals).route("/metrics", metrics).route("/version", get(chassis::admin::version))
}

/// Serves the same pages, the live page, and its chat box, which requires the key too.
pub fn admin_router(parts: DebugParts, chat_box: Router, key: AdminKey, refusals: Refusals) -> Router {
    let chat_box = key.clone().guard(chat_box, refusals.clone());
    router(parts, key, refusals).merge(chat_box).route("/", get(live::page))
}

/// Answers with the servers of another engine.
async fn servers(State(upstream): State<Upstream>) -> Json<Value> {
    let server = |one: &MemberStatus| {
        json!({
            "url": one.url,
            "role": one.role.as_str(),
            "health": one.health.as_str(),
            "requests": one.in_flight,
            "failures": one.failures,
        })
    };
    let source = |(role, source): (LegRole, SourceState)| json!({ "role": role.as_str(), "url": source.url, "failure": source.failure });
    Json(json!({
        "servers": upstream.members().iter().map(server).collect::<Vec<_>>(),
        "sources": upstream.sources().map(source),
    }))
}

/// The parts that `/debug/cluster` shows.
#[derive(Clone, Debug)]
struct ClusterParts {
    cluster: Cluster,
    breakers: Breakers,
    admission: Admission,
    balance: Option<BalanceReport>,
}

async fn nodes(State(parts): State<ClusterParts>) -> Json<Value> {
    let ClusterParts { cluster, breakers, admission, balance } = parts;
    let everyone = cluster.everyone();
    let shown = |(info, state): &(Arc<NodeInfo>, NodeState)| {
        let mut node = node(&cluster, info, state);
        node["breaker"] = breaker(breakers.of(info).as_ref());
        node
    };
    let nodes: Vec<Value> = everyone.iter().map(shown).collect();
    let infos: Vec<&NodeInfo> = everyone.iter().map(|(info, _)| &**info).collect();
    let (pairs, pairs_left_out) = pairs(&infos);
    let failing = breakers.paths();
    let failing = failing.iter().map(|([from, to], path)| {
        json!({ "from": from.as_str(), "to": to.as_str(), "breaker": breaker(Some(path)) })
    });
    let models: Vec<Value> = cluster.groups().iter().map(model).collect();
    let learned = learned(&cluster.learner().costs());
    let lines: Vec<Value> = admission.shown().iter().map(line).collect();
    Json(json!({
        "nodes": nodes,
        "models": models,
        "lines": lines,
        "balance": balance.map(|balance| balance.shown()),
        "learned": learned,
        "pairs": pairs,
        "pairs_left_out": pairs_left_out,
        "failing_pairs": failing.collect::<Vec<_>>(),
    }))
}

/// Returns the costs learned from requests as JSON.
fn learned(costs: &RouteCosts) -> Value {
    let connector = |(scheme, costs): &(Scheme, ConnectorCosts)| {
        let shown = json!({
            "bytes_per_second": (costs.rate * 1e3).round(),
            "tail_ms": costs.tail_ms,
            "transfers": costs.n_transfers,
        });
        (scheme.as_str().to_owned(), shown)
    };
    let calls = |arm: Arm| {
        let CallTime { ms, n_requests } = costs.calls(arm);
        json!({ "ms": ms, "requests": n_requests })
    };
    json!({
        "connectors": costs.connectors().map(connector).collect::<Map<_, _>>(),
        "calls": { "remote": calls(Arm::Remote), "local": calls(Arm::Local) },
    })
}

/// Returns the line of a model as JSON.
fn line(line: &ShownLine) -> Value {
    let tenants = line.waiting.iter().map(|((priority, tenant), n_waiting)| {
        json!({ "priority": priority, "tenant": tenant, "waiting": n_waiting })
    });
    json!({
        "model": line.model,
        "waiting": line.n_waiting,
        "served": line.n_served,
        "admitted": line.n_admitted,
        "tenants": tenants.collect::<Vec<_>>(),
        "work_per_second": line.work_per_second,
        "answer_tokens": line.answer_tokens,
    })
}

/// Returns the breaker of a node, or of a pair of nodes, as JSON.
fn breaker(breaker: Option<&Breaker>) -> Value {
    let failures = breaker.map_or(0, Breaker::failures);
    match breaker.map_or(BreakerState::Closed, Breaker::state) {
        BreakerState::Closed => json!({ "state": "closed", "failures": failures }),
        BreakerState::HalfOpen => json!({ "state": "half_open", "failures": failures }),
        BreakerState::Open { until } => {
            let left = until.saturating_duration_since(Instant::now());
            json!({ "state": "open", "failures": failures, "tried_in_ms": left.as_millis() as u64 })
        }
    }
}

fn node(cluster: &Cluster, info: &NodeInfo, state: &NodeState) -> Value {
    let connectors: Vec<&str> = info.wires.iter().map(|wire| wire.scheme.as_str()).collect();
    let without: Vec<Value> = info.without.iter().map(missing).collect();
    let load = cluster.load(&info.id);
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
        "waiting": load.waiting,
        "load": self::load(load),
        "known_from": if cluster.is_old(&info.id) { "file" } else { "registry" },
        "cached_blocks": cache.as_ref().and_then(|cache| cache.n_cached()),
        "cache": cache.as_ref().map(|cache| cache.knowledge().as_str()),
    });
    let reason = state.reason().map(str::to_owned).or_else(|| cluster.no_stream(&info.id));
    if let Some(reason) = reason {
        node["reason"] = json!(reason);
    }
    node
}

/// Returns a node's last report about its load.
fn load(load: NodeLoad) -> Value {
    let mut shown = json!({
        "running": load.running,
        "arriving": load.arriving,
        "queued_tokens": load.queued_tokens,
        "queue_ms": load.queue_ms,
        "step_ms": load.step_ms,
        "learned": {
            "prompt_token_ms": load.costs.prompt_token_ms,
            "prompt_context_ms": load.costs.prompt_context_ms,
            "prompt_step_ms": load.costs.prompt_step_ms,
            "step_ms": load.costs.step_ms,
            "row_ms": load.costs.row_ms,
            "context_ms": load.costs.context_ms,
            "step_tokens": load.costs.step_tokens,
            "gap_ms_max": load.costs.gap_ms_max,
        },
        "blocks": {},
    });
    add_counts(&mut shown["blocks"], load.blocks);
    shown
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
async fn kv(
    State(cluster): State<Cluster>,
    query: Result<Query<KvQuery>, QueryRejection>,
) -> Result<Json<Value>, HttpError> {
    let Query(query) = query?;
    let detail = if query.blocks == 0 { LedgerDetail::Counts } else { LedgerDetail::Blocks };
    let asked = cluster.everyone().into_iter().map(|(info, _)| ledger(cluster.clone(), info, detail));
    Ok(Json(json!({ "nodes": join_all(asked).await })))
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
