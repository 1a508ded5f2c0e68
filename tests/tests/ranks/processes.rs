//! Prefill nodes of several processes. The tokens are those of one process, also if a process is lost meanwhile.

use std::net::SocketAddr;
use std::time::Duration;

use baton_tests::fleet::{Fleet, Settings};
use baton_tests::logs::{A_NODE_DIES, NO_TOKENIZER};
use baton_tests::process::Process;
use baton_tests::{eventually, executable, free_addr, in_time};
use rustix::process::Signal;
use serde_json::Value;
use tempfile::TempDir;

use super::{completions, folder};

/// Warnings of a node that loses one of its processes.
pub(super) const A_PROCESS_DIES: &[&str] = &[
    "process of this node lost",
    "engine step failed, all of its sequences fail",
    "engine backend lost, all sequences fail",
    "step cannot be computed",
];

/// A node of several processes.
#[derive(Clone, Debug)]
pub(super) struct GroupPlan {
    pub(super) role: &'static str,
    pub(super) n_processes: usize,
    /// The ranks of each stage. Each process has a stage, unless `more` says otherwise.
    pub(super) tp: u16,
    pub(super) more: Settings,
}

/// The processes of a node besides its first one, which the fleet has.
pub(super) struct Group {
    pub(super) ranks: Vec<Process>,
    /// The index of the first process among the fleet's nodes.
    pub(super) head: usize,
    settings: Settings,
    _folder: TempDir,
}

pub(super) fn on_one_thread() -> Settings {
    vec![("BATON_MODEL__DEVICE", "cpu".to_owned()), ("BATON_EXPERT__MODEL__THREADS", "1".to_owned())]
}

impl Group {
    /// Starts a prefill node of `n` processes with `tp` ranks each. Returns when the node is usable.
    pub(super) async fn start(fleet: &mut Fleet, model: &str, n: usize, tp: u16) -> Self {
        let plan = GroupPlan { role: "prefill", n_processes: n, tp, more: Vec::new() };
        Self::planned(fleet, model, plan).await
    }

    /// Starts a node. Returns when it is usable.
    pub(super) async fn planned(fleet: &mut Fleet, model: &str, plan: GroupPlan) -> Self {
        let GroupPlan { role, n_processes: n, tp, more } = plan;
        let join: SocketAddr = free_addr();
        let mut settings = on_one_thread();
        settings.push(("BATON_MODEL__TP", tp.to_string()));
        settings.push(("BATON_EXPERT__MODEL__PROCESSES", n.to_string()));
        settings.push(("BATON_EXPERT__MODEL__JOIN", join.to_string()));
        settings.extend(more);
        let logs = tempfile::tempdir().expect("a folder");
        let rank = |place: usize| {
            let mut settings = settings.clone();
            settings.push(("BATON_MODEL__PATH", model.to_owned()));
            settings.push(("BATON_RANK_OF", join.to_string()));
            settings.push(("BATON_RANK_PLACE", place.to_string()));
            Process::start(logs.path(), &format!("rank-{place}"), "rank", settings)
        };
        let ranks = (0..n - 1).map(rank).collect();
        let head = fleet.nodes.len();
        let nth = fleet.nodes.iter().filter(|node| node.role == role).count();
        fleet.add_with(role, nth, model, settings.clone());
        fleet.all_ready().await;
        Self { ranks, head, settings, _folder: logs }
    }

    /// Starts all processes again, as an orchestrator does when they have ended.
    pub(super) async fn revive(&mut self, fleet: &mut Fleet) {
        self.ranks.iter_mut().for_each(Process::revive);
        fleet.nodes[self.head].process.revive();
        fleet.all_ready().await;
    }
}

pub(super) async fn fleet(model: &str, of_decode: Settings) -> Fleet {
    let of_decode = on_one_thread().into_iter().chain(of_decode).collect();
    let fleet = Fleet::start_narrow(model, 0, 1, of_decode).await;
    fleet.expect_log(NO_TOKENIZER);
    fleet
}

/// The settings of a node whose processes share this number of stages.
pub(super) fn stages(n_stages: usize) -> Settings {
    vec![("BATON_EXPERT__MODEL__STAGES", n_stages.to_string())]
}

fn plan(n_processes: usize, tp: u16) -> GroupPlan {
    GroupPlan { role: "prefill", n_processes, tp, more: Vec::new() }
}

