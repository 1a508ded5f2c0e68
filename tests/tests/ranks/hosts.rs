//! A prefill node of two processes with two ranks each, and a decode node of three processes. Each process has a host of
//! its own, and etcd is between them. Processes and hosts fail under load, and only an orchestrator restarts processes.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::hosts::{self, Flaw, Hosts};
use baton_tests::logs::{A_NODE_DIES, A_NODE_STANDS_STILL, NO_TOKENIZER, THE_REGISTRY_IS_AWAY};
use baton_tests::process::Process;
use baton_tests::{Ask, Client, Etcd, Stopwatch, eventually};
use futures::future::join_all;
use rustix::process::Signal;
use serde_json::{Value, json};
use tempfile::TempDir;
use tokio::time::{Instant, sleep};

use super::processes::A_PROCESS_DIES;
use super::{folder, up};

const NAMES: &[&str] = &["etcd", "router", "head", "rank", "prefill", "decode", "first", "second"];
/// The processes of the decode node.
const OF_DECODE: &[&str] = &["first", "second", "decode"];
const MODEL: &str = "qwen2-window";

/// The division of the prefill node's work between its two processes.
#[derive(Clone, Copy, Debug)]
enum Prefill {
    /// A stage each.
    StageForEach,
    /// Ranks of one stage.
    OneStage,
}

const TOKENS: u32 = 20;
/// More prompts than nodes have KV memory for, so that none of them finds all of its KV in a cache.
const N_PROMPTS: usize = 64;
const KV_MEMORY: &str = "256KiB";
/// The number of requests at one time.
const N_CLIENTS: usize = 6;
/// The deadlines of requests, in turn. The first one is shorter than the silence after which a process is lost.
const DEADLINES: [Duration; 2] = [Duration::from_secs(4), Duration::from_secs(20)];
/// How long after its deadline a request may end.
const LATE_MAX: Duration = Duration::from_secs(1);
/// How long a process stands still, or a host is cut off: longer than the silence after which a process is lost.
const FAULT: Duration = Duration::from_secs(7);

/// Warnings of faults. A process that was cut off comes back while its head still waits for the life before.
const EXPECTED: [&[&str]; 6] = [
    NO_TOKENIZER,
    A_NODE_DIES,
    A_NODE_STANDS_STILL,
    THE_REGISTRY_IS_AWAY,
    A_PROCESS_DIES,
    &["process may not join this node"],
];

/// A prompt with the answer that one process gives.
struct Question {
    prompt: Vec<u32>,
    answer: Value,
}

/// How requests have ended: with their whole answer, or with one of these errors after this deadline.
#[derive(Debug, Default)]
struct Ends {
    n_complete: usize,
    errors: BTreeMap<(String, Duration), usize>,
}

impl Ends {
    /// Checks that the other prefill node has answered all requests but those with too short a deadline.
    fn all_but_short(&self, what: &str) {
        let is_short = |(code, deadline): &(String, Duration)| code == "deadline" && *deadline < FAULT;
        assert!(self.n_complete > 0 && self.errors.keys().all(is_short), "{what}: {self:?}");
    }
}

/// The processes, each on its host. They must be dropped before the hosts.
struct Cluster {
    processes: Mutex<BTreeMap<&'static str, Process>>,
    client: Client,
    registry: String,
    secret: String,
    etcd: Mutex<Etcd>,
    folder: TempDir,
    hosts: Hosts,
}

