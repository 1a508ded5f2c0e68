//! Tests of tenants at the router, over real processes: keys, limits, and the contents of logs and pages.

#[path = "tenants/provider.rs"]
mod provider;
#[path = "tenants/sharing.rs"]
mod sharing;

use std::path::PathBuf;
use std::time::Duration;

use baton_tests::{Answer, Ask, Client, Failed, Stopwatch, Up, executable, in_time};
use futures::future::join_all;
use proto::v1;
use proto::v1::generate_request::Input;
use proto::v1::inference_client::InferenceClient;
use tempfile::TempDir;

/// A cluster whose router requires keys.
struct Keyed {
    up: Up,
    file: PathBuf,
    _folder: TempDir,
}

/// Makes a key. Returns it with its line for the tenants file, as `baton keys new` prints them.
fn new_key(tenant: &str) -> (String, String) {
    let made = std::process::Command::new(executable::baton()).args(["keys", "new", tenant]).output();
    let said = String::from_utf8(made.expect("baton runs").stdout).expect("text");
    let after = |start: &str| {
        let line = said.lines().find_map(|line| line.strip_prefix(start));
        line.unwrap_or_else(|| panic!("no {start:?} in {said:?}")).trim().to_owned()
    };
    (after("key (for the client):"), after("line (under [keys]):"))
}

/// Returns the text of a tenants file with these sections and lines of keys.
fn file(sections: &str, lines: &[&str]) -> String {
    format!("{sections}\n[keys]\n{}\n", lines.join("\n"))
}

impl Keyed {
    async fn start(model: &str, text: &str, env: &[(&str, &str)]) -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        let file = folder.path().join("tenants.toml");
        std::fs::write(&file, text).expect("written");
        let of_file = ("BATON_ROUTER__TENANTS_FILE", file.to_str().expect("UTF-8"));
        let env: Vec<(&str, &str)> = env.iter().copied().chain([of_file]).collect();
        let up = Up::start_with(&["--model", model], &env).await;
        Self { up, file, _folder: folder }
    }

    fn client(&self) -> Client {
        self.up.client()
    }
}

fn with_key(ask: Ask, key: &str) -> Ask {
    ask.header("authorization", format!("Bearer {key}"))
}

fn refused(answer: Result<Answer, Failed>) -> (Option<u16>, String) {
    let failed = answer.expect_err("refused");
    (failed.status, failed.code)
}

const UNAUTHORIZED: Option<u16> = Some(401);

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn strangers_get_401_and_headers_choose_no_tenant() {
    let ((acme, acme_line), (zenith, zenith_line)) = (new_key("acme"), new_key("zenith"));
    let text = file("[tenants.acme]\n[tenants.zenith]", &[&acme_line, &zenith_line]);
    let keyed = Keyed::start("mock", &text, &[]).await;
    let client = keyed.client();
    let ask = Ask::new((0..100).collect(), 2);
    let unauthorized = (UNAUTHORIZED, "invalid_api_key".to_owned());
    assert_eq!(refused(client.ask(&ask).await), unauthorized);
    assert_eq!(refused(client.ask(&with_key(ask.clone(), "baton-00")).await), unauthorized);
    let (status, page) = client.get("/v1/models").await;
    assert_eq!(status, 401, "{page}");
    let error: serde_json::Value = serde_json::from_str(&page).expect("JSON");
    assert_eq!(error["error"]["type"], "invalid_request_error", "{page}");

    let mut grpc = InferenceClient::connect(format!("http://{}", keyed.up.grpc)).await.expect("it listens");
    let call = |key: Option<&str>| {
        let input = Some(Input::Tokens(v1::Tokens { ids: vec![1, 2, 3] }));
        let stop = Some(v1::StopParams { max_tokens: Some(2), ..v1::StopParams::default() });
        let request = v1::GenerateRequest { input, stop, ..v1::GenerateRequest::default() };
        let mut call = tonic::Request::new(v1::GenerateRequest { tenant: "zenith".to_owned(), ..request });
        if let Some(key) = key {
            call.metadata_mut().insert("authorization", format!("Bearer {key}").parse().expect("metadata"));
        }
        call
    };
    for key in [None, Some("baton-00")] {
        let status = grpc.generate(call(key)).await.expect_err("refused");
        assert_eq!(status.code(), tonic::Code::Unauthenticated, "{status}");
    }
    grpc.generate(call(Some(&acme))).await.expect("accepted");

    // The prompt of tenant acme is cached for acme. A header does not give another client access to it.
    let first = client.ask(&with_key(ask.clone(), &acme)).await.expect("an answer");
    assert_eq!(first.cached_tokens, 0);
    let again = client.ask(&with_key(ask.clone(), &acme)).await.expect("an answer");
    assert!(again.cached_tokens > 0, "{again:?}");
    let other = with_key(ask.clone(), &zenith).header("x-baton-tenant", "acme");
    let other = client.ask(&other.header("x-baton-priority", 100)).await.expect("an answer");
    assert_eq!(other.cached_tokens, 0, "acme's blocks are not zenith's");
    let own = with_key(ask, &acme).header("x-baton-tenant", "zenith");
    assert!(client.ask(&own).await.expect("an answer").cached_tokens > 0);
    let counted = client.counter("baton_router_unauthorized_total{reason=\"missing\"}").await;
    assert_eq!(counted, 3, "HTTP twice and gRPC once");
}

