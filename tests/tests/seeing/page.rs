//! The live page in a headless Chromium: every panel has data, the chat answers, and the page makes no error.
//!
//! `UPDATE_DOCS=1` also writes the pictures of `docs/operating.md`.

use std::path::Path;

use base64::Engine as _;
use base64::prelude::BASE64_STANDARD;
use baton_tests::check::prompts;
use baton_tests::{Ask, Browser, Client, Process, Up, eventually, executable, free_addr, in_time};
use futures::StreamExt as _;
use futures::stream::iter;
use serde_json::json;

/// The name of a model that would run a script if the page made HTML of it.
const HOSTILE: &str = "<img src=x onerror=fail()>";
/// Requests at one time, and how long they last.
const AT_ONCE: usize = 5;
const TOKENS: u32 = 60;
/// The page is as high as the picture.
const WIDTH: u32 = 1440;
const HEIGHT: u32 = 1500;

const ALL_PANELS: &str = "[...document.querySelectorAll('[data-panel]')]";

/// Makes a key of a client. Returns it with the text of a tenants file.
fn tenants_file() -> (String, String) {
    let made = std::process::Command::new(executable::baton()).args(["keys", "new", "acme"]).output();
    let said = String::from_utf8(made.expect("baton runs").stdout).expect("text");
    let after = |start: &str| said.lines().find_map(|line| line.strip_prefix(start)).expect("a line").trim();
    let line = after("line (under [keys]):");
    (after("key (for the client):").to_owned(), format!("[tenants.acme]\n[keys]\n{line}\n"))
}

/// Sends `count` requests, some at one time.
async fn load(client: &Client, model: &str, key: &str, count: usize) {
    let ask = |(nth, prompt)| {
        let ask = Ask::new(prompt, TOKENS).with("ignore_eos", true.into()).with("model", model.into());
        let ask = ask.header("x-request-id", format!("load-{nth}"));
        let ask = ask.header("authorization", format!("Bearer {key}"));
        async move { client.ask(&ask).await.expect("an answer") }
    };
    let asks = iter(prompts(3, count, 200).into_iter().enumerate()).map(ask);
    in_time("the load", asks.buffer_unordered(AT_ONCE).collect::<Vec<_>>()).await;
}

/// Fills in the chat box and sends it, and waits for the answer.
async fn chat(browser: &mut Browser, text: &str) {
    browser.value(&format!("byId('prompt').value = '{text}'; byId('ask').requestSubmit()")).await;
    let answered = "byId('send').textContent === 'Send' && !!byId('talk').querySelector('.note')";
    browser.until(answered).await;
    let failed = browser.value("byId('talk').querySelector('.failed')?.textContent ?? ''").await;
    assert_eq!(failed, "", "the chat failed");
    let answer = browser.value("byId('talk').querySelector('.assistant').textContent").await;
    assert!(answer.as_str().is_some_and(|answer| answer.len() > 3), "{answer}");
}

/// Checks the panels for the cluster and for the load.
async fn check_panels(browser: &mut Browser, up: &Up, model: &str) {
    browser.until(&format!("{ALL_PANELS}.length === 9")).await;
    browser.until(&format!("{ALL_PANELS}.every((panel) => panel.dataset.state === 'data')")).await;
    let topology = browser.value("byId('topology').textContent").await.to_string();
    for node in up.nodes().await {
        assert!(topology.contains(&node.id), "{} in {topology}", node.id);
    }
    let named = browser.value("byId('topology-note').textContent").await;
    assert_eq!(named, model, "the name of a model is text");
    for (panel, least) in [("ttft", 2), ("gaps", 2), ("load", 2), ("transfers", 1), ("queue-chart", 2)] {
        let drawn = format!(
            "[...byId('{panel}').querySelectorAll('path')].filter((path) => path.getAttribute('d')).length >= {least}"
        );
        browser.until(&drawn).await;
    }
    browser.until("byId('ttft').querySelectorAll('circle').length >= 10").await;
    browser.until("byId('gaps').querySelectorAll('circle').length >= 10").await;
    browser.until("/[1-9].* transfers · \\w+ [1-9]/.test(byId('transfer-note').textContent)").await;
    browser.until("byId('kv').querySelectorAll('.bar').length === 5").await;
    browser.until("byId('queue').querySelectorAll('.bar').length >= 7").await;
    browser.until("byId('tiles').children.length === 7").await;
}