impl Cluster {
    fn start() -> Self {
        let hosts = Hosts::new(NAMES);
        let etcd = Etcd::on(&hosts, "etcd");
        let folder = tempfile::tempdir().expect("a folder");
        let secret = folder.path().join("secret");
        std::fs::write(&secret, "a secret of this test's cluster").expect("written");
        let cluster = Self {
            processes: Mutex::default(),
            client: Client::new((hosts.addr_of("router"), 8000).into()),
            registry: etcd.url("hosts"),
            secret: secret.display().to_string(),
            etcd: Mutex::new(etcd),
            folder,
            hosts,
        };
        let ports =
            [("BATON_ROUTER__HTTP", 8000), ("BATON_ROUTER__ADMIN", 8001), ("BATON_ROUTER__GRPC", 50051)];
        let listen = ports.map(|(name, port)| (name, cluster.addr("router", port)));
        cluster.add("router", "router", listen.into());
        cluster
    }

    fn addr(&self, host: &str, port: u16) -> String {
        format!("{}:{port}", self.hosts.addr_of(host))
    }

    /// Starts a process of a role on the host of this name.
    fn add(&self, name: &'static str, role: &'static str, more: Vec<(&'static str, String)>) {
        let settings = vec![
            ("BATON_CLUSTER__SECRET_FILE", self.secret.clone()),
            // The test reads /debug and /metrics without a key.
            ("BATON_CLUSTER__INSECURE", "true".to_owned()),
            ("BATON_REGISTRY__URL", self.registry.clone()),
        ];
        let settings = settings.into_iter().chain(more).collect();
        let process = Process::start_on(self.hosts.namespace_of(name), self.folder.path(), role, settings);
        for parts in EXPECTED {
            process.expect_log(parts);
        }
        self.processes().insert(name, process);
    }

    /// Starts a process of a node.
    fn add_node(&self, name: &'static str, role: &'static str, more: &[(&'static str, String)]) {
        let settings = vec![
            ("BATON_NODE__ID", name.to_owned()),
            ("BATON_NODE__LISTEN", self.addr(name, 7000)),
            ("BATON_NODE__ADMIN", self.addr(name, 7001)),
            ("BATON_TRANSFER__LISTEN", self.addr(name, 7002)),
            ("BATON_TRANSFER__CONNECTORS", "[\"tcp\"]".to_owned()),
            ("BATON_MODEL__PATH", folder(MODEL)),
            ("BATON_MODEL__DEVICE", "cpu".to_owned()),
            ("BATON_MODEL__KV_MEMORY", KV_MEMORY.to_owned()),
            ("BATON_EXPERT__MODEL__THREADS", "1".to_owned()),
        ];
        self.add(name, role, settings.into_iter().chain(more.iter().cloned()).collect());
    }

    /// Starts the processes of the prefill node, which have two ranks each, and of the decode node, which have a stage each.
    fn add_groups(&self, prefill: Prefill) {
        let (stages, tp) = match prefill {
            Prefill::StageForEach => (2, 2),
            Prefill::OneStage => (1, 4),
        };
        self.add_group(("head", "prefill"), (stages, tp), &["rank"]);
        self.add_group(("decode", "decode"), (3, 1), &OF_DECODE[..2]);
    }

    /// Starts a node of several processes.
    fn add_group(
        &self,
        head: (&'static str, &'static str),
        stages_and_tp: (u16, u16),
        others: &[&'static str],
    ) {
        let ((name, role), (stages, tp)) = (head, stages_and_tp);
        let join = self.addr(name, 7003);
        let group = [
            ("BATON_MODEL__TP", tp.to_string()),
            ("BATON_EXPERT__MODEL__STAGES", stages.to_string()),
            ("BATON_EXPERT__MODEL__PROCESSES", (1 + others.len()).to_string()),
            ("BATON_EXPERT__MODEL__JOIN", join.clone()),
        ];
        self.add_node(name, role, &group);
        for (place, other) in others.iter().enumerate() {
            let of_rank = [("BATON_RANK_OF", join.clone()), ("BATON_RANK_PLACE", place.to_string())];
            self.add_node(other, "rank", &[&group[..], &of_rank].concat());
        }
    }

    fn processes(&self) -> MutexGuard<'_, BTreeMap<&'static str, Process>> {
        self.processes.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn etcd(&self) -> MutexGuard<'_, Etcd> {
        self.etcd.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn pid(&self, name: &str) -> u32 {
        self.processes()[name].pid()
    }

    /// Starts every process again that has ended, at the same address, as an orchestrator does.
    async fn supervise(&self) {
        loop {
            sleep(Duration::from_millis(200)).await;
            for process in self.processes().values_mut() {
                if !process.is_alive() {
                    process.revive();
                }
            }
        }
    }

    /// Waits until the router finds the current life of every node usable.
    async fn all_ready(&self) {
        let router = (self.hosts.addr_of("router"), 8000);
        eventually("the router to listen", async || tokio::net::TcpStream::connect(router).await.ok()).await;
        eventually("every node to be usable", async || {
            let cluster = self.client.get_json("/debug/cluster").await;
            let is_usable = |name: &str, process: &Process| {
                let nodes = cluster["nodes"].as_array().expect("a list of nodes");
                let node = nodes.iter().find(|node| node["id"] == name);
                node.is_some_and(|node| {
                    node["state"] == "ready" && node["pid"].as_u64() == Some(u64::from(process.pid()))
                })
            };
            let processes = self.processes();
            let mut nodes =
                processes.iter().filter(|(name, _)| !["router", "rank", "first", "second"].contains(name));
            nodes.all(|(name, process)| is_usable(name, process)).then_some(())
        })
        .await;
    }

    /// Waits until no node holds a block.
    async fn baseline(&self) {
        eventually("the pools' baseline", async || {
            let kv = self.client.get_json("/debug/kv").await;
            let is_quiet = |node: &Value| node["leased"] == 0 && node["quarantined"] == 0;
            kv["nodes"].as_array().expect("a list of nodes").iter().all(is_quiet).then_some(())
        })
        .await;
    }

    /// Waits until the node of two processes computes a prompt.
    async fn group_computes(&self) {
        let head = Client::new((self.hosts.addr_of("head"), 7001).into());
        let computed = async || head.counter("baton_node_prefill_tokens_total{role=\"prefill\"}").await;
        let before = computed().await;
        eventually("the node of two processes to be used", async || {
            (computed().await > before).then_some(())
        })
        .await;
    }

    /// Sends a request. Returns the code of the error that it ends with.
    async fn ask(&self, question: &Question, deadline: Duration) -> Result<(), String> {
        let body = json!({
            "model": MODEL, "prompt": question.prompt, "max_tokens": TOKENS, "temperature": 0,
            "ignore_eos": true, "logprobs": 5, "return_token_ids": true,
        });
        let headers = [("x-baton-timeout-ms", deadline.as_millis().to_string())];
        let (status, _, body) = self.client.post_with("/v1/completions", &headers, body.to_string()).await;
        let answer: Value = serde_json::from_str(&body).unwrap_or_else(|error| panic!("{error}: {body}"));
        if status == 200 {
            assert_eq!(answer["choices"][0], question.answer);
            return Ok(());
        }
        Err(answer["error"]["code"].as_str().unwrap_or_else(|| panic!("{status}: {body}")).to_owned())
    }

    /// Sends a request, and takes its answer as a stream. Returns the code of the error that it ends with.
    async fn ask_stream(&self, question: &Question, deadline: Duration) -> Result<(), String> {
        let ask = Ask::new(question.prompt.clone(), TOKENS).with("model", MODEL.into());
        let ask = ask.with("ignore_eos", true.into()).header("x-baton-timeout-ms", deadline.as_millis());
        match self.client.ask(&ask).await {
            Ok(answer) => assert_eq!(json!(answer.tokens), question.answer["token_ids"]),
            Err(failed) if failed.code == "broken" || failed.code.is_empty() => {
                panic!("no error: {failed:?}")
            }
            Err(failed) => return Err(failed.code),
        }
        Ok(())
    }

    /// Sends requests until `over`. Each ends soon after its deadline.
    async fn load(&self, questions: &[Question], over: &AtomicBool) -> Ends {
        let (next, ends) = (AtomicUsize::new(0), Mutex::new(Ends::default()));
        let one = async || {
            while !over.load(Ordering::Relaxed) {
                let nth = next.fetch_add(1, Ordering::Relaxed);
                let (question, deadline) = (&questions[nth % questions.len()], DEADLINES[nth / 2 % 2]);
                let watch = Stopwatch::start();
                let ended = match nth % 2 {
                    0 => self.ask(question, deadline).await,
                    _ => self.ask_stream(question, deadline).await,
                };
                let took = watch.elapsed();
                assert!(took < deadline + LATE_MAX, "deadline {deadline:?}, {took:?}: {ended:?}");
                let mut ends = ends.lock().unwrap_or_else(PoisonError::into_inner);
                match ended {
                    Ok(()) => ends.n_complete += 1,
                    Err(code) => *ends.errors.entry((code, deadline)).or_default() += 1,
                }
            }
        };
        join_all((0..N_CLIENTS).map(|_| one())).await;
        ends.into_inner().unwrap_or_else(PoisonError::into_inner)
    }

    /// Causes a fault under load, and waits until all processes in `restarted` have been started again and every node
    /// is used.
    async fn disturbed(&self, questions: &[Question], restarted: &[&str], fault: impl AsyncFnOnce()) -> Ends {
        let over = AtomicBool::new(false);
        let disturb = async {
            sleep(Duration::from_millis(300)).await;
            let before: Vec<u32> = restarted.iter().map(|name| self.pid(name)).collect();
            fault().await;
            eventually("the restarts", async || {
                let mut pids = restarted.iter().zip(&before);
                pids.all(|(name, before)| self.pid(name) != *before).then_some(())
            })
            .await;
            self.all_ready().await;
            self.group_computes().await;
            over.store(true, Ordering::Relaxed);
        };
        let (ends, ()) = tokio::join!(self.load(questions, &over), disturb);
        self.baseline().await;
        ends
    }

    fn signal(&self, name: &str, signal: Signal) {
        self.processes()[name].signal(signal);
    }
}

impl Drop for Cluster {
    fn drop(&mut self) {
        self.processes().values_mut().for_each(Process::judge_until_now);
    }
}

/// Returns prompts with the answers of one prefill process and one decode process, each with one rank and one stage.
async fn questions() -> Vec<Question> {
    let one = up("tcp", &folder(MODEL), ("1", "1"), &[]).await;
    one.expect_log(NO_TOKENIZER);
    let client = one.client();
    let question = async |prompt: Vec<u32>| {
        let prompt: Vec<u32> = prompt.iter().map(|token| 2 + token % 90).collect();
        let body = json!({ "model": MODEL, "prompt": prompt });
        Question { prompt, answer: super::completion(&client, body).await }
    };
    join_all(prompts(31, N_PROMPTS, 90).into_iter().map(question)).await
}

/// Returns a cluster whose node of two processes has answered every question, and the questions. There is another
/// prefill node besides.
async fn cluster(prefill: Prefill) -> (Cluster, Vec<Question>) {
    let questions = questions().await;
    let cluster = Cluster::start();
    cluster.add_groups(prefill);
    cluster.all_ready().await;
    let asked = questions.iter().map(|question| cluster.ask(question, DEADLINES[1]));
    assert!(join_all(asked).await.iter().all(Result::is_ok), "an answer with no fault");
    assert!(cluster.client.kv_arrived("tcp").await > 0, "no KV travelled");
    cluster.baseline().await;
    cluster.add_node("prefill", "prefill", &[]);
    cluster.all_ready().await;
    (cluster, questions)
}

/// Runs `test` while an orchestrator restarts processes that end.
async fn supervised(cluster: &Cluster, test: impl Future<Output = ()>) {
    tokio::select! {
        () = cluster.supervise() => {}
        () = test => {}
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn every_process_may_fail() {
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; nothing was tested");
        return;
    }
    let (cluster, questions) = cluster(Prefill::OneStage).await;
    let processes_fail = async {
        for name in ["rank", "head", "prefill"] {
            let restarted = if name == "prefill" { &["prefill"][..] } else { &["rank", "head"] };
            let kill = async || cluster.signal(name, Signal::KILL);
            cluster.disturbed(&questions, restarted, kill).await.all_but_short(&format!("{name} killed"));
        }
        for name in ["rank", "head"] {
            let stop = async || {
                cluster.signal(name, Signal::STOP);
                sleep(FAULT).await;
                cluster.signal(name, Signal::CONT);
            };
            let stopped = cluster.disturbed(&questions, &["rank", "head"], stop).await;
            stopped.all_but_short(&format!("{name} stopped"));
            let cut = async || {
                cluster.hosts.cut(name);
                sleep(FAULT).await;
                cluster.hosts.mend(name);
            };
            let cut = cluster.disturbed(&questions, &["rank", "head"], cut).await;
            cut.all_but_short(&format!("{name} cut off"));
        }
        for name in ["second", "decode"] {
            let kill = async || cluster.signal(name, Signal::KILL);
            let without_decode = cluster.disturbed(&questions, OF_DECODE, kill).await;
            assert!(without_decode.n_complete > 0, "{name} killed: {without_decode:?}");
        }
        let cut = async || {
            cluster.hosts.cut("first");
            sleep(FAULT).await;
            cluster.hosts.mend("first");
        };
        let without_decode = cluster.disturbed(&questions, OF_DECODE, cut).await;
        assert!(without_decode.n_complete > 0, "first cut off: {without_decode:?}");
        let restart = async || {
            cluster.etcd().kill();
            sleep(FAULT).await;
            cluster.etcd().restart();
        };
        cluster.disturbed(&questions, &[], restart).await.all_but_short("etcd restarted");
    };
    supervised(&cluster, processes_fail).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn bad_cables_between_processes_change_no_token() {
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; nothing was tested");
        return;
    }
    let (cluster, questions) = cluster(Prefill::StageForEach).await;
    let cables_fail = async {
        let (sent, begin) = (cluster.hosts.bytes_sent("rank"), Instant::now());
        let undisturbed = async || sleep(FAULT / 2).await;
        cluster.disturbed(&questions, &[], undisturbed).await.all_but_short("no fault");
        let rate = (cluster.hosts.bytes_sent("rank") - sent) as f64 / begin.elapsed().as_secs_f64();
        let tenth = (rate / 10.0) as u32;
        for (host, flaw) in [
            ("rank", Flaw { loss: 0.05, ..Flaw::default() }),
            ("head", Flaw { loss: 0.05, ..Flaw::default() }),
            ("etcd", Flaw { loss: 0.05, delay_ms: 50, ..Flaw::default() }),
            ("rank", Flaw { delay_ms: 50, ..Flaw::default() }),
            ("rank", Flaw { bytes_per_second: tenth, ..Flaw::default() }),
            ("decode", Flaw { bytes_per_second: tenth, ..Flaw::default() }),
            ("first", Flaw { loss: 0.05, ..Flaw::default() }),
            ("second", Flaw { delay_ms: 50, ..Flaw::default() }),
        ] {
            let mut cable = None;
            let worsen = async || {
                cable = Some(cluster.hosts.bad_cable(host, flaw));
                sleep(FAULT / 2).await;
            };
            let ends = cluster.disturbed(&questions, &[], worsen).await;
            ends.all_but_short(&format!("{host} with {flaw:?}"));
            let n_carried = cable.expect("it was made").n_carried();
            assert!(n_carried > 0, "nothing of {host}'s went over the bad cable");
        }
    };
    supervised(&cluster, cables_fail).await;
}
