//! Tests of the table of endpoints in `docs/api.md`: a cluster serves every row, and every route in the code
//! is in a row.

use std::collections::BTreeSet;
use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::process::Stdio;

use axum::http::StatusCode;
use baton_tests::{Ask, Client, Fleet, Process, Up, eventually, free_addr, in_time, python};
use serde_json::json;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio::process::Command;
use tonic_health::pb::HealthCheckRequest;
use tonic_health::pb::health_check_response::ServingStatus;
use tonic_health::pb::health_client::HealthClient;
use tonic_reflection::pb::v1::ServerReflectionRequest;
use tonic_reflection::pb::v1::server_reflection_client::ServerReflectionClient;
use tonic_reflection::pb::v1::server_reflection_request::MessageRequest;
use tonic_reflection::pb::v1::server_reflection_response::MessageResponse;

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Returns the ports of the page's table, each with its endpoints.
fn rows() -> Vec<(String, Vec<String>)> {
    let page = std::fs::read_to_string(root().join("docs/api.md")).expect("the page");
    let section =
        page.split("## Endpoints").nth(1).and_then(|rest| rest.split("## ").next()).expect("a table");
    let cells = section.lines().filter(|line| line.starts_with("| ") && line.contains('`'));
    let row = |line: &str| {
        let cells: Vec<&str> = line.split(" | ").collect();
        let endpoints = cells[1].split('`').skip(1).step_by(2).map(str::to_owned).collect();
        (cells[0].trim_start_matches("| ").to_owned(), endpoints)
    };
    cells.map(row).collect()
}

/// Checks the status of an endpoint that exists. A POST is sent without a request in it, except to sleep and
/// to wake.
async fn check(port: SocketAddr, endpoint: &str) {
    let (method, path) = endpoint.split_once(' ').expect("a method and a path");
    let path = path.replace("NAME", "mock");
    let client = Client::new(port);
    let needs_body = method == "POST" && !["/sleep", "/wake"].contains(&path.as_str());
    let expected = if needs_body { 400 } else { 200 };
    // The check is repeated, because a node learns a moment after its start that it may serve.
    eventually(&format!("{endpoint} at {port} to answer {expected}"), async || {
        let status = match method {
            "GET" => client.get(&path).await.0,
            "POST" => client.post(&path, json!({}).to_string()).await.0,
            other => panic!("{other}"),
        };
        (status.as_u16() == expected).then_some(())
    })
    .await;
    let (other, _, _) = match method {
        "GET" => client.post(&path, "").await,
        _ => (client.get(&path).await.0, Default::default(), String::new()),
    };
    assert_eq!(other.as_u16(), 405, "the other method of {endpoint} at {port}");
}

async fn services(port: SocketAddr) -> Vec<String> {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{port}")).expect("an address");
    let mut client = ServerReflectionClient::new(endpoint.connect().await.expect("it listens"));
    let request = ServerReflectionRequest {
        host: String::new(),
        message_request: Some(MessageRequest::ListServices(String::new())),
    };
    let answers = client.server_reflection_info(tokio_stream::once(request)).await.expect("reflection");
    match answers.into_inner().message().await.expect("an answer").and_then(|one| one.message_response) {
        Some(MessageResponse::ListServicesResponse(list)) => {
            list.service.into_iter().map(|service| service.name).collect()
        }
        other => panic!("{other:?}"),
    }
}

/// Waits until a probe of the service `name` gets this answer.
async fn until_health(port: SocketAddr, name: &str, expected: Result<ServingStatus, tonic::Code>) {
    let endpoint = tonic::transport::Endpoint::from_shared(format!("http://{port}")).expect("an address");
    let mut client = HealthClient::new(endpoint.connect().await.expect("it listens"));
    eventually(&format!("the health of `{name}` to be {expected:?}"), async || {
        let answer = client.check(HealthCheckRequest { service: name.to_owned() }).await;
        let answer = answer.map(|status| status.into_inner().status()).map_err(|status| status.code());
        (answer == expected).then_some(())
    })
    .await;
}

