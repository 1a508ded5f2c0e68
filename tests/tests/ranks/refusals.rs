//! Processes that do not fit their head are refused before they load weights. Both sides say what differs, and the head waits
//! on for the right process.

use std::io::Write as _;
use std::net::SocketAddr;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use baton_tests::executable::{self, Finished};
use baton_tests::fleet::Settings;
use baton_tests::logs::NO_TOKENIZER;
use baton_tests::process::Process;
use baton_tests::{eventually, free_addr};
use tempfile::TempDir;
use tokio::task::spawn_blocking;
use tokio::time::Instant;

use super::processes::{fleet, on_one_thread};
use super::{completions, folder};

const MODEL: &str = "llama";
/// The exit code of a process that could not start.
const NOT_STARTED: Option<i32> = Some(3);

/// Settings of all processes of a node of two.
fn of_two(join: SocketAddr) -> Settings {
    let mut settings = on_one_thread();
    settings.push(("BATON_EXPERT__MODEL__PROCESSES", "2".to_owned()));
    settings.push(("BATON_EXPERT__MODEL__JOIN", join.to_string()));
    settings
}

/// Returns the settings of a head's own ports.
fn of_head() -> Settings {
    let [listen, admin, kv, registry]: [SocketAddr; 4] = std::array::from_fn(|_| free_addr());
    vec![
        ("BATON_NODE__LISTEN", listen.to_string()),
        ("BATON_NODE__ADMIN", admin.to_string()),
        ("BATON_TRANSFER__LISTEN", kv.to_string()),
        ("BATON_REGISTRY__URL", format!("embedded://{registry}")),
    ]
}

/// Starts the process of the first stage, and returns how it ended.
async fn rank(join: SocketAddr, model: &str, more: Settings) -> Finished {
    rank_of(executable::command(), join, model, more).await
}

async fn rank_of(mut command: Command, join: SocketAddr, model: &str, more: Settings) -> Finished {
    command.args(["rank", "--of", &join.to_string(), "--place", "0"]).env("BATON_MODEL__PATH", model);
    command.envs(of_two(join)).envs(more);
    spawn_blocking(move || executable::finish(&mut command)).await.expect("the process runs")
}

/// Copies the model's files.
fn copied(path: &str) -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join(MODEL);
    std::fs::create_dir(&copy).expect("a folder");
    for file in ["config.json", "generation_config.json", "model.safetensors"] {
        std::fs::copy(Path::new(path).join(file), copy.join(file)).expect("a copy");
    }
    folder
}

/// Returns a model with the same name and shapes, and one other weight.
fn other_weights(path: &str) -> TempDir {
    let folder = copied(path);
    let weights = folder.path().join(MODEL).join("model.safetensors");
    let mut bytes = std::fs::read(&weights).expect("weights");
    *bytes.last_mut().expect("a weight") ^= 1;
    std::fs::write(&weights, bytes).expect("a file");
    folder
}

/// Returns another executable that does the same: a byte more at the end is never read.
fn other_executable() -> TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    let copy = folder.path().join("baton");
    std::fs::copy(executable::baton(), &copy).expect("a copy");
    let mut file = std::fs::OpenOptions::new().append(true).open(copy).expect("the copy");
    file.write_all(&[0]).expect("written");
    folder
}

fn in_folder(folder: &TempDir) -> String {
    folder.path().join(MODEL).to_str().expect("UTF-8").to_owned()
}

