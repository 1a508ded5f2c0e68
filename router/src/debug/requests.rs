//! `/debug/requests` and `/debug/requests/ID`: the records of requests. No text, token or key is shown.

use std::collections::BTreeMap;
use std::time::Duration;

use axum::Json;
use axum::extract::rejection::{PathRejection, QueryRejection};
use axum::extract::{Path, Query, State};
use serde::Deserialize;
use serde_json::{Map, Value, json};

use crate::http::{Code, HttpError, ms, parts_ms, route, worst_gap};
use crate::requests::{Place, RequestEvent, RequestRecord, RequestSummary, Requests};

#[derive(Debug, Deserialize)]
pub(super) struct ListQuery {
    /// The number of requests in each list.
    #[serde(default = "ListQuery::usual")]
    limit: usize,
}

impl ListQuery {
    fn usual() -> usize {
        100
    }
}

/// Answers with the requests under way, the last that ended, and the slowest.
pub(super) async fn list(
    State(requests): State<Requests>,
    query: Result<Query<ListQuery>, QueryRejection>,
) -> Result<Json<Value>, HttpError> {
    let Query(query) = query?;
    let lines = |records: Vec<RequestRecord>| {
        records.iter().take(query.limit).map(|record| line(record, &record.summary())).collect::<Vec<_>>()
    };
    Ok(Json(json!({
        "under_way": lines(requests.under_way()),
        "last": lines(requests.last()),
        "slowest": lines(requests.slowest()),
    })))
}

/// Answers with the records of one request, one for each of its answers.
pub(super) async fn one(
    State(requests): State<Requests>,
    id: Result<Path<String>, PathRejection>,
) -> Result<Json<Value>, HttpError> {
    let Path(id) = id?;
    match requests.find(&id) {
        found if found.is_empty() => {
            let message =
                "no such request is under way, among the last 1,000 that ended, or among the slowest 100";
            Err(HttpError::new(Code::NotFound, message))
        }
        found => Ok(Json(json!({ "requests": found.iter().map(whole).collect::<Vec<_>>() }))),
    }
}

/// Returns one request as it stands in a list.
fn line(record: &RequestRecord, summary: &RequestSummary) -> Value {
    let mut line = json!({
        "id": record.id().as_str(),
        "model": record.model(),
        "arrived": record.arrived().as_secs_f64(),
        "ms": ms(summary.took),
        "first_token_ms": summary.first_token.map(ms),
        "prompt_tokens": record.prompt_tokens(),
        "output_tokens": summary.output_tokens,
        "tries": summary.tries,
        "continuations": summary.continuations,
        "stages_ms": stages(summary),
    });
    match summary.outcome {
        Some(outcome) => line["outcome"] = json!(outcome),
        None => line["place"] = json!(record.place().as_str()),
    }
    line
}

/// Returns everything about one request.
fn whole(record: &RequestRecord) -> Value {
    let summary = record.summary();
    let mut whole = line(record, &summary);
    whole["cached_tokens"] = json!(summary.cached_tokens);
    whole["parts_ms"] = parts_ms(&summary.parts);
    whole["route"] = json!(summary.decision.as_deref().map(route));
    whole["worst_gap"] = json!(summary.worst_gap.as_ref().map(worst_gap));
    whole["prefill_node_ms"] = json!(
        summary.prefill_node.map(|(queue, compute)| json!({ "queue": ms(queue), "compute": ms(compute) }))
    );
    whole["kv"] = json!(kv(&summary));
    whole["events"] = summary.events.iter().map(|(at, event)| shown(*at, event)).collect();
    whole["events_left_out"] = json!(summary.events_left_out);
    whole
}

/// Returns the time in each place. Their sum is the request's duration.
fn stages(summary: &RequestSummary) -> Value {
    let places = Place::ALL.into_iter().zip(summary.places);
    places.map(|(place, took)| (place.as_str().to_owned(), json!(ms(took)))).collect::<Map<_, _>>().into()
}

/// Returns the bytes of KV that arrived, by connector.
fn kv(summary: &RequestSummary) -> BTreeMap<&str, u64> {
    let mut bytes_by_connector = BTreeMap::new();
    for (_, event) in &summary.events {
        if let RequestEvent::KvArrived { connector, bytes, .. } = event {
            *bytes_by_connector.entry(connector.as_str()).or_default() += bytes;
        }
    }
    bytes_by_connector
}

fn shown(at: Duration, event: &RequestEvent) -> Value {
    let mut shown = match event {
        RequestEvent::Try { prefill, decode } => {
            let name = |node: &Option<types::NodeId>| node.as_ref().map(|node| node.as_str().to_owned());
            json!({ "event": "try", "prefill": name(prefill), "decode": name(decode) })
        }
        RequestEvent::Store { pool } => json!({ "event": "store", "pool": pool.as_str() }),
        RequestEvent::Deliver { decode } => json!({ "event": "deliver", "decode": decode.as_str() }),
        RequestEvent::Failed { node, code } => {
            json!({ "event": "failed", "node": node.as_str(), "code": code })
        }
        RequestEvent::FirstToken => json!({ "event": "first_token" }),
        RequestEvent::KvArrived { connector, bytes, waited, moved } => json!({
            "event": "kv_arrived",
            "connector": connector,
            "bytes": bytes,
            "transfer_ms": ms(*waited),
            "moved_ms": ms(*moved),
        }),
        RequestEvent::Continue { code } => json!({ "event": "continue", "code": code }),
    };
    shown["at_ms"] = json!(ms(at));
    shown
}

#[cfg(test)]
mod tests {
    use axum::Router;
    use axum::body::Body;
    use axum::routing::get;
    use http::Request;

    use super::*;
    use crate::http::tests::fake_serve::send;

    #[tokio::test]
    async fn a_wrong_query_or_path_is_refused_as_json() {
        let routes = Router::new().route("/requests", get(list)).route("/requests/{id}", get(one));
        for (path, param, message) in [
            ("/requests?limit=abc", json!("limit"), "limit: invalid digit found in string"),
            ("/requests?limit=1&limit=2", Value::Null, "duplicate field `limit`"),
            ("/requests/%ff", Value::Null, "Invalid URL: Invalid UTF-8 in `id`"),
        ] {
            let app = routes.clone().with_state(Requests::default());
            let answer = send(app, Request::get(path).body(Body::empty()).expect("a request")).await;
            let error = &answer.json()["error"];
            assert_eq!((answer.status.as_u16(), &error["code"]), (400, &json!("invalid_value")));
            assert_eq!((&error["param"], &error["message"]), (&param, &json!(message)), "{path}");
        }
    }
}
