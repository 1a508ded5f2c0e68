//! `baton doctor` and `baton --check-config` find problems before a process is started, and say how to solve them.

use std::net::TcpListener;
use std::path::PathBuf;
use std::process::{Command, Output};

use baton_tests::hosts::{self, Hosts};
use baton_tests::{Up, executable};
use serde_json::Value;
use tempfile::TempDir;

/// Runs `baton` without any `BATON_` variable in its environment.
fn baton(args: &[&str]) -> Output {
    executable::command().args(args).output().expect("baton runs")
}

fn doctor(file: &str) -> (Option<i32>, Value) {
    let output = baton(&["doctor", "--config", file, "--json"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    let report = serde_json::from_str(&text)
        .unwrap_or_else(|error| panic!("{error}: {text}{}", String::from_utf8_lossy(&output.stderr)));
    (output.status.code(), report)
}

fn file(folder: &TempDir, name: &str, text: &str) -> String {
    let path: PathBuf = folder.path().join(name);
    std::fs::write(&path, text).expect("written");
    path.display().to_string()
}

/// Returns the findings of one group.
fn group<'a>(report: &'a Value, name: &str) -> Vec<&'a Value> {
    let findings = report["findings"].as_array().expect("findings");
    findings.iter().filter(|finding| finding["group"] == name).collect()
}

/// Returns the groups of the findings that prevent serving.
fn bad(report: &Value) -> Vec<&str> {
    let findings = report["findings"].as_array().expect("findings").iter();
    let bad = findings.filter(|finding| finding["level"] == "bad");
    bad.map(|finding| finding["group"].as_str().expect("a group")).collect()
}

#[test]
fn a_healthy_router_is_told_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let (code, report) = doctor(&file(&folder, "router.toml", &router("127.0.0.1:0", "demo")));
    assert_eq!((code, &report["ok"]), (Some(0), &Value::Bool(true)), "{report}");
    for finding in report["findings"].as_array().expect("findings") {
        assert!(finding["advice"].as_str().is_some_and(|advice| !advice.is_empty()), "{finding}");
    }
    for name in ["ports", "registry", "host", "clock", "gpu", "rdma"] {
        assert!(!group(&report, name).is_empty(), "{name} in {report}");
    }
}

/// A router's file with free ports besides the admin port.
fn router(admin: &str, model: &str) -> String {
    let ports = format!("http = \"127.0.0.1:0\"\ngrpc = \"127.0.0.1:0\"\nadmin = \"{admin}\"\n");
    format!("[router]\n{ports}[model]\npath = \"{model}\"\n")
}

#[test]
fn what_stands_in_a_routers_way_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let admin = taken.local_addr().expect("bound").to_string();
    let files = "[cluster]\nadmin_key_file = \"/no/such/key\"\n";
    let text = router(&admin, "/no/such/model") + files;
    let (code, report) = doctor(&file(&folder, "router.toml", &text));
    assert_eq!(code, Some(1), "{report}");
    assert_eq!(bad(&report), ["files", "ports", "model"], "{report}");
}

#[test]
fn what_stands_in_the_way_is_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let taken = TcpListener::bind("127.0.0.1:0").expect("a port");
    let admin = taken.local_addr().expect("bound");
    let text = format!(
        "[node]\nlisten = \"0.0.0.0:0\"\nadmin = \"{admin}\"\n[model]\npath = \"/no/such/model\"\n\
         kv_memory = \"900TiB\"\n[registry]\nurl = \"embedded://{admin}\"\n"
    );
    let (code, report) = doctor(&file(&folder, "node.toml", &text));
    assert_eq!((code, &report["ok"]), (Some(1), &Value::Bool(false)), "{report}");
    assert_eq!(bad(&report), ["identity", "ports", "address", "registry", "model", "model"], "{report}");
}

