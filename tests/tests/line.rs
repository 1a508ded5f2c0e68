//! Prompts wait for room in the router: in order, without asking nodes, until their objective is lost.

use std::sync::Mutex;
use std::time::Duration;

use baton_tests::fleet::{Fleet, PACED, Settings};
use baton_tests::process::processor_time;
use baton_tests::{Ask, Client, eventually};
use chassis::{Gate, Task, spawn_guarded};
use futures::future::join_all;
use tokio::sync::Semaphore;
use tokio::time::{Instant, sleep};

/// The number of tokens in a block of the mock, and a block's bytes.
const BLOCK_TOKENS: usize = 16;
const BLOCK_BYTES: usize = 8 << 10;
const ANSWER_TOKENS: u32 = 8;

/// A model with which all rooms of a decode node are taken while prompts wait.
const SLOW_ROWS: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/slow-rows.toml");

/// The size of a test. `TEST_LINE_PROMPTS`, `TEST_LINE_TOKENS` and `TEST_LINE_ROOMS` set another one.
struct Size {
    n_prompts: usize,
    n_tokens: usize,
    /// The number of prompts that nodes have room for at one time.
    n_rooms: usize,
}

impl Size {
    fn asked() -> Self {
        let number = |name, unset| std::env::var(name).map_or(unset, |text| text.parse().expect("a number"));
        Self {
            n_prompts: number("TEST_LINE_PROMPTS", 192),
            n_tokens: number("TEST_LINE_TOKENS", 512),
            n_rooms: number("TEST_LINE_ROOMS", 16),
        }
    }

    /// Starts a prefill and a decode node of this model with room for `n_rooms` prompts.
    async fn fleet(&self, model: &str) -> Fleet {
        let n_blocks = self.n_rooms * (self.n_tokens / BLOCK_TOKENS + 2);
        let memory = format!("{}KiB", n_blocks * BLOCK_BYTES / 1024);
        let trusted = ("BATON_ROUTER__TRUSTED_PROXIES", "[\"127.0.0.1\"]".to_owned());
        let patient = ("BATON_ROUTER__WAIT_MS", "600000".to_owned());
        let of_router: Settings = vec![trusted, patient];
        Fleet::start_each(model, 1, 1, of_router, |_| vec![("BATON_MODEL__KV_MEMORY", memory.clone())]).await
    }

    fn ask(&self, nth: usize) -> Ask {
        let prompt =
            (0..self.n_tokens).map(|at| ((nth * 31 + at * 13 + at * at * (nth + 3)) % 250) as u32).collect();
        Ask::new(prompt, ANSWER_TOKENS).with("ignore_eos", true.into())
    }
}

/// Waits until this number of a tenant's requests waits in the line of the only model.
async fn waiting(client: &Client, tenant: &str, wanted: impl Fn(u64) -> bool) {
    let waits = async || {
        let cluster = client.get_json("/debug/cluster").await;
        let tenants = cluster["lines"][0]["tenants"].as_array()?;
        let of_tenant = tenants.iter().filter(|shown| shown["tenant"] == tenant);
        wanted(of_tenant.filter_map(|shown| shown["waiting"].as_u64()).sum()).then_some(())
    };
    eventually("requests to wait in the line", waits).await;
}

