//! Tests of downloads from a fake hub that behaves and fails as the real one does.

mod support;

use std::error::Error as _;
use std::fs;
use std::path::{Path, PathBuf};
use std::time::Duration;

use axum::http::StatusCode;
use baton_models::{Authorities, Hub, HubError, HubSettings, ModelId, Proxies};
use support::proxy::FakeProxy;
use support::tls::Front;
use support::{COMMIT, FakeHub, OLD, git_name, sha256};

const CONFIG: &[u8] = b"{\"vocab_size\": 1}";
const WEIGHTS: &[u8] = &[7; 100_000];

fn files() -> Vec<(&'static str, &'static [u8])> {
    vec![
        (".gitattributes", b"x"),
        ("README.md", b"read me"),
        ("config.json", CONFIG),
        ("consolidated.safetensors", b"another format of the same"),
        ("model.gguf", b"and another"),
        ("model.safetensors", WEIGHTS),
        ("pytorch_model.bin", b"and another"),
        ("tokenizer.json", b"{}"),
    ]
}

fn id(text: &str) -> ModelId {
    ModelId::parse(text).expect("an id")
}

async fn fetched(hub: &Hub, model: &str) -> Result<PathBuf, HubError> {
    tokio::time::timeout(Duration::from_secs(60), hub.fetch(&id(model))).await.expect("in time")
}

fn names(folder: impl AsRef<Path>) -> Vec<String> {
    let mut names: Vec<String> = fs::read_dir(folder)
        .expect("a folder")
        .map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8"))
        .collect();
    names.sort();
    names
}

/// Returns the error and its causes as one sentence.
fn sentence(error: &HubError) -> String {
    let (mut line, mut cause) = (error.to_string(), error.source());
    while let Some(error) = cause {
        line.push_str(&format!(": {error}"));
        cause = error.source();
    }
    line
}

#[tokio::test]
async fn a_model_is_laid_out_as_the_hubs_tools_do() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    let snapshot = fetched(&fake.client(cache.path()), "org/name").await.expect("fetched");
    let model = cache.path().join("models--org--name");
    assert_eq!(snapshot, model.join("snapshots").join(COMMIT));
    assert_eq!(names(&snapshot), ["config.json", "model.safetensors", "tokenizer.json"]);
    assert_eq!(fs::read(snapshot.join("model.safetensors")).expect("it is there"), WEIGHTS);
    assert_eq!(fs::read_to_string(model.join("refs/main")).expect("it is there"), COMMIT);
    let mut blobs = [git_name(CONFIG), git_name(b"{}"), sha256(WEIGHTS)];
    blobs.sort();
    assert_eq!(names(model.join("blobs")), blobs);
    let link = fs::read_link(snapshot.join("config.json")).expect("a link");
    assert_eq!(link, Path::new("../../blobs").join(git_name(CONFIG)));
    assert_eq!(names(&model), ["blobs", "refs", "snapshots"]);
}

#[tokio::test]
async fn a_file_in_a_folder_is_laid_out_there() {
    const TEMPLATE: &str = "additional_chat_templates/tool_use.jinja";
    let mut files = files();
    files.extend([(TEMPLATE, b"tools".as_slice()), ("additional_chat_templates/rag.jinja", b"not read")]);
    let (fake, cache) = (FakeHub::new(&files).await, tempfile::tempdir().expect("a folder"));
    let snapshot = fetched(&fake.client(cache.path()), "org/name").await.expect("fetched");
    assert_eq!(fs::read(snapshot.join(TEMPLATE)).expect("the link leads to it"), b"tools");
    assert_eq!(names(snapshot.join("additional_chat_templates")), ["tool_use.jinja"]);
}

#[tokio::test]
async fn what_is_here_is_not_fetched_again() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    let hub = fake.client(cache.path());
    let first = fetched(&hub, "org/name").await.expect("fetched");
    fake.received();
    assert_eq!(fetched(&hub, "org/name").await.expect("here"), first);
    assert_eq!(fake.received(), ["revision main"]);
    fetched(&hub, &format!("org/name@{COMMIT}")).await.expect("here");
    assert_eq!(fake.received(), [""; 0], "a commit never changes");
    fs::remove_file(first.join("tokenizer.json")).expect("removed");
    fetched(&hub, "org/name").await.expect("the link is made again");
    assert_eq!(fake.received(), ["revision main", "HEAD tokenizer.json"], "its content was still there");
}

