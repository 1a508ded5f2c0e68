//! Tests of the command line: short addresses, pipes that close early, Ctrl-C, and too much memory.

use std::io::{BufRead as _, BufReader, Read as _, Write as _};
use std::net::{SocketAddr, TcpListener};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};

use baton_tests::{PATIENCE, Up, eventually, executable};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use tempfile::TempDir;

fn baton(args: &[&str]) -> Command {
    let mut command = Command::new(executable::baton());
    command.args(args);
    command
}

fn stderr_of(output: &Output) -> String {
    String::from_utf8_lossy(&output.stderr).into_owned()
}

fn interrupt(child: &Child) {
    kill_process(Pid::from_raw(child.id() as i32).expect("a pid"), Signal::INT).expect("it runs");
}

/// Waits for the end of a child. Returns its exit code and standard error.
async fn ended(mut child: Child) -> (Option<i32>, String) {
    let status = eventually("the command to end", async || child.try_wait().expect("our child")).await;
    let mut text = String::new();
    child.stderr.take().expect("it is piped").read_to_string(&mut text).expect("text");
    (status.code(), text)
}

/// Serves a page that answers every connection with 200, and returns the requested path.
fn page() -> (SocketAddr, std::sync::mpsc::Receiver<String>) {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a port");
    let addr = listener.local_addr().expect("bound");
    let (paths, asked) = std::sync::mpsc::sync_channel(8);
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let mut stream = stream.expect("a connection");
            let mut line = String::new();
            BufReader::new(&stream).read_line(&mut line).expect("a request line");
            let _ = stream.write_all(b"HTTP/1.1 200 OK\r\ncontent-length: 0\r\nconnection: close\r\n\r\n");
            let path = line.split(' ').nth(1).unwrap_or_default().to_owned();
            if paths.send(path).is_err() {
                return;
            }
        }
    });
    (addr, asked)
}

#[test]
fn a_reader_that_has_left_is_no_error() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = folder.path().join("router.toml");
    std::fs::write(
        &file,
        "[router]\nhttp = \"127.0.0.1:0\"\nadmin = \"127.0.0.1:0\"\ngrpc = \"127.0.0.1:0\"\n",
    )
    .expect("written");
    let file = file.to_str().expect("UTF-8");
    for args in [&["doctor", "--config", file, "--json"][..], &["doctor", "--config", file], &["--help"]] {
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = baton(args).stdout(writer).output().expect("it runs");
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", stderr_of(&output));
        assert!(!stderr_of(&output).contains("panicked"), "{args:?}: {}", stderr_of(&output));
    }
    let (reader, writer) = std::io::pipe().expect("a pipe");
    drop(reader);
    let failed = baton(&["health", "https://router"]).stderr(writer).status().expect("it runs");
    assert_eq!(failed.code(), Some(2), "nor is one of errors");
}

#[test]
fn health_takes_a_host_and_a_port() {
    let (addr, asked) = page();
    for (typed, path) in [
        (addr.to_string(), "/ready"),
        (format!("http://{addr}/"), "/ready"),
        (format!("http://{addr}/live"), "/live"),
        (format!("localhost:{}", addr.port()), "/ready"),
    ] {
        let output = baton(&["health", &typed]).output().expect("it runs");
        assert_eq!(output.status.code(), Some(0), "{typed}: {}", stderr_of(&output));
        assert_eq!(asked.recv_timeout(PATIENCE).expect("it was asked"), path, "{typed}");
    }
    for (typed, expected) in
        [("https://router:8000", "plain http"), ("router:port", "host:port"), ("ftp://x", "http://")]
    {
        let output = baton(&["health", typed]).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{typed}: {}", stderr_of(&output));
        assert!(stderr_of(&output).contains(expected), "{typed}: {}", stderr_of(&output));
    }
    let free = TcpListener::bind("127.0.0.1:0").expect("a port").local_addr().expect("bound");
    let output = baton(&["health", &free.to_string()]).output().expect("it runs");
    let text = stderr_of(&output);
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains(&free.to_string()) && text.contains("refused"), "{text}");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn up_listens_at_a_host_name_and_chat_takes_its_address_in_every_form() {
    let mut up = Up::start(&["--http", "localhost:0"]).await;
    let (addr, port) = (up.http.to_string(), up.http.port());
    for url in [
        addr.clone(),
        format!("http://{addr}/"),
        format!("http://{addr}/v1"),
        format!("http://{addr}/v1/"),
        format!("localhost:{port}/v1"),
    ] {
        let asked = url.clone();
        let chat = tokio::task::spawn_blocking(move || {
            baton(&["chat", "--url", &asked, "--max-tokens", "5", "hello"]).output().expect("it runs")
        });
        let output = tokio::time::timeout(PATIENCE, chat).await.expect("in time").expect("it ran");
        assert_eq!(output.status.code(), Some(0), "{url}: {}", stderr_of(&output));
        assert!(!output.stdout.is_empty(), "{url}");
    }
    up.signal(up.pid(), Signal::INT);
    assert_eq!(up.stop_code(), Some(0));
    assert!(up.log().contains("stopping: running requests end first"), "{}", up.log());
}

