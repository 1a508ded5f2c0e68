//! A router process in a pod, in front of servers that a Service of Kubernetes has as endpoints.

use std::fs::File;
use std::net::SocketAddr;
use std::process::{Child, Command, Stdio};

use baton_tests::{Client, Stopwatch, eventually, executable, free_addr, hosts, in_time};
use serde_json::{Value, json};
use tempfile::TempDir;

use super::api_server::{ApiServer, Calls, NAMESPACE};
use super::engine_server::{Engine, EngineServer, Role, Transfers};
use super::{CHAT, SOON, chat, code};

/// Runs a command with the folder `$1` in the place of a service account's, which no other process sees.
const IN_A_POD: &str = r#"
    account=/var/run/secrets/kubernetes.io/serviceaccount
    mount -t tmpfs tmpfs /var/run
    mkdir -p $account
    mount --bind "$1" $account
    shift
    exec "$@"
"#;
const FAILURES: &str = "baton_router_upstream_source_failures_total{role=\"prefill\"}";

/// A router process. Dropping it kills it; a failing test prints its log.
struct RouterPod {
    http: SocketAddr,
    child: Child,
    log: TempDir,
}

impl RouterPod {
    async fn start(api: &ApiServer, prefill: &str, decode: &EngineServer) -> Self {
        let (http, log) = (free_addr(), tempfile::tempdir().expect("a folder"));
        let file = File::create(log.path().join("log")).expect("a log file");
        let mut command = Command::new("unshare");
        command.args(["--mount", "--propagation", "private", "sh", "-euc", IN_A_POD, "sh"]);
        command.arg(api.account()).arg(executable::baton()).arg("router");
        command.envs(settings(http, prefill, &decode.url()));
        command.env("KUBERNETES_SERVICE_HOST", "127.0.0.1");
        command.env("KUBERNETES_SERVICE_PORT", api.addr.port().to_string());
        let child = command.stdout(Stdio::null()).stderr(file).spawn().expect("it starts");
        let pod = Self { http, child, log };
        let client = pod.client();
        eventually("the router to listen", async || {
            tokio::net::TcpStream::connect(http).await.ok()?;
            (client.get("/live").await.0 == 200).then_some(())
        })
        .await;
        pod
    }

    fn client(&self) -> Client {
        Client::new(self.http)
    }

    /// Waits until requests have this status. One without a server is refused within a second.
    async fn until_status(&self, expected: u16) {
        let client = self.client();
        eventually("the status of requests", async || {
            let asked = Stopwatch::start();
            let (status, _, body) = client.post(CHAT, chat(false).to_string()).await;
            let took = asked.elapsed();
            assert!(took < SOON, "{status} came after {took:?}");
            let status = status.as_u16();
            assert!(status == 200 || (status, code(&body).as_str()) == (503, "no_nodes"), "{status} {body}");
            (status == expected).then_some(())
        })
        .await;
    }

    /// Waits until the pool has these prefill servers.
    async fn until_servers(&self, expected: &[&EngineServer]) {
        let client = self.client();
        let mut urls: Vec<String> = expected.iter().map(|server| server.url()).collect();
        urls.sort();
        eventually("the list of servers", async || {
            let page = client.get_json("/debug/upstream").await;
            let servers = page["servers"].as_array().expect("a list").iter();
            let prefill = servers.filter(|server| server["role"] == "prefill");
            let mut found: Vec<&str> = prefill.map(|server| server["url"].as_str().expect("a URL")).collect();
            found.sort_unstable();
            (found == urls).then_some(())
        })
        .await;
    }

    async fn source(&self) -> Value {
        self.client().get_json("/debug/upstream").await["sources"][0].clone()
    }

    /// Waits until the list cannot be read for this reason.
    async fn until_failure(&self, part: &str) {
        eventually(part, async || self.source().await["failure"].as_str()?.contains(part).then_some(()))
            .await;
    }

    async fn until_well(&self) {
        eventually("the list to be read", async || self.source().await["failure"].is_null().then_some(()))
            .await;
    }
}

impl Drop for RouterPod {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        if std::thread::panicking() {
            eprintln!("{}", std::fs::read_to_string(self.log.path().join("log")).unwrap_or_default());
        }
    }
}

