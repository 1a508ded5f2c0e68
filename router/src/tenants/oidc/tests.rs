use base64::Engine as _;
use base64::engine::general_purpose::URL_SAFE_NO_PAD;
use jsonwebtoken::{EncodingKey, Header, encode};
use rcgen::{KeyPair, PublicKeyData as _};
use serde_json::json;
use tempfile::NamedTempFile;

use super::*;

pub(super) const NOW: Duration = Duration::from_secs(1_700_000_000);

/// A provider with one key.
pub(super) struct Provider {
    key: KeyPair,
    id: &'static str,
}

impl Provider {
    pub(super) fn new(id: &'static str) -> Self {
        Self { key: KeyPair::generate().expect("a P-256 key"), id }
    }

    pub(super) fn jwk(&self) -> Value {
        let point = self.key.der_bytes();
        let [x, y] = [&point[1..33], &point[33..65]].map(|half| URL_SAFE_NO_PAD.encode(half));
        json!({ "kty": "EC", "crv": "P-256", "alg": "ES256", "use": "sig", "kid": self.id, "x": x, "y": y })
    }

    pub(super) fn token(&self, claims: &Value) -> String {
        let header = Header { kid: Some(self.id.to_owned()), ..Header::new(Algorithm::ES256) };
        encode(&header, claims, &EncodingKey::from_ec_der(&self.key.serialize_der())).expect("signed")
    }
}

fn file(keys: &[Value]) -> NamedTempFile {
    let file = NamedTempFile::new().expect("a file");
    std::fs::write(file.path(), json!({ "keys": keys }).to_string()).expect("written");
    file
}

fn oidc(keys: &[Value]) -> Oidc {
    let file = file(keys);
    Oidc::load(settings(KeySource::File(file.path().to_owned()))).expect("keys")
}

pub(super) fn settings(keys: KeySource) -> OidcSettings {
    OidcSettings {
        issuer: "https://id.example".to_owned(),
        audience: "baton".to_owned(),
        keys,
        tenant_claim: "tenant".to_owned(),
    }
}

pub(super) fn claims() -> Value {
    let exp = NOW.as_secs() + 600;
    json!({ "iss": "https://id.example", "aud": ["other", "baton"], "exp": exp, "tenant": "acme" })
}

fn with(field: &str, value: Value) -> Value {
    let mut claims = claims();
    claims[field] = value;
    claims
}

fn without(field: &str) -> Value {
    let mut claims = claims();
    claims.as_object_mut().expect("an object").remove(field);
    claims
}

#[test]
fn a_token_says_the_tenant_and_its_limits() {
    let provider = Provider::new("one");
    let oidc = oidc(&[provider.jwk()]);
    let plain = oidc.verify(&provider.token(&claims()), NOW).expect("a right token");
    assert_eq!(plain, TokenTenant { tenant: TenantId::new("acme"), limits: TenantLimits::default() });
    let limits = json!({ "requests_max": 2, "priority_max": 3 });
    let limited = oidc.verify(&provider.token(&with(LIMITS_CLAIM, limits)), NOW).expect("a right token");
    assert_eq!((limited.limits.requests_max.map(u32::from), limited.limits.priority_max), (Some(2), 3));
}

#[test]
fn wrong_claims_are_refused() {
    let provider = Provider::new("one");
    let oidc = oidc(&[provider.jwk()]);
    let now = NOW.as_secs();
    for (claims, expected) in [
        (with("exp", json!(now - 31)), TokenRefused::Expired),
        (without("exp"), TokenRefused::Malformed),
        (with("exp", json!("soon")), TokenRefused::Malformed),
        (with("nbf", json!(now + 31)), TokenRefused::NotYetValid),
        (with("aud", json!("another")), TokenRefused::Audience),
        (without("aud"), TokenRefused::Audience),
        (with("iss", json!("https://other.example")), TokenRefused::Issuer),
        (without("iss"), TokenRefused::Issuer),
        (without("tenant"), TokenRefused::NoTenant),
        (with("tenant", json!("a b")), TokenRefused::NoTenant),
        (with("tenant", json!(7)), TokenRefused::NoTenant),
        (with(LIMITS_CLAIM, json!({ "requests": 2 })), TokenRefused::Limits),
    ] {
        assert_eq!(oidc.verify(&provider.token(&claims), NOW), Err(expected), "{claims}");
    }
    for claims in [with("exp", json!(now - 29)), with("nbf", json!(now + 29)), with("aud", json!("baton"))] {
        oidc.verify(&provider.token(&claims), NOW).unwrap_or_else(|refused| panic!("{claims}: {refused:?}"));
    }
}

