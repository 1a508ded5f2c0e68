//! The EndpointSlices of one Service, and the servers in them.

use std::collections::BTreeMap;
use std::net::{IpAddr, SocketAddr};

use serde::Deserialize;
use tracing::warn;

use super::super::settings::MemberAddress;
use super::super::source::SERVERS_MAX;
use super::url::ServicePort;

/// The largest number of slices of a Service.
const SLICES_MAX: usize = 1024;

/// An object of the API, as far as it is read here (`discovery.k8s.io/v1`).
#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct EndpointSlice {
    pub(super) metadata: ObjectMeta,
    address_type: String,
    endpoints: Option<Vec<Endpoint>>,
    ports: Option<Vec<EndpointPort>>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "camelCase")]
pub(super) struct ObjectMeta {
    /// Bookmarks have no name.
    #[serde(default)]
    pub(super) name: String,
    pub(super) resource_version: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct Endpoint {
    /// The first one counts; the API gives no meaning to others.
    addresses: Vec<String>,
    #[serde(default)]
    conditions: Conditions,
}

#[derive(Clone, Debug, Default, PartialEq, Eq, Deserialize)]
struct Conditions {
    ready: Option<bool>,
    terminating: Option<bool>,
}

#[derive(Clone, Debug, PartialEq, Eq, Deserialize)]
struct EndpointPort {
    name: Option<String>,
    port: Option<u16>,
}

/// The slices by name.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(super) struct Slices(BTreeMap<String, Slice>);

/// The contents of one slice. All its addresses are of one family.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Slice {
    family: Family,
    servers: Vec<SocketAddr>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Family {
    Ipv4,
    Ipv6,
}

impl Conditions {
    /// Returns whether new requests may go there. A pod that terminates takes none, even where the Service publishes
    /// pods that are not ready (`publishNotReadyAddresses`), which sets `ready` for all.
    fn is_usable(&self) -> bool {
        self.ready != Some(false) && self.terminating != Some(true)
    }
}

impl EndpointSlice {
    /// Returns the number of the port in this slice; `None` if it has no port of that name.
    fn port(&self, port: &ServicePort) -> Option<u16> {
        match port {
            ServicePort::Number(number) => Some(*number),
            ServicePort::Name(name) => {
                let named = |one: &&EndpointPort| one.name.as_deref() == Some(name);
                self.ports.as_deref()?.iter().find(named)?.port
            }
        }
    }

    fn family(&self) -> Option<Family> {
        match self.address_type.as_str() {
            "IPv4" => Some(Family::Ipv4),
            "IPv6" => Some(Family::Ipv6),
            _ => None,
        }
    }
}

impl Slices {
    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Adds a slice or replaces it. An error says why there is no room for it.
    pub(super) fn put(&mut self, slice: EndpointSlice, port: &ServicePort) -> Result<(), String> {
        let name = slice.metadata.name.clone();
        let Some(family) = slice.family() else {
            warn!(
                slice = name,
                address_type = slice.address_type,
                "EndpointSlice ignored: neither IPv4 nor IPv6"
            );
            self.remove(&name);
            return Ok(());
        };
        let number = slice.port(port);
        if number.is_none() && slice.endpoints.as_ref().is_some_and(|all| !all.is_empty()) {
            warn!(slice = name, ?port, ports = ?slice.ports, "EndpointSlice ignored: it has no port of that name");
        }
        let usable = slice.endpoints.iter().flatten().filter(|one| one.conditions.is_usable());
        let servers = usable.filter_map(|one| family.server(&name, one, number?)).take(SERVERS_MAX).collect();
        self.0.insert(name, Slice { family, servers });
        if self.0.len() > SLICES_MAX {
            return Err(format!("the Service has more than {SLICES_MAX} EndpointSlices"));
        }
        Ok(())
    }

    pub(super) fn remove(&mut self, name: &str) {
        self.0.remove(name);
    }

