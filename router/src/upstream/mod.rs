//! Pools of other engines behind this router: requests and answers pass through as they came.
//!
//! Suggested reading order: the settings ([`settings`]); the servers ([`members`], [`source`], `kubernetes`); a request's
//! JSON ([`fields`]); one call to a server (`leg`, over `client`); the legs of a request (this file); and its answer
//! ([`answer`]).
//!
//! `crate::dispatch` is the counterpart for Baton's own nodes. Tenants, deadlines, the drain, records and metrics
//! are the same for both. No server reports its room for prompts, so a number of requests is the limit.

pub mod answer;
mod client;
pub mod fields;
mod kubernetes;
mod leg;
mod limit;
pub mod members;
pub mod settings;
pub mod source;

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use chassis::{Gate, Task, World, spawn_guarded};
use http::{HeaderMap, HeaderValue, Method, Request, header};
use http_body_util::Full;
use serde_json::{Value, json};
use tracing::info;
use types::NodeId;

pub use self::answer::{AnswerStream, UpstreamAnswer};
use self::answer::{HeldByAnswer, StartedAnswer, kind_of};
use self::client::EngineClient;
pub use self::fields::Fields;
pub(crate) use self::leg::LEG_OUTCOMES;
use self::leg::{DrainedLeg, FailedLeg, Leg, LegFailure};
pub use self::limit::RequestLimit;
pub use self::members::{Health, LegRole, MemberStatus, SourceState};
use self::members::{LegPlace, Pool};
pub use self::settings::{EngineKind, PoolSource, UpstreamSection, UpstreamSettings};
use self::source::Source;
use crate::accept::Caller;
use crate::admission::AdmissionTerms;
use crate::drain::Drain;
use crate::error::{AcceptError, ServeError};
use crate::metrics::{Outcome, RouterMetrics};
use crate::requests::{Part, Place, RecordHead, RequestEvent, RequestRecord, Requests};
use crate::serve::{Arrival, Ready};
use crate::tenants::{TenantPermit, Tenants};

/// The largest bootstrap room of a request. SGLang counts up from it for each further answer of the request, in 63
/// bits.
const ROOM_MAX: u64 = (1 << 63) - (1 << 20);

/// Serves requests on the pools of another engine. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Upstream(Arc<UpstreamParts>);

#[derive(Debug)]
pub struct UpstreamParts {
    pub settings: UpstreamSettings,
    pub pools: Pools,
    pub world: World,
    pub limit: RequestLimit,
    pub tenants: Tenants,
    pub requests: Requests,
    /// The number of servers of each kind that may fail one request.
    pub attempts_max: u32,
    pub metrics: RouterMetrics,
    pub drain: Drain,
    pub gate: Gate,
}

/// The two pools, with the client that calls their servers.
#[derive(Debug)]
pub struct Pools {
    prefill: Pool,
    decode: Pool,
    client: EngineClient,
    /// The `authorization` of calls.
    authorization: Option<HeaderValue>,
    /// The lists of servers that are not followed yet.
    sources: Vec<(LegRole, Source)>,
    /// The tasks that follow lists.
    following: Vec<Task<()>>,
}

/// A request as the client sent it.
#[derive(Debug)]
pub struct UpstreamRequest {
    pub method: Method,
    /// The path and the query.
    pub target: String,
    /// The headers that the servers get.
    pub headers: HeaderMap,
    pub body: Bytes,
    pub legs: Legs,
    /// The number of answers that the request asks for.
    pub n_answers: usize,
}

/// The servers that a request needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Legs {
    /// A prefill server computes the prompt for a decode server. The body is a JSON object.
    Both,
    /// One server does all.
    Only(LegRole),
}

impl Pools {
    /// Begins to check the servers. An error is the reason why the API key cannot be read, or a list cannot be followed.
    pub fn new(settings: &UpstreamSettings, gate: &Gate) -> Result<Self, String> {
        let client = EngineClient::new();
        let authorization = settings.api_key_file.as_deref().map(authorization).transpose()?;
        let pool = |role| Pool::new(role, &client, gate);
        let (prefill, decode, following) = (pool(LegRole::Prefill), pool(LegRole::Decode), Vec::new());
        let mut pools = Self { prefill, decode, client, authorization, sources: Vec::new(), following };
        for (role, source) in [(LegRole::Prefill, &settings.prefill), (LegRole::Decode, &settings.decode)] {
            match source {
                PoolSource::Fixed(addresses) => pools.of(role).set(addresses.clone()),
                PoolSource::Etcd(url) => pools.sources.push((role, Source::etcd(role, url)?)),
                PoolSource::Kubernetes(service) => pools.sources.push((role, Source::kubernetes(service)?)),
            }
        }
        Ok(pools)
    }

