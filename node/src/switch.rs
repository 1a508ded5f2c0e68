//! The admin pages that switch a node: `POST /sleep`, `POST /wake`, with `?role=` for another role, and `POST /role`
//! for a node that is awake.
//!
//! The caller waits for the answer; the switch continues if the caller disconnects. A request that comes
//! during a switch is handled after it. Only this file of the crate uses JSON and status codes.

use std::time::Duration;

use axum::extract::{Query, Request, State};
use axum::http::{StatusCode, header};
use axum::middleware::{self, Next};
use axum::response::{IntoResponse, Response};
use axum::routing::post;
use axum::{Json, Router};
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{mpsc, oneshot};
use types::{NodeId, Role};

/// The number of switch requests that may wait for the current one.
const WAITING_MAX: usize = 8;

/// An operator's request to switch the node to sleep, from sleep, or to a role.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SwitchRequest {
    Sleep,
    /// Wake the node in this role, or in its last role if `None`.
    Wake(Option<Role>),
    /// Change the role of the awake node.
    Role(RoleRequest),
}

/// The role that an awake node shall have.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RoleRequest {
    pub role: Role,
    /// Change the role even if no other node does the work that this node stops doing.
    pub force: bool,
}

/// The roles that a node can have: all that compute.
const ROLES: [Role; 3] = [Role::Prefill, Role::Decode, Role::Both];

/// A switch request, and the channel for its answer.
#[derive(Debug)]
pub struct PendingSwitch {
    pub request: SwitchRequest,
    answered_at: AnsweredAt,
    /// `None` once the answer was sent.
    answer: Option<oneshot::Sender<Result<Change, SwitchRefusal>>>,
}

/// The moment at which the caller of a switch gets its answer, unless the node refuses.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum AnsweredAt {
    Begin,
    End,
}

/// The result of a switch: its duration, and the device memory in use before and after.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Change {
    pub took: Duration,
    pub used_bytes_before: Option<u64>,
    pub used_bytes_after: Option<u64>,
    /// Whether the registry lists the node as it is now; `None`: it sleeps.
    pub announced: Option<bool>,
}

/// The reason why a switch request had no effect.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum SwitchRefusal {
    #[error("the node is asleep already")]
    AsleepAlready,
    #[error("the node is awake already")]
    AwakeAlready,
    #[error("the node is asleep: wake it in the role (/wake?role=ROLE)")]
    Asleep,
    #[error("the role is {0} already")]
    RoleAlready(Role),
    /// `silent` are the members that would do the work and do not answer.
    #[error("no other node {work} for `{model}`{}: add one, or use force=true (--force)", no_answer(silent))]
    LastOfKind { work: &'static str, model: String, silent: Vec<NodeId> },
    #[error("another node changes its role: try again when it has ended")]
    AnotherChanges,
    #[error("{0:?} is not a role of a node that computes: use prefill, decode or both")]
    UnknownRole(String),
    #[error("{WAITING_MAX} requests to sleep, wake or change the role are already waiting")]
    Busy,
    #[error("web pages may not switch nodes (the request names an Origin)")]
    FromAPage,
    #[error("the node is stopping")]
    Stopping,
    #[error("the node stays awake: {0}")]
    CannotSleep(String),
    #[error("the node stays asleep: {0}")]
    CannotWake(String),
    #[error("the role stays {role}: {why}")]
    CannotChangeRole { role: Role, why: String },
}

/// Names the members that do not answer, for the text of a refusal.
fn no_answer(silent: &[NodeId]) -> String {
    match silent {
        [] => String::new(),
        _ => {
            format!(" (no answer from {})", silent.iter().map(NodeId::as_str).collect::<Vec<_>>().join(", "))
        }
    }
}

/// The sending end of the queue of switch requests. Clones share one queue.
#[derive(Clone, Debug)]
pub struct Switch(mpsc::Sender<PendingSwitch>);

/// The receiving end of the queue of switch requests, the oldest first.
#[derive(Debug)]
pub struct SwitchRequests(mpsc::Receiver<PendingSwitch>);

/// Makes the two ends of the queue of switch requests.
pub fn switch() -> (Switch, SwitchRequests) {
    let (requests, asked) = mpsc::channel(WAITING_MAX);
    (Switch(requests), SwitchRequests(asked))
}

impl Switch {
    /// Sends a switch request and waits for the answer. If the future is dropped, the request stays in the
    /// queue.
    pub async fn ask(&self, request: SwitchRequest) -> Result<Change, SwitchRefusal> {
        self.send(request, AnsweredAt::End).await
    }

    /// Sends a request for another role and waits until the change begins, or is refused. If the future is dropped, the
    /// request stays in the queue.
    pub async fn begin(&self, request: RoleRequest) -> Result<(), SwitchRefusal> {
        self.send(SwitchRequest::Role(request), AnsweredAt::Begin).await.map(|_| ())
    }

