//! Tokens of an OpenID provider in place of API keys, over real processes.

use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use baton_tests::{Ask, Client, Up};
use chassis::{Gate, Task, World, spawn_guarded};
use jsonwebtoken::{Algorithm, EncodingKey, Header, encode};
use rcgen::{KeyPair, PublicKeyData as _};
use serde_json::{Value, json};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpListener;

use super::{UNAUTHORIZED, refused, with_key};

/// A provider with one key.
struct Provider(KeyPair);

impl Provider {
    fn new() -> Self {
        Self(KeyPair::generate().expect("a P-256 key"))
    }

    fn keys(&self) -> String {
        let point = self.0.der_bytes();
        let [x, y] = [&point[1..33], &point[33..65]].map(|half| URL_SAFE_NO_PAD.encode(half));
        json!({ "keys": [{ "kty": "EC", "crv": "P-256", "kid": "one", "x": x, "y": y }] }).to_string()
    }

    /// Returns a token of the tenant that is valid for this number of seconds.
    fn token(&self, tenant: &str, seconds: i64, limits: &Value) -> String {
        let header = Header { kid: Some("one".to_owned()), ..Header::new(Algorithm::ES256) };
        let exp = World::real().unix_time().as_secs() as i64 + seconds;
        let claims = json!({
            "iss": "https://id.example", "aud": "baton", "exp": exp, "org": tenant, "baton_limits": limits,
        });
        encode(&header, &claims, &EncodingKey::from_ec_der(&self.0.serialize_der())).expect("signed")
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_providers_token_is_a_key_and_other_tokens_are_not() {
    let (provider, stranger) = (Provider::new(), Provider::new());
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("keys.json");
    std::fs::write(&file, provider.keys()).expect("written");
    let env = [
        ("BATON_EXPERT__OIDC__ISSUER", "https://id.example"),
        ("BATON_EXPERT__OIDC__AUDIENCE", "baton"),
        ("BATON_EXPERT__OIDC__TENANT_CLAIM", "org"),
        ("BATON_EXPERT__OIDC__KEYS_FILE", file.to_str().expect("UTF-8")),
    ];
    let up = Up::start_with(&[], &env).await;
    let client = up.client();
    let ask = |token: &str| with_key(Ask::new((0..100).collect(), 2), token);
    let none = json!({});
    let cached =
        async |client: &Client, token: &str| client.ask(&ask(token)).await.expect("known").cached_tokens;
    assert_eq!(cached(&client, &provider.token("acme", 60, &none)).await, 0);
    assert!(cached(&client, &provider.token("acme", 60, &none)).await > 0, "the tenant is the token's");
    assert_eq!(cached(&client, &provider.token("zenith", 60, &none)).await, 0);

    let unauthorized = (UNAUTHORIZED, "invalid_api_key".to_owned());
    for token in [provider.token("acme", -60, &none), stranger.token("acme", 60, &none), "a.b.c".to_owned()] {
        assert_eq!(refused(client.ask(&ask(&token)).await), unauthorized);
    }
    assert_eq!(refused(client.ask(&Ask::new(vec![1], 1)).await), unauthorized, "no token");
    let short = provider.token("short", 60, &json!({ "context_tokens_max": 40 }));
    assert_eq!(refused(client.ask(&ask(&short)).await), (Some(400), "context_length_exceeded".to_owned()));
    let counted = client.counter("baton_router_unauthorized_total{reason=\"token\"}").await;
    assert_eq!(counted, 3);

    // The provider has a new key. Tokens of the old one are refused.
    std::fs::write(&file, stranger.keys()).expect("written");
    let new = stranger.token("acme", 60, &none);
    let in_force = async || client.ask(&ask(&new)).await.is_ok().then_some(());
    baton_tests::eventually("the new key to be in force", in_force).await;
    assert_eq!(refused(client.ask(&ask(&provider.token("acme", 60, &none))).await), unauthorized);
}

/// Serves the provider's keys over TLS with a certificate for `localhost`, until the task is dropped. Returns it with
/// the URL and the certificate.
async fn keys_over_tls(gate: &Gate, provider: &Provider) -> (Task<()>, String, String) {
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
    let key = rustls::pki_types::PrivateKeyDer::try_from(made.signing_key.serialize_der()).expect("a key");
    let config = rustls::ServerConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_no_client_auth()
        .with_single_cert(vec![made.cert.der().clone()], key)
        .expect("a pair");
    let acceptor = tokio_rustls::TlsAcceptor::from(std::sync::Arc::new(config));
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("https://localhost:{}/keys", listener.local_addr().expect("bound").port());
    let keys = provider.keys();
    let answer =
        format!("HTTP/1.1 200 OK\r\ncontent-length: {}\r\nconnection: close\r\n\r\n{keys}", keys.len());
    let serving = spawn_guarded(gate, "keys", async move {
        while let Ok((stream, _)) = listener.accept().await {
            let Ok(mut tls) = acceptor.accept(stream).await else { continue };
            let _ = tls.read(&mut [0; 4096]).await;
            let _ = tls.write_all(answer.as_bytes()).await;
            let _ = tls.shutdown().await;
        }
    });
    (serving, url, made.cert.pem())
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn keys_come_from_the_providers_url() {
    let provider = Provider::new();
    let (_serving, url, certificate) = keys_over_tls(&Gate::new("provider"), &provider).await;
    let folder = tempfile::tempdir().expect("a folder");
    let trusted = folder.path().join("ca.pem");
    std::fs::write(&trusted, certificate).expect("written");
    let env = [
        ("BATON_EXPERT__OIDC__ISSUER", "https://id.example"),
        ("BATON_EXPERT__OIDC__AUDIENCE", "baton"),
        ("BATON_EXPERT__OIDC__TENANT_CLAIM", "org"),
        ("BATON_EXPERT__OIDC__KEYS_URL", url.as_str()),
        ("SSL_CERT_FILE", trusted.to_str().expect("UTF-8")),
    ];
    let up = Up::start_with(&["--colocated"], &env).await;
    let client = up.client();
    let token = provider.token("acme", 60, &json!({}));
    let ask = with_key(Ask::new((0..100).collect(), 2), &token);
    let in_force = async || client.ask(&ask).await.is_ok().then_some(());
    baton_tests::eventually("the keys to be fetched", in_force).await;
    assert!(client.counter("baton_router_oidc_keys_fetches_total{outcome=\"fetched\"}").await > 0);
    let stranger = Provider::new().token("acme", 60, &json!({}));
    let unauthorized = (UNAUTHORIZED, "invalid_api_key".to_owned());
    assert_eq!(refused(client.ask(&with_key(Ask::new(vec![1], 1), &stranger)).await), unauthorized);
}