/// Opens a request in the list, and checks its stages and events.
async fn check_request(browser: &mut Browser) {
    browser
        .until(
            "[...byId('requests').querySelectorAll('.id')].some((id) => id.textContent.startsWith('load-'))",
        )
        .await;
    browser.value("[...byId('requests').querySelectorAll('.id')].find((id) => id.textContent.startsWith('load-')).click()").await;
    for said in ["first token", "prefill", "tries"] {
        browser
            .until(&format!(
                "byId('requests').querySelector('.detail')?.textContent.includes('{said}') ?? false"
            ))
            .await;
    }
}

/// Writes a picture of the page to docs.
async fn picture(browser: &mut Browser, name: &str) {
    let picture = BASE64_STANDARD.decode(browser.picture().await).expect("base64");
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../docs").join(name);
    std::fs::write(path, picture).expect("docs are ours");
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_panel_of_the_live_page_has_data_and_the_chat_answers() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, admin) = (folder.path().join("tenants.toml"), free_addr());
    let (key, text) = tenants_file();
    std::fs::write(&file, text).expect("written");
    let updates_docs = std::env::var_os("UPDATE_DOCS").is_some();
    let model = if updates_docs { "demo" } else { HOSTILE };
    let env = [
        ("BATON_ROUTER__ADMIN", admin.to_string()),
        ("BATON_ROUTER__TENANTS_FILE", file.display().to_string()),
        ("BATON_MODEL__NAME", model.to_owned()),
    ];
    let env = env.each_ref().map(|(name, value)| (*name, value.as_str()));
    let up =
        Up::start_with(&["--model", "demo", "--prefill", "2", "--decode", "2", "--pool", "1"], &env).await;
    let mut browser = Browser::open(&format!("http://{admin}/"), WIDTH, HEIGHT).await;
    let client = up.client();
    load(&client, model, &key, if updates_docs { 240 } else { 24 }).await;
    check_panels(&mut browser, &up, model).await;
    check_request(&mut browser).await;

    let ask = json!({ "model": model, "messages": [{ "role": "user", "content": "Hello" }] }).to_string();
    let (status, _, body) = Client::new(admin).post("/debug/v1/chat/completions", ask).await;
    assert_eq!(status, 401, "a chat needs the client's key: {body}");
    browser.value(&format!("byId('api-key').value = '{key}'")).await;
    chat(&mut browser, "What is prefill?").await;
    assert_eq!(browser.errors(), [] as [String; 0]);
    if updates_docs {
        browser.value("window.scrollTo(0, 0)").await;
        for scheme in ["light", "dark"] {
            browser.value(&format!("document.documentElement.style.colorScheme = '{scheme}'")).await;
            load(&client, model, &key, 20).await;
            picture(&mut browser, &format!("live-page-{scheme}.webp")).await;
        }
    }
}

/// A router without nodes, whose `/debug` needs a key: the page asks for it, and its panels say what is missing.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_live_page_asks_for_the_admin_key() {
    let folder = tempfile::tempdir().expect("a folder");
    let (file, admin) = (folder.path().join("admin.key"), free_addr());
    std::fs::write(&file, "correct horse battery").expect("written");
    let settings = vec![
        ("BATON_ROUTER__HTTP", free_addr().to_string()),
        ("BATON_ROUTER__GRPC", free_addr().to_string()),
        ("BATON_ROUTER__ADMIN", admin.to_string()),
        ("BATON_CLUSTER__ADMIN_KEY_FILE", file.display().to_string()),
    ];
    let _router = Process::start(folder.path(), "router", "router", settings);
    eventually("the router to listen", async || tokio::net::TcpStream::connect(admin).await.ok()).await;
    let (status, _, _) = Client::new(admin).post("/debug/v1/chat/completions", "{}").await;
    assert_eq!(status, 401, "a chat needs the admin key");

    let mut browser = Browser::open(&format!("http://{admin}/"), WIDTH, HEIGHT).await;
    for (reason, key) in
        [("needs the admin key", "wrong"), ("this is not the admin key", "correct horse battery")]
    {
        browser
            .until(&format!("byId('key-dialog').open && byId('key-reason').textContent.includes('{reason}')"))
            .await;
        browser.value(&format!("byId('key').value = '{key}'; byId('key-form').requestSubmit()")).await;
    }
    browser
        .until("byId('tiles').children.length === 7 && !byId('key-dialog').open && byId('banner').hidden")
        .await;
    assert_eq!(
        browser.value(&format!("{ALL_PANELS}.every((panel) => panel.dataset.state === 'empty')")).await,
        true
    );
    let shown =
        browser.value("document.querySelector('[data-panel=topology] .empty').checkVisibility()").await;
    assert_eq!(shown, true, "the panel says that no node has joined");
    browser.until("byId('ready').textContent.includes('no ')").await;
    assert_eq!(browser.errors(), [] as [String; 0]);
}