/// Returns the values of the head and of the process in the last line of `text` that says how `name` differs.
fn values<'a>(text: &'a str, name: &str) -> Option<(&'a str, &'a str)> {
    let line = text.lines().rev().find(|line| line.contains(&format!("{name} is ")))?;
    let (_, values) = line.split_once(&format!("{name} is "))?;
    let (ours, theirs) = values.split_once(" at the head and ")?;
    Some((ours, theirs.split_once(" at 127.0.0.1:")?.0))
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_with_other_files_or_settings_is_refused_and_the_head_waits_on() {
    let path = folder(MODEL);
    let mut fleet = fleet(&path, Vec::new()).await;
    let expected = completions(&fleet.client(), MODEL).await;
    let join: SocketAddr = free_addr();
    fleet.add_with("prefill", 0, &path, of_two(join));
    fleet.expect_log(NO_TOKENIZER);
    fleet.expect_log(&["process may not join this node"]);
    let other = other_weights(&path);
    let tokenizer = copied(&path);
    std::fs::write(tokenizer.path().join(MODEL).join("tokenizer.json"), "{}").expect("a file");
    let set = |name, value: &str| vec![(name, value.to_owned())];
    // Each row has what differs, the process's model and settings, and the values of both sides if they are known.
    type Row<'a> = (&'a str, String, Settings, Option<(&'a str, &'a str)>);
    let executable = other_executable();
    let cases: [Row<'_>; 6] = [
        ("executable", path.clone(), Vec::new(), None),
        ("weights", in_folder(&other), Vec::new(), None),
        ("tokenizer", in_folder(&tokenizer), Vec::new(), None),
        ("architecture", folder("qwen2"), Vec::new(), None),
        (
            "expert.model.stage_layers",
            path.clone(),
            set("BATON_EXPERT__MODEL__STAGE_LAYERS", "[1, 1]"),
            Some(("[]", "[1, 1]")),
        ),
        ("model.kv_dtype", path.clone(), set("BATON_MODEL__KV_DTYPE", "f32"), Some(("bf16", "f32"))),
    ];
    for (name, model, settings, expected) in cases {
        let command = match name {
            "executable" => executable::without_our_variables(Command::new(executable.path().join("baton"))),
            _ => executable::command(),
        };
        let Finished { status, stderr, .. } = rank_of(command, join, &model, settings).await;
        assert_eq!(status.code(), NOT_STARTED, "{name}: {stderr}");
        let error = stderr.lines().last().unwrap_or_default();
        assert!(error.contains(&format!("the head at {join} refuses this process: ")), "{name}: {stderr}");
        let differing = values(error, name).unwrap_or_else(|| panic!("{name}: {stderr}"));
        assert_ne!(differing.0, differing.1, "{name}");
        assert!(expected.is_none_or(|expected| differing == expected), "{name}: {differing:?}");
        let head = &mut fleet.nodes[1].process;
        assert!(head.is_alive(), "{name}: the head waits on");
        let (_, why) = error.split_once("this process: ").expect("checked above");
        eventually("the head's log", async || head.log().contains(why).then_some(())).await;
    }
    let log = tempfile::tempdir().expect("a folder");
    let settings = of_two(join).into_iter().chain([
        ("BATON_MODEL__PATH", path.clone()),
        ("BATON_RANK_OF", join.to_string()),
        ("BATON_RANK_PLACE", "0".to_owned()),
    ]);
    let right = Process::start(log.path(), "rank", "rank", settings.collect());
    fleet.all_ready().await;
    assert_eq!(completions(&fleet.client(), MODEL).await, expected);
    drop(fleet);
    drop(right);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_head_without_its_process_says_which_is_missing_and_why() {
    let path = folder(MODEL);
    let other = other_weights(&path);
    let join: SocketAddr = free_addr();
    let mut command = executable::command();
    command
        .arg("prefill")
        .envs(of_two(join))
        .envs(of_head())
        .envs([("BATON_MODEL__PATH", path), ("BATON_EXPERT__MODEL__JOIN_MS", "5000".to_owned())]);
    let head = spawn_blocking(move || executable::finish(&mut command));
    let refused = rank(join, &in_folder(&other), Vec::new()).await;
    assert_eq!(refused.status.code(), NOT_STARTED, "{}", refused.stderr);
    let Finished { status, stderr, .. } = head.await.expect("the head runs");
    assert_eq!(status.code(), NOT_STARTED, "{stderr}");
    let error = stderr.lines().last().unwrap_or_default();
    let missing = format!(
        "no process has joined for stage 0 within 5000 ms: start `baton rank --of {join} --place PLACE` for each (the last \
         one was refused: weights is "
    );
    assert!(error.contains(&missing), "{error}");
}

/// The process waits 120 s for a head that is not there yet, but not for one of another cluster.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_of_another_cluster_is_refused_at_once() {
    let (path, join) = (folder(MODEL), free_addr());
    let files = tempfile::tempdir().expect("a folder");
    let secret = |name: &str| {
        let file = files.path().join(name);
        std::fs::write(&file, format!("a secret of the cluster {name}")).expect("written");
        ("BATON_CLUSTER__SECRET_FILE", file.display().to_string())
    };
    let settings = of_two(join).into_iter().chain(of_head());
    let settings = settings.chain([("BATON_MODEL__PATH", path.clone()), secret("ours")]);
    let head = Process::start(files.path(), "head", "prefill", settings.collect());
    head.expect_log(&["process may not join this node"]);
    eventually("the head to wait", async || head.log().contains("head waits for the other").then_some(()))
        .await;
    for more in [vec![secret("theirs")], Vec::new()] {
        let begun = Instant::now();
        let Finished { status, stderr, .. } = rank(join, &path, more).await;
        assert_eq!(status.code(), NOT_STARTED, "{stderr}");
        let error = stderr.lines().last().unwrap_or_default();
        let what = format!("no head answers at {join} (");
        assert!(error.contains(&what) && error.contains("`cluster.secret_file`"), "{error}");
        assert!(begun.elapsed() < Duration::from_secs(20), "it has tried for {:?}", begun.elapsed());
    }
    // The head has one line for each reason and minute.
    let refused = "did not prove that it has the cluster's secret";
    assert_eq!(head.log().matches(refused).count(), 1, "{}", head.log());
}