const LIMITED: &str = "\
[tenants.few]
requests_max = 2

[tenants.slow]
tokens_per_minute = 600

[tenants.short]
context_tokens_max = 40
";

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_limit_is_hit_and_released() {
    let ((few, few_line), (slow, slow_line), (short, short_line)) =
        (new_key("few"), new_key("slow"), new_key("short"));
    let text = file(LIMITED, &[&few_line, &slow_line, &short_line]);
    let keyed = Keyed::start(baton_tests::fleet::PACED, &text, &[]).await;
    let client = keyed.client();

    // The tenant may have two requests at one time, not three. The end of one makes room.
    let long = with_key(Ask::new(vec![1, 2, 3], 2_000).with("ignore_eos", true.into()), &few);
    let running = [client.stream(&long).await, client.stream(&long).await].map(|one| one.expect("begun"));
    let third = with_key(Ask::new(vec![1, 2, 3], 1), &few);
    assert_eq!(refused(client.ask(&third).await), (Some(429), "tenant_requests".to_owned()));
    drop(running);
    let again = async || client.ask(&third).await.ok();
    baton_tests::eventually("the places to be given back", again).await;

    // The tenant has six hundred tokens a minute: the first request uses more, and the next one waits until
    // the excess has passed.
    let ask = with_key(Ask::new(vec![7; 640], 1), &slow);
    client.ask(&ask).await.expect("nothing was used before it");
    let next = with_key(Ask::new(vec![7; 10], 1), &slow);
    let body = serde_json::json!({ "model": "mock", "prompt": [7], "max_tokens": 1 }).to_string();
    let (status, headers, page) = client.post_with("/v1/completions", &next.headers, body).await;
    assert_eq!(status, 429, "{page}");
    let error: serde_json::Value = serde_json::from_str(&page).expect("JSON");
    assert_eq!(error["error"]["code"], "tenant_tokens_per_minute", "{page}");
    let after: u64 = headers["retry-after"].to_str().expect("text").parse().expect("seconds");
    assert!((1..=6).contains(&after), "{after} s");
    tokio::time::sleep(Duration::from_secs(after)).await;
    client.ask(&next).await.expect("after the time that was said");

    // A request of the tenant may have forty tokens in all.
    let long = with_key(Ask::new(vec![7; 30], 11), &short);
    assert_eq!(refused(client.ask(&long).await), (Some(400), "context_length_exceeded".to_owned()));
    client.ask(&with_key(Ask::new(vec![7; 30], 10), &short)).await.expect("it fits");

    for (tenant, limit) in [("few", "requests"), ("slow", "tokens_per_minute"), ("short", "context")] {
        let labels = format!("{{limit=\"{limit}\",tenant=\"{tenant}\"}}");
        let counted = client.counter(&format!("baton_router_tenant_refusals_total{labels}")).await;
        assert!(counted > 0, "{labels}");
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_changed_tenants_file_is_in_force_within_5_s() {
    let ((old, old_line), (new, new_line)) = (new_key("acme"), new_key("acme"));
    let keyed = Keyed::start("mock", &file("[tenants.acme]", &[&old_line]), &[]).await;
    keyed.up.expect_log(&["tenants file was not reloaded"]);
    let client = keyed.client();
    let works = async |key: &str| client.ask(&with_key(Ask::new(vec![1, 2, 3], 1), key)).await.is_ok();
    assert!(works(&old).await && !works(&new).await);

    let changed = Stopwatch::start();
    std::fs::write(&keyed.file, file("[tenants.acme]", &[&new_line])).expect("written");
    let in_force = async || (works(&new).await && !works(&old).await).then_some(());
    baton_tests::eventually("the new key to be in force", in_force).await;
    let took = changed.elapsed();
    assert!(took < Duration::from_secs(5), "{took:?}");

    // A file with an error changes nothing, and the error is counted.
    std::fs::write(&keyed.file, file("[tenants.acme]", &[&old_line, "broken"])).expect("written");
    let refused = "baton_router_tenants_file_reloads_total{outcome=\"refused\"}";
    let counted = async || (client.counter(refused).await == 1).then_some(());
    baton_tests::eventually("the wrong file to be counted", counted).await;
    assert!(works(&new).await && !works(&old).await, "the keys before it hold");
}

/// Texts that must be in no log and on no page.
const PROMPT: &str = "xylophone-quartz-hummingbird";
const TOKENS: [u32; 6] = [201, 77, 133, 92, 248, 54];

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn no_log_span_or_page_has_keys_prompts_or_tokens() {
    let (key, line) = new_key("acme");
    let env = [("BATON_LOG", "trace"), ("BATON_LOG__FORMAT", "json"), ("BATON_EXPERT__LOG__SPANS", "true")];
    let keyed = Keyed::start("mock", &file("[tenants.acme]", &[&line]), &env).await;
    let client = keyed.client();
    let wrong = "baton-0123456789abcdef0123456789abcdef";
    refused(client.ask(&with_key(Ask::new(TOKENS.to_vec(), 4), wrong)).await);
    let asks = [
        Ask::new(TOKENS.repeat(8), 40),
        Ask::new(TOKENS.to_vec(), 4).with("prompt", PROMPT.into()),
        Ask::new(TOKENS.to_vec(), 4).with("stop", PROMPT.into()),
    ];
    let answers = join_all(asks.map(async |ask| client.ask(&with_key(ask, &key)).await)).await;
    let answers: Vec<Answer> = answers.into_iter().map(|answer| answer.expect("an answer")).collect();

    let mut texts = vec![("the log".to_owned(), keyed.up.log())];
    for path in ["/metrics", "/debug/cluster", "/debug/kv?blocks=1", "/ready"] {
        texts.push((path.to_owned(), client.get(path).await.1));
    }
    for node in keyed.up.nodes().await {
        let admin = Client::new(node.admin.parse().expect("an address"));
        for path in ["/metrics", "/debug/kv", "/ready"] {
            texts.push((format!("{} {path}", node.id), in_time("a page", admin.get(path)).await.1));
        }
    }
    assert!(texts[0].1.contains("\"level\":\"TRACE\""), "the log is at trace");
    let mut secrets =
        vec![key.clone(), key["baton-".len()..].to_owned(), wrong.to_owned(), PROMPT.to_owned()];
    secrets.extend([&TOKENS[..], &answers[0].tokens[..6]].into_iter().flat_map(written));
    for (place, text) in &texts {
        for secret in &secrets {
            let found = text.lines().find(|line| line.contains(secret.as_str()));
            assert!(found.is_none(), "{secret:?} stands in {place}: {found:?}");
        }
    }
}

/// Returns the forms in which a list of tokens may be printed.
fn written(tokens: &[u32]) -> [String; 4] {
    let list = |each: &dyn Fn(&u32) -> String, between: &str| {
        tokens.iter().map(each).collect::<Vec<_>>().join(between)
    };
    let plain = |token: &u32| token.to_string();
    [
        list(&plain, ", "),
        list(&plain, ","),
        list(&|token| format!("t{token}"), ", "),
        list(&|token| format!("TokenId({token})"), ", "),
    ]
}