#[tokio::test]
async fn revisions_are_branches_tags_and_commits() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    let hub = fake.client(cache.path());
    let (branch, commit) =
        (fetched(&hub, "org/name@refs/pr/3").await, fetched(&hub, &format!("org/name@{OLD}")).await);
    let branch = branch.expect("fetched");
    assert_eq!(branch, commit.expect("the same"));
    assert!(branch.ends_with(OLD));
    let refs = cache.path().join("models--org--name/refs");
    assert_eq!(fs::read_to_string(refs.join("refs/pr/3")).expect("it is there"), OLD);
    assert_eq!(names(refs), ["refs"], "a commit needs none");
}

#[tokio::test]
async fn a_cut_wire_costs_only_what_had_not_come() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    fake.state().cuts = vec![60_000, 10_000];
    let snapshot = fetched(&fake.client(cache.path()), "org/name").await.expect("fetched");
    assert_eq!(fs::read(snapshot.join("model.safetensors")).expect("it is there"), WEIGHTS);
    let asked: Vec<String> =
        fake.received().into_iter().filter(|request| request.starts_with("store")).collect();
    assert_eq!(asked.len(), 3, "{asked:?}");
    assert_eq!(asked[0], "store all");
    let firsts: Vec<usize> = asked[1..]
        .iter()
        .map(|request| {
            request.trim_start_matches("store bytes=").trim_end_matches('-').parse().expect("a number")
        })
        .collect();
    assert!(firsts[0] <= 60_000 && firsts[0] < firsts[1] && firsts[1] <= 70_000, "{firsts:?}");
}

/// Writes a partial file into the cache, as a killed process leaves it.
fn leave(cache: &Path, bytes: &[u8]) -> PathBuf {
    let blobs = cache.join("models--org--name/blobs");
    fs::create_dir_all(&blobs).expect("made");
    let partial = blobs.join(format!("{}.incomplete", sha256(WEIGHTS)));
    fs::write(&partial, bytes).expect("written");
    partial
}

#[tokio::test]
async fn what_an_earlier_process_left_is_gone_on_with() {
    for (left, no_ranges, expected) in [
        (&WEIGHTS[..99_000], false, &["store bytes=99000-"][..]),
        (&WEIGHTS[..99_000], true, &["store bytes=99000-"]),
        (WEIGHTS, false, &[]),
        (&[7; 100_001][..], false, &["store all"]),
        (&[1; 50_000][..], false, &["store bytes=50000-", "store all"]),
    ] {
        let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
        fake.state().no_ranges = no_ranges;
        let partial = leave(cache.path(), left);
        let snapshot = fetched(&fake.client(cache.path()), "org/name").await.expect("fetched");
        assert_eq!(fs::read(snapshot.join("model.safetensors")).expect("it is there"), WEIGHTS);
        let asked: Vec<String> =
            fake.received().into_iter().filter(|request| request.starts_with("store")).collect();
        assert_eq!(asked, expected, "{} bytes were left", left.len());
        assert!(!partial.exists());
    }
}

#[tokio::test]
async fn a_damaged_file_is_fetched_once_more_and_never_kept() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    fake.state().damage = true;
    let error = fetched(&fake.client(cache.path()), "org/name").await.expect_err("damaged");
    assert_eq!(error.to_string(), "model.safetensors arrived damaged: its digest differs from the hub's");
    assert_eq!(fake.received().iter().filter(|request| request.starts_with("store")).count(), 2);
    let blobs = names(cache.path().join("models--org--name/blobs"));
    assert!(blobs.iter().all(|name| !name.starts_with(&sha256(WEIGHTS))), "{blobs:?}");
    fake.state().damage = false;
    fetched(&fake.client(cache.path()), "org/name").await.expect("fetched");
}

