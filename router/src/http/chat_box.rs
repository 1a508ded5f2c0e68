//! The live page's chat box: chats on the admin port, with a limit that leaves its connections to probes.

use axum::Router;
use axum::body::Body;
use axum::extract::{Request, State};
use axum::middleware::{self, Next};
use axum::response::Response;
use axum::routing::{MethodRouter, post};
use chassis::counted::Counter;
use http_body_util::BodyExt as _;

use super::api::HttpApi;
use super::caller;
use super::error::HttpError;
use crate::error::{RETRY_AFTER, ServeError};

/// The limit of concurrent chats. The admin port has `expert.connections.admin_max` connections, 64 by default.
const CHATS_MAX: u32 = 16;

/// Returns the route of the live page's chat box: the API's, on the admin port. A page may call only its own
/// origin without CORS, and the HTTP port may be unreachable for the operator's browser. The admin key is in
/// `authorization`, so the API key is in another header: `caller::without_admin_key`.
pub fn chat_box(api: HttpApi) -> Router {
    answered_by(post(super::chat_completions)).with_state(api)
}

/// Returns the route with the handler that answers its chats.
pub(super) fn answered_by<S: Clone + Send + Sync + 'static>(handler: MethodRouter<S>) -> Router<S> {
    Router::new()
        .route("/debug/v1/chat/completions", handler)
        .layer(middleware::from_fn(caller::without_admin_key))
        .layer(middleware::from_fn_with_state(Counter::default(), bounded))
}

/// Refuses a chat above the limit. A chat counts until its answer has ended.
async fn bounded(State(chats): State<Counter>, request: Request, next: Next) -> Result<Response, HttpError> {
    let Some(chat) = chats.enter(CHATS_MAX) else {
        let reason = format!("the live page has {CHATS_MAX} chats already");
        return Err(ServeError::Overloaded { retry_after: RETRY_AFTER, reason }.into());
    };
    let answer = next.run(request).await;
    Ok(answer.map(|body| {
        Body::new(body.map_frame(move |frame| {
            let _held = &chat;
            frame
        }))
    }))
}

#[cfg(test)]
mod tests {
    use http::StatusCode;
    use tower::ServiceExt as _;

    use super::*;
    use crate::http::tests::fake_serve::{FakeServe, app, babbles};

    #[tokio::test(start_paused = true)]
    async fn chats_above_the_limit_are_refused_until_one_has_ended() {
        let app = app(&FakeServe::new(|_| babbles()));
        let chat = async || {
            let body =
                r#"{"messages": [{"role": "user", "content": "Hi"}], "stream": true, "max_tokens": 500}"#;
            let request =
                Request::post("/debug/v1/chat/completions").body(Body::from(body)).expect("a request");
            app.clone().oneshot(request).await.expect("routers are infallible")
        };
        let mut answers = Vec::new();
        for _ in 0..CHATS_MAX {
            answers.push(chat().await);
        }
        assert!(answers.iter().all(|answer| answer.status() == StatusCode::OK));
        let refused = chat().await;
        assert_eq!(refused.status(), StatusCode::TOO_MANY_REQUESTS);
        assert_eq!(refused.headers()["retry-after"], "1");
        answers.pop();
        assert_eq!(chat().await.status(), StatusCode::OK);
    }
}
