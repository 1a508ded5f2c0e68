//! Pools of vLLM and SGLang behind a router, played by servers that check what they are sent.

#[path = "upstream/api_server.rs"]
mod api_server;
#[path = "upstream/engine_server.rs"]
mod engine_server;
#[path = "upstream/kubernetes.rs"]
mod kubernetes;

use std::net::SocketAddr;
use std::process::Command;
use std::sync::Arc;
use std::time::Duration;

use axum::http::StatusCode;
use base64::Engine as _;
use base64::engine::general_purpose::STANDARD as BASE64;
use baton_tests::etcd::Etcd;
use baton_tests::{Ask, Client, Stopwatch, eventually, executable, in_time};
use chassis::{Gate, Shutdown, Task, World, spawn_guarded};
use engine_server::{Act, Engine, EngineServer, Role, Seen, Transfers};
use futures::future::join_all;
use router::{RawRouterConfig, Router, RouterConfig};
use serde_json::{Value, json};
use tokio::net::TcpStream;
use tokio::time::{sleep, timeout};

/// The longest time that a leg may outlive its client, and that a refusal may take where no server is left.
const SOON: Duration = Duration::from_secs(1);
const ENGINES: [Engine; 2] = [Engine::Vllm, Engine::Sglang];
const CHAT: &str = "/v1/chat/completions";

/// A router in front of servers.
struct Pools {
    prefill: Vec<EngineServer>,
    decode: Vec<EngineServer>,
    http: SocketAddr,
    shutdown: Shutdown,
    _serving: Task<()>,
}

impl Pools {
    async fn start(engine: Engine) -> Self {
        Self::start_with(engine, [1, 1], |_| {}).await
    }

    /// Starts `n[0]` prefill servers, `n[1]` decode servers and a router. `change` edits the router's configuration first.
    async fn start_with(engine: Engine, n: [usize; 2], change: impl FnOnce(&mut RawRouterConfig)) -> Self {
        let transfers = Transfers::new(engine);
        let servers = |role, n| (0..n).map(|_| EngineServer::start(role, &transfers)).collect::<Vec<_>>();
        let (prefill, decode) = (servers(Role::Prefill, n[0]), servers(Role::Decode, n[1]));
        let mut raw = RawRouterConfig::default();
        for port in [&mut raw.router.http, &mut raw.router.admin, &mut raw.router.grpc] {
            *port = "127.0.0.1:0".to_owned();
        }
        raw.router.drain_ms = 200;
        raw.expert.upstream.kind = if engine == Engine::Vllm { "vllm" } else { "sglang" }.to_owned();
        raw.expert.upstream.prefill = prefill.iter().map(EngineServer::url).collect();
        raw.expert.upstream.decode = decode.iter().map(EngineServer::url).collect();
        change(&mut raw);
        let config = RouterConfig::resolve(raw).expect("a valid configuration");
        let router = Router::bind(World::real(), config).await.expect("it binds");
        let (http, shutdown) = (router.http_addr(), Shutdown::new());
        let stop = shutdown.clone();
        let serving = async move { drop(router.serve(stop, std::future::ready(())).await) };
        let _serving = spawn_guarded(&Gate::new("router"), "router", serving);
        let pools = Self { prefill, decode, http, shutdown, _serving };
        let client = pools.client();
        eventually("the router to be ready", async || (client.get("/ready").await.0 == 200).then_some(()))
            .await;
        pools
    }

    fn client(&self) -> Client {
        Client::new(self.http)
    }

    /// Posts a request, and returns status and body.
    async fn post(&self, path: &str, body: &Value) -> (u16, String) {
        let (status, _, text) = self.client().post(path, body.to_string()).await;
        (status.as_u16(), text)
    }

    /// Waits until no server works on a request, for a second at most.
    async fn all_legs_end(&self) {
        let (servers, watch) = (|| self.prefill.iter().chain(&self.decode), Stopwatch::start());
        eventually("the legs to end", async || servers().all(|server| server.n_running() == 0).then_some(()))
            .await;
        let took = watch.elapsed();
        assert!(took < SOON, "a leg outlived its client by {took:?}");
    }