#[tokio::test]
async fn shards_are_fetched_as_the_index_names_them() {
    let index = br#"{"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}"#;
    let files: Vec<(&str, &[u8])> = vec![
        ("config.json", CONFIG),
        ("consolidated.safetensors", b"not these"),
        ("model.safetensors.index.json", index),
        ("model-1.safetensors", &[1; 10]),
        ("model-2.safetensors", &[2; 20]),
    ];
    let (fake, cache) = (FakeHub::new(&files).await, tempfile::tempdir().expect("a folder"));
    let snapshot = fetched(&fake.client(cache.path()), "org/name").await.expect("fetched");
    let expected =
        ["config.json", "model-1.safetensors", "model-2.safetensors", "model.safetensors.index.json"];
    assert_eq!(names(snapshot), expected);
}

#[tokio::test]
async fn two_processes_fetch_a_file_once() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    let (one, other) = (fake.client(cache.path()), fake.client(cache.path()));
    let (one, other) = tokio::join!(fetched(&one, "org/name"), fetched(&other, "org/name"));
    assert_eq!(one.expect("fetched"), other.expect("fetched"));
    assert_eq!(fake.received().iter().filter(|request| request.starts_with("store")).count(), 1);
}

#[tokio::test]
async fn the_token_is_shown_to_the_hub_alone() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    fake.state().token = Some("secret");
    let error = fetched(&fake.client(cache.path()), "org/name").await.expect_err("no token");
    assert!(matches!(error, HubError::Unauthorized { .. }), "{error}");
    let with_token = HubSettings { token: Some("secret".to_owned()), ..fake.settings(cache.path()) };
    let hub = Hub::new(with_token).expect("an address");
    // The download succeeds, although the store breaks the connection if it gets the token.
    fetched(&hub, "org/name").await.expect("fetched");
}

#[tokio::test]
async fn refusals_are_sentences() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    let hub = fake.client(cache.path());
    let endpoint = fake.settings(cache.path()).endpoint;
    let refusal = async |model: &str| sentence(&fetched(&hub, model).await.expect_err("refused"));
    assert_eq!(refusal("org/other").await, format!("org/other is not on {endpoint}"));
    assert_eq!(refusal("org/name@v9").await, "org/name has no revision \"v9\"");
    for (status, code, expected) in [
        (
            StatusCode::FORBIDDEN,
            "GatedRepo",
            format!("org/name is gated: ask for access at {endpoint}/org/name"),
        ),
        (
            StatusCode::UNAUTHORIZED,
            "GatedRepo",
            format!("org/name is gated: ask for access at {endpoint}/org/name"),
        ),
        (
            StatusCode::UNAUTHORIZED,
            "RepoNotFound",
            format!("org/name is not on {endpoint}, or it is private: set HF_TOKEN"),
        ),
        (StatusCode::IM_A_TEAPOT, "", format!("{endpoint}/api/models/org/name/revision/main answered 418")),
    ] {
        fake.state().refuse = Some((status, code));
        let sentence = refusal("org/name").await;
        assert!(sentence.starts_with(&expected), "{sentence}");
    }
}

#[tokio::test]
async fn a_model_without_safetensors_is_refused() {
    let files: Vec<(&str, &[u8])> = vec![("config.json", CONFIG), ("pytorch_model.bin", b"x")];
    let (fake, cache) = (FakeHub::new(&files).await, tempfile::tempdir().expect("a folder"));
    let error = fetched(&fake.client(cache.path()), "org/name").await.expect_err("no weights");
    assert_eq!(error.to_string(), "org/name has no safetensors weights: other formats are not supported");
}

#[tokio::test]
async fn a_model_that_cannot_be_served_is_refused_before_its_weights_are_fetched() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    let hub = fake.client(cache.path()).judged_by(|path, config| {
        assert!(path.ends_with("config.json") && config == CONFIG, "{}", path.display());
        Err("of another kind".into())
    });
    let error = fetched(&hub, "org/name").await.expect_err("the judge refuses");
    assert_eq!(sentence(&error), "org/name cannot be served: of another kind");
    let received = fake.state().received.clone();
    assert_eq!(received, ["revision main", "HEAD config.json", "GET config.json"]);
}