/// Probes and load balancers ask for a service by its name.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_health_of_each_grpc_service_is_that_of_its_requests() {
    let mut fleet = Fleet::start("mock", 1, 1).await;
    for name in ["", "baton.v1.Inference", "baton.v1.Bootstrap"] {
        until_health(fleet.grpc, name, Ok(ServingStatus::Serving)).await;
    }
    until_health(fleet.grpc, "baton.v1.Nothing", Err(tonic::Code::NotFound)).await;
    fleet.expect_log(&["status stream from node lost"]);
    fleet.nodes[1].process.kill();
    until_health(fleet.grpc, "baton.v1.Inference", Ok(ServingStatus::NotServing)).await;
    until_health(fleet.grpc, "", Ok(ServingStatus::Serving)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_endpoint_of_the_page_is_served() {
    let fleet = Fleet::start_pooled("mock", 1, 1, 1).await;
    let rows = rows();
    assert!(rows.len() > 5, "{rows:?}");
    // The page names a request `ID`.
    fleet.client().ask(&Ask::new(vec![1], 1).header("x-request-id", "ID")).await.expect("an answer");
    for (port, endpoints) in &rows {
        let nodes = |roles: &[&str]| -> Vec<SocketAddr> {
            let nodes = fleet.nodes.iter().filter(|node| roles.contains(&node.role));
            nodes.map(|node| node.admin).collect()
        };
        let ports = match port.as_str() {
            "router, HTTP" => vec![fleet.http],
            "router, admin" | "router, admin only" => vec![fleet.admin],
            "node, admin" => nodes(&["prefill", "decode", "pool"]),
            "prefill or decode node, admin" => nodes(&["prefill", "decode"]),
            "router, gRPC" => {
                let served = services(fleet.grpc).await;
                endpoints
                    .iter()
                    .for_each(|service| assert!(served.contains(service), "{service}: {served:?}"));
                continue;
            }
            other => panic!("no process has a port called `{other}`"),
        };
        for port in ports {
            for endpoint in endpoints {
                check(port, endpoint).await;
            }
        }
    }
}

/// The description for programs has the endpoints and the fields of the page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_description_for_programs_says_what_the_page_says() {
    let up = Up::start(&["--colocated"]).await;
    let description = up.client().get_json("/openapi.json").await;
    let paths = description["paths"].as_object().expect("paths");
    let described: BTreeSet<String> = paths
        .iter()
        .flat_map(|(path, methods)| {
            let path = path.replace("{name}", "NAME").replace("{id}", "ID");
            methods
                .as_object()
                .expect("methods")
                .keys()
                .map(move |method| format!("{} {path}", method.to_uppercase()))
        })
        .collect();
    let rows = rows();
    let documented = rows.iter().filter(|(port, _)| port == "router, HTTP").flat_map(|(_, all)| all.clone());
    assert_eq!(described, documented.collect());
    for (schema, endpoint) in [("ChatRequest", "chat"), ("CompletionRequest", "completions")] {
        let properties = &description["components"]["schemas"][schema]["properties"];
        let described: BTreeSet<String> = properties.as_object().expect("fields").keys().cloned().collect();
        assert_eq!(described, fields(endpoint), "{schema}");
    }
}