    async fn legs(&self, role: &str, outcome: &str) -> u64 {
        let name = format!("baton_router_upstream_legs_total{{outcome=\"{outcome}\",role=\"{role}\"}}");
        self.client().counter(&name).await
    }
}

impl Drop for Pools {
    fn drop(&mut self) {
        self.shutdown.trigger();
    }
}

fn chat(stream: bool) -> Value {
    json!({ "model": "m", "messages": [{ "role": "user", "content": "hi" }], "stream": stream, "top_k": 3 })
}

fn code(body: &str) -> String {
    let body: Value = serde_json::from_str(body).unwrap_or_default();
    body["error"]["code"].as_str().unwrap_or_default().to_owned()
}

/// Returns the fields that two requests do not share, or have with other values.
fn difference(one: &Value, other: &Value) -> Vec<String> {
    let names = |value: &Value| value.as_object().expect("an object").keys().cloned().collect::<Vec<_>>();
    let mut all = [names(one), names(other)].concat();
    all.sort();
    all.dedup();
    all.retain(|name| one.get(name) != other.get(name));
    all
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_and_answers_pass_as_they_came() {
    for engine in ENGINES {
        let pools = Pools::start(engine).await;
        for path in [CHAT, "/v1/completions"] {
            for stream in [false, true] {
                let mut sent = chat(stream);
                sent["prompt"] = json!([1, 2, 3]);
                sent["logit_bias"] = json!({ "5": 1e-7 });
                let expected =
                    if stream { engine_server::events(path).concat() } else { engine_server::whole(path) };
                assert_eq!(pools.post(path, &sent).await, (200, expected), "{engine:?} {path} {stream}");
                let last = |server: &EngineServer| server.seen().pop().expect("a request").json();
                let added: &[&str] = match engine {
                    Engine::Vllm => &["kv_transfer_params"],
                    Engine::Sglang => &["bootstrap_host", "bootstrap_port", "bootstrap_room"],
                };
                assert_eq!(difference(&sent, &last(&pools.decode[0])), added);
                if engine == Engine::Sglang {
                    assert_eq!(last(&pools.prefill[0]), last(&pools.decode[0]));
                }
            }
        }
        let ended = async || (pools.legs("prefill", "finished").await == 4).then_some(());
        eventually("the prefill legs to end", ended).await;
        assert_eq!(pools.legs("decode", "finished").await, 4);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_official_openai_client_works_with_other_engines() {
    for engine in ENGINES {
        let pools = Pools::start(engine).await;
        let script = format!("{}/python/openai_upstream.py", env!("CARGO_MANIFEST_DIR"));
        let (python, url) = (executable::python(), format!("http://{}/v1", pools.http));
        let run = tokio::task::spawn_blocking(move || Command::new(python).args([script, url]).output());
        let output = in_time("the client", run).await.expect("it ran").expect("python runs");
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn requests_share_the_servers_and_each_has_its_own_room() {
    for engine in ENGINES {
        let pools = Pools::start_with(engine, [2, 3], |_| {}).await;
        let answers = join_all((0..60).map(|_| async { pools.post(CHAT, &chat(true)).await })).await;
        assert!(answers.iter().all(|answer| answer.0 == 200), "{answers:?}");
        for (servers, least) in [(&pools.prefill, 15), (&pools.decode, 10)] {
            let counts: Vec<usize> = servers.iter().map(|server| server.seen().len()).collect();
            assert!(counts.iter().all(|n| *n >= least), "{engine:?} {counts:?}");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn an_error_of_the_request_passes_and_one_of_the_server_is_tried_elsewhere() {
    for engine in ENGINES {
        for at_prefill in [true, false] {
            let pools = Pools::start_with(engine, [2, 2], |_| {}).await;
            let servers = if at_prefill { &pools.prefill } else { &pools.decode };
            servers.iter().for_each(|server| server.does(Act::Status(400)));
            let (status, body) = pools.post(CHAT, &chat(true)).await;
            assert_eq!((status, body.contains("as told")), (400, true), "{engine:?} {body}");
            assert_eq!(servers.iter().map(|server| server.seen().len()).sum::<usize>(), 1, "{engine:?}");
            pools.all_legs_end().await;
            for status in [503, 500, 429] {
                servers.iter().for_each(|server| server.does(Act::Answer));
                servers[0].does(Act::Status(status));
                for _ in 0..2 {
                    assert_eq!(pools.post(CHAT, &chat(true)).await.0, 200, "{engine:?} {status}");
                }
            }
            servers.iter().for_each(|server| server.does(Act::Status(503)));
            let (status, body) = pools.post(CHAT, &chat(true)).await;
            assert_eq!((status, body.contains("as told")), (503, true), "{engine:?} {body}");
            pools.all_legs_end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_does_not_answer_is_waited_for_until_the_deadline() {
    for engine in ENGINES {
        for at_prefill in [true, false] {
            for act in [Act::Silent, Act::Stall] {
                if at_prefill && act == Act::Stall {
                    continue; // The prefill leg of vLLM is not a stream.
                }
                let pools = Pools::start(engine).await;
                let servers = if at_prefill { &pools.prefill } else { &pools.decode };
                servers[0].does(act);
                let watch = Stopwatch::start();
                let headers = [("x-baton-timeout-ms", "400".to_owned())];
                let body = chat(true).to_string();
                let (status, _, text) = pools.client().post_with(CHAT, &headers, body).await;
                let took = watch.elapsed();
                assert!(took < Duration::from_millis(400) + SOON, "{took:?}");
                match act {
                    Act::Silent => {
                        assert_eq!((status.as_u16(), code(&text).as_str()), (504, "deadline"), "{text}")
                    }
                    _ => {
                        let event = text.split("data: ").last().expect("an event");
                        assert_eq!((status.as_u16(), code(event).as_str()), (200, "deadline"), "{text}");
                    }
                }
                pools.all_legs_end().await;
            }
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn late_and_early_legs_meet() {
    for engine in ENGINES {
        for at_prefill in [true, false] {
            let pools = Pools::start(engine).await;
            let late = if at_prefill { &pools.prefill } else { &pools.decode };
            late[0].does(Act::Late(Duration::from_millis(300)));
            assert_eq!(
                pools.post(CHAT, &chat(true)).await,
                (200, engine_server::events(CHAT).concat()),
                "{engine:?}"
            );
            pools.all_legs_end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cut_answer_is_not_taken_for_a_whole_one() {
    for engine in ENGINES {
        let pools = Pools::start(engine).await;
        pools.decode[0].does(Act::Cut);
        let (status, text) = pools.post(CHAT, &chat(true)).await;
        let (head, event) = text.split_once("event: error\ndata: ").expect("an error event");
        assert_eq!((status, code(event).as_str()), (200, "failed"), "{text}");
        assert_eq!(head, engine_server::events(CHAT)[..2].concat());
        pools.decode[0].does(Act::CutInside);
        let mut stream = pools.client().stream(&Ask::new(vec![1], 4)).await.expect("an answer begins");
        assert!(stream.next().await.expect("the first event").is_some());
        assert_eq!(stream.next().await.expect_err("the connection breaks").code, "broken");
        pools.all_legs_end().await;
        assert_eq!(pools.legs("decode", "failed").await, 2);
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_leg_outlives_its_client() {
    for engine in ENGINES {
        for (at_prefill, act) in [(true, Act::Silent), (false, Act::Silent), (false, Act::Stall)] {
            let pools = Pools::start(engine).await;
            let servers = if at_prefill { &pools.prefill } else { &pools.decode };
            servers[0].does(act);
            let client = pools.client();
            let ask = Ask::new(vec![1, 2], 4);
            let mut asking = Box::pin(client.stream(&ask));
            let is_running = async {
                while servers.iter().map(EngineServer::n_running).sum::<usize>() != 1 {
                    sleep(Duration::from_millis(10)).await;
                }
            };
            let begun = match act {
                Act::Stall => Some(asking.as_mut().await.expect("an answer begins")),
                _ => tokio::select! {
                    _ = &mut asking => panic!("{engine:?} {act:?}: an answer"),
                    running = timeout(Duration::from_secs(10), is_running) => {
                        running.expect("the leg begins");
                        None
                    }
                },
            };
            drop((asking, begun));
            pools.all_legs_end().await;
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_failed_leg_ends_the_other_one() {
    let pools = Pools::start(Engine::Sglang).await;
    pools.decode[0].does(Act::Silent);
    pools.prefill[0].does(Act::Status(500));
    let watch = Stopwatch::start();
    assert_eq!(pools.post(CHAT, &chat(true)).await.0, 500);
    let took = watch.elapsed();
    assert!(took < SOON, "{took:?}");
    pools.all_legs_end().await;
    assert_eq!((pools.legs("prefill", "refused").await, pools.legs("decode", "cancelled").await), (1, 1));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn without_servers_of_a_kind_there_is_a_503_within_a_second() {
    for engine in ENGINES {
        for at_prefill in [true, false] {
            let mut pools = Pools::start(engine).await;
            assert_eq!(pools.post(CHAT, &chat(false)).await.0, 200);
            drop(if at_prefill { pools.prefill.pop() } else { pools.decode.pop() });
            for _ in 0..2 {
                let watch = Stopwatch::start();
                let (status, text) = pools.post(CHAT, &chat(true)).await;
                let is_known = status == 503 && code(&text) == "no_nodes";
                // The request that finds the server gone may have begun on its last connection.
                assert!(is_known || (status, code(&text).as_str()) == (502, "failed"), "{status} {text}");
                let took = watch.elapsed();
                assert!(took < SOON, "{took:?}");
            }
            let (status, text) = pools.post(CHAT, &chat(true)).await;
            assert_eq!((status, code(&text).as_str()), (503, "no_nodes"), "{text}");
            if !at_prefill {
                let (status, text) = pools.post("/v1/messages", &chat(true)).await;
                let error: Value = serde_json::from_str(&text).expect("JSON");
                assert_eq!((status, &error["error"]["type"]), (503, &json!("overloaded_error")), "{text}");
            }
            assert_eq!(pools.client().get("/ready").await.0, StatusCode::SERVICE_UNAVAILABLE);
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_server_that_is_ill_gets_no_requests() {
    let pools = Pools::start_with(Engine::Vllm, [1, 2], |_| {}).await;
    pools.decode[0].is_ill();
    let client = pools.client();
    let url = pools.decode[0].url();
    eventually("the router to see it", async || {
        let page = client.get_json("/debug/upstream").await;
        let servers = page["servers"].as_array().expect("a list").clone();
        servers.iter().any(|server| server["url"] == url && server["health"] == "down").then_some(())
    })
    .await;
    let before = pools.decode[0].seen().len();
    for _ in 0..4 {
        assert_eq!(pools.post(CHAT, &chat(false)).await.0, 200);
    }
    assert_eq!(pools.decode[0].seen().len(), before);
    assert_eq!(client.counter("baton_router_upstream_members{health=\"down\",role=\"decode\"}").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn other_endpoints_need_one_server() {
    for engine in ENGINES {
        let pools = Pools::start(engine).await;
        for (path, at_prefill) in [("/v1/embeddings", true), ("/tokenize", true), ("/v1/responses", false)] {
            let (status, body) = pools.post(path, &json!({ "input": "x" })).await;
            assert_eq!((status, body.contains(path)), (200, true), "{body}");
            let servers = if at_prefill { &pools.prefill } else { &pools.decode };
            assert_eq!(servers[0].seen().pop().expect("a request").json(), json!({ "input": "x" }));
        }
        let recording = "x".repeat(9 << 20);
        let (status, _, body) = pools.client().post("/v1/audio/transcriptions", recording).await;
        assert_eq!(status.as_u16(), 200, "{body}");
        assert_eq!(pools.client().get_json("/v1/models").await["data"][0]["id"], "m");
        for path in ["/flush_cache", "/sleep", "/v1/load_lora_adapter"] {
            assert_eq!(pools.post(path, &json!({})).await.0, 404, "{path} is for operators");
        }
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_without_kv_to_fetch_is_computed_by_the_decode_server() {
    let pools = Pools::start(Engine::Vllm).await;
    pools.prefill[0].does(Act::WithoutKv);
    pools.decode[0].does(Act::WithoutKv);
    assert_eq!(pools.post(CHAT, &chat(false)).await.0, 200);
    assert!(pools.decode[0].seen()[0].json().get("kv_transfer_params").is_none());
    assert_eq!(pools.client().counter("baton_router_upstream_prefills_without_kv_total").await, 1);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn several_answers_of_vllm_are_computed_by_the_decode_server() {
    let pools = Pools::start(Engine::Vllm).await;
    pools.decode[0].does(Act::WithoutKv);
    for (path, field, value) in [(CHAT, "n", json!(2)), ("/v1/completions", "prompt", json!(["a", "b"]))] {
        let mut sent = chat(false);
        sent[field] = value;
        sent["kv_transfer_params"] = json!({ "remote_host": "of a client" });
        assert_eq!(pools.post(path, &sent).await.0, 200);
        sent.as_object_mut().expect("an object").remove("kv_transfer_params");
        assert_eq!(pools.decode[0].seen().pop().expect("a request").json(), sent);
    }
    assert_eq!(pools.prefill[0].seen().len(), 0);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn only_answers_for_clients_may_be_compressed() {
    let pools = Pools::start(Engine::Vllm).await;
    let headers = [("accept-encoding", "gzip".to_owned())];
    assert_eq!(pools.client().post_with(CHAT, &headers, chat(false).to_string()).await.0, StatusCode::OK);
    let asked = |server: &EngineServer| server.seen()[0].headers.contains_key("accept-encoding");
    assert_eq!((asked(&pools.prefill[0]), asked(&pools.decode[0])), (false, true));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn admission_keys_and_records_are_those_of_own_nodes() {
    let folder = tempfile::tempdir().expect("a folder");
    let key_file = folder.path().join("key");
    std::fs::write(&key_file, "engine-key\n").expect("written");
    let key_file = key_file.to_str().expect("UTF-8").to_owned();
    let pools = Pools::start_with(Engine::Sglang, [1, 1], |raw| {
        raw.router.requests_max = 2;
        raw.expert.upstream.api_key_file = key_file;
    })
    .await;
    let headers = |name, value: &str| vec![(name, value.to_owned())];
    let own = [headers("authorization", "Bearer client"), headers("x-request-id", "r1")].concat();
    let explained = [own, headers("x-baton-explain", "1"), headers("x-data-parallel-rank", "3")].concat();
    let (status, answered, _) = pools.client().post_with(CHAT, &explained, chat(true).to_string()).await;
    assert_eq!((status, answered["x-request-id"].as_bytes()), (StatusCode::OK, &b"r1"[..]));
    let explanation: Value =
        serde_json::from_slice(answered["x-baton-explanation"].as_bytes()).expect("JSON");
    assert_eq!(
        (&explanation["decode_node"], &explanation["tries"]),
        (&json!(pools.decode[0].url()), &json!(1))
    );
    for server in [&pools.prefill[0], &pools.decode[0]] {
        let Seen { headers, path, .. } = server.seen().pop().expect("a request");
        let header = |name: &str| headers.get(name).map(|value| value.to_str().expect("text").to_owned());
        assert_eq!(path, CHAT);
        assert_eq!(header("authorization").as_deref(), Some("Bearer engine-key"));
        assert_eq!(
            (header("x-request-id").as_deref(), header("x-data-parallel-rank").as_deref()),
            (Some("r1"), Some("3"))
        );
        assert_eq!(header("x-baton-explain"), None);
    }
    let client = pools.client();
    eventually("the record to end", async || {
        let record = client.get_json("/debug/requests/r1").await["requests"][0].clone();
        (record["outcome"] == "finished" && record["model"] == "upstream").then_some(())
    })
    .await;
    let mut wide = chat(true);
    wide["n"] = json!(3);
    let (status, body) = pools.post(CHAT, &wide).await;
    assert_eq!((status, code(&body).as_str()), (400, "invalid_value"), "each answer counts: {body}");
    assert!(body.contains(r#""param":"n""#), "{body}");
    let (status, body) = pools.post(CHAT, &json!([1])).await;
    assert_eq!((status, code(&body).as_str()), (400, "invalid_value"), "{body}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_drain_ends_the_answers_that_are_left() {
    let pools = Pools::start(Engine::Sglang).await;
    pools.decode[0].does(Act::Stall);
    let client = pools.client();
    let ask = Ask::new(vec![1], 4);
    let mut stream = client.stream(&ask).await.expect("an answer begins");
    assert!(stream.next().await.expect("the first event").is_some());
    pools.shutdown.trigger();
    assert_eq!(stream.next().await.expect_err("the drain is over").code, "draining");
    pools.all_legs_end().await;
}

/// The JSON interface of an etcd, as a server's start script may use it.
struct EtcdJson(Client);

impl EtcdJson {
    fn of(etcd: &Etcd) -> Self {
        Self(Client::new(etcd.endpoints()[0].parse().expect("an address")))
    }

    async fn call(&self, path: &str, body: Value) -> Value {
        let (status, _, text) = self.0.post(path, body.to_string()).await;
        assert_eq!(status.as_u16(), 200, "{text}");
        serde_json::from_str(&text).expect("JSON")
    }

    async fn put(&self, key: &str, value: &str, lease: &Value) {
        let body = json!({ "key": BASE64.encode(key), "value": BASE64.encode(value), "lease": lease });
        self.call("/v3/kv/put", body).await;
    }
}

/// Waits until requests have this status. One without a server is refused within a second.
async fn until_status(pools: &Pools, expected: u16) {
    eventually("the status of requests", async || {
        let asked = Stopwatch::start();
        let (status, body) = pools.post(CHAT, &chat(false)).await;
        assert!(status == 200 || (status, code(&body).as_str()) == (503, "no_nodes"), "{status} {body}");
        let took = asked.elapsed();
        assert!(took < SOON, "{status} came after {took:?}");
        (status == expected).then_some(())
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn servers_come_and_go_with_their_keys_in_etcd() {
    const KEY: &str = "/baton/pools/upstream/prefill/a";
    let mut etcd = Etcd::start();
    eventually("etcd to listen", async || TcpStream::connect(&etcd.endpoints()[0]).await.ok().map(drop))
        .await;
    let (json, source) = (EtcdJson::of(&etcd), etcd.url("pools"));
    let (told, url) = tokio::sync::oneshot::channel();
    let starting = Pools::start_with(Engine::Vllm, [1, 1], |raw| {
        let list = std::mem::replace(&mut raw.expert.upstream.prefill, vec![source.clone()]);
        told.send(list[0].clone()).expect("the test waits for it");
    });
    let (pools, url) = tokio::join!(starting, async {
        let url = url.await.expect("the closure sends it");
        json.put("/baton/pools/upstream/prefill/b", "nonsense", &Value::Null).await;
        json.put(KEY, &url, &Value::Null).await;
        url
    });
    until_status(&pools, 200).await;
    let failure = async || pools.client().get_json("/debug/upstream").await["sources"][0]["failure"].clone();
    assert_eq!(failure().await, Value::Null);

    etcd.kill();
    eventually("the failure to be shown", async || failure().await.as_str().map(drop)).await;
    until_status(&pools, 200).await;
    let failures = "baton_router_upstream_source_failures_total{role=\"prefill\"}";
    assert_ne!(pools.client().counter(failures).await, 0);
    etcd.restart();
    eventually("the list to be read again", async || failure().await.is_null().then_some(())).await;

    json.call("/v3/kv/deleterange", json!({ "key": BASE64.encode(KEY) })).await;
    until_status(&pools, 503).await;
    let lease = json.call("/v3/lease/grant", json!({ "TTL": 2 })).await["ID"].clone();
    json.put(KEY, &url, &lease).await;
    until_status(&pools, 200).await;
    until_status(&pools, 503).await;
    assert_eq!(pools.client().get("/ready").await.0, 503);
}

/// Keeps the shared state of the servers in use by all of them.
#[tokio::test]
async fn a_skipped_prefill_is_an_error_of_the_servers() {
    let transfers = Transfers::new(Engine::Vllm);
    let decode = EngineServer::start(Role::Decode, &Arc::clone(&transfers));
    let (status, _, body) = Client::new(decode.addr).post(CHAT, chat(true).to_string()).await;
    assert_eq!((status.as_u16(), body.contains("skipped")), (500, true));
}