fn settings(http: SocketAddr, prefill: &str, decode: &str) -> Vec<(&'static str, String)> {
    vec![
        ("BATON_ROUTER__HTTP", http.to_string()),
        ("BATON_ROUTER__GRPC", free_addr().to_string()),
        ("BATON_ROUTER__ADMIN", free_addr().to_string()),
        ("BATON_EXPERT__UPSTREAM__KIND", "vllm".to_owned()),
        ("BATON_EXPERT__UPSTREAM__PREFILL", json!([prefill]).to_string()),
        ("BATON_EXPERT__UPSTREAM__DECODE", json!([decode]).to_string()),
    ]
}

/// A slice as the controller of Kubernetes writes it. Endpoints have an address and whether they are ready.
fn slice(name: &str, service: &str, port: u16, endpoints: &[(&str, bool)]) -> Value {
    let endpoint = |(nth, (address, is_ready)): (usize, &(&str, bool))| {
        json!({
            "addresses": [address],
            "conditions": { "ready": is_ready, "serving": is_ready, "terminating": false },
            "targetRef": { "kind": "Pod", "namespace": NAMESPACE, "name": format!("{name}-{nth}"), "uid": format!("{name}-{nth}") },
            "nodeName": "machine-1",
            "zone": "a",
        })
    };
    json!({
        "kind": "EndpointSlice",
        "apiVersion": "discovery.k8s.io/v1",
        "metadata": {
            "name": name,
            "generateName": format!("{service}-"),
            "namespace": NAMESPACE,
            "uid": name,
            "creationTimestamp": "2026-11-27T01:00:00Z",
            "labels": {
                "endpointslice.kubernetes.io/managed-by": "endpointslice-controller.k8s.io",
                "kubernetes.io/service-name": service,
            },
            "ownerReferences": [{ "apiVersion": "v1", "kind": "Service", "name": service, "uid": service, "controller": true }],
        },
        "addressType": "IPv4",
        "endpoints": endpoints.iter().enumerate().map(endpoint).collect::<Vec<_>>(),
        "ports": [{ "name": "http", "port": port, "protocol": "TCP" }],
    })
}

/// A slice with one server of the pool.
fn slice_of(name: &str, server: &EngineServer, is_ready: bool) -> Value {
    slice(name, "vllm", server.addr.port(), &[("127.0.0.1", is_ready)])
}