    async fn send(&self, request: SwitchRequest, answered_at: AnsweredAt) -> Result<Change, SwitchRefusal> {
        let (answer, answered) = oneshot::channel();
        match self.0.try_send(PendingSwitch { request, answered_at, answer: Some(answer) }) {
            Err(mpsc::error::TrySendError::Full(_)) => Err(SwitchRefusal::Busy),
            Err(mpsc::error::TrySendError::Closed(_)) => Err(SwitchRefusal::Stopping),
            Ok(()) => answered.await.unwrap_or(Err(SwitchRefusal::Stopping)),
        }
    }

    /// Returns the `/sleep`, `/wake` and `/role` pages for the admin port.
    pub fn pages(self) -> Router {
        Router::new()
            .route("/sleep", post(sleep))
            .route("/wake", post(wake))
            .route("/role", post(change_role))
            .layer(middleware::from_fn(not_from_a_page))
            .with_state(self)
    }
}

/// The query parameters of `/wake`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct WakeQuery {
    role: Option<String>,
}

impl WakeQuery {
    fn request(self) -> Result<SwitchRequest, SwitchRefusal> {
        Ok(SwitchRequest::Wake(self.role.map(named).transpose()?))
    }
}

/// The query parameters of `/role`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RoleQuery {
    #[serde(default)]
    role: String,
    #[serde(default)]
    force: bool,
}

fn named(word: String) -> Result<Role, SwitchRefusal> {
    let role = ROLES.into_iter().find(|role| role.as_str() == word);
    role.ok_or(SwitchRefusal::UnknownRole(word))
}

/// Refuses requests from web pages: a page in an operator's browser can reach local ports, and browsers then
/// set `Origin`.
async fn not_from_a_page(request: Request, next: Next) -> Response {
    match request.headers().contains_key(header::ORIGIN) {
        true => page(Err(SwitchRefusal::FromAPage)),
        false => next.run(request).await,
    }
}

async fn sleep(State(switch): State<Switch>) -> Response {
    page(switch.ask(SwitchRequest::Sleep).await)
}

async fn wake(State(switch): State<Switch>, Query(query): Query<WakeQuery>) -> Response {
    page(match query.request() {
        Ok(request) => switch.ask(request).await,
        Err(unknown) => Err(unknown),
    })
}

async fn change_role(State(switch): State<Switch>, Query(query): Query<RoleQuery>) -> Response {
    let RoleQuery { role, force } = query;
    page(match named(role) {
        Ok(role) => switch.ask(SwitchRequest::Role(RoleRequest { role, force })).await,
        Err(unknown) => Err(unknown),
    })
}

impl SwitchRequests {
    /// Returns the next request. Waits forever if no sender is left. Cancel-safe.
    pub async fn next(&mut self) -> PendingSwitch {
        match self.0.recv().await {
            Some(asked) => asked,
            None => std::future::pending().await,
        }
    }
}

impl PendingSwitch {
    /// Sends the answer to the caller. It is lost if the caller has disconnected.
    pub fn answer(self, answer: Result<Change, SwitchRefusal>) {
        if let Some(caller) = self.answer {
            let _ = caller.send(answer);
        }
    }

    /// Answers a caller that waits only for the begin of the switch.
    pub fn begins(&mut self) {
        let waits = self.answered_at == AnsweredAt::Begin;
        if let Some(caller) = self.answer.take_if(|_| waits) {
            let (used_bytes_before, used_bytes_after, announced) = (None, None, None);
            let change = Change { took: Duration::ZERO, used_bytes_before, used_bytes_after, announced };
            let _ = caller.send(Ok(change));
        }
    }
}

impl SwitchRefusal {
    /// Returns the reason as a stable code for programs.
    pub fn code(&self) -> &'static str {
        match self {
            Self::AsleepAlready => "asleep_already",
            Self::AwakeAlready => "awake_already",
            Self::Asleep => "asleep",
            Self::RoleAlready(_) => "role_already",
            Self::LastOfKind { .. } => "last_of_kind",
            Self::AnotherChanges => "another_changes",
            Self::UnknownRole(_) => "unknown_role",
            Self::FromAPage => "from_a_page",
            Self::Busy => "busy",
            Self::Stopping => "stopping",
            Self::CannotSleep(_) => "cannot_sleep",
            Self::CannotWake(_) => "cannot_wake",
            Self::CannotChangeRole { .. } => "cannot_change_role",
        }
    }

    fn status(&self) -> StatusCode {
        match self {
            Self::AsleepAlready
            | Self::AwakeAlready
            | Self::Asleep
            | Self::RoleAlready(_)
            | Self::LastOfKind { .. }
            | Self::AnotherChanges => StatusCode::CONFLICT,
            Self::UnknownRole(_) => StatusCode::BAD_REQUEST,
            Self::FromAPage => StatusCode::FORBIDDEN,
            Self::Busy
            | Self::Stopping
            | Self::CannotSleep(_)
            | Self::CannotWake(_)
            | Self::CannotChangeRole { .. } => StatusCode::SERVICE_UNAVAILABLE,
        }
    }
}