    /// Returns the servers of all slices. A Service with both families lists each pod twice; then IPv4 counts.
    pub(super) fn addresses(&self, bootstrap_port: u16) -> Vec<MemberAddress> {
        let has_ipv4 = self.0.values().any(|slice| slice.family == Family::Ipv4);
        let family = if has_ipv4 { Family::Ipv4 } else { Family::Ipv6 };
        let slices = self.0.values().filter(|slice| slice.family == family);
        slices.flat_map(|slice| &slice.servers).map(|server| address(*server, bootstrap_port)).collect()
    }
}

impl Family {
    fn server(self, slice: &str, endpoint: &Endpoint, port: u16) -> Option<SocketAddr> {
        let first = endpoint.addresses.first()?;
        match (self, first.parse()) {
            (Self::Ipv4, Ok(ip @ IpAddr::V4(_))) | (Self::Ipv6, Ok(ip @ IpAddr::V6(_))) => {
                Some(SocketAddr::new(ip, port))
            }
            _ => {
                warn!(
                    slice,
                    address = first,
                    "endpoint ignored: its address is not of the slice's address type"
                );
                None
            }
        }
    }
}

fn address(server: SocketAddr, bootstrap_port: u16) -> MemberAddress {
    let host = match server.ip() {
        IpAddr::V4(ip) => ip.to_string(),
        IpAddr::V6(ip) => format!("[{ip}]"),
    };
    MemberAddress { base: format!("http://{server}"), host, bootstrap_port }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;

    /// A slice as the controller of Kubernetes writes it, with the fields that are not read too.
    fn slice(name: &str, family: &str, endpoints: &Value, ports: &Value) -> EndpointSlice {
        let object = json!({
            "metadata": { "name": name, "namespace": "prod", "resourceVersion": "7", "generation": 3 },
            "addressType": family,
            "endpoints": endpoints,
            "ports": ports,
        });
        serde_json::from_value(object).expect("a slice")
    }

    fn endpoint(address: &str, conditions: &Value) -> Value {
        json!({ "addresses": [address, "ignored"], "conditions": conditions, "nodeName": "n", "zone": "a" })
    }

    fn servers(slices: &[EndpointSlice], port: &ServicePort) -> Vec<String> {
        let mut all = Slices::default();
        slices.iter().for_each(|one| all.put(one.clone(), port).expect("there is room"));
        all.addresses(9).into_iter().map(|one| one.base).collect()
    }

    #[test]
    fn endpoints_are_used_unless_they_are_not_ready_or_terminate() {
        for (conditions, is_used) in [
            (json!({}), true),
            (json!({ "ready": null, "serving": null, "terminating": null }), true),
            (json!({ "ready": true, "serving": true, "terminating": false }), true),
            (json!({ "ready": false, "serving": false, "terminating": false }), false),
            (json!({ "ready": false, "serving": true, "terminating": true }), false),
            // publishNotReadyAddresses
            (json!({ "ready": true, "serving": false, "terminating": false }), true),
            (json!({ "ready": true, "serving": true, "terminating": true }), false),
        ] {
            let slice = slice("a", "IPv4", &json!([endpoint("10.0.0.1", &conditions)]), &Value::Null);
            let expected: &[&str] = if is_used { &["http://10.0.0.1:8000"] } else { &[] };
            assert_eq!(servers(&[slice], &ServicePort::Number(8000)), expected, "{conditions}");
        }
        let without: EndpointSlice = serde_json::from_value(json!({
            "metadata": { "name": "a", "resourceVersion": "1" },
            "addressType": "IPv4",
            "endpoints": [{ "addresses": ["10.0.0.1"] }],
        }))
        .expect("a slice");
        assert_eq!(servers(&[without], &ServicePort::Number(1)), ["http://10.0.0.1:1"]);
    }

    #[test]
    fn a_port_is_a_number_or_a_name_in_the_slice() {
        let ports = json!([
            { "name": "metrics", "port": 9100, "protocol": "TCP" },
            { "name": "http", "port": 8100, "protocol": "TCP", "appProtocol": null },
            { "name": "all", "port": null },
        ]);
        let ready = json!([endpoint("10.0.0.1", &json!({ "ready": true }))]);
        let name = |name: &str| ServicePort::Name(name.to_owned());
        for (ports, port, expected) in [
            (&ports, name("http"), Some("http://10.0.0.1:8100")),
            (&ports, ServicePort::Number(8000), Some("http://10.0.0.1:8000")),
            (&ports, name("grpc"), None),
            (&ports, name("all"), None),
            (&Value::Null, name("http"), None),
            (&json!([{ "port": 8100 }]), name("http"), None),
        ] {
            let found = servers(&[slice("a", "IPv4", &ready, ports)], &port);
            assert_eq!(found.first().map(String::as_str), expected, "{ports} {port:?}");
        }
    }

    #[test]
    fn all_slices_of_a_service_are_merged_and_one_family_counts() {
        let of = |name, family, addresses: &[&str]| {
            let endpoints: Vec<Value> = addresses.iter().map(|one| endpoint(one, &json!({}))).collect();
            slice(name, family, &json!(endpoints), &Value::Null)
        };
        let (one, two) =
            (of("a", "IPv4", &["10.0.0.2", "10.0.0.1"]), of("b", "IPv4", &["10.0.0.3", "nonsense", "::1"]));
        let (six, fqdn) = (of("c", "IPv6", &["fd00::1", "10.0.0.9"]), of("d", "FQDN", &["a.example"]));
        let found = |slices: &[&EndpointSlice]| {
            servers(&slices.iter().map(|one| (*one).clone()).collect::<Vec<_>>(), &ServicePort::Number(1))
        };
        let ipv4 = ["http://10.0.0.2:1", "http://10.0.0.1:1", "http://10.0.0.3:1"];
        assert_eq!(found(&[&two, &one]), ipv4);
        assert_eq!(found(&[&two, &six, &one, &fqdn]), ipv4);
        assert_eq!(found(&[&six, &fqdn]), ["http://[fd00::1]:1"]);
        assert!(found(&[&six, &of("e", "IPv4", &[])]).is_empty(), "no IPv4 address is ready");
        let mut all = Slices::default();
        for slice in [&one, &six, &of("a", "IPv6", &["fd00::2"])] {
            all.put(slice.clone(), &ServicePort::Number(1)).expect("there is room");
        }
        let hosts = |all: &Slices| all.addresses(9).into_iter().map(|one| one.host).collect::<Vec<_>>();
        assert_eq!(hosts(&all), ["[fd00::2]", "[fd00::1]"]);
        all.remove("a");
        assert_eq!(hosts(&all), ["[fd00::1]"]);
        all.put(of("c", "FQDN", &["a.example"]), &ServicePort::Number(1)).expect("there is room");
        assert!(all.is_empty());
    }

    #[test]
    fn slices_have_a_largest_number() {
        let (mut all, port) = (Slices::default(), ServicePort::Number(1));
        let one = |nth: usize| slice(&format!("s{nth}"), "IPv4", &Value::Null, &Value::Null);
        (0..SLICES_MAX).for_each(|nth| all.put(one(nth), &port).expect("there is room"));
        assert_eq!(all.put(one(0), &port), Ok(()));
        let reason = all.put(one(SLICES_MAX), &port).expect_err("there is no room");
        assert_eq!(reason, "the Service has more than 1024 EndpointSlices");
    }
}
