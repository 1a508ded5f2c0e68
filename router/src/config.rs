//! A router's configuration: [`RawRouterConfig`] is the file, [`RouterConfig`] the checked form.

use std::net::IpAddr;
use std::path::{Path, PathBuf};
use std::time::Duration;

use chassis::config::{ListenError, check_listening};
use chassis::connections::ConnectionLimits;
use chassis::identity::settings::{ClusterSection, TlsSection};
use chassis::telemetry::{LogExpertSettings, LogSection, LogSettings};
use http::Uri;
use serde::{Deserialize, Serialize};

use types::FingerprintDigest;

use crate::accept::Deadlines;
use crate::balance::{BalanceSection, BalanceSettings};
use crate::cluster::WantedFingerprint;
use crate::dispatch::Budget;
use crate::drain::DrainTimes;
use crate::http::{CertificateFiles, CorsOrigins};
use crate::policy;
use crate::policy::Order;
use crate::tenants::{KeySource, OidcSettings, TrustedProxies};
use crate::text::tools::ToolFormat;
use crate::upstream::{UpstreamSection, UpstreamSettings};

/// A router's TOML file.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RawRouterConfig {
    pub router: RouterSection,
    pub balance: BalanceSection,
    pub registry: RegistrySection,
    pub model: ModelSection,
    pub cluster: ClusterSection,
    pub tls: TlsSection,
    pub log: LogSection,
    pub expert: RouterExpertSettings,
}

/// A router's `[expert]` tables: settings that are rarely changed.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RouterExpertSettings {
    pub router: RoutingExpertSettings,
    pub oidc: OidcSection,
    pub upstream: UpstreamSection,
    pub connections: ConnectionLimits,
    pub log: LogExpertSettings,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RoutingExpertSettings {
    /// Failed routes that one request may have between two of its tokens.
    pub attempts_max: u32,
    /// How long a new request may wait for a usable node, if nodes are known, before it gets 503.
    pub new_nodes_wait_ms: u64,
    /// How long a stream that has begun may wait for a usable node before it ends with `no_nodes`. The
    /// default is longer than a node's restart.
    pub nodes_wait_ms: u64,
    /// If no running request makes progress for this long, `/ready` fails and names the stages in which
    /// requests wait. The default is longer than the longest step of an engine.
    pub stuck_ms: u64,
    /// The share of requests that are explained without asking for it, from 0 to 1: nodes time each of their
    /// steps, and answer, log and span say where the time went.
    pub explain_share: f64,
    /// The origins whose pages may send requests to the HTTP port (CORS), such as `https://chat.example`, or
    /// `*`.
    pub cors_origins: Vec<String>,
}