    /// Begins to follow the lists of servers.
    fn follow(&mut self, world: &World, metrics: &RouterMetrics, gate: &Gate) {
        for (role, source) in std::mem::take(&mut self.sources) {
            let following = source.follow(self.of(role).clone(), world.clone(), metrics.clone());
            self.following.push(spawn_guarded(gate, "upstream list", following));
        }
    }

    fn of(&self, role: LegRole) -> &Pool {
        match role {
            LegRole::Prefill => &self.prefill,
            LegRole::Decode => &self.decode,
        }
    }
}

fn authorization(file: &Path) -> Result<HeaderValue, String> {
    let failed = |reason: String| format!("read {}: {reason}", file.display());
    let key = std::fs::read_to_string(file).map_err(|error| failed(error.to_string()))?;
    let value = HeaderValue::from_str(&format!("Bearer {}", key.trim()));
    let mut value = value.map_err(|_| failed("the key is not plain text".to_owned()))?;
    value.set_sensitive(true);
    Ok(value)
}

// === impl Upstream ===

impl Upstream {
    /// Begins to follow the lists of servers.
    pub fn new(mut parts: UpstreamParts) -> Self {
        parts.pools.follow(&parts.world, &parts.metrics, &parts.gate);
        Self(Arc::new(parts))
    }

    pub fn kind(&self) -> EngineKind {
        self.0.settings.kind
    }

    /// Returns the servers, the prefill servers first.
    pub fn members(&self) -> Vec<MemberStatus> {
        let Pools { prefill, decode, .. } = &self.0.pools;
        [prefill.status(), decode.status()].concat()
    }

    /// Returns the source of each pool's servers.
    pub fn sources(&self) -> [(LegRole, SourceState); 2] {
        LegRole::ALL.map(|role| (role, self.0.pools.of(role).source()))
    }

    /// Counts a request against its tenant's limits. `prompt_tokens` is an estimate, because the router has no
    /// tokenizer here.
    pub fn admit(
        &self,
        caller: &Caller,
        n_answers: usize,
        prompt_tokens: usize,
    ) -> Result<Option<Arc<TenantPermit>>, AcceptError> {
        let UpstreamParts { tenants, limit, .. } = &*self.0;
        limit.check(n_answers)?;
        let admitted = tenants.admit(&caller.client, n_answers, prompt_tokens);
        admitted.inspect_err(|error| tenants.refused(&caller.client, error))
    }

    /// Serves a request. Returns when the first bytes of the answer are there; until then other servers are
    /// tried. Dropping the future or the answer ends the request on all servers.
    pub async fn serve(
        &self,
        request: UpstreamRequest,
        caller: &Caller,
        tenant: Option<Arc<TenantPermit>>,
    ) -> Result<UpstreamAnswer, ServeError> {
        let UpstreamParts { settings, world, limit, requests, metrics, drain, .. } = &*self.0;
        let mut outcome = Outcome::new(metrics.of_model(&settings.model), caller.arrived);
        let arrival = Arrival {
            at: caller.arrived,
            read: caller.read,
            accepted: world.now(),
            detail: caller.detail,
            terms: AdmissionTerms::default(),
        };
        let unix_time = world.unix_time().saturating_sub(arrival.at.elapsed());
        let head =
            RecordHead { id: caller.id.clone(), model: settings.model.as_str().into(), prompt_tokens: 0 };
        let open = requests.begin(head, &arrival, unix_time);
        let record = open.record().clone();
        record.enter_part(Part::Admission);
        let permits = (0..request.n_answers).map(|_| limit.admit()).collect();
        let permits = match outcome.note(permits) {
            Ok(permits) => permits,
            Err(refused) => {
                open.discard();
                return Err(refused);
            }
        };
        outcome.keep(open);
        let starting = drain.by_deadline(caller.deadline, self.start(&request, &record));
        let StartedAnswer { head, first, rest } = outcome.note(starting.await)?;
        if head.status.is_success() {
            let ttft = record.first_token(types::Usage::default());
            outcome.metrics().first_token.observe(ttft.as_secs_f64());
        } else {
            let (kind, reason) = (kind_of(head.status.as_u16()), head.status.to_string());
            let _ = outcome.note(Err::<(), _>(ServeError::Refused { kind, reason }));
        }
        record.enter(Place::Client);
        let held = HeldByAnswer { outcome, _permits: permits, tenant };
        let bytes = AnswerStream::new(first, rest, held, caller.deadline, drain);
        Ok(UpstreamAnswer { head, record, bytes })
    }