/// A head that a follower's host reaches, one that does not run, and one behind a closed port.
#[test]
fn a_closed_join_port_is_named_with_what_to_open() {
    let folder = tempfile::tempdir().expect("a folder");
    let text =
        "[model]\npath = \"mock\"\ndevice = \"cpu\"\n[expert.model]\nprocesses = 2\njoin = \"127.0.0.1:0\"\n";
    let file = file(&folder, "prefill.toml", text);
    let finding = |mut command: Command, head: Option<&str>| -> Value {
        command.args(["doctor", "--config", &file, "--json"]).envs(head.map(|head| ("BATON_RANK_OF", head)));
        let report = serde_json::from_slice(&command.output().expect("baton runs").stdout).expect("a report");
        group(&report, "processes")[0].clone()
    };
    let check = |finding: &Value, level: &str, found: &str, advice: &str| {
        let says = |field: &str, part: &str| finding[field].as_str().expect("a text").contains(part);
        let is_right = finding["level"] == level && says("found", found) && says("advice", advice);
        assert!(is_right, "{level}, {found}, {advice}: {finding}");
    };
    // Nothing accepts the connection, and nothing must.
    let head = TcpListener::bind("127.0.0.1:0").expect("a port");
    let (taken, free) = (head.local_addr().expect("bound").to_string(), baton_tests::free_addr().to_string());
    let reachable = finding(executable::command(), Some(&taken));
    check(&reachable, "ok", &format!("{taken}: reachable"), "nothing to do");
    let refused = format!("the head's join port {free}: ");
    check(&finding(executable::command(), Some(&free)), "bad", &refused, "start the head");
    let of_head = finding(executable::command(), None);
    check(&of_head, "note", "expert.model.join 127.0.0.1:0", "BATON_RANK_OF=HOST:PORT");
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; a closed port was not tested");
        return;
    }
    let hosts = Hosts::new(&["head", "rank"]);
    hosts.cut("head");
    let head = format!("{}:7411", hosts.addr_of("head"));
    let closed = finding(executable::command_on(&hosts.namespace_of("rank")), Some(&head));
    check(&closed, "bad", &format!("the head's join port {head}: "), "open TCP port 7411");
}

#[test]
fn only_gpus_of_one_stage_in_several_processes_need_nccl() {
    let folder = tempfile::tempdir().expect("a folder");
    let nccl = |device: &str, stages: u16| {
        let processes =
            format!("tp = 2\n[expert.model]\nprocesses = 2\nstages = {stages}\njoin = \"127.0.0.1:0\"\n");
        let text = format!("[model]\npath = \"mock\"\ndevice = \"{device}\"\n{processes}");
        let (_, report) = doctor(&file(&folder, "prefill.toml", &text));
        let findings = group(&report, "processes").into_iter();
        findings
            .filter(|finding| finding["found"].as_str().is_some_and(|found| found.contains("libnccl")))
            .count()
    };
    assert_eq!([nccl("cuda:0", 1), nccl("cuda:0", 2), nccl("cpu", 1)], [1, 0, 0]);
}

#[test]
fn the_table_says_what_to_do() {
    let output = baton(&["doctor"]);
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(text.contains("router.http 127.0.0.1:8000"), "{text}");
    assert!(text.contains("no RDMA devices") || text.contains("port 1 is"), "{text}");
}

