//! The size of a call is bounded: as a message, after it is decompressed, and before its text is tokenized. Without access
//! it is not read at all.

use std::io::Write as _;

use bytes::Bytes;
use chassis::metrics::Metrics;
use futures::stream;
use http_body_util::{Full, StreamBody};
use hyper::body::Frame;
use proto::v1::inference_client::InferenceClient;
use tonic::Code;
use tonic::body::Body;
use tonic::codegen::Service as _;

use super::*;
use crate::accept::Deadlines;
use crate::http::tests::fake_serve::FakeServe;
use crate::tenants::{KeySources, TenantTable, Tenants, TenantsFile};

/// Calls the service as a client does, with a compressed message or without. The metrics are on `page`.
async fn call(page: &Metrics, compressed: Option<CompressionEncoding>, text: String) -> Result<(), Status> {
    call_with(page, Tenants::default(), compressed, text).await
}

async fn call_with(
    page: &Metrics,
    tenants: Tenants,
    compressed: Option<CompressionEncoding>,
    text: String,
) -> Result<(), Status> {
    let mut client = InferenceClient::new(api(page, tenants).server());
    if let Some(encoding) = compressed {
        client = client.send_compressed(encoding);
    }
    let input = Some(Input::Text(text));
    client.generate(v1::GenerateRequest { input, ..Default::default() }).await.map(drop)
}

fn api(page: &Metrics, tenants: Tenants) -> GrpcApi {
    let (world, metrics) = (World::seeded(1), RouterMetrics::new(page));
    let acceptor = Acceptor::new(world.clone(), Deadlines::default(), metrics.clone()).with_tenants(tenants);
    let models = RouterModels::new([ServedModel::mock("org/mock", 512)]);
    GrpcApi { serve: FakeServe::saying("x"), models, acceptor, metrics, world, shutdown: Shutdown::new() }
}

/// Bodies end with an error if they take too long.
#[tokio::test(start_paused = true)]
async fn a_call_whose_message_is_late_or_broken_is_refused_with_a_code() {
    let late =
        Body::new(StreamBody::new(stream::iter([Err::<Frame<Bytes>, _>(Status::deadline_exceeded("late"))])));
    let broken = Body::new(Full::new(Bytes::from_static(&[0, 0, 0, 0, 1, 255])));
    for (body, code) in [(late, "body_timeout"), (broken, "invalid_value")] {
        let page = Metrics::new("router");
        let call = ::http::Request::post("/baton.v1.Inference/Generate").header(REQUEST_ID, "mine");
        let call = call.header("content-type", "application/grpc").body(body).expect("a request");
        let answer = api(&page, Tenants::default()).server().call(call).await.expect("an answer");
        let header = |name| answer.headers().get(name).and_then(|value| value.to_str().ok());
        assert_eq!((header("baton-code"), header(REQUEST_ID)), (Some(code), Some("mine")));
        let counted = format!("baton_router_refusals_total{{code=\"{code}\"}} 1");
        assert!(page.page().contains(&counted), "{}", page.page());
    }
}

#[tokio::test(start_paused = true)]
async fn a_compressed_call_is_served_and_its_message_is_bounded() {
    let (page, gzip) = (|| Metrics::new("router"), Some(CompressionEncoding::Gzip));
    call(&page(), gzip, "Hi".to_owned()).await.expect("served");
    let too_large = || "a".repeat(BodyLimits::default().bytes_max);
    for (encoding, code) in [(gzip, Code::ResourceExhausted), (None, Code::OutOfRange)] {
        let page = page();
        let refused = call(&page, encoding, too_large()).await.expect_err("too large, compressed or not");
        assert_eq!(refused.code(), code, "{refused}");
        assert_eq!(refused.metadata().get("baton-code").expect("a code"), "body_too_large");
        assert!(refused.metadata().contains_key(REQUEST_ID), "{refused}");
        let counted = "baton_router_refusals_total{code=\"body_too_large\"} 1";
        assert!(page.page().contains(counted), "{}", page.page());
    }
}

#[tokio::test(start_paused = true)]
async fn a_text_of_megabytes_is_refused_before_it_is_tokenized() {
    let page = Metrics::new("router");
    let refused = call(&page, None, "é".repeat(2_000_000)).await.expect_err("no context is that long");
    let message = "the first 16384 of the prompt's 4000000 bytes have 16384 tokens, which leaves no room in \
                   the model's context of 512";
    assert_eq!((refused.code(), refused.message()), (Code::InvalidArgument, message));
    assert_eq!(refused.metadata().get("baton-code").expect("a code"), "context_length_exceeded");
    assert!(page.page().contains("baton_router_tokenized_bytes_total 0"), "{}", page.page());
}

#[tokio::test(start_paused = true)]
async fn a_call_without_a_key_is_refused_before_its_message_is_decompressed() {
    let mut file = tempfile::NamedTempFile::new().expect("a file");
    write!(file, "[tenants.acme]\n[keys]\n").expect("written");
    let table = TenantTable::load(file.path(), None).expect("a table");
    let file = Some(TenantsFile { path: file.path().to_owned(), table });
    let (page, of_tenants) = (Metrics::new("router"), RouterMetrics::new(&Metrics::new("router")));
    let keyed = Tenants::with_keys(KeySources { file, oidc: None }, World::seeded(1), of_tenants);
    let bomb = "a".repeat(BodyLimits::default().bytes_max);
    let refused = call_with(&page, keyed, Some(CompressionEncoding::Gzip), bomb).await.expect_err("no key");
    assert_eq!(refused.code(), Code::Unauthenticated, "{refused}");
    assert_eq!(refused.metadata().get("baton-code").expect("a code"), "invalid_api_key");
    assert!(refused.metadata().contains_key(REQUEST_ID));
    let counted = "baton_router_refusals_total{code=\"invalid_api_key\"} 1";
    assert!(page.page().contains(counted), "{}", page.page());
}