    /// Tries servers until an answer begins. A server that fails is not tried again by this request. A refusal
    /// that is the last is passed on as it came.
    async fn start(
        &self,
        request: &UpstreamRequest,
        record: &RequestRecord,
    ) -> Result<StartedAnswer, ServeError> {
        let UpstreamParts { attempts_max, metrics, .. } = &*self.0;
        let (mut failed, mut last) = (Vec::new(), None::<FailedLeg>);
        for _ in 0..*attempts_max {
            record.enter(Place::Route);
            let route = match self.route(request, &failed) {
                Ok(route) => route,
                // The servers that are left are down, or have failed this request.
                Err(reason) if last.is_none() => return Err(ServeError::NoNodes { reason }),
                Err(_) => break,
            };
            metrics.attempts.inc();
            record.note(route.event());
            let leg = match self.attempt(request, route, record).await {
                Ok(started) => return Ok(started),
                Err(leg) => leg,
            };
            let (code, url) = (leg.code(), leg.url.clone());
            info!(role = leg.role.as_str(), url, code, "leg failed before the first byte of the answer");
            record.note(RequestEvent::Failed { node: NodeId::new(url.as_str()), code });
            let is_over = !leg.is_retryable();
            last = Some(leg);
            if is_over {
                break;
            }
            metrics.retries.with_label_values(&[code]).inc();
            failed.push(url);
        }
        match last.expect("attempts_max is at least 1, and only a failed leg ends the loop") {
            FailedLeg { why: LegFailure::Refused(refusal), .. } => Ok(StartedAnswer::of_refusal(*refusal)),
            unanswered => Err(unanswered.into()),
        }
    }

    /// Chooses servers. An answer of vLLM's prefill server describes the KV of one sequence, so a decode server computes the
    /// prompts of several answers.
    fn route(&self, request: &UpstreamRequest, failed: &[String]) -> Result<UpstreamRoute, String> {
        let now = self.0.world.now();
        let place = |role| self.0.pools.of(role).place(failed, now);
        match (request.legs, self.kind()) {
            (Legs::Only(role), _) => Ok(UpstreamRoute::One { role, place: place(role)? }),
            (Legs::Both, EngineKind::Vllm) if request.n_answers > 1 => {
                Ok(UpstreamRoute::One { role: LegRole::Decode, place: place(LegRole::Decode)? })
            }
            (Legs::Both, _) => {
                Ok(UpstreamRoute::Two { prefill: place(LegRole::Prefill)?, decode: place(LegRole::Decode)? })
            }
        }
    }

    async fn attempt(
        &self,
        request: &UpstreamRequest,
        route: UpstreamRoute,
        record: &RequestRecord,
    ) -> Result<StartedAnswer, FailedLeg> {
        match (route, self.kind()) {
            (UpstreamRoute::One { role, place }, _) => {
                record.enter(if role == LegRole::Prefill { Place::Prefill } else { Place::Decode });
                let body = match request.legs {
                    Legs::Both => without_kv(&request.body),
                    Legs::Only(_) => request.body.clone(),
                };
                let begun = self.leg(role, place, request, body).begin().await?;
                Ok(StartedAnswer::of_legs(begun, None, &self.0.gate))
            }
            (UpstreamRoute::Two { prefill, decode }, EngineKind::Vllm) => {
                self.one_after_the_other(request, prefill, decode, record).await
            }
            (UpstreamRoute::Two { prefill, decode }, EngineKind::Sglang) => {
                record.enter(Place::Prefill);
                self.both_at_once(request, prefill, decode).await
            }
        }
    }

    /// vLLM: the prefill server computes the prompt and one token, and says how to fetch the KV. An answer
    /// without that has no KV to fetch, and the decode server computes the prompt itself.
    async fn one_after_the_other(
        &self,
        request: &UpstreamRequest,
        prefill: LegPlace,
        decode: LegPlace,
        record: &RequestRecord,
    ) -> Result<StartedAnswer, FailedLeg> {
        let fields = Fields::parse(&request.body).expect("the request's fields have been read");
        record.enter(Place::Prefill);
        let mut leg = self.leg(LegRole::Prefill, prefill, request, vllm_prefill(fields.clone()));
        // This router reads the answer, and it does not decompress.
        leg.request.headers_mut().remove(header::ACCEPT_ENCODING);
        let computed = leg.whole().await?;
        let params = Fields::parse(&computed).ok().and_then(|computed| computed.get::<Value>(KV_PARAMS));
        let mut fields = fields;
        match params.filter(|params| !params.is_null()) {
            Some(params) => fields.set(KV_PARAMS, &params),
            None => {
                self.0.metrics.upstream_prefills_without_kv.inc();
                fields.remove(KV_PARAMS);
            }
        }
        record.enter(Place::Decode);
        let begun = self.leg(LegRole::Decode, decode, request, fields.write()).begin().await?;
        Ok(StartedAnswer::of_legs(begun, None, &self.0.gate))
    }