#[test]
fn every_file_is_checked_and_every_wrong_one_named() {
    let folder = tempfile::tempdir().expect("a folder");
    let router = file(&folder, "router.toml", "[router]\npolicy = \"random\"\n");
    let node = file(&folder, "node.toml", "[registry]\nurl = \"etcd://etcd:2379/blue\"\n");
    let good = baton(&["--check-config", &router, &node]);
    assert_eq!(good.status.code(), Some(0), "{good:?}");
    for (name, text, wrong) in [
        ("policy.toml", "[router]\npolicy = \"best\"\n", "\"best\" is not one of"),
        ("typo.toml", "[node]\nlisen = \"0.0.0.0:1\"\n", "did you mean `node.listen`"),
        ("moved.toml", "[decode]\nlandings_max = 1\n", "it is called `expert.decode.landings_max` now"),
        ("section.toml", "[router]\nhttp = \"0.0.0.0:1\"\n[decode]\nlandings_max = 1\n", "no such setting"),
        ("wire.toml", "[transfer]\nconnectors = [\"pigeon\"]\n", "\"pigeon\" is not one of auto"),
        ("registry.toml", "[registry]\nurl = \"zk://a\"\n", "is not a registry"),
        ("syntax.toml", "[node\n", "is not TOML"),
        ("host.toml", "[node]\nlisten = \"7000\"\n", "`node.listen`: \"7000\" is not `host:port`"),
        (
            "port.toml",
            "[router]\nhttp = \"0.0.0.0:9000\"\ngrpc = \"127.0.0.1:9000\"\n",
            "`router.grpc`: \"127.0.0.1:9000\" is not free: `router.http` has the same port",
        ),
        ("landings.toml", "[expert.decode]\nlandings_max = 0\n", "landings_max is zero: no KV could arrive"),
        (
            "keys.toml",
            "[router]\n[expert.oidc]\nissuer = \"x\"\naudience = \"y\"\n",
            "set either keys_file or keys_url",
        ),
    ] {
        let file = file(&folder, name, text);
        let output = baton(&["--check-config", &router, &file, &node]);
        let said = String::from_utf8_lossy(&output.stderr).into_owned();
        assert_eq!(output.status.code(), Some(2), "{said}");
        assert!(said.contains(wrong) && said.contains("a valid node configuration"), "{name}: {said}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn kv_is_sent_to_a_peer_for_real() {
    let up = Up::start(&[]).await;
    // The warning about the fallback is expected: `doctor` is no process of the cluster, and shares no memory
    // with it.
    up.expect_log(&["connector cannot be used with the peer, falling back"]);
    let cluster = up.client().get_json("/debug/cluster").await;
    let node = |role: &str| {
        let nodes = cluster["nodes"].as_array().expect("nodes");
        let node = nodes.iter().find(|node| node["role"] == role).expect("one of each role");
        node["address"].as_str().expect("an address").to_owned()
    };
    let (decode, prefill) = (node("decode"), node("prefill"));
    let folder = tempfile::tempdir().expect("a folder");
    let router = file(&folder, "router.toml", "[router]\nhttp = \"127.0.0.1:0\"\ngrpc = \"127.0.0.1:0\"\n");
    let doctor = |peer: String| baton(&["doctor", "--config", &router, "--json", "--peer", &peer]);

    let output = doctor(decode);
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    let found = |text: &str| {
        group(&report, "peer").into_iter().any(|finding| {
            finding["level"] == "ok" && finding["found"].as_str().is_some_and(|found| found.contains(text))
        })
    };
    assert!(found("over tcp") && found("GB/s"), "{report}");
    assert_eq!(output.status.code(), Some(0), "{report}");

    let output = doctor(prefill);
    let report: Value = serde_json::from_slice(&output.stdout).expect("a report");
    assert_eq!(output.status.code(), Some(1), "{report}");
    assert_eq!(group(&report, "peer")[0]["level"], "bad", "{report}");
    up.baseline().await;
}

/// Returns the reason why a connector is unused, from a list of them.
fn why<'a>(out: &'a Value, connector: &str) -> Option<&'a str> {
    let out = out.as_array().expect("a list");
    out.iter().find(|out| out["connector"] == connector)?["why"].as_str()
}

/// A node that is configured for tcp uses no shared memory, and no node of the test has a GPU. `doctor`
/// reports it beforehand, and the router for each running node and each pair.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn connectors_that_are_out_are_named_with_their_reason() {
    let folder = tempfile::tempdir().expect("a folder");
    for (text, connector, reason) in [
        ("[model]\npath = \"mock\"\n", "cuda-ipc", "its KV is not on a GPU"),
        ("[pool]\nmemory = \"1MiB\"\n", "cuda-ipc", "its KV is not on a GPU"),
        ("[transfer]\nconnectors = [\"tcp\"]\n", "shm", "transfer.connectors is tcp"),
    ] {
        let (_, report) = doctor(&file(&folder, "node.toml", text));
        let wanted = format!("{connector}: not available: {reason}");
        let said = group(&report, "connectors").iter().any(|finding| finding["found"] == wanted.as_str());
        assert!(said, "{wanted} in {report}");
    }
    for (connector, used, out, reason) in [
        ("auto", "shm", "cuda-ipc", "decode-0: its KV is not on a GPU"),
        ("tcp", "tcp", "shm", "decode-0: transfer.connectors is tcp"),
    ] {
        let up = Up::start_over(connector, &["--prefill", "1", "--decode", "1", "--pool", "1"]).await;
        let cluster = up.client().get_json("/debug/cluster").await;
        let nodes = cluster["nodes"].as_array().expect("nodes");
        assert!(nodes.iter().all(|node| why(&node["connectors_out"], out).is_some()), "{cluster}");
        let pairs = cluster["pairs"].as_array().expect("pairs");
        let ends =
            |pair: &Value| format!("{} {}", pair["from"].as_str().unwrap(), pair["to"].as_str().unwrap());
        let all: Vec<String> = pairs.iter().map(ends).collect();
        assert_eq!(all, ["pool-0 decode-0", "prefill-0 decode-0", "prefill-0 pool-0"], "{cluster}");
        let pair = &pairs[1];
        assert_eq!(pair["connector"], used, "{cluster}");
        let said = why(&pair["out"], out).expect("it is out");
        assert!(reason.ends_with(said.split_once(": ").expect("node: why").1), "{said}");
    }
}
