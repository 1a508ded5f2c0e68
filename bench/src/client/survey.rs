//! Sends requests before a run, to find out the model, the way to count its tokens, and the latency of the
//! very first request.

use std::sync::Arc;
use std::time::Duration;

use serde_json::{Map, Value};
use tokio::time::Instant;

use crate::client::exchange::{Assignment, Client, ClientOptions};
use crate::client::recorder::AnswerText;
use crate::client::request::{Endpoint, OptionalFields, Prompt, RequestShape, ShapeParts};
use crate::client::target::TargetServer;
use crate::error::{BenchError, Result};
use crate::metrics::metric::ms;
use crate::record::{CountedBy, FailureKind, RequestRecord};

/// The timeout of the first request. The server may still load, compile or connect, so its time is reported
/// and not measured.
const FIRST_CONTACT_TIMEOUT: Duration = Duration::from_secs(300);
/// Pages that describe a server, for the report. Pages that a server does not have are left out.
const CONFIG_PAGES: [&str; 4] = ["/v1/models", "/version", "/debug/cluster", "/get_server_info"];

/// The settings of a survey of a server.
#[derive(Clone, Debug)]
pub struct SurveyRequest<'a> {
    pub endpoint: Endpoint,
    pub model: Option<&'a str>,
    pub headers: &'a [(String, String)],
    pub fields: &'a Map<String, Value>,
    pub ignore_eos: bool,
    /// A prompt that every server accepts.
    pub probe: Prompt,
}

/// The results of a survey of a server.
#[derive(Clone, Debug)]
pub struct Survey {
    pub model: String,
    pub shape: RequestShape,
    pub extras: OptionalFields,
    pub counted_by: CountedBy,
    /// The time to the first token of the very first request, in milliseconds.
    pub cold_ttft_ms: f64,
    pub cold_second_token_ms: f64,
    /// The server's configuration, as its pages show it, page by page.
    pub config: Map<String, Value>,
}

/// Surveys a server. If no form of request is answered, the error is the server's answer to the simplest one.
pub async fn survey(target: &Arc<TargetServer>, request: &SurveyRequest<'_>) -> Result<Survey> {
    let config = config(target).await;
    let model = match request.model {
        Some(model) => model.to_owned(),
        None => first_model(&config)
            .ok_or_else(|| BenchError::target(&target.url, "GET /v1/models names no model: give --model"))?,
    };
    let mut refusal = String::new();
    for extras in attempts(request) {
        let parts = ShapeParts {
            target,
            endpoint: request.endpoint,
            model: &model,
            extras,
            headers: request.headers,
            fields: request.fields,
        };
        let shape = RequestShape::new(&parts);
        let record = first_contact(target, &shape, &request.probe).await;
        match record.failure() {
            None => return Ok(found(model, shape, extras, &record, config)),
            Some(failure) if failure.kind == FailureKind::Status => refusal.clone_from(&failure.message),
            Some(failure) => return Err(BenchError::target(&target.url, &failure.message)),
        }
    }
    Err(BenchError::target(&target.url, refusal))
}

/// Returns the combinations of optional fields to try, from all to none: a server that refuses unknown fields
/// gets fewer.
fn attempts(request: &SurveyRequest<'_>) -> impl Iterator<Item = OptionalFields> + use<> {
    let ignore_eos = request.ignore_eos;
    let counting = [(true, true), (true, false), (false, true), (false, false)];
    let with = move |eos: bool| {
        counting.map(|(return_token_ids, continuous_usage)| OptionalFields {
            return_token_ids,
            continuous_usage,
            ignore_eos: eos,
        })
    };
    let plain = if ignore_eos { with(false).to_vec() } else { Vec::new() };
    with(ignore_eos).into_iter().chain(plain)
}

fn found(
    model: String,
    shape: RequestShape,
    extras: OptionalFields,
    record: &RequestRecord,
    config: Map<String, Value>,
) -> Survey {
    let or_never = |us: Option<u32>| us.map_or(f64::NAN, ms);
    Survey {
        model,
        shape,
        extras,
        counted_by: record.counted_by,
        cold_ttft_ms: or_never(record.token_us(0)),
        cold_second_token_ms: or_never(record.token_us(1)),
        config,
    }
}

/// Sends the very first request. It has three tokens, so that the transfer of KV after the first one is
/// included.
async fn first_contact(target: &Arc<TargetServer>, shape: &RequestShape, probe: &Prompt) -> RequestRecord {
    let options = ClientOptions { keeps_connections: false, timeout: FIRST_CONTACT_TIMEOUT };
    let client = Client::new(Arc::clone(target), Arc::default(), Instant::now(), options);
    let wire = shape.compose(probe, 3, "bench-first-contact");
    let assignment = Assignment {
        index: 0,
        session: 0,
        turn: 0,
        slice: 0,
        intended: Instant::now(),
        prompt_tokens: 0,
        wanted_tokens: 3,
        cancel_after: None,
        text: AnswerText::Discard,
    };
    client.exchange(assignment, wire).await.0
}

async fn config(target: &TargetServer) -> Map<String, Value> {
    let mut config = Map::new();
    for page in CONFIG_PAGES {
        if let Ok((200, body)) = target.get(page).await
            && let Ok(value) = serde_json::from_str(&body)
        {
            config.insert(page.to_owned(), value);
        }
    }
    config
}

fn first_model(config: &Map<String, Value>) -> Option<String> {
    config.get("/v1/models")?["data"][0]["id"].as_str().map(str::to_owned)
}