#[tokio::test]
async fn gguf_and_a_missing_config_have_their_own_sentences() {
    let gguf: Vec<(&str, &[u8])> = vec![("config.json", CONFIG), ("model-q4.gguf", b"x")];
    let bare: Vec<(&str, &[u8])> = vec![("model.safetensors", WEIGHTS)];
    for (files, expected) in [
        (gguf, "org/name has weights in GGUF, which are not downloaded: "),
        (bare, "org/name cannot be served, because it has no config.json"),
    ] {
        let (fake, cache) = (FakeHub::new(&files).await, tempfile::tempdir().expect("a folder"));
        let error = fetched(&fake.client(cache.path()), "org/name").await.expect_err("refused");
        assert!(error.to_string().starts_with(expected), "{error}");
        let received = fake.state().received.clone();
        assert_eq!(received.len(), 1, "only the list of files was asked for: {received:?}");
    }
}

#[tokio::test]
async fn without_a_network_what_was_fetched_before_is_used() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    let unreachable =
        HubSettings { endpoint: "http://127.0.0.1:9".to_owned(), ..fake.settings(cache.path()) };
    let away = Hub::new(unreachable.clone()).expect("an address");
    let error = fetched(&away, "org/name").await.expect_err("no server");
    assert!(sentence(&error).starts_with("cannot reach http://127.0.0.1:9/api/models/org/name"), "{error}");
    let offline = Hub::new(HubSettings { offline: true, ..unreachable }).expect("an address");
    let error = fetched(&offline, "org/name").await.expect_err("nothing is here");
    assert!(error.to_string().ends_with("HF_HUB_OFFLINE is set"), "{error}");
    let snapshot = fetched(&fake.client(cache.path()), "org/name").await.expect("fetched");
    assert_eq!(fetched(&away, "org/name").await.expect("from the cache"), snapshot);
    assert_eq!(fetched(&offline, "org/name").await.expect("from the cache"), snapshot);
    fs::remove_file(snapshot.join("model.safetensors")).expect("removed");
    fetched(&away, "org/name").await.expect_err("it is not whole any more");
}

#[test]
fn an_address_that_is_none_is_refused() {
    let settings = HubSettings {
        endpoint: "huggingface.co".to_owned(),
        token: None,
        cache: PathBuf::new(),
        offline: false,
        authorities: Authorities::default(),
        proxies: Proxies::default(),
    };
    let error = Hub::new(settings).expect_err("no scheme");
    assert!(error.to_string().contains("begin with http:// or https://"), "{error}");
}

/// Downloads over TLS, with these authorities instead of the machine's.
async fn fetched_by_tls(
    fake: &FakeHub,
    front: &Front,
    authorities: Authorities,
) -> Result<PathBuf, HubError> {
    let cache = tempfile::tempdir().expect("a folder");
    let settings = HubSettings {
        endpoint: front.endpoint(),
        authorities,
        token: Some("secret".to_owned()),
        ..fake.settings(cache.path())
    };
    fetched(&Hub::new(settings)?, "org/name").await
}

#[tokio::test]
async fn a_hub_is_trusted_whose_authority_is() {
    let fake = FakeHub::new(&files()).await;
    fake.state().token = Some("secret");
    let front = Front::of(fake.hub(), "127.0.0.1").await;
    let folder = front.authority().parent().map(Path::to_owned);
    let of_file = Authorities { file: Some(front.authority()), folder: None };
    for authorities in [of_file, Authorities { file: None, folder }] {
        let snapshot = fetched_by_tls(&fake, &front, authorities).await.expect("fetched");
        assert!(snapshot.ends_with(COMMIT));
    }
}

#[tokio::test]
async fn a_hub_without_a_trusted_certificate_gets_no_request() {
    let fake = FakeHub::new(&files()).await;
    let (front, elsewhere) =
        (Front::of(fake.hub(), "127.0.0.1").await, Front::of(fake.hub(), "hub.example").await);
    let others = elsewhere.authority();
    for (front, authorities, why) in [
        (&front, None, "UnknownIssuer"),
        (&front, Some(&others), "UnknownIssuer"),
        (&elsewhere, Some(&others), "not valid for name \"127.0.0.1\""),
    ] {
        let authorities = Authorities { file: authorities.cloned(), folder: None };
        let error = fetched_by_tls(&fake, front, authorities).await.expect_err("a stranger");
        assert!(matches!(error, HubError::Untrusted { .. }), "{error:?}");
        let said = sentence(&error);
        assert!(
            said.contains("is not trusted") && said.contains(why) && said.contains("SSL_CERT_FILE"),
            "{said}"
        );
    }
    assert_eq!(fake.received(), [""; 0], "no question, and no token");
}