    /// SGLang: both servers get the request with a bootstrap room that no other request has, and find each
    /// other by it. The first leg that fails ends the other one.
    async fn both_at_once(
        &self,
        request: &UpstreamRequest,
        prefill: LegPlace,
        decode: LegPlace,
    ) -> Result<StartedAnswer, FailedLeg> {
        let mut fields = Fields::parse(&request.body).expect("the request's fields have been read");
        let address = prefill.address();
        fields.set("bootstrap_host", &address.host);
        fields.set("bootstrap_port", &address.bootstrap_port);
        fields.set("bootstrap_room", &(self.0.world.draw() % ROOM_MAX));
        let body = fields.write();
        let mut prefill: Option<DrainedLeg> =
            Some(self.leg(LegRole::Prefill, prefill, request, body.clone()).drain());
        let mut decode = Box::pin(self.leg(LegRole::Decode, decode, request, body).begin());
        loop {
            let Some(running) = &mut prefill else {
                return Ok(StartedAnswer::of_legs(decode.await?, None, &self.0.gate));
            };
            tokio::select! {
                begun = &mut decode => return Ok(StartedAnswer::of_legs(begun?, prefill, &self.0.gate)),
                ended = running => {
                    prefill = None;
                    ended?;
                }
            }
        }
    }

    fn leg(&self, role: LegRole, place: LegPlace, request: &UpstreamRequest, body: Bytes) -> Leg {
        let url = format!("{}{}", place.address().base, request.target);
        let call = Request::builder().method(request.method.clone()).uri(url).body(Full::new(body));
        let mut call = call.expect("the base is a URL, and the target is the one of a request");
        *call.headers_mut() = request.headers.clone();
        if let Some(authorization) = &self.0.pools.authorization {
            call.headers_mut().insert(header::AUTHORIZATION, authorization.clone());
        }
        let (client, counter) = (self.0.pools.client.clone(), self.0.metrics.upstream_legs.clone());
        Leg { role, client, request: call, place, counter }
    }
}

impl Ready for Upstream {
    fn ready(&self) -> Result<(), String> {
        if self.0.drain.requested.requested() {
            return Err("the router is stopping".to_owned());
        }
        LegRole::ALL.into_iter().try_for_each(|role| self.0.pools.of(role).ready())
    }
}

// === the two engines ===

/// vLLM's field for the parameters of a transfer of KV.
const KV_PARAMS: &str = "kv_transfer_params";

/// Returns the body of vLLM's prefill leg: one token, not streamed, and KV that stays for another server.
fn vllm_prefill(mut fields: Fields<'_>) -> Bytes {
    let params = json!({
        "do_remote_decode": true,
        "do_remote_prefill": false,
        "remote_engine_id": null,
        "remote_block_ids": null,
        "remote_host": null,
        "remote_port": null,
    });
    fields.set(KV_PARAMS, &params);
    fields.set("stream", &false);
    fields.set("max_tokens", &1);
    fields.replace("max_completion_tokens", &1);
    ["stream_options", "min_tokens", "min_completion_tokens"].iter().for_each(|name| fields.remove(name));
    fields.write()
}

/// Returns the body of a leg that computes its prompts itself.
fn without_kv(body: &[u8]) -> Bytes {
    let mut fields = Fields::parse(body).expect("the request's fields have been read");
    fields.remove(KV_PARAMS);
    fields.write()
}

/// The servers of one attempt, with their places.
enum UpstreamRoute {
    One { role: LegRole, place: LegPlace },
    Two { prefill: LegPlace, decode: LegPlace },
}

impl UpstreamRoute {
    fn event(&self) -> RequestEvent {
        let node = |place: &LegPlace| Some(NodeId::new(place.address().base.as_str()));
        let (prefill, decode) = match self {
            Self::Two { prefill, decode } => (node(prefill), node(decode)),
            Self::One { role: LegRole::Prefill, place } => (node(place), None),
            Self::One { role: LegRole::Decode, place } => (None, node(place)),
        };
        RequestEvent::Try { prefill, decode }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_prefill_leg_of_vllm_asks_for_one_token() {
        let body = br#"{"model":"m","stream":true,"stream_options":{},"max_completion_tokens":9,"min_tokens":2,"n":1.0}"#;
        let written = vllm_prefill(Fields::parse(body).expect("an object"));
        let expected = concat!(
            r#"{"model":"m","stream":false,"max_completion_tokens":1,"n":1.0,"kv_transfer_params":"#,
            r#"{"do_remote_decode":true,"do_remote_prefill":false,"remote_engine_id":null,"remote_block_ids":null,"#,
            r#""remote_host":null,"remote_port":null},"max_tokens":1}"#
        );
        assert_eq!(std::str::from_utf8(&written), Ok(expected));
    }
}
