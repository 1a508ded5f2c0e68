use std::net::SocketAddr;
use std::sync::Arc;
use std::sync::Mutex;

use axum::Router;
use axum::routing::get;
use chassis::metrics::Metrics;
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;
use tokio::time::Instant;

use super::super::TokenRefused;
use super::super::tests::{NOW, Provider, claims, settings};
use super::*;
use crate::tenants::oidc::KeySource;

const TIMES: FetchTimes = FetchTimes { every: Duration::from_secs(600), pause: Duration::from_millis(50) };

/// A provider's server: its answer, and how often it was asked.
#[derive(Clone, Default)]
struct KeysServer(Arc<Mutex<(String, u32)>>);

impl KeysServer {
    /// Serves until the future is dropped.
    async fn serve(self, listener: TcpListener) {
        let page = get(move || async move {
            let mut state = self.0.lock().expect("no handler panics");
            state.1 += 1;
            state.0.clone()
        });
        let pages = Router::new().route("/keys", page);
        axum::serve(listener, pages).await.expect("it serves");
    }

    fn answer(&self, providers: &[&Provider]) {
        let keys: Vec<_> = providers.iter().map(|provider| provider.jwk()).collect();
        self.0.lock().expect("no handler panics").0 = json!({ "keys": keys }).to_string();
    }

    fn fail(&self) {
        self.0.lock().expect("no handler panics").0 = "no keys today".to_owned();
    }

    fn n_fetches(&self) -> u32 {
        self.0.lock().expect("no handler panics").1
    }
}

/// Waits until `look` is true.
async fn until(mut look: impl FnMut() -> bool) {
    let all = async {
        while !look() {
            tokio::time::sleep(Duration::from_millis(5)).await;
        }
    };
    tokio::time::timeout(Duration::from_secs(30), all).await.expect("in time");
}

/// Runs `steps` with a provider whose keys come from a server.
async fn with_server(steps: impl AsyncFnOnce(&KeysServer, &Oidc)) -> Metrics {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let address: SocketAddr = listener.local_addr().expect("bound");
    let url: Uri = format!("http://{address}/keys").parse().expect("an address");
    let (server, metrics) = (KeysServer::default(), Metrics::new("router"));
    let router_metrics = RouterMetrics::new(&metrics);
    let oidc = Oidc::load(settings(KeySource::Url(url.clone()))).expect("keys by URL are fetched later");
    tokio::select! {
        () = server.clone().serve(listener) => {}
        () = follow(&oidc, &url, TIMES, &router_metrics) => {}
        () = steps(&server, &oidc) => {}
    }
    metrics
}

#[tokio::test]
async fn a_new_key_is_fetched_and_a_failure_keeps_the_old_ones() {
    let [first, second, third] = ["first", "second", "third"].map(Provider::new);
    let metrics = with_server(async |server, oidc| {
        let accepts = |provider: &Provider| oidc.verify(&provider.token(&claims()), NOW).is_ok();
        server.answer(&[&first]);
        until(|| accepts(&first)).await;
        server.answer(&[&first, &second]);
        until(|| accepts(&second)).await;
        assert!(accepts(&first));

        server.fail();
        let n_before = server.n_fetches();
        until(|| !accepts(&third) && server.n_fetches() > n_before + 2).await;
        assert!(accepts(&first) && accepts(&second), "a failure changes nothing");

        server.answer(&[&third]);
        until(|| accepts(&third)).await;
        assert_eq!(oidc.verify(&first.token(&claims()), NOW), Err(TokenRefused::UnknownKey));
    })
    .await;
    let page = metrics.page();
    for outcome in ["fetched", "failed"] {
        let line = format!("baton_router_oidc_keys_fetches_total{{outcome=\"{outcome}\"}} ");
        let count = page.lines().find_map(|text| text.strip_prefix(&line)?.parse::<u32>().ok());
        assert!(count.is_some_and(|count| count > 0), "{outcome} in {page}");
    }
}

#[tokio::test]
async fn unknown_keys_cause_few_fetches() {
    let (known, stranger) = (Provider::new("known"), Provider::new("stranger"));
    with_server(async |server, oidc| {
        server.answer(&[&known]);
        let began = Instant::now();
        let token = stranger.token(&claims());
        until(|| {
            assert!(oidc.verify(&token, NOW).is_err());
            began.elapsed() > TIMES.pause * 10 && server.n_fetches() >= 2
        })
        .await;
        let n_fetches = server.n_fetches();
        let most = began.elapsed().as_millis() / TIMES.pause.as_millis() + 2;
        assert!(u128::from(n_fetches) <= most, "{n_fetches} fetches, at most {most}");
        // A token of a known key causes none.
        tokio::time::sleep(TIMES.pause * 2).await;
        let n_before = server.n_fetches();
        let token = known.token(&claims());
        until(|| {
            assert!(oidc.verify(&token, NOW).is_ok());
            began.elapsed() > TIMES.pause * 20
        })
        .await;
        assert!(server.n_fetches() <= n_before + 1, "{} fetches", server.n_fetches());
    })
    .await;
}

/// Answers one connection like a proxy that refuses, and returns the head of its request.
async fn refusing_proxy(listener: &TcpListener) -> String {
    let (mut stream, _) = listener.accept().await.expect("a connection");
    let mut head = Vec::new();
    while !head.ends_with(b"\r\n\r\n") {
        head.push(stream.read_u8().await.expect("a head"));
    }
    stream.write_all(b"HTTP/1.1 403 Forbidden\r\n\r\n").await.expect("written");
    String::from_utf8(head).expect("ASCII")
}

#[tokio::test]
async fn https_goes_through_the_proxy_and_http_on_this_machine_does_not() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let proxy = listener.local_addr().expect("bound");
    let proxies = || Matcher::builder().all(format!("http://user:secret@{proxy}")).no("127.0.0.1").build();
    let ask = async |url: &'static str| fetch(&client(proxies()), &Uri::from_static(url)).await;
    let (head, asked) = tokio::join!(refusing_proxy(&listener), ask("https://keys.example/keys"));
    assert!(head.starts_with("CONNECT keys.example:443 "), "{head}");
    assert!(head.to_lowercase().contains("proxy-authorization: basic "), "{head}");
    let reason = asked.map(drop).expect_err("the proxy refuses");
    assert!(reason.contains(&format!("the proxy http://{proxy}/")) && !reason.contains("secret"), "{reason}");

    for direct in ["http://127.0.0.1:1/keys", "https://127.0.0.1:1/keys"] {
        let reason = ask(direct).await.map(drop).expect_err("there is no such server");
        assert!(!reason.contains("proxy"), "{reason}");
    }
    let other = client(Matcher::builder().https("https://p.example").build());
    let reason =
        fetch(&other, &Uri::from_static("https://keys.example")).await.map(drop).expect_err("refused");
    assert!(reason.contains("https://p.example/ is not supported"), "{reason}");
}