#[tokio::test]
async fn a_hub_is_asked_through_the_proxy_of_its_scheme() {
    let fake = FakeHub::new(&files()).await;
    let front = Front::of(fake.hub(), "127.0.0.1").await;
    let (plain, tunnels) = (FakeProxy::new().await, FakeProxy::new().await);
    let of = |proxy: &FakeProxy| format!("http://user:secret@{}", proxy.addr());
    let proxies = Proxies { http: of(&plain), https: of(&tunnels), ..Proxies::default() };
    let none_for = Proxies { none_for: "127.0.0.0/8".to_owned(), ..proxies.clone() };
    for (endpoint, proxies, asked) in [
        (format!("http://{}", fake.hub()), &proxies, "GET http://127.0.0.1:"),
        (front.endpoint(), &proxies, "CONNECT 127.0.0.1:"),
        (front.endpoint(), &none_for, ""),
    ] {
        let cache = tempfile::tempdir().expect("a folder");
        let authorities = Authorities { file: Some(front.authority()), folder: None };
        let settings = HubSettings {
            endpoint: endpoint.clone(),
            authorities,
            proxies: proxies.clone(),
            ..fake.settings(cache.path())
        };
        fetched(&Hub::new(settings).expect("an address"), "org/name").await.expect("fetched");
        let received = [tunnels.received(), plain.received()].concat();
        assert_eq!(received.is_empty(), asked.is_empty(), "{endpoint}: {received:?}");
        if let Some(first) = received.first() {
            assert!(first.starts_with(asked), "{endpoint}: {received:?}");
        }
        // The password of "user:secret", in each request to a proxy.
        assert!(
            received.iter().all(|head| head.contains("Basic dXNlcjpzZWNyZXQ=")),
            "{endpoint}: {received:?}"
        );
    }
}

#[tokio::test]
async fn a_proxy_that_fails_is_named() {
    let (fake, cache) = (FakeHub::new(&files()).await, tempfile::tempdir().expect("a folder"));
    for (proxy, why) in [
        ("http://127.0.0.1:9", "the proxy http://127.0.0.1:9/: "),
        (
            "socks5://127.0.0.1:9",
            "the proxy socks5://127.0.0.1:9/ is not supported: it must begin with http://",
        ),
    ] {
        let proxies = Proxies { all: proxy.to_owned(), ..Proxies::default() };
        let settings = HubSettings { proxies, ..fake.settings(cache.path()) };
        let error =
            fetched(&Hub::new(settings).expect("an address"), "org/name").await.expect_err("no proxy");
        assert!(sentence(&error).contains(why), "{}", sentence(&error));
    }
    assert_eq!(fake.received(), [""; 0]);
}

#[tokio::test]
async fn authorities_that_are_none_are_named() {
    let fake = FakeHub::new(&files()).await;
    let front = Front::of(fake.hub(), "127.0.0.1").await;
    let folder = tempfile::tempdir().expect("a folder");
    let (missing, empty) = (folder.path().join("missing.pem"), folder.path().join("empty.pem"));
    fs::write(&empty, "nothing in particular").expect("written");
    let others = front.authority().parent().map(Path::to_owned);
    for (path, folder, why) in [
        (&missing, None, "No such file"),
        (&missing, others, "No such file"),
        (&empty, None, "it holds none"),
    ] {
        let authorities = Authorities { file: Some(path.clone()), folder };
        let error = fetched_by_tls(&fake, &front, authorities).await.expect_err("not trusted");
        let said = sentence(&error);
        assert!(said.starts_with(&format!("no CA certificate is in {}", path.display())), "{said}");
        assert!(said.contains(why), "{said}");
    }
}
