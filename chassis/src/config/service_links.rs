//! Recognises the variables that kubelet sets in every container of a namespace, one set per Service.
//!
//! A Service `baton-router` sets `BATON_ROUTER_SERVICE_HOST`, `BATON_ROUTER_SERVICE_PORT[_NAME]`,
//! `BATON_ROUTER_PORT` and `BATON_ROUTER_PORT_<n>_<PROTOCOL>[_ADDR|_PORT|_PROTO]`. They have the prefix of
//! settings and are not settings.

use std::net::IpAddr;

const HOST: &str = "_SERVICE_HOST";
const PROTOCOLS: [&str; 3] = ["TCP", "UDP", "SCTP"];

/// The Services with variables in the environment, as prefixes of variable names: `BATON_ROUTER`.
pub(super) struct ServiceLinks<'a> {
    services: Vec<&'a str>,
}

impl<'a> ServiceLinks<'a> {
    /// Finds the Services in `env`. A Service has a variable with its host, an address, and one with its
    /// port, a number.
    pub(super) fn of(env: &'a [(String, String)]) -> Self {
        let has_port = |service: &str| {
            let port = format!("{service}_SERVICE_PORT");
            env.iter().any(|(name, value)| *name == port && is_port(value))
        };
        let host_of = |(name, value): &'a (String, String)| {
            let service = name.strip_suffix(HOST)?;
            (is_address(value) && has_port(service)).then_some(service)
        };
        Self { services: env.iter().filter_map(host_of).collect() }
    }

    /// Returns whether kubelet sets this variable for one of the Services.
    pub(super) fn include(&self, name: &str, value: &str) -> bool {
        let of_service = |service: &&str| {
            name.strip_prefix(service)
                .and_then(|rest| rest.strip_prefix('_'))
                .is_some_and(|rest| is_form(rest, value))
        };
        self.services.iter().any(of_service)
    }
}

/// Returns whether `rest` is one of kubelet's suffixes after the Service's name, with a value of the right
/// kind.
fn is_form(rest: &str, value: &str) -> bool {
    match rest {
        "SERVICE_HOST" => is_address(value),
        "SERVICE_PORT" => is_port(value),
        "PORT" => is_url(value),
        _ if rest.starts_with("SERVICE_PORT_") => is_port(value),
        _ => rest.strip_prefix("PORT_").is_some_and(|rest| is_port_form(rest, value)),
    }
}

/// Returns whether `rest` is `<n>_<PROTOCOL>`, optionally followed by `ADDR`, `PORT` or `PROTO`.
fn is_port_form(rest: &str, value: &str) -> bool {
    let mut words = rest.split('_');
    let (Some(port), Some(protocol), part, None) = (words.next(), words.next(), words.next(), words.next())
    else {
        return false;
    };
    let fits = match part {
        None => is_url(value),
        Some("ADDR") => is_address(value),
        Some("PORT") => is_port(value),
        Some("PROTO") => is_protocol(&value.to_uppercase()),
        Some(_) => false,
    };
    is_port(port) && is_protocol(protocol) && fits
}

fn is_protocol(word: &str) -> bool {
    PROTOCOLS.contains(&word)
}

fn is_address(value: &str) -> bool {
    value.parse::<IpAddr>().is_ok()
}

fn is_port(value: &str) -> bool {
    value.parse::<u16>().is_ok()
}

/// Returns whether the value has the form `tcp://10.0.0.1:80`.
fn is_url(value: &str) -> bool {
    value.split_once("://").is_some_and(|(protocol, _)| is_protocol(&protocol.to_uppercase()))
}