fn page(answer: Result<Change, SwitchRefusal>) -> Response {
    match answer {
        Ok(Change { took, used_bytes_before, used_bytes_after, announced }) => Json(json!({
            "seconds": took.as_secs_f64(),
            "used_bytes_before": used_bytes_before,
            "used_bytes_after": used_bytes_after,
            "announced": announced,
        }))
        .into_response(),
        Err(unchanged) => {
            let error = json!({ "error": { "code": unchanged.code(), "message": unchanged.to_string() } });
            (unchanged.status(), Json(error)).into_response()
        }
    }
}

#[cfg(test)]
mod tests {
    use axum::body::Body;
    use tower::ServiceExt;

    use super::*;

    const CHANGE: Change = Change {
        took: Duration::from_secs(2),
        used_bytes_before: Some(5),
        used_bytes_after: None,
        announced: Some(false),
    };

    #[tokio::test]
    async fn a_request_is_answered() {
        let (switch, mut requests) = switch();
        let node = async {
            let asked = requests.next().await;
            assert_eq!(asked.request, SwitchRequest::Sleep);
            asked.answer(Ok(CHANGE));
            requests.next().await.answer(Err(SwitchRefusal::AsleepAlready));
        };
        let client = async {
            assert_eq!(switch.ask(SwitchRequest::Sleep).await, Ok(CHANGE));
            assert_eq!(switch.ask(SwitchRequest::Sleep).await, Err(SwitchRefusal::AsleepAlready));
        };
        tokio::join!(node, client);
    }

    #[tokio::test]
    async fn a_caller_may_wait_for_the_begin_only() {
        let (switch, mut requests) = switch();
        let request = RoleRequest { role: Role::Decode, force: false };
        let node = async {
            let mut asked = requests.next().await;
            asked.begins();
            asked.answer(Err(SwitchRefusal::Stopping));
            requests.next().await.answer(Err(SwitchRefusal::AnotherChanges));
            let mut asked = requests.next().await;
            asked.begins();
            asked.answer(Ok(CHANGE));
        };
        let client = async {
            assert_eq!(switch.begin(request).await, Ok(()), "it has begun, whatever comes later");
            assert_eq!(switch.begin(request).await, Err(SwitchRefusal::AnotherChanges));
            assert_eq!(switch.ask(SwitchRequest::Role(request)).await, Ok(CHANGE), "the end");
        };
        tokio::join!(node, client);
    }

    #[tokio::test]
    async fn requests_to_a_full_or_gone_node_are_answered_at_once() {
        let (switch, mut requests) = switch();
        let wake = SwitchRequest::Wake(None);
        let waiting: Vec<_> = (0..WAITING_MAX).map(|_| Box::pin(switch.ask(wake))).collect();
        let mut waiting = futures::future::join_all(waiting);
        assert!(futures::poll!(&mut waiting).is_pending());
        assert_eq!(switch.ask(wake).await, Err(SwitchRefusal::Busy));
        drop(requests.next().await);
        drop(requests);
        assert!(waiting.await.iter().all(|answer| *answer == Err(SwitchRefusal::Stopping)));
        assert_eq!(switch.ask(wake).await, Err(SwitchRefusal::Stopping));
    }

    #[tokio::test]
    async fn a_page_in_a_browser_changes_nothing() {
        let (switch, mut requests) = switch();
        for path in ["/sleep", "/wake", "/role?role=both"] {
            let request = Request::post(path).header("origin", "https://example.org").body(Body::empty());
            let answer = switch.clone().pages().oneshot(request.unwrap()).await.expect("pages always answer");
            assert_eq!(answer.status(), 403, "{path}");
        }
        assert!(futures::poll!(Box::pin(requests.next())).is_pending(), "the node was asked for nothing");
    }

    #[test]
    fn roles_are_those_that_compute() {
        let request = |role: Option<&str>| WakeQuery { role: role.map(str::to_owned) }.request();
        assert_eq!(request(None), Ok(SwitchRequest::Wake(None)));
        assert_eq!(request(Some("both")), Ok(SwitchRequest::Wake(Some(Role::Both))));
        let refused = request(Some("pool")).expect_err("it computes nothing");
        assert_eq!(
            refused.to_string(),
            "\"pool\" is not a role of a node that computes: use prefill, decode or both"
        );
    }

    #[tokio::test]
    async fn pages_say_what_they_mean() {
        for (answer, status, body) in [
            (
                Ok(CHANGE),
                200,
                r#"{"seconds":2.0,"used_bytes_before":5,"used_bytes_after":null,"announced":false}"#,
            ),
            (
                Err(SwitchRefusal::AsleepAlready),
                409,
                r#"{"error":{"code":"asleep_already","message":"the node is asleep already"}}"#,
            ),
            (
                Err(SwitchRefusal::CannotWake("no room".to_owned())),
                503,
                r#"{"error":{"code":"cannot_wake","message":"the node stays asleep: no room"}}"#,
            ),
        ] {
            let page = page(answer);
            assert_eq!(page.status(), status);
            let bytes = axum::body::to_bytes(page.into_body(), 1 << 10).await.expect("a short page");
            assert_eq!(String::from_utf8_lossy(&bytes), body);
        }
    }
}