impl Default for RoutingExpertSettings {
    fn default() -> Self {
        Self {
            attempts_max: 4,
            new_nodes_wait_ms: 2_000,
            nodes_wait_ms: 30_000,
            stuck_ms: 4_000,
            explain_share: 0.0,
            cors_origins: Vec::new(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RouterSection {
    /// `host:port` of the OpenAI-compatible endpoint, with `/metrics`, `/ready` and `/debug`.
    pub http: String,
    /// `host:port` of `/live`, `/ready`, `/metrics` and `/debug`, with connections of its own.
    pub admin: String,
    /// `host:port` of the gRPC endpoint, with the embedded registry.
    pub grpc: String,
    /// How nodes are chosen: `random`, `round-robin`, `least-loaded`, `session-affinity`, `prefix-aware` or `cost`, as
    /// in docs/routing.md.
    pub policy: String,
    /// `decode-first` reserves room before a prompt is computed; `prefill-first` chooses a decode node when
    /// the KV is computed.
    pub order: String,
    /// The timeout of requests that name none.
    pub deadline_ms: u64,
    /// The longest timeout of a request. Longer timeouts are shortened to it.
    pub deadline_max_ms: u64,
    /// The limit of concurrent answers of a model, waiting and served (a request with `n` counts `n`). Requests above
    /// it get 429.
    pub requests_max: usize,
    /// How long a request may wait for room, in its model's line and on a node, before it gets 429 (`full` or
    /// `queue`).
    pub wait_ms: u64,
    /// How long requests may run after the router was asked to stop. Then streams end with the error event
    /// `draining`, and other requests get 503.
    pub drain_ms: u64,
    /// The part of `drain_ms` in which new requests are still accepted while `/ready` fails, so that load
    /// balancers notice the stop.
    pub notice_ms: u64,
    /// A file with the hashes of API keys and the limits of tenants, as in docs/security.md. A change is in
    /// force within 5 s. Empty: no API keys are required.
    pub tenants_file: String,
    /// Without a tenants file: the proxies whose headers `x-baton-tenant` and `x-baton-priority` are
    /// accepted, as addresses or networks such as `10.0.0.0/8`. From other peers these headers are refused.
    pub trusted_proxies: Vec<String>,
    /// Serves the metrics that vLLM has too under vLLM's names besides their own, for dashboards that exist.
    pub vllm_metrics: bool,
    /// The PEM file of the HTTP port's certificate and its chain. With it the port serves TLS only. A change
    /// is in force within 5 s. Empty: no TLS.
    pub tls_cert_file: String,
    /// The PEM file of the certificate's key.
    pub tls_key_file: String,
}

impl Default for RouterSection {
    fn default() -> Self {
        Self {
            http: "127.0.0.1:8000".to_owned(),
            admin: "127.0.0.1:8001".to_owned(),
            grpc: "127.0.0.1:50051".to_owned(),
            policy: "least-loaded".to_owned(),
            order: "decode-first".to_owned(),
            deadline_ms: 600_000,
            deadline_max_ms: 3_600_000,
            requests_max: 4096,
            wait_ms: 60_000,
            drain_ms: 30_000,
            notice_ms: 3_000,
            tenants_file: String::new(),
            trusted_proxies: Vec::new(),
            vllm_metrics: false,
            tls_cert_file: String::new(),
            tls_key_file: String::new(),
        }
    }
}

/// The OpenID provider whose tokens are accepted as API keys.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct OidcSection {
    /// The `iss` of accepted tokens. Empty: no tokens are accepted.
    pub issuer: String,
    /// The `aud` of accepted tokens.
    pub audience: String,
    /// The file with the provider's keys, a JSON Web Key Set. A change is in force within 5 s.
    pub keys_file: String,
    /// The URL of the keys, in place of the file: `https`, or `http` on this machine. They are fetched every 5
    /// minutes, and within 5 s after a token names an unknown key.
    pub keys_url: String,
    /// The claim with the tenant's name. The claim `baton_limits` may have limits, written like a tenant's
    /// section in the tenants file. The tenants file has priority over the claim.
    pub tenant_claim: String,
}

impl Default for OidcSection {
    fn default() -> Self {
        Self {
            issuer: String::new(),
            audience: String::new(),
            keys_file: String::new(),
            keys_url: String::new(),
            tenant_claim: "tenant".to_owned(),
        }
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct RegistrySection {
    /// `embedded`: this router serves the registry. Otherwise `etcd://host:2379,host:2379/cluster`.
    pub url: String,
    /// The file in which the router keeps the known members. If etcd is unreachable at the start, the router
    /// uses the members that answer. Empty: it waits for etcd.
    pub members_file: String,
}

impl Default for RegistrySection {
    fn default() -> Self {
        Self { url: EMBEDDED.to_owned(), members_file: String::new() }
    }
}

const EMBEDDED: &str = "embedded";

/// The model that this router serves: its nodes have the same section.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ModelSection {
    /// The model whose tokenizer and chat template are read: a folder, GGUF, `demo`, or
    /// `org/name[@revision]` on a hub. Empty or `mock`: no model.
    pub path: String,
    /// The model's name in requests. Empty: the folder's name.
    pub name: String,
    /// The weights that may serve: a `fingerprint` of `/debug/cluster`, 16 hexadecimal digits; other nodes
    /// are refused. The fingerprint changes with the cluster's secret. Empty: the larger group of agreeing
    /// nodes. Without `name` and `path` the setting holds for every model.
    pub fingerprint: String,
    /// How the model writes tool calls: `hermes`, `llama3-json`, `pythonic`, `mistral`, `qwen3-coder` or
    /// `deepseek`. Empty: as its chat template shows it.
    pub tool_format: String,
}

/// The folder of a model's tokenizer and chat template, and the name that requests use for the model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelFolder {
    pub path: PathBuf,
    pub name: String,
    /// How the model writes tool calls; `None`: as its chat template shows it.
    pub tool_format: Option<ToolFormat>,
}

/// A router's checked configuration.
#[derive(Clone, Debug, PartialEq)]
pub struct RouterConfig {
    pub http: String,
    pub admin: String,
    pub grpc: String,
    /// The name of a policy in the table of policies.
    pub policy: String,
    pub order: Order,
    pub deadlines: Deadlines,
    pub requests_max: usize,
    pub budget: Budget,
    /// The share of requests that are explained without asking for it.
    pub explain_share: f64,
    pub drain: DrainTimes,
    pub stuck_after: Duration,
    /// The file with tenants and API keys; `None`: no API keys are required.
    pub tenants_file: Option<PathBuf>,
    pub trusted_proxies: TrustedProxies,
    pub vllm_metrics: bool,
    /// The provider of tokens; `None`: no tokens are accepted.
    pub oidc: Option<OidcSettings>,
    /// The certificate of the HTTP port; `None`: the port has no TLS.
    pub certificate: Option<CertificateFiles>,
    pub cors: CorsOrigins,
    /// The address of an external registry; `None`: this router serves the registry.
    pub registry_url: Option<String>,
    pub members_file: Option<PathBuf>,
    /// The model to read a tokenizer and chat template from; `None`: only models that need neither are
    /// served.
    pub model: Option<ModelFolder>,
    /// The pools of another engine that the HTTP port serves; `None`: it serves Baton's nodes.
    pub upstream: Option<UpstreamSettings>,
    /// How nodes are moved between roles; `None`: they are not.
    pub balance: Option<BalanceSettings>,
    /// The fingerprint that nodes must have; `None`: the largest group of nodes is used.
    pub wanted: Option<WantedFingerprint>,
    pub cluster: ClusterSection,
    pub tls: TlsSection,
    pub connections: ConnectionLimits,
    pub log: LogSettings,
    /// The settings as written, without passwords, for `/debug/config`.
    pub shown: serde_json::Value,
}

/// The error of a setting with an invalid value.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("`{key}`: {value:?} is not {known}")]
pub struct UnknownChoice {
    pub key: &'static str,
    pub value: String,
    pub known: String,
}

impl RouterConfig {
    pub fn resolve(raw: RawRouterConfig) -> Result<Self, UnknownChoice> {
        let shown = chassis::config::shown(&raw);
        let RawRouterConfig { router, balance, registry, model, cluster, tls, log, expert } = raw;
        if policy::by_name(&router.policy).is_none() {
            return Err(unknown("router.policy", router.policy, policy::NAMES));
        }
        for (key, value) in [
            ("router.deadline_ms", router.deadline_ms),
            ("router.deadline_max_ms", router.deadline_max_ms),
            ("expert.router.stuck_ms", expert.router.stuck_ms),
            ("expert.connections.admin_max", expert.connections.admin_max as u64),
        ] {
            if value == 0 {
                return Err(unknown(key, "0".to_owned(), &["above zero"]));
            }
        }
        let config = Self {
            order: order(&router.order)?,
            http: router.http,
            admin: router.admin,
            grpc: router.grpc,
            policy: router.policy,
            deadlines: Deadlines {
                unsaid: Duration::from_millis(router.deadline_ms),
                longest: Duration::from_millis(router.deadline_max_ms),
            },
            requests_max: router.requests_max.max(1),
            budget: Budget {
                attempts_max: expert.router.attempts_max.max(1),
                wait_max: Duration::from_millis(router.wait_ms),
                nodes_wait_new: Duration::from_millis(expert.router.new_nodes_wait_ms),
                nodes_wait_begun: Duration::from_millis(expert.router.nodes_wait_ms),
            },
            explain_share: share("expert.router.explain_share", expert.router.explain_share)?,
            drain: DrainTimes {
                notice: Duration::from_millis(router.notice_ms),
                whole: Duration::from_millis(router.drain_ms),
            },
            stuck_after: Duration::from_millis(expert.router.stuck_ms),
            tenants_file: (!router.tenants_file.is_empty()).then(|| router.tenants_file.into()),
            trusted_proxies: trusted_proxies(&router.trusted_proxies)?,
            vllm_metrics: router.vllm_metrics,
            oidc: provider(expert.oidc)?,
            certificate: certificate(&router.tls_cert_file, &router.tls_key_file)?,
            cors: cors(&expert.router.cors_origins)?,
            members_file: (!registry.members_file.is_empty()).then(|| registry.members_file.into()),
            registry_url: (registry.url != EMBEDDED).then_some(registry.url),
            balance: balance.resolve()?,
            upstream: expert.upstream.resolve(&model.name)?,
            wanted: wanted(&model)?,
            model: model_folder(&model, tool_format(&model.tool_format)?),
            cluster,
            tls,
            connections: expert.connections,
            log: log.settings(&expert.log),
            shown,
        };
        check_listening(&config.listening())?;
        Ok(config)
    }

    /// Returns the addresses on which the router listens, each after its setting.
    pub fn listening(&self) -> Vec<(&'static str, &str)> {
        vec![("router.http", &self.http), ("router.admin", &self.admin), ("router.grpc", &self.grpc)]
    }
}

impl From<ListenError> for UnknownChoice {
    fn from(error: ListenError) -> Self {
        Self { key: error.setting, value: error.address, known: error.wanted }
    }
}

fn order(name: &str) -> Result<Order, UnknownChoice> {
    match name {
        "decode-first" => Ok(Order::DecodeFirst),
        "prefill-first" => Ok(Order::PrefillFirst),
        _ => Err(unknown("router.order", name.to_owned(), &["decode-first", "prefill-first"])),
    }
}

fn share(key: &'static str, value: f64) -> Result<f64, UnknownChoice> {
    match (0.0..=1.0).contains(&value) {
        true => Ok(value),
        false => Err(unknown(key, value.to_string(), &["a number from 0 to 1"])),
    }
}

fn trusted_proxies(texts: &[String]) -> Result<TrustedProxies, UnknownChoice> {
    let known = "an address, or a network such as 10.0.0.0/8";
    TrustedProxies::parse(texts).map_err(|text| unknown("router.trusted_proxies", text, &[known]))
}

/// Returns the provider of tokens, if it has an issuer. Then all of its settings are needed, and either place of
/// its keys.
fn provider(section: OidcSection) -> Result<Option<OidcSettings>, UnknownChoice> {
    let OidcSection { issuer, audience, keys_file, keys_url, tenant_claim } = section;
    if [&issuer, &audience, &keys_file, &keys_url].into_iter().all(String::is_empty) {
        return Ok(None);
    }
    for (key, value, known) in [
        ("expert.oidc.issuer", &issuer, "the issuer of tokens"),
        ("expert.oidc.audience", &audience, "the audience of tokens"),
        ("expert.oidc.tenant_claim", &tenant_claim, "the name of a claim"),
    ] {
        if value.is_empty() {
            return Err(unknown(key, String::new(), &[known]));
        }
    }
    let keys = match (keys_file.is_empty(), keys_url.is_empty()) {
        (false, true) => KeySource::File(keys_file.into()),
        (true, false) => KeySource::Url(keys_address(keys_url)?),
        _ => {
            return Err(unknown(
                "expert.oidc.keys_url",
                keys_url,
                &["set alone: set either keys_file or keys_url"],
            ));
        }
    };
    Ok(Some(OidcSettings { issuer, audience, keys, tenant_claim }))
}

/// Parses the URL of a provider's keys. Keys over plaintext could be replaced on their way, so `http` is only for
/// this machine.
fn keys_address(text: String) -> Result<Uri, UnknownChoice> {
    let url = text.parse::<Uri>().ok();
    let is_safe = |url: &Uri| match (url.scheme_str(), url.host()) {
        (Some("https"), Some(_)) => true,
        (Some("http"), Some(host)) => {
            let host = host.trim_matches(['[', ']']);
            host == "localhost" || host.parse::<IpAddr>().is_ok_and(|address| address.is_loopback())
        }
        _ => false,
    };
    let known = "https://HOST/PATH, or http:// on this machine";
    url.filter(is_safe).ok_or_else(|| unknown("expert.oidc.keys_url", text, &[known]))
}

/// Returns the files of the certificate. Both are set, or neither is.
fn certificate(certificate: &str, key: &str) -> Result<Option<CertificateFiles>, UnknownChoice> {
    match (certificate.is_empty(), key.is_empty()) {
        (true, true) => Ok(None),
        (false, false) => Ok(Some(CertificateFiles { certificate: certificate.into(), key: key.into() })),
        (true, false) => {
            Err(unknown("router.tls_cert_file", String::new(), &["the certificate of `router.tls_key_file`"]))
        }
        (false, true) => {
            Err(unknown("router.tls_key_file", String::new(), &["the key of `router.tls_cert_file`"]))
        }
    }
}

fn cors(origins: &[String]) -> Result<CorsOrigins, UnknownChoice> {
    let known = "an origin such as https://chat.example, or * alone";
    CorsOrigins::parse(origins).map_err(|text| unknown("expert.router.cors_origins", text, &[known]))
}

fn wanted(section: &ModelSection) -> Result<Option<WantedFingerprint>, UnknownChoice> {
    let ModelSection { name, fingerprint, .. } = section;
    if fingerprint.is_empty() {
        return Ok(None);
    }
    let digest = FingerprintDigest::parse(fingerprint).ok_or_else(|| {
        unknown("model.fingerprint", fingerprint.clone(), &["16 hexadecimal digits as in /debug/cluster"])
    })?;
    let model = model_folder(section, None).map_or_else(|| name.clone(), |folder| folder.name);
    Ok(Some(WantedFingerprint { model, fingerprint: digest }))
}

/// Returns the model's folder, if the section names one. A node's `mock` and `mock:NAME` are no folders.
fn model_folder(section: &ModelSection, tool_format: Option<ToolFormat>) -> Option<ModelFolder> {
    let ModelSection { path, name, .. } = section;
    if path.is_empty() || path == "mock" || path.starts_with("mock:") {
        return None;
    }
    let path = PathBuf::from(path);
    let name = if name.is_empty() { folder_name(&path) } else { name.clone() };
    Some(ModelFolder { path, name, tool_format })
}

fn tool_format(name: &str) -> Result<Option<ToolFormat>, UnknownChoice> {
    if name.is_empty() {
        return Ok(None);
    }
    let known: Vec<&str> = ToolFormat::names().collect();
    ToolFormat::named(name).map(Some).ok_or_else(|| unknown("model.tool_format", name.to_owned(), &known))
}

/// Returns the name of a folder after links and relative paths are resolved. Nodes use the same name for
/// their model.
fn folder_name(path: &Path) -> String {
    let whole = path.canonicalize().unwrap_or_else(|_| path.to_owned());
    whole.file_name().unwrap_or(whole.as_os_str()).to_string_lossy().into_owned()
}

pub(crate) fn unknown(key: &'static str, value: String, known: &[&str]) -> UnknownChoice {
    let known = match known {
        [one] => (*one).to_owned(),
        several => format!("one of {}", several.join(", ")),
    };
    UnknownChoice { key, value, known }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_defaults_are_a_configuration() {
        let config = RouterConfig::resolve(RawRouterConfig::default()).expect("the defaults are valid");
        assert_eq!(config.order, Order::DecodeFirst);
        assert_eq!(config.registry_url, None);
        assert_eq!(config.deadlines, Deadlines::default());
    }

    #[test]
    fn a_certificate_origins_and_a_provider_are_checked() {
        let refused = |change: fn(&mut RawRouterConfig)| {
            let mut raw = RawRouterConfig::default();
            change(&mut raw);
            RouterConfig::resolve(raw).expect_err("refused").key
        };
        assert_eq!(refused(|raw| raw.router.tls_cert_file = "c".to_owned()), "router.tls_key_file");
        assert_eq!(refused(|raw| raw.router.tls_key_file = "k".to_owned()), "router.tls_cert_file");
        let key = refused(|raw| raw.expert.router.cors_origins = vec!["a".to_owned()]);
        assert_eq!(key, "expert.router.cors_origins");
        assert_eq!(refused(|raw| raw.expert.router.explain_share = 1.5), "expert.router.explain_share");
        assert_eq!(refused(|raw| raw.balance.margin = -0.1), "balance.margin");
        assert_eq!(refused(|raw| raw.balance.for_ms = 0), "balance.for_ms");
        assert_eq!(refused(|raw| raw.expert.oidc.issuer = "i".to_owned()), "expert.oidc.audience");
        assert_eq!(refused(|raw| raw.expert.oidc.keys_file = "k".to_owned()), "expert.oidc.issuer");
    }

    #[test]
    fn a_providers_keys_come_from_a_file_or_a_safe_url() {
        let keys = |keys_file: &str, keys_url: &str| {
            let section = OidcSection {
                issuer: "i".to_owned(),
                audience: "a".to_owned(),
                keys_file: keys_file.to_owned(),
                keys_url: keys_url.to_owned(),
                ..OidcSection::default()
            };
            provider(section).map(|settings| settings.expect("a provider").keys).map_err(|error| error.key)
        };
        assert_eq!(keys("k", ""), Ok(KeySource::File("k".into())));
        for url in
            ["https://id.example/keys", "http://127.0.0.1:9/keys", "http://localhost/k", "http://[::1]/k"]
        {
            assert_eq!(keys("", url), Ok(KeySource::Url(url.parse().expect("a URL"))));
        }
        for (file, url) in [
            ("", ""),
            ("k", "https://a"),
            ("", "http://id.example/keys"),
            ("", "ftp://a"),
            ("", "keys"),
            ("", "/k"),
        ] {
            assert_eq!(keys(file, url), Err("expert.oidc.keys_url"), "{file} {url}");
        }
    }

    #[test]
    fn a_model_is_named_after_its_folder() {
        let model = |path: &str, name: &str| {
            let section =
                ModelSection { path: path.to_owned(), name: name.to_owned(), ..ModelSection::default() };
            model_folder(&section, None).map(|folder| folder.name)
        };
        assert_eq!(model("", ""), None);
        assert_eq!(model("mock:paced", ""), None);
        assert_eq!(model("/nowhere/Qwen3-0.6B", "").as_deref(), Some("Qwen3-0.6B"));
        assert_eq!(model("/nowhere/Qwen3-0.6B/", "").as_deref(), Some("Qwen3-0.6B"));
        assert_eq!(model("src/text/..", "").as_deref(), Some("src"));
        assert_eq!(model("/nowhere/Qwen3-0.6B", "org/qwen").as_deref(), Some("org/qwen"));
    }

    #[test]
    fn a_fingerprint_is_the_operators_word() {
        let resolved = |fingerprint: &str| {
            let mut raw = RawRouterConfig::default();
            (raw.model.name, raw.model.fingerprint) = ("m".to_owned(), fingerprint.to_owned());
            RouterConfig::resolve(raw).map(|config| config.wanted)
        };
        assert_eq!(resolved(""), Ok(None));
        let wanted = WantedFingerprint { model: "m".to_owned(), fingerprint: FingerprintDigest(0xab) };
        assert_eq!(resolved("00000000000000ab"), Ok(Some(wanted)));
        let error = resolved("ab").expect_err("too short");
        let expected = "`model.fingerprint`: \"ab\" is not 16 hexadecimal digits as in /debug/cluster";
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn what_means_nothing_is_refused_with_what_would() {
        let mut raw = RawRouterConfig::default();
        raw.router.order = "both".to_owned();
        let error = RouterConfig::resolve(raw).expect_err("no such order");
        assert_eq!(error.to_string(), "`router.order`: \"both\" is not one of decode-first, prefill-first");
        let mut raw = RawRouterConfig::default();
        raw.model.tool_format = "xml".to_owned();
        let error = RouterConfig::resolve(raw).expect_err("no such format");
        let known = "hermes, llama3-json, pythonic, mistral, qwen3-coder, deepseek";
        assert_eq!(error.to_string(), format!("`model.tool_format`: \"xml\" is not one of {known}"));
        let mut raw = RawRouterConfig::default();
        raw.router.policy = "best".to_owned();
        let error = RouterConfig::resolve(raw).expect_err("no such policy");
        assert_eq!(
            error.to_string(),
            "`router.policy`: \"best\" is not one of random, round-robin, least-loaded, session-affinity, prefix-aware, cost"
        );
    }
}