/// Checks that every bit of every log-probability is that of one process.
async fn answers_as_one_process_does(model: &str, plan: GroupPlan, of_decode: Settings) {
    let path = folder(model);
    let mut fleet = fleet(&path, of_decode).await;
    let expected = completions(&fleet.client(), model).await;
    let group = Group::planned(&mut fleet, &path, plan.clone()).await;
    fleet.expect_log(NO_TOKENIZER);
    // The decode node has the KV of the same prompts, and the answers would need none from the prefill node.
    fleet.nodes[0].process.restart().await;
    fleet.all_ready().await;
    let seen = completions(&fleet.client(), model).await;
    assert_eq!(seen, expected, "{model}, {plan:?}");
    assert!(fleet.client().kv_arrived("tcp").await > 0, "no KV travelled");
    fleet.baseline().await;
    drop(fleet);
    drop(group);
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_processes_of_two_ranks_answer_as_one_does() {
    answers_as_one_process_does("qwen2-window", plan(2, 2), stages(3)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_send_latents() {
    let ranks = vec![("BATON_MODEL__TP", "2".to_owned())];
    answers_as_one_process_does("deepseek-v3", plan(3, 1), ranks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_share_experts() {
    answers_as_one_process_does("mixtral", plan(2, 1), Vec::new()).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn ranks_of_one_stage_in_two_processes_answer_as_one_does() {
    let ranks = vec![("BATON_MODEL__TP", "2".to_owned())];
    answers_as_one_process_does("llama", GroupPlan { more: stages(1), ..plan(2, 4) }, ranks).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_process_for_each_rank_of_each_stage_answers_as_one_does() {
    answers_as_one_process_does("mixtral", GroupPlan { more: stages(2), ..plan(4, 2) }, Vec::new()).await;
}

/// A process is killed, or stands still. The node ends, its requests are computed elsewhere, and after a restart of all
/// processes the node is used again.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_process_costs_no_request() {
    a_process_is_lost(plan(2, 1)).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_lost_process_with_ranks_of_the_heads_stage_costs_no_request() {
    a_process_is_lost(GroupPlan { more: stages(1), ..plan(2, 2) }).await;
}

async fn a_process_is_lost(plan: GroupPlan) {
    let path = folder("llama");
    let mut fleet = fleet(&path, Vec::new()).await;
    let expected = completions(&fleet.client(), "llama").await;
    let mut group = Group::planned(&mut fleet, &path, plan).await;
    fleet.expect_log(NO_TOKENIZER);
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(A_PROCESS_DIES);
    for fault in [Signal::KILL, Signal::STOP] {
        let client = fleet.client();
        let asking = async {
            for _ in 0..4 {
                let seen = in_time("all answers", completions(&client, "llama")).await;
                assert_eq!(seen, expected, "{fault:?}");
            }
        };
        let failing = async {
            tokio::time::sleep(Duration::from_millis(100)).await;
            group.ranks[0].signal(fault);
        };
        tokio::join!(asking, failing);
        let head = &mut fleet.nodes[group.head].process;
        eventually("the node's end", async || (!head.is_alive()).then_some(())).await;
        group.revive(&mut fleet).await;
        fleet.baseline().await;
    }
    let prefill = baton_tests::Client::new(fleet.nodes[1].admin);
    let computed = async || prefill.counter("baton_node_prefill_tokens_total{role=\"prefill\"}").await;
    let before = computed().await;
    let prompt: Vec<u32> = (0..60).map(|at| 2 + at * 5 % 90).collect();
    let body: Value = serde_json::json!({ "model": "llama", "prompt": prompt });
    super::completion(&fleet.client(), body).await;
    assert!(computed().await > before, "the node is used again");
    drop(fleet);
    drop(group);
}

/// A process that does not fit is refused, and each side names the difference.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_that_do_not_fit_are_refused() {
    let path = folder("llama");
    let mut fleet = fleet(&path, Vec::new()).await;
    let group = Group::start(&mut fleet, &path, 2, 1).await;
    fleet.expect_log(NO_TOKENIZER);
    fleet.expect_log(&["process may not join this node"]);
    let join = group.settings.iter().find(|(name, _)| name.ends_with("JOIN")).expect("an address").1.clone();
    let refused = |place: &str, settings: &[(&str, &str)]| {
        let mut command = executable::command();
        command.args(["rank", "--of", &join, "--place", place]).env("BATON_MODEL__PATH", &path);
        command.envs(group.settings.iter().cloned()).envs(settings.iter().copied());
        executable::finish(&mut command).stderr
    };
    for (place, settings, reason) in [
        ("0", &[][..], "the process of stage 0 at 127.0.0.1:"),
        ("1", &[], "place 1: with 2 processes it is at most 0"),
        (
            "0",
            &[("BATON_MODEL__KV_DTYPE", "f32")],
            "model.kv_dtype is bf16 at the head and f32 at 127.0.0.1:",
        ),
        ("0", &[("BATON_EXPERT__MODEL__PROCESSES", "1")], "a node of one process has no others"),
    ] {
        let error = refused(place, settings);
        assert!(error.contains(reason), "{error}");
    }
    drop(fleet);
    drop(group);
}
