//! The settings of pools of other engines.

use std::path::PathBuf;

use http::Uri;
use serde::{Deserialize, Serialize};

use super::kubernetes::ServiceUrl;
use crate::config::{UnknownChoice, unknown};

/// The pools of other engines that the HTTP port serves in place of Baton's nodes.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct UpstreamSection {
    /// The engine of the pools, `vllm` or `sglang`, as in docs/routing.md. Empty: Baton's own nodes serve.
    pub kind: String,
    /// The URLs of the prefill servers, such as `http://10.0.0.1:8100`. An SGLang server whose bootstrap port is not
    /// 8998 names it: `http://10.0.0.1:30000?bootstrap_port=9001`. In their place the URL of one list, in etcd or
    /// Kubernetes, as in docs/routing.md.
    pub prefill: Vec<String>,
    /// The same for the decode servers.
    pub decode: Vec<String>,
    /// The file with the API key of the servers. Empty: they get none.
    pub api_key_file: String,
}

/// The engine of upstream pools: how the KV of a prompt goes from one server to the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum EngineKind {
    /// The prefill server answers with the parameters by which the decode server fetches the KV.
    Vllm,
    /// Both servers get the request at once, and find each other by a bootstrap room at the prefill server's
    /// bootstrap port.
    Sglang,
}

/// The checked settings of upstream pools.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct UpstreamSettings {
    pub kind: EngineKind,
    pub prefill: PoolSource,
    pub decode: PoolSource,
    pub api_key_file: Option<PathBuf>,
    /// The name of the model in metrics and records.
    pub model: String,
}

/// Where the servers of a pool are listed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum PoolSource {
    Fixed(Vec<MemberAddress>),
    /// The URL of an etcd, whose keys name the servers.
    Etcd(String),
    /// A Service of Kubernetes, whose endpoints are the servers.
    Kubernetes(ServiceUrl),
}

/// The address of one server of an upstream pool.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct MemberAddress {
    /// `http://host:port` or `https://host:port`, without a path.
    pub base: String,
    pub host: String,
    pub bootstrap_port: u16,
}

/// The port of SGLang's bootstrap server if `--disaggregation-bootstrap-port` does not change it.
const BOOTSTRAP_PORT: u16 = 8998;
/// The model's name in metrics and records if the configuration names none.
const MODEL: &str = "upstream";

impl UpstreamSection {
    /// Checks the section. Returns `None` if Baton's own nodes serve.
    pub(crate) fn resolve(self, model: &str) -> Result<Option<UpstreamSettings>, UnknownChoice> {
        let Self { kind, prefill, decode, api_key_file } = self;
        let kind = match kind.as_str() {
            "" if prefill.is_empty() && decode.is_empty() && api_key_file.is_empty() => return Ok(None),
            "vllm" => EngineKind::Vllm,
            "sglang" => EngineKind::Sglang,
            _ => return Err(unknown("expert.upstream.kind", kind, &["vllm", "sglang"])),
        };
        Ok(Some(UpstreamSettings {
            kind,
            prefill: members("expert.upstream.prefill", &prefill)?,
            decode: members("expert.upstream.decode", &decode)?,
            api_key_file: (!api_key_file.is_empty()).then(|| api_key_file.into()),
            model: if model.is_empty() { MODEL } else { model }.to_owned(),
        }))
    }
}

fn members(key: &'static str, urls: &[String]) -> Result<PoolSource, UnknownChoice> {
    let known = [
        "http://HOST:PORT",
        "https://HOST:PORT",
        "http://HOST:PORT?bootstrap_port=PORT",
        "a single etcd://HOST:PORT/CLUSTER",
        "a single kubernetes://SERVICE.NAMESPACE:PORT",
    ];
    let refused = |url: &String| unknown(key, url.clone(), &known);
    let member = |url: &String| MemberAddress::parse(url).ok_or_else(|| refused(url));
    match urls {
        [] => Err(unknown(key, String::new(), &["a list of at least one URL"])),
        [url] if url.starts_with("etcd://") => Ok(PoolSource::Etcd(url.clone())),
        [url] if ServiceUrl::is_meant(url) => {
            ServiceUrl::parse(url).map(PoolSource::Kubernetes).ok_or_else(|| refused(url))
        }
        urls => urls.iter().map(member).collect::<Result<_, _>>().map(PoolSource::Fixed),
    }
}

/// Reads the query of an address. `None`: it is not known.
pub(super) fn bootstrap_port(query: Option<&str>) -> Option<u16> {
    match query {
        None => Some(BOOTSTRAP_PORT),
        Some(query) => query.strip_prefix("bootstrap_port=")?.parse().ok(),
    }
}

impl MemberAddress {
    pub(super) fn parse(url: &str) -> Option<Self> {
        let uri: Uri = url.parse().ok()?;
        let (scheme, authority) = (uri.scheme_str()?, uri.authority()?);
        let is_plain = matches!(scheme, "http" | "https") && !authority.as_str().contains('@');
        if !is_plain || uri.path() != "/" {
            return None;
        }
        let bootstrap_port = bootstrap_port(uri.query())?;
        let host = authority.host().to_owned();
        Some(Self { base: format!("{scheme}://{authority}"), host, bootstrap_port })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn section(kind: &str, prefill: &[&str], decode: &[&str]) -> UpstreamSection {
        let owned = |urls: &[&str]| urls.iter().map(|url| (*url).to_owned()).collect();
        UpstreamSection {
            kind: kind.to_owned(),
            prefill: owned(prefill),
            decode: owned(decode),
            ..UpstreamSection::default()
        }
    }

    #[test]
    fn members_are_urls() {
        let address = |base: &str, host: &str, bootstrap_port| {
            Some(MemberAddress { base: base.to_owned(), host: host.to_owned(), bootstrap_port })
        };
        for (url, expected) in [
            ("http://10.0.0.1:8100", address("http://10.0.0.1:8100", "10.0.0.1", 8998)),
            ("https://a.example/", address("https://a.example", "a.example", 8998)),
            ("http://[::1]:3?bootstrap_port=9001", address("http://[::1]:3", "[::1]", 9001)),
            ("10.0.0.1:8100", None),
            ("ftp://a:1", None),
            ("http://a:1/v1", None),
            ("http://user@a:1", None),
            ("http://a:1?port=3", None),
            ("http://a:1?bootstrap_port=x", None),
        ] {
            assert_eq!(MemberAddress::parse(url), expected, "{url}");
        }
    }

    #[test]
    fn a_section_is_whole_or_absent() {
        assert_eq!(UpstreamSection::default().resolve("m"), Ok(None));
        let urls = ["http://a:1"];
        let resolved = section("sglang", &urls, &urls).resolve("").expect("whole").expect("there");
        assert_eq!((resolved.kind, resolved.model.as_str()), (EngineKind::Sglang, "upstream"));
        for (section, key) in [
            (section("", &urls, &[]), "expert.upstream.kind"),
            (section("tgi", &urls, &urls), "expert.upstream.kind"),
            (section("vllm", &[], &urls), "expert.upstream.prefill"),
            (section("vllm", &urls, &["a"]), "expert.upstream.decode"),
            (section("vllm", &urls, &["etcd://a", "http://a:1"]), "expert.upstream.decode"),
            (section("vllm", &urls, &["kubernetes://a.b:1", "http://a:1"]), "expert.upstream.decode"),
            (section("vllm", &["kubernetes://a/b:1"], &urls), "expert.upstream.prefill"),
        ] {
            assert_eq!(section.resolve("").expect_err("refused").key, key);
        }
    }
}