/// Returns the number of prompts that have come to the line: those that have left it, and those in it.
async fn n_come(client: &Client) -> u64 {
    let page = client.get("/metrics").await.1;
    let counts = ["baton_router_line_wait_seconds_count ", "baton_router_line_waiting{"];
    let counted = |line: &&str| counts.iter().any(|name| line.starts_with(name));
    let values = page.lines().filter(counted).filter_map(|line| line.rsplit(' ').next()?.parse::<u64>().ok());
    values.sum()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_are_asked_in_order_and_once_there_is_room() {
    let size = Size::asked();
    let fleet = size.fleet(SLOW_ROWS).await;
    let client = fleet.client();
    let started = Instant::now();
    let begun = Mutex::new(Vec::new());
    // Few prompts are on their way to the router at one time, because it may read those in another order.
    let turns = Semaphore::new(0);
    let give_turns = async {
        for given in 1..=size.n_prompts {
            turns.add_permits(1);
            sleep(Duration::from_millis(3)).await;
            if given.is_multiple_of(size.n_rooms / 2) {
                let has_come = async || (n_come(&client).await >= given as u64).then_some(());
                eventually("the router to have the prompts", has_come).await;
            }
        }
    };
    let one = async |nth: usize| {
        turns.acquire().await.expect("it stays open").forget();
        let is_urgent = nth >= size.n_prompts * 3 / 4;
        let ask = size.ask(nth).header("x-baton-priority", i8::from(is_urgent));
        let mut stream = client.stream(&ask).await.expect("every prompt is answered");
        begun.lock().expect("the lock").push((nth, is_urgent));
        while stream.next().await.expect("the stream goes on").is_some() {}
    };
    let longest = Duration::from_secs(20 + size.n_prompts as u64 / 4);
    let all = async { tokio::join!(join_all((0..size.n_prompts).map(one)), give_turns) };
    tokio::time::timeout(longest, all).await.expect("all answers");
    let attempts = client.counter("baton_router_attempts_total").await;
    assert!(attempts <= 2 * size.n_prompts as u64, "{attempts} attempts for {} prompts", size.n_prompts);
    let begun = begun.into_inner().expect("the lock");
    for urgent in [false, true] {
        let order: Vec<usize> = begun.iter().filter(|(_, is)| *is == urgent).map(|(nth, _)| *nth).collect();
        let first = order.iter().min().copied().unwrap_or_default();
        let late = order
            .iter()
            .enumerate()
            .filter(|(at, nth)| (*nth - first).abs_diff(*at) > 2 * size.n_rooms)
            .count();
        assert_eq!(late, 0, "prompts of one priority are served in order: {order:?}");
    }
    let place = |urgent| begun.iter().rposition(|(_, is)| *is == urgent).unwrap_or_default();
    assert!(place(true) < place(false), "the last urgent prompt is served before the last other one");
    let router =
        processor_time(fleet.router.pid()).expect("the router runs").div_duration_f64(started.elapsed());
    eprintln!("{attempts} attempts for {} prompts; the router takes {router:.2} of a core", size.n_prompts);
    assert!(router < 0.5, "the router takes {router:.2} of a core");
    assert!(client.counter("baton_router_line_wait_seconds_count").await == size.n_prompts as u64);
    fleet.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prompt_that_would_be_late_is_refused_and_one_that_leaves_gives_up_its_place() {
    let size = Size { n_prompts: 0, n_tokens: 512, n_rooms: 16 };
    let fleet = size.fleet(PACED).await;
    let client = fleet.client();
    let long = |nth| Ask { max_tokens: 400, ..size.ask(nth) };
    let asks = (0..3 * size.n_rooms).map(|nth| spawned(&client, long(nth)));
    let running: Vec<_> = asks.collect();
    waiting(&client, "default", |n_waiting| n_waiting >= size.n_rooms as u64).await;
    let patient = size.ask(100).header("x-baton-tenant", "patient").header("x-baton-priority", -5);
    let patient = spawned(&client, patient);
    waiting(&client, "patient", |n_waiting| n_waiting == 1).await;
    let gauge = "baton_router_line_waiting{model=\"mock\",priority=\"-5\",tenant=\"patient\"}";
    assert_eq!(client.counter(gauge).await, 1);
    let late =
        client.ask(&size.ask(101).header("x-baton-slo", "ttft=300ms")).await.expect_err("there is no room");
    assert_eq!((late.status, late.code.as_str()), (Some(429), "overloaded"), "{late:?}");
    assert!(late.message.contains("first token") && late.message.contains("300 ms"), "{late:?}");
    let slow =
        client.ask(&size.ask(102).header("x-baton-slo", "tbt=1ms")).await.expect_err("steps are longer");
    assert!(slow.message.contains("time between tokens") && slow.status == Some(429), "{slow:?}");
    let refused = async |reason| {
        client.counter(&format!("baton_router_line_refusals_total{{reason=\"{reason}\"}}")).await
    };
    assert_eq!((refused("late_first_token").await, refused("late_tokens").await), (1, 1));
    drop(patient);
    waiting(&client, "patient", |n_waiting| n_waiting == 0).await;
    drop(running);
    waiting(&client, "default", |n_waiting| n_waiting == 0).await;
    let answer = client.ask(&size.ask(103).header("x-baton-slo", "ttft=20s,tbt=2s")).await;
    assert_eq!(answer.expect("there is room again").tokens.len(), ANSWER_TOKENS as usize);
    fleet.baseline().await;
}

/// Sends a request in a task. Dropping the task closes the request's connection.
fn spawned(client: &Client, ask: Ask) -> Task<()> {
    let client = client.clone();
    spawn_guarded(&Gate::new("clients"), "client", async move { drop(client.ask(&ask).await) })
}