/// Schemathesis sends requests that the description allows and requests that it forbids. No answer is a 5xx or differs
/// from the description, and none is late.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_made_from_the_description_find_no_fault() {
    const SHORT: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/short.toml");
    let up = Up::start(&["--model", SHORT]).await;
    // A router that has just started answers 503 to an unknown model.
    eventually("the router to know its nodes", async || {
        (up.client().get("/v1/models/no-such-model").await.0 == StatusCode::NOT_FOUND).then_some(())
    })
    .await;
    let seconds = std::env::var("TEST_SCHEMATHESIS_S").unwrap_or_else(|_| "60".to_owned());
    // It writes its findings into a folder.
    let folder = tempfile::tempdir().expect("a folder");
    let schemathesis = python().with_file_name("schemathesis");
    let output = Command::new(std::path::absolute(schemathesis).expect("a path"))
        .current_dir(folder.path())
        .arg("run")
        .arg(format!("http://{}/openapi.json", up.http))
        .args(["--max-time", &seconds, "--request-timeout", "30", "--generation-database", "none"])
        .args(["--warnings", "off", "--no-color", "--checks", CHECKS])
        .stdin(Stdio::null())
        .output();
    let output = output.await.expect("./test.sh installs it");
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success(), "{said}{}", String::from_utf8_lossy(&output.stderr));
    let sent = said.lines().find_map(|line| line.trim().split_once(" generated")?.0.parse::<u32>().ok());
    assert!(sent > Some(200), "{said}");
    up.baseline().await;
}

/// The checks of each answer.
const CHECKS: &str =
    "not_a_server_error,status_code_conformance,content_type_conformance,response_schema_conformance";

/// Returns the fields of an endpoint that the page says are honoured or ignored.
fn fields(endpoint: &str) -> BTreeSet<String> {
    let page = std::fs::read_to_string(root().join("docs/api.md")).expect("the page");
    let table = page.split("## Request fields").nth(1).expect("a table").to_owned();
    let rows = table.lines().filter_map(|line| line.strip_prefix("| `")).filter_map(|row| {
        let cells: Vec<&str> = row.split(" | ").collect();
        let counts = [endpoint, "both"].contains(&cells[1])
            && (cells[2].starts_with("honoured") || cells[2].starts_with("ignored"));
        counts.then(|| cells[0].split('`').step_by(2).map(str::to_owned).collect::<Vec<_>>())
    });
    rows.flatten().filter(|name| !name.is_empty()).collect()
}

/// Secrets are in files, and a password in a URL is left out of the page.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_settings_in_force_are_shown_without_passwords() {
    let settings = vec![("BATON_LOG__OTLP", "http://joe:secret-word@127.0.0.1:9".to_owned())];
    let fleet = Fleet::start_with("mock", 1, 1, settings).await;
    fleet.expect_log(&["sending spans to the collector failed"]);
    let page = fleet.client().get_json("/debug/config").await;
    assert_eq!(page["log"]["otlp"], "http://joe:***@127.0.0.1:9");
    assert_eq!(page["router"]["http"], fleet.http.to_string(), "as in the environment");
    assert_eq!(page["router"]["policy"], "least-loaded", "a default");
    let node = Client::new(fleet.nodes[0].admin).get_json("/debug/config").await;
    assert_eq!(node["node"]["id"], "prefill-0");
}

/// Returns the paths of `.route("…")` in the sources of a crate, without its tests.
fn routes(of_crate: &str) -> BTreeSet<String> {
    let mut folders = vec![root().join(of_crate).join("src")];
    let mut paths = BTreeSet::new();
    while let Some(folder) = folders.pop() {
        for entry in std::fs::read_dir(folder).expect("sources").flatten() {
            let path = entry.path();
            if path.is_dir() {
                folders.push(path);
            } else if path.extension().is_some_and(|extension| extension == "rs")
                && !path.ends_with("tests.rs")
            {
                let text = std::fs::read_to_string(&path).expect("text");
                let code = text.split("#[cfg(test)]").next().unwrap_or_default();
                let routes = code.split(".route(").skip(1).map(str::trim_start);
                let literal = |rest: &str| Some(rest.strip_prefix('"')?.split('"').next()?.to_owned());
                paths.extend(
                    routes
                        .filter_map(literal)
                        .map(|path| path.replace("{*name}", "NAME").replace("{id}", "ID")),
                );
            }
        }
    }
    paths
}

