//! A call has an id: in the metadata of its answer or error, and in the log.

use std::sync::Arc;

use chassis::metrics::Metrics;
use chassis::telemetry::{Capture, request_span};
use tonic::metadata::MetadataMap;
use tracing::Instrument as _;

use super::*;
use crate::accept::Deadlines;
use crate::http::tests::fake_serve::FakeServe;

fn api() -> GrpcApi {
    let world = World::seeded(1);
    let metrics = RouterMetrics::new(&Metrics::new("router"));
    let acceptor = Acceptor::new(world.clone(), Deadlines::default(), metrics.clone());
    let models = RouterModels::new([ServedModel::mock("org/mock", 512)]);
    let serve: Arc<FakeServe> = FakeServe::saying("x");
    GrpcApi { serve, models, acceptor, metrics, world, shutdown: Shutdown::new() }
}

/// Calls the API as the server does, in a span without an id. Returns the metadata of the answer or error.
async fn call(message: v1::GenerateRequest, metadata: &[(&'static str, &str)]) -> MetadataMap {
    let mut request = Request::new(message);
    for (name, value) in metadata {
        request.metadata_mut().insert(*name, value.parse().expect("a value"));
    }
    let span = request_span("/baton.v1.Inference/Generate", None, &::http::HeaderMap::new());
    match api().generate(request).instrument(span).await {
        Ok(answer) => answer.metadata().clone(),
        Err(status) => status.metadata().clone(),
    }
}

fn text(request_id: &str) -> v1::GenerateRequest {
    let input = Some(Input::Text("Hi".to_owned()));
    v1::GenerateRequest { input, request_id: request_id.to_owned(), ..Default::default() }
}

#[tokio::test(start_paused = true)]
async fn an_answer_and_an_error_have_the_id() {
    let refused = |request_id: &str| v1::GenerateRequest { n: Some(0), ..text(request_id) };
    let metadata = [(REQUEST_ID, "of-metadata")];
    for (message, metadata, expected) in [
        (text("of-message"), &metadata[..], "of-message"),
        (text(""), &metadata, "of-metadata"),
        (refused("of-message"), &[], "of-message"),
        (refused(""), &metadata, "of-metadata"),
    ] {
        let answered = call(message, metadata).await;
        assert_eq!(answered.get(REQUEST_ID).expect("an id"), expected);
    }
    let made = call(text(""), &[(REQUEST_ID, "a b")]).await;
    assert!(made.get(REQUEST_ID).expect("an id").to_str().expect("text").starts_with("req-"));
}

#[tokio::test(start_paused = true)]
async fn a_refused_call_is_in_the_log_with_its_id() {
    let capture = Capture::spans("router");
    {
        let _listening = capture.listen();
        call(v1::GenerateRequest { n: Some(0), ..text("r1") }, &[]).await;
    }
    let lines = capture.lines();
    let refused = lines.iter().find(|line| line["message"] == "request refused").expect("a line");
    assert_eq!((&refused["request_id"], &refused["code"]), (&"r1".into(), &"invalid_value".into()));
}