/// Three prefill servers and a decode server.
fn servers() -> ([EngineServer; 3], EngineServer) {
    let transfers = Transfers::new(Engine::Vllm);
    let prefill = [0; 3].map(|_| EngineServer::start(Role::Prefill, &transfers));
    (prefill, EngineServer::start(Role::Decode, &transfers))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_come_and_go_with_the_endpoints_of_a_service() {
    if !hosts::possible() {
        return;
    }
    let ([a, b, c], decode) = servers();
    let mut api = ApiServer::start();
    api.put(&slice("other", "redis", 1, &[("127.0.0.1", true)]));
    let pod = RouterPod::start(&api, "kubernetes://vllm:http", &decode).await;
    pod.until_well().await;
    pod.until_status(503).await;
    assert_eq!(pod.source().await["url"], "kubernetes://vllm:http");

    api.put(&slice_of("a", &a, true));
    pod.until_status(200).await;
    api.put(&slice_of("b", &b, false));
    api.put(&slice_of("c", &c, true));
    pod.until_servers(&[&a, &c]).await;
    api.put(&slice_of("c", &c, false));
    pod.until_servers(&[&a]).await;
    pod.until_status(200).await;
    api.remove("a");
    pod.until_status(503).await;
    assert_eq!(pod.client().get("/ready").await.0, 503);
    api.put(&slice_of("b", &b, true));
    pod.until_status(200).await;

    // Watches that end in order follow each other. They are no failures, and nothing is listed again.
    let Calls { watches, .. } = api.seen();
    eventually("two more watches", async || (api.seen().watches >= watches + 2).then_some(())).await;
    api.put(&slice_of("a", &a, true));
    pod.until_servers(&[&a, &b]).await;
    assert_eq!(api.seen().lists, 1);
    api.compact();
    eventually("a list after 410 Gone", async || (api.seen().lists == 2).then_some(())).await;
    api.put(&slice_of("c", &c, true));
    pod.until_servers(&[&a, &b, &c]).await;
    assert_eq!((api.seen().lists, pod.client().counter(FAILURES).await), (2, 0));

    api.kill();
    pod.until_failure("its list cannot be read").await;
    pod.until_status(200).await;
    assert_ne!(pod.client().counter(FAILURES).await, 0);
    api.remove("a");
    api.remove("b");
    api.revive();
    pod.until_servers(&[&c]).await;
    pod.until_well().await;
    pod.until_status(200).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_list_of_several_pages_is_read_whole() {
    if !hosts::possible() {
        return;
    }
    let ([a, b, c], decode) = servers();
    let api = ApiServer::start();
    (0..80).for_each(|nth| api.put(&slice(&format!("s{nth:03}"), "vllm", 1, &[("127.0.0.1", false)])));
    for (name, server) in [("s000", &a), ("s040", &b), ("s079", &c)] {
        api.put(&slice_of(name, server, true));
    }
    let pod = RouterPod::start(&api, &format!("kubernetes://vllm.{NAMESPACE}:http"), &decode).await;
    pod.until_servers(&[&a, &b, &c]).await;
    assert_eq!((api.seen().lists, api.seen().further_pages), (1, 2));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_refused_token_or_role_is_named_and_the_last_list_stays() {
    if !hosts::possible() {
        return;
    }
    let ([a, b, _], decode) = servers();
    let mut api = ApiServer::start();
    api.put(&slice_of("a", &a, true));
    api.set_role(false);
    let pod = RouterPod::start(&api, "kubernetes://vllm:http", &decode).await;
    let rule =
        "needs a Role in that namespace with the verbs get, list and watch on the resource endpointslices";
    pod.until_failure(rule).await;
    pod.until_status(503).await;
    api.set_role(true);
    pod.until_status(200).await;

    api.write_token("second");
    api.accept_token("second");
    let Calls { watches, .. } = api.seen();
    eventually("a watch with the new token", async || (api.seen().watches > watches).then_some(())).await;
    api.put(&slice_of("b", &b, true));
    pod.until_servers(&[&a, &b]).await;

    api.accept_token("third");
    pod.until_failure("401 Unauthorized: Unauthorized. It does not accept the token").await;
    pod.until_status(200).await;
    api.write_token("third");
    pod.until_well().await;

    api.set_role(false);
    api.revive();
    pod.until_failure(rule).await;
    pod.until_status(200).await;
}

#[test]
fn a_router_outside_of_a_pod_says_what_is_missing() {
    let run = |variables: &[(&str, &str)]| {
        let mut command = executable::command();
        command.arg("router").envs(settings(
            free_addr(),
            "kubernetes://vllm.prod:http",
            "http://127.0.0.1:1",
        ));
        command.env_remove("KUBERNETES_SERVICE_HOST").envs(variables.iter().copied());
        let ended = executable::finish(&mut command);
        assert!(!ended.status.success(), "{ended:?}");
        ended.stderr
    };
    let stderr = run(&[]);
    let expected =
        "kubernetes://vllm.prod:http: KUBERNETES_SERVICE_HOST is not set: this is no pod of Kubernetes";
    assert!(stderr.contains(expected), "{stderr}");
    let stderr = run(&[("KUBERNETES_SERVICE_HOST", "10.0.0.1"), ("KUBERNETES_SERVICE_PORT", "443")]);
    assert!(
        stderr.contains("read /var/run/secrets/kubernetes.io/serviceaccount/token of the pod's"),
        "{stderr}"
    );
}

#[tokio::test]
async fn the_puppet_serves_what_the_kubernetes_api_defines() {
    const CHECK: &str = "
import json, sys, kubernetes_validate
objects = json.load(sys.stdin)
assert len(objects) == 5, objects
for thing in objects:
    kubernetes_validate.validate(thing, '1.37', strict=True)
";
    let api = ApiServer::start();
    api.put(&slice("a", "vllm", 8000, &[("10.0.0.1", true), ("10.0.0.2", false)]));
    api.put(&slice("a", "vllm", 8000, &[]));
    api.put(&slice("b", "vllm", 8000, &[]));
    api.remove("b");
    let objects = api.objects();
    let check = tokio::task::spawn_blocking(move || {
        let mut child = Command::new(executable::python())
            .args(["-c", CHECK])
            .stdin(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .expect("python runs");
        serde_json::to_writer(child.stdin.take().expect("it was piped"), &objects).expect("written");
        child.wait_with_output().expect("it ends")
    });
    let output = in_time("the check", check).await.expect("it ran");
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}