#[test]
fn every_route_of_the_code_is_on_the_page() {
    let rows = rows();
    let documented = |ports: &[&str]| -> BTreeSet<String> {
        let rows = rows.iter().filter(|(port, _)| ports.contains(&port.as_str()));
        let endpoints = rows.flat_map(|(_, endpoints)| endpoints);
        endpoints.filter_map(|endpoint| Some(endpoint.split_once(' ')?.1.to_owned())).collect()
    };
    let mut router = routes("router");
    assert!(router.remove("/debug/upstream"), "a router in front of other engines has it: upstream.rs");
    assert_eq!(router, documented(&["router, HTTP", "router, admin only"]));
    let is_clients = |path: &str| path.starts_with("/v1/") || ["/tokenize", "/detokenize"].contains(&path);
    let operators: BTreeSet<String> = router.into_iter().filter(|path| !is_clients(path)).collect();
    assert_eq!(operators, documented(&["router, admin", "router, admin only"]));
    let nodes: BTreeSet<String> = ["chassis", "node", "pool-node", "prefill-node", "decode-node"]
        .into_iter()
        .flat_map(routes)
        .collect();
    assert_eq!(nodes, documented(&["node, admin", "prefill or decode node, admin"]));
}

/// The router's HTTP port with a certificate and an allowed origin. The admin port has neither.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_http_port_may_have_tls_and_pages_of_other_origins() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = |name: &str| folder.path().join(name).display().to_string();
    let made = rcgen::generate_simple_self_signed(vec!["localhost".to_owned()]).expect("a certificate");
    std::fs::write(path("cert.pem"), made.cert.pem()).expect("written");
    std::fs::write(path("key.pem"), made.signing_key.serialize_pem()).expect("written");
    let (http, grpc, admin) = (free_addr(), free_addr(), free_addr());
    let settings = vec![
        ("BATON_ROUTER__HTTP", http.to_string()),
        ("BATON_ROUTER__GRPC", grpc.to_string()),
        ("BATON_ROUTER__ADMIN", admin.to_string()),
        ("BATON_ROUTER__TLS_CERT_FILE", path("cert.pem")),
        ("BATON_ROUTER__TLS_KEY_FILE", path("key.pem")),
        ("BATON_EXPERT__ROUTER__CORS_ORIGINS", "[\"https://chat.example\"]".to_owned()),
    ];
    let _router = Process::start(folder.path(), "router", "router", settings);
    let listens = async || TcpStream::connect(admin).await.ok();
    eventually("the router to listen", listens).await;
    let (status, _) = Client::new(admin).get("/live").await;
    assert_eq!(status, 200, "the admin port has no TLS");

    let mut roots = rustls::RootCertStore::empty();
    roots.add(made.cert.der().clone()).expect("an authority");
    let config = rustls::ClientConfig::builder_with_provider(rustls::crypto::ring::default_provider().into())
        .with_safe_default_protocol_versions()
        .expect("versions")
        .with_root_certificates(roots)
        .with_no_client_auth();
    let tcp = TcpStream::connect(http).await.expect("it listens");
    let name = rustls::pki_types::ServerName::try_from("localhost").expect("a name");
    let connector = tokio_rustls::TlsConnector::from(std::sync::Arc::new(config));
    let mut tls = in_time("the handshake", connector.connect(name, tcp)).await.expect("it is trusted");
    let head =
        "GET /live HTTP/1.1\r\nhost: localhost\r\norigin: https://chat.example\r\nconnection: close\r\n\r\n";
    tls.write_all(head.as_bytes()).await.expect("sent");
    let mut answer = String::new();
    in_time("an answer", tls.read_to_string(&mut answer)).await.expect("a whole answer");
    assert!(answer.starts_with("HTTP/1.1 200"), "{answer}");
    assert!(answer.contains("access-control-allow-origin: https://chat.example"), "{answer}");
}
