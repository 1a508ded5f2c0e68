//! The URL of a Service: `kubernetes://SERVICE.NAMESPACE:PORT`.

use std::fmt;

use super::super::settings::bootstrap_port;

/// The Service whose endpoints are the servers of a pool.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ServiceUrl {
    pub service: String,
    /// `None`: the namespace of the router's own pod.
    pub namespace: Option<String>,
    pub port: ServicePort,
    /// The port of SGLang's bootstrap server on each server.
    pub bootstrap_port: u16,
}

/// The port of the servers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum ServicePort {
    /// The port on which the pods listen.
    Number(u16),
    /// The name of the Service's port. Pods may listen on different ports of that name.
    Name(String),
}

const SCHEME: &str = "kubernetes://";
/// The longest name of a Service, a namespace or a port.
const LABEL_MAX: usize = 63;

impl ServiceUrl {
    pub(in super::super) fn is_meant(url: &str) -> bool {
        url.starts_with(SCHEME)
    }

    pub(in super::super) fn parse(url: &str) -> Option<Self> {
        let rest = url.strip_prefix(SCHEME)?;
        let (address, query) = match rest.split_once('?') {
            Some((address, query)) => (address, Some(query)),
            None => (rest, None),
        };
        let (name, port) = address.split_once(':')?;
        let (service, namespace) = match name.split_once('.') {
            Some((service, namespace)) => (service, Some(label(namespace)?)),
            None => (name, None),
        };
        Some(Self {
            service: label(service)?,
            namespace,
            port: ServicePort::parse(port)?,
            bootstrap_port: bootstrap_port(query)?,
        })
    }
}

impl ServicePort {
    fn parse(text: &str) -> Option<Self> {
        if text.bytes().all(|byte| byte.is_ascii_digit()) {
            return text.parse().ok().filter(|port| *port > 0).map(Self::Number);
        }
        label(text).map(Self::Name)
    }
}

impl fmt::Display for ServiceUrl {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{SCHEME}{}", self.service)?;
        if let Some(namespace) = &self.namespace {
            write!(f, ".{namespace}")?;
        }
        match &self.port {
            ServicePort::Number(port) => write!(f, ":{port}"),
            ServicePort::Name(name) => write!(f, ":{name}"),
        }
    }
}

/// Returns the text if it is a name as Kubernetes has them.
fn label(text: &str) -> Option<String> {
    let is_known = |byte: u8| byte.is_ascii_lowercase() || byte.is_ascii_digit() || byte == b'-';
    let has_ends = !text.is_empty() && !text.starts_with('-') && !text.ends_with('-');
    (has_ends && text.len() <= LABEL_MAX && text.bytes().all(is_known)).then(|| text.to_owned())
}

/// Encodes a value of a query. The API server's tokens are opaque.
pub(super) fn query_value(text: &str) -> String {
    let mut encoded = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'a'..=b'z' | b'A'..=b'Z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' => encoded.push(byte.into()),
            _ => encoded.push_str(&format!("%{byte:02X}")),
        }
    }
    encoded
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_url_names_a_service_and_a_port() {
        let url = |service: &str, namespace: Option<&str>, port, bootstrap_port| {
            let (service, namespace) = (service.to_owned(), namespace.map(str::to_owned));
            Some(ServiceUrl { service, namespace, port, bootstrap_port })
        };
        let (number, name) = (ServicePort::Number, |name: &str| ServicePort::Name(name.to_owned()));
        let long = "a".repeat(64);
        for (text, expected) in [
            ("kubernetes://vllm.prod:8000", url("vllm", Some("prod"), number(8000), 8998)),
            ("kubernetes://vllm-0:http", url("vllm-0", None, name("http"), 8998)),
            ("kubernetes://sglang.a:9?bootstrap_port=7", url("sglang", Some("a"), number(9), 7)),
            ("kubernetes://a:1-2", url("a", None, name("1-2"), 8998)),
            ("kubernetes://vllm.prod", None),
            ("kubernetes://vllm.prod:", None),
            ("kubernetes://vllm.prod:0", None),
            ("kubernetes://vllm.prod:65536", None),
            ("kubernetes://vllm.prod:8000/", None),
            ("kubernetes://vllm.prod.svc:8000", None),
            ("kubernetes://prod/vllm:8000", None),
            ("kubernetes://.prod:8000", None),
            ("kubernetes://vllm.:8000", None),
            ("kubernetes://-a:1", None),
            ("kubernetes://Vllm:1", None),
            ("kubernetes://a@b:1", None),
            ("kubernetes://a:1?port=3", None),
            ("kubernetes://a:1?bootstrap_port=0x1", None),
            (&format!("kubernetes://{long}:1"), None),
            ("http://a:1", None),
        ] {
            assert_eq!(ServiceUrl::parse(text), expected, "{text}");
        }
    }

    #[test]
    fn pages_show_the_url_without_its_query() {
        for url in ["kubernetes://vllm.prod:8000", "kubernetes://vllm:http"] {
            let parsed = ServiceUrl::parse(&format!("{url}?bootstrap_port=1")).expect("it is right");
            assert_eq!(parsed.to_string(), url);
        }
    }

    #[test]
    fn values_of_queries_are_encoded() {
        assert_eq!(query_value("eyJ2-._~=+/&é"), "eyJ2-._~%3D%2B%2F%26%C3%A9");
    }
}