#[test]
fn an_address_to_listen_at_is_a_host_and_a_port() {
    for wrong in ["8000", "localhost", ":8000", "127.0.0.1:99999", "a b:1", "http://localhost:8000"] {
        let output = baton(&["up", "--http", wrong]).output().expect("it runs");
        assert_eq!(output.status.code(), Some(2), "{wrong}");
        assert!(stderr_of(&output).contains("expected HOST:PORT"), "{wrong}: {}", stderr_of(&output));
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ctrl_c_in_a_conversation_says_so() {
    let mut child = baton(&["chat", "--model", "x", "--url", "127.0.0.1:9"])
        .stdin(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .expect("it starts");
    let mut first = [0; 10];
    child.stderr.as_mut().expect("it is piped").read_exact(&mut first).expect("it greets");
    interrupt(&child);
    let (code, text) = ended(child).await;
    assert_eq!(code, Some(130), "{text}");
    assert!(text.contains("interrupted"), "{text}");
}

/// The hub accepts and never answers, so that every process that fetches a model must log that it was
/// stopped.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ctrl_c_while_a_model_is_fetched_says_so() {
    let hub = TcpListener::bind("127.0.0.1:0").expect("a port");
    let cache = tempfile::tempdir().expect("a folder");
    for (command, model) in [("up", &["--model", "org/name"][..]), ("router", &[]), ("decode", &[])] {
        let child = baton(&[command])
            .args(model)
            .env("HF_ENDPOINT", format!("http://{}", hub.local_addr().expect("bound")))
            .env("HF_HOME", cache.path())
            .env(if command == "up" { "UNUSED" } else { "BATON_MODEL__PATH" }, "org/name")
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("it starts");
        let _asked = hub.accept().expect("it asks the hub");
        interrupt(&child);
        let (code, text) = ended(child).await;
        assert_eq!(code, Some(4), "{command}: {text}");
        assert!(text.contains("stopped before the model was downloaded"), "{command}: {text}");
    }
}

fn started(args: &[&str], env: &[(&str, &str)]) -> (Option<i32>, String) {
    let output = baton(args).envs(env.iter().copied()).output().expect("it runs");
    (output.status.code(), stderr_of(&output))
}

/// F56: the node itself refuses, with both amounts and the setting, before the kernel's OOM killer acts.
#[test]
fn more_kv_memory_than_there_is_is_refused_at_the_start() {
    for model in ["mock", "demo"] {
        let env = [
            ("BATON_MODEL__PATH", model),
            ("BATON_MODEL__DEVICE", "cpu"),
            ("BATON_MODEL__KV_MEMORY", "4TiB"),
            ("BATON_REGISTRY__URL", "embedded://127.0.0.1:9"),
        ];
        let (code, text) = started(&["decode"], &env);
        assert_eq!(code, Some(3), "{model}: {text}");
        let says = |part: &str| assert!(text.contains(part), "{model}: {part} in {text}");
        says("MiB of memory are requested");
        says("MiB are available to this process");
        says("set model.kv_memory lower");
    }
    let ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let args = [&["up", "--model", "mock", "--device", "cpu", "--kv-memory", "4TiB"][..], &ports].concat();
    let (code, text) = started(&args, &[]);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("all nodes together ask for") && text.contains("--kv-memory"), "{text}");
}

/// There is enough memory for each of two nodes alone, but not for both, so `up` must refuse.
#[test]
fn kv_memory_of_all_nodes_of_up_is_added() {
    let ports = ["--http", "127.0.0.1:0", "--grpc", "127.0.0.1:0"];
    let args = [&["up", "--model", "mock", "--device", "cpu", "--kv-memory", "60%"][..], &ports].concat();
    let (code, text) = started(&args, &[]);
    assert_eq!(code, Some(3), "{text}");
    assert!(text.contains("all nodes together ask for"), "{text}");
}

fn put(folder: &TempDir, name: &str, text: &str) {
    std::fs::write(folder.path().join(name), text).expect("written");
}

#[test]
fn what_is_no_model_is_refused_with_a_sentence_of_its_own() {
    let [gguf, bare, other, looped, snapshot, clone] =
        [(); 6].map(|()| tempfile::tempdir().expect("a folder"));
    // A config.json that is there and cannot be read, also by root.
    std::os::unix::fs::symlink("config.json", looped.path().join("config.json")).expect("linked");
    std::os::unix::fs::symlink("../blobs/4d7a", snapshot.path().join("config.json")).expect("linked");
    put(&clone, "config.json", "{}");
    put(&clone, "tokenizer.json", "version https://git-lfs.github.com/spec/v1\nsize 9\n");
    put(&gguf, "model-q4.gguf", "GGUF");
    put(&bare, "README.md", "read me");
    put(&other, "config.json", "{\"architectures\": [\"GptForCausalLM\"]}");
    let path = |folder: &TempDir, name: &str| folder.path().join(name).display().to_string();
    for (model, both, expected) in [
        (path(&gguf, ""), true, "model-q4.gguf: the file ends at byte 4, within this"),
        (path(&gguf, "model-q4.gguf"), true, "model-q4.gguf: the file ends at byte 4, within this"),
        (path(&bare, ""), true, "has no config.json and no GGUF file: it is not a model's folder"),
        (path(&bare, "README.md"), true, "is a file: a model is a folder"),
        (path(&bare, "absent"), true, "absent: No such file or directory"),
        (path(&looped, ""), true, "config.json: Too many levels of symbolic links"),
        (path(&snapshot, ""), true, "config.json is a link to ../blobs/4d7a, which is not there"),
        (path(&clone, ""), true, "tokenizer.json is a pointer of Git LFS: `git lfs pull` downloads the file"),
        (
            path(&other, ""),
            false,
            "of architecture \"GptForCausalLM\", which is not implemented: LlamaForCausalLM",
        ),
    ] {
        let env = [("BATON_MODEL__PATH", model.as_str()), ("BATON_MODEL__DEVICE", "cpu")];
        for process in ["decode", "router"].iter().take(if both { 2 } else { 1 }) {
            let env = &env[..if *process == "router" { 1 } else { 2 }];
            let (code, text) = started(&[process], env);
            assert_eq!(code, Some(3), "{process} {model}: {text}");
            assert!(text.contains(expected), "{process} {model}: {text}");
        }
    }
}

#[test]
fn a_measurement_of_an_absent_model_names_its_folder() {
    for more in [&[][..], &["--device", "cpu"], &["--check"], &["--write-weights", "/no/such/folder"]] {
        let args = [&["bench", "engine", "--model", "/no/such/model"][..], more].concat();
        let (code, text) = started(&args, &[]);
        assert_eq!(code, Some(3), "{more:?}: {text}");
        assert!(text.contains("no model at /no/such/model: No such file or directory"), "{more:?}: {text}");
    }
}

#[test]
fn a_pool_that_would_get_no_kv_is_refused() {
    for (args, env) in [
        (&["up", "--pool", "1", "--order", "decode-first"][..], &[][..]),
        (&["up", "--pool", "1"], &[("BATON_ROUTER__ORDER", "decode-first")]),
    ] {
        let (code, text) = started(args, env);
        assert_eq!(code, Some(2), "{text}");
        assert!(text.contains("--pool needs --order prefill-first"), "{text}");
    }
}

/// Copies the bundled model without its tokenizer, or without its chat template.
fn without(what: &str) -> TempDir {
    let (from, folder) = (Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/demo"), tempfile::tempdir());
    let folder = folder.expect("a folder");
    for file in std::fs::read_dir(from).expect("the bundled model").flatten() {
        let (path, name) = (file.path(), file.file_name());
        if path.is_file() && name != what {
            std::fs::copy(path, folder.path().join(name)).expect("copied");
        }
    }
    let config = folder.path().join("tokenizer_config.json");
    let text = std::fs::read_to_string(&config).expect("a tokenizer's configuration");
    let mut fields: Value = serde_json::from_str(&text).expect("JSON");
    fields.as_object_mut().expect("fields").remove(what);
    std::fs::write(config, fields.to_string()).expect("written");
    folder
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_missing_tokenizer_and_a_missing_chat_template_are_named() {
    let messages = json!({"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 2});
    let (text, ids) =
        (json!({"prompt": "Hi", "max_tokens": 2}), json!({"prompt": [5, 6, 7], "max_tokens": 2}));
    for (what, logged, path, refused, reason, accepted) in [
        (
            "tokenizer.json",
            "model has no tokenizer.json: requests must bring token ids, text is refused",
            "/v1/completions",
            &text,
            "the model has no tokenizer: send the prompt as token ids",
            &ids,
        ),
        (
            "chat_template",
            "model has no chat template: /v1/chat/completions is refused, /v1/completions is served",
            "/v1/chat/completions",
            &messages,
            "the model has no chat template: send the prompt as a text or token ids",
            &text,
        ),
    ] {
        let folder = without(what);
        let up = Up::start(&["--model", folder.path().to_str().expect("UTF-8")]).await;
        up.expect_log(&["model has no tokenizer.json", "model has no chat template"]);
        assert!(up.log().contains(logged), "{what}: {}", up.log());
        let (status, _, body) = up.client().post(path, refused.to_string()).await;
        assert!(status == 400 && body.contains(reason), "{what}: {status} {body}");
        let (status, _, body) = up.client().post("/v1/completions", accepted.to_string()).await;
        assert_eq!(status, 200, "{what}: {body}");
    }
}

/// Texts that Rust's `Debug` formatting leaves in a sentence.
const RUST_NAMES: [&str; 5] = ["Some(", "None", "Duration", "::", "Ok("];

/// Checks tables on a terminal and on a page, and sentences about differences.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_measurement_reads_without_names_of_the_source() {
    let (up, folder) = (Up::start(&[]).await, tempfile::tempdir().expect("a folder"));
    let run = async |args: &[&str]| {
        let mut command = baton(&[&["bench"], args].concat());
        command.current_dir(folder.path());
        let run = tokio::task::spawn_blocking(move || command.output().expect("it runs"));
        let output = tokio::time::timeout(PATIENCE, run).await.expect("in time").expect("it ran");
        let read = format!("{}{}", String::from_utf8_lossy(&output.stdout), stderr_of(&output));
        assert!(output.status.success(), "{args:?}: {read}");
        let found: Vec<&str> = RUST_NAMES.into_iter().filter(|name| read.contains(name)).collect();
        assert!(found.is_empty(), "{args:?} says {found:?}:\n{read}");
        read
    };
    let url = format!("http://{}", up.http);
    let load = ["serve", "--url", &url, "--requests", "20", "--concurrency", "4", "--input-tokens", "32"];
    for (out, workload) in [("a.json", "random"), ("b.json", "shared-prefix")] {
        let more = ["--output-tokens", "4", "--warmup", "0s", "--workload", workload, "--out", out];
        let read = run(&[&load[..], &more, &["--slo", "ttft=10s", "--lag-limit", "10s"]].concat()).await;
        assert!(read.contains("ttft p50"), "{read}");
    }
    run(&["compare", "a.json", "b.json"]).await;
    run(&["report", "a.json", "b.json"]).await;
}