#[test]
fn only_the_providers_private_key_signs() {
    let (provider, stranger) = (Provider::new("one"), Provider::new("one"));
    let oidc = oidc(&[provider.jwk()]);
    assert_eq!(oidc.verify(&stranger.token(&claims()), NOW), Err(TokenRefused::Signature));
    let unknown = Provider { key: stranger.key, id: "two" };
    assert_eq!(oidc.verify(&unknown.token(&claims()), NOW), Err(TokenRefused::UnknownKey));

    let part = |json: Value| URL_SAFE_NO_PAD.encode(json.to_string());
    for alg in ["none", "None", "NONE"] {
        let head = part(json!({ "alg": alg, "typ": "JWT", "kid": "one" }));
        for signature in ["", "AAAA"] {
            let token = format!("{head}.{}.{signature}", part(claims()));
            oidc.verify(&token, NOW).expect_err("no signature");
        }
    }
    // A token that is signed by HMAC with the public key, which everyone knows.
    let header = Header { kid: Some("one".to_owned()), ..Header::new(Algorithm::HS256) };
    let token =
        encode(&header, &claims(), &EncodingKey::from_secret(provider.key.der_bytes())).expect("made");
    assert_eq!(oidc.verify(&token, NOW), Err(TokenRefused::Algorithm));
    for text in ["", "a.b", "a.b.c", &"a".repeat(TOKEN_BYTES_MAX + 1)] {
        assert_eq!(oidc.verify(text, NOW), Err(TokenRefused::Malformed), "{text:?}");
    }
    // A signature of other claims.
    let (right, other) = (provider.token(&claims()), provider.token(&with("tenant", json!("zenith"))));
    let [head, _, signature] = right.split('.').collect::<Vec<_>>()[..] else { panic!("{right}") };
    let claimed = other.split('.').nth(1).expect("claims");
    let mixed = format!("{head}.{claimed}.{signature}");
    assert_eq!(oidc.verify(&mixed, NOW), Err(TokenRefused::Signature));
}

#[test]
fn usage_outlives_a_change_of_limits() {
    let oidc = oidc(&[Provider::new("one").jwk()]);
    let limits =
        |max| TenantLimits { requests_max: std::num::NonZeroU32::new(max), ..TenantLimits::default() };
    let account = |max| oidc.account(TokenTenant { tenant: TenantId::new("acme"), limits: limits(max) });
    let now = tokio::time::Instant::now();
    let _running = super::super::TenantPermit::take(&account(2), now, 2, 1).expect("two fit");
    assert!(super::super::TenantPermit::take(&account(2), now, 1, 1).is_err());
    let _one_more = super::super::TenantPermit::take(&account(3), now, 1, 1).expect("three fit");
}

#[test]
fn a_file_without_usable_keys_is_refused() {
    let oct = json!({ "kty": "oct", "kid": "one", "k": "AAAA" });
    let mut encryption = Provider::new("two").jwk();
    encryption["use"] = json!("enc");
    let broken = json!({ "kty": "EC", "crv": "P-256", "kid": "three", "x": "AAAA" });
    let twice = [Provider::new("one").jwk(), Provider::new("one").jwk()];
    let refused = |keys: &[Value]| KeySet::load(file(keys).path()).expect_err("refused").to_string();
    assert!(refused(&[]).ends_with("it has no key for signatures that is accepted"));
    assert!(refused(&[oct, encryption]).ends_with("it has no key for signatures that is accepted"));
    assert!(refused(&twice).ends_with("two keys have the id \"one\""));
    refused(&[broken]);
}
