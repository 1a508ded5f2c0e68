//! Tests of the worker through its handle, with its driver, on a clock that advances only when all tasks
//! wait.

use std::num::NonZero;

use chassis::metrics::Metrics;
use chassis::{Gate, Task, World, spawn_guarded};
use engine::backend::flaky::{Failures, Flaky};
use engine::{Backend, Mock, MockSettings, Pace};
use tokio::time::timeout;
use types::{Prompt, Refusal, RefusalKind, Step, TokenId};

use super::*;
use crate::handle::Ticket;
use crate::inbox::WorkerState;
use crate::landing_room::RoomRequest;
use crate::metrics::SchedulerMetrics;
use crate::settings::SchedulerSettings;
use crate::submission::{NewSequence, Source};
use crate::testing::{Recorder, Recording, alone, blocks, deadline_in, holder, mock, prompt, roomy, small};

const LONG: Duration = Duration::from_secs(3600);

struct Node {
    handle: WorkerHandle,
    pool: BlockPool,
    task: Task<Box<dyn Backend>>,
}

fn start(backend: impl Backend, settings: SchedulerSettings) -> Node {
    let (handle, driver, pool) = prepare(backend, settings);
    let task = spawn_guarded(&Gate::new("test"), "worker", driver.drive_simulated());
    Node { handle, pool, task }
}

fn prepare(backend: impl Backend, settings: SchedulerSettings) -> (WorkerHandle, Driver, BlockPool) {
    let pool = BlockPool::new(&backend.model().layout, backend.memory().n_blocks());
    let parts = WorkerParts {
        backend: Box::new(backend),
        pool: pool.clone(),
        world: World::seeded(1),
        settings,
        metrics: SchedulerMetrics::new(&Metrics::new("test")),
    };
    let (handle, driver) = worker(parts).expect("right settings");
    (handle, driver, pool)
}

/// Returns a mock whose steps take 10 ms, plus 1 ms per prompt token.
fn costly() -> Mock {
    costly_by_groups(1)
}

/// In steps with prompts, the time is that of whole groups of rows.
fn costly_by_groups(rows_together: usize) -> Mock {
    let mut settings = small();
    settings.cost.step_ms = 10.0;
    settings.cost.prefill_token_ms = 1.0;
    settings.cost.rows_together = NonZero::new(rows_together).expect("some rows");
    Mock::new("mock", settings, 64, Pace::Modelled).expect("memory for a few blocks")
}

fn endless(id: &str, n_tokens: usize, max_tokens: u32) -> Prompt {
    let mut prompt = prompt(id, n_tokens, max_tokens);
    prompt.stop.ignore_eos = true;
    prompt
}

fn submit(handle: &WorkerHandle, prompt: Prompt) -> Result<(Ticket, Recording), Refusal> {
    let (sink, recorded) = Recorder::stream();
    let source = Source::Fresh;
    let ticket = handle.submit(NewSequence {
        prompt,
        source,
        sink: Box::new(sink),
        steps_wanted: u32::MAX,
        constraint: None,
    })?;
    Ok((ticket, recorded))
}

/// Waits until `is_so` returns true. It is called after each turn of the worker.
async fn until(handle: &WorkerHandle, is_so: impl Fn() -> bool) {
    let mut load = handle.load();
    let waiting = async {
        while !is_so() {
            load.changed().await.expect("the worker lives");
        }
    };
    timeout(LONG, waiting).await.expect("in time");
}

async fn stopped(handle: &WorkerHandle) -> WorkerState {
    timeout(LONG, handle.stopped()).await.expect("in time")
}

#[tokio::test(start_paused = true)]
async fn modelled_costs_are_waited_for() {
    let node = start(costly(), roomy());
    let began = Instant::now();
    let (_ticket, recorded) = submit(&node.handle, endless("a", 20, 5)).expect("let in");
    until(&node.handle, || recorded.has_ended()).await;
    assert_eq!(began.elapsed(), Duration::from_millis(30 + 4 * 10), "a prompt of 20 tokens, then four steps");
    let timing = recorded.get().timings[0];
    assert_eq!((timing.queued, timing.computed), (Duration::ZERO, Duration::from_millis(30)));
    assert_eq!(recorded.tokens(), alone(&endless("a", 20, 5)));
}

/// Computes short prompts, from which the worker learns the time of prompt tokens.
async fn learns_prompt_times(node: &Node) {
    for (nth, n_tokens) in (12..20).enumerate() {
        let (_ticket, recorded) =
            submit(&node.handle, endless(&format!("b{nth}"), n_tokens, 1)).expect("let in");
        until(&node.handle, || recorded.has_ended()).await;
    }
}

/// Returns the longest gap of a stream's tokens while a prompt of 200 tokens is computed beside it, and how long that
/// takes.
async fn longest_gap_beside_a_prompt(mock: Mock, gap_ms_max: f64) -> (Duration, Duration) {
    let node = start(mock, SchedulerSettings { gap_ms_max, ..roomy() });
    let (_stream, tokens) = submit(&node.handle, endless("a", 4, 200)).expect("let in");
    learns_prompt_times(&node).await;
    let began = Instant::now();
    let (_ticket, recorded) = submit(&node.handle, endless("c", 200, 1)).expect("let in");
    let mut longest = Duration::ZERO;
    while !recorded.has_ended() {
        let (n_tokens, before) = (tokens.tokens().len(), Instant::now());
        until(&node.handle, || tokens.tokens().len() > n_tokens).await;
        longest = longest.max(before.elapsed());
    }
    (longest, began.elapsed())
}

#[tokio::test(start_paused = true)]
async fn prompts_make_no_gap_longer_than_the_bound() {
    let (gap, took) = longest_gap_beside_a_prompt(costly(), 0.0).await;
    assert!(gap >= Duration::from_millis(150) && took < Duration::from_millis(240), "{gap:?}, {took:?}");
    let (gap, took) = longest_gap_beside_a_prompt(costly(), 40.0).await;
    assert!(gap <= Duration::from_millis(36), "with some time to spare: {gap:?}");
    assert!(took < Duration::from_millis(400), "{took:?}");
    let (gap, took) = longest_gap_beside_a_prompt(costly(), 32.0).await;
    assert!(gap <= Duration::from_millis(24), "{gap:?}");
    assert!(
        took < Duration::from_millis(500),
        "no KV arrives, so the prompt has half of each step: {took:?}"
    );
}

#[tokio::test(start_paused = true)]
async fn a_step_is_not_a_little_larger_than_whole_groups_of_rows() {
    for rows_together in [9, 10] {
        let (gap, took) = longest_gap_beside_a_prompt(costly_by_groups(rows_together), 50.0).await;
        // Planned for 37.5 ms. With one row more, groups of 9 take 45 ms.
        assert!(gap <= Duration::from_millis(38), "groups of {rows_together}: {gap:?}");
        assert!(took < Duration::from_millis(350), "groups of {rows_together}: {took:?}");
    }
}

/// A prompt has long steps while KV arrives from another node, but none at the end of the transfer: the second token
/// would wait for the step and for one more.
#[tokio::test(start_paused = true)]
async fn kv_does_not_wait_for_long_steps_when_its_end_is_expected() {
    // A step with a group of 24 rows takes 34 ms, so KV that has waited for one has no time for another.
    let cases = (80..160).step_by(8).flat_map(|ms| [(ms, 1, 40_u32), (ms, 24, 50)]);
    for (arrives_ms, rows_together, gap_ms) in cases {
        let settings = SchedulerSettings { gap_ms_max: f64::from(gap_ms), ..roomy() };
        let node = start(costly_by_groups(rows_together), settings);
        let (_stream, _tokens) = submit(&node.handle, endless("a", 4, 60)).expect("let in");
        learns_prompt_times(&node).await;
        let (_prompt, _recorded) = submit(&node.handle, endless("c", 120, 1)).expect("let in");
        let mut expected = node.handle.expect_arrival().expect("gaps are bounded");
        for nth in 1..=8 {
            tokio::time::sleep(Duration::from_millis(arrives_ms) / 8).await;
            expected.progressed(nth, 8, Instant::now());
        }
        drop(expected);
        let (began, (sink, tokens)) = (Instant::now(), Recorder::stream());
        let first = Step { token: TokenId(65), index: 0, logprobs: None, finish: None };
        let source = Source::Arrived { lease: node.pool.reserve(5, holder("d")).expect("room"), first };
        let (prompt, sink) = (endless("d", 20, 3), Box::new(sink));
        let new = NewSequence { prompt, source, sink, steps_wanted: u32::MAX, constraint: None };
        let _ticket = node.handle.submit(new).expect("let in");
        // The mock refuses the blocks, which nothing has filled, at the end of the sequence's first step.
        until(&node.handle, || tokens.has_ended()).await;
        let gap = began.elapsed();
        assert!(
            gap <= Duration::from_millis(gap_ms.into()),
            "{gap:?} after {arrives_ms} ms of transfer, groups of {rows_together}"
        );
    }
}

#[tokio::test(start_paused = true)]
async fn a_deadline_ends_a_sequence_on_an_idle_node() {
    let node = start(mock(8), roomy());
    let landing = node.pool.reserve(8, holder("landing")).expect("room");
    let began = Instant::now();
    let mut late = endless("a", 5, 20);
    late.deadline = deadline_in(Duration::from_millis(1500));
    let (_ticket, recorded) = submit(&node.handle, late).expect("let in");
    until(&node.handle, || recorded.has_ended()).await;
    assert_eq!(recorded.refusal(), Some(RefusalKind::Deadline));
    let late = began.elapsed() - Duration::from_millis(1500);
    assert!(late < Duration::from_millis(5), "{late:?} too late");
    drop(landing);
}

#[tokio::test(start_paused = true)]
async fn room_that_is_given_back_is_used_at_once() {
    let node = start(costly(), roomy());
    let landing = node.pool.reserve(64, holder("landing")).expect("room");
    let (_ticket, recorded) = submit(&node.handle, endless("a", 20, 1)).expect("let in");
    tokio::time::sleep(Duration::from_millis(1005)).await;
    assert!(recorded.tokens().is_empty());
    let began = Instant::now();
    drop(landing);
    until(&node.handle, || recorded.has_ended()).await;
    assert_eq!(began.elapsed(), Duration::from_millis(30));
}

#[tokio::test(start_paused = true)]
async fn a_ticket_that_is_dropped_cancels() {
    let node = start(costly(), roomy());
    let (ticket, recorded) = submit(&node.handle, endless("a", 20, 100)).expect("let in");
    until(&node.handle, || recorded.tokens().len() == 3).await;
    drop(ticket);
    until(&node.handle, || recorded.has_ended() && node.pool.counts().leased == 0).await;
    assert_eq!(recorded.refusal(), Some(RefusalKind::Cancelled));
    assert_eq!(node.pool.integrity(), Ok(()));
}

#[tokio::test(start_paused = true)]
async fn a_burst_is_refused_beyond_the_queue() {
    let settings = SchedulerSettings { waiting_max: 5, ..roomy() };
    let node = start(costly(), settings);
    let let_in = |n: usize| (0..n).map(|nth| submit(&node.handle, endless(&format!("p{nth}"), 9, 1)));
    let (kept, refused): (Vec<_>, Vec<_>) = let_in(9).partition(Result::is_ok);
    assert_eq!((kept.len(), refused.len()), (5, 4), "the worker has not turned yet");
    for refusal in refused {
        let refusal = refusal.expect_err("it was refused");
        assert_eq!((refusal.kind, refusal.reason.as_str()), (RefusalKind::Queue, "5 prompts wait already"));
    }
}

fn room(n_blocks: usize) -> RoomRequest {
    RoomRequest {
        holder: holder("landing"),
        priority: types::prompt::Priority(0),
        deadline: deadline_in(LONG),
        hashes: Vec::new(),
        n_blocks,
        landings: chassis::counted::Counter::default(),
        landings_max: 256,
    }
}

#[tokio::test(start_paused = true)]
async fn room_is_granted_when_its_turn_comes() {
    let node = start(costly(), roomy());
    let all = timeout(LONG, node.handle.room(room(64))).await.expect("in time").expect("the pool is empty");
    let waiting = async { timeout(LONG, node.handle.room(room(64))).await.expect("in time") };
    let freed = async {
        until(&node.handle, || node.handle.load().borrow().node.waiting == 1).await;
        drop(all);
    };
    let (room, ()) = tokio::join!(waiting, freed);
    assert_eq!(room.expect("it came back").lease.n_blocks(), 64);
    until(&node.handle, || node.pool.counts().leased == 0).await;
}

#[tokio::test(start_paused = true)]
async fn a_newcomer_does_not_overtake_the_line() {
    let node = start(costly(), roomy());
    let half = node.handle.room(room(32)).await.expect("the pool is empty");
    let mut large = Box::pin(node.handle.room(room(64)));
    assert!(timeout(Duration::from_millis(50), &mut large).await.is_err(), "half of it is taken");
    let mut small = Box::pin(node.handle.room(room(1)));
    assert!(timeout(Duration::from_millis(50), &mut small).await.is_err(), "the large one is first");
    drop(large);
    timeout(LONG, small).await.expect("in time").expect("the line is empty before it");
    drop(half);
}

#[tokio::test(start_paused = true)]
async fn a_line_is_bounded_and_ends_with_the_node() {
    let node = start(costly(), SchedulerSettings { waiting_max: 1, ..roomy() });
    let _all = node.handle.room(room(64)).await.expect("the pool is empty");
    let waiting = async { node.handle.room(room(1)).await.expect_err("the node drains") };
    let others = async {
        until(&node.handle, || node.handle.load().borrow().node.waiting == 1).await;
        let refused = node.handle.room(room(1)).await.expect_err("one waits already");
        assert_eq!(
            (refused.kind, refused.reason.as_str()),
            (RefusalKind::Full, "1 prompts wait for KV room already")
        );
        node.handle.drain();
    };
    let (refused, ()) = tokio::join!(waiting, others);
    assert_eq!(refused.kind, RefusalKind::Draining);
    assert_eq!(stopped(&node.handle).await, WorkerState::Stopped);
    let refused = node.handle.room(room(1)).await.expect_err("the node has stopped");
    assert_eq!(refused.kind, RefusalKind::Draining);
}

#[tokio::test(start_paused = true)]
async fn predicted_work_beyond_the_bound_is_refused() {
    let settings = SchedulerSettings { queue_ms_max: 250.0, ..roomy() };
    let node = start(costly(), settings);
    let (_first, recorded) =
        submit(&node.handle, endless("a", 100, 1)).expect("let in: nothing is known yet");
    until(&node.handle, || recorded.has_ended()).await;
    let mut kept = Vec::new();
    let refusal = loop {
        match submit(&node.handle, endless("b", 100, 1)) {
            Ok(let_in) => kept.push(let_in),
            Err(refusal) => break refusal,
        }
        assert!(kept.len() < 100, "nothing is refused");
    };
    assert_eq!((refusal.kind, kept.len()), (RefusalKind::Queue, 3), "{refusal}");
    let source = Source::Arrived {
        lease: node.pool.reserve(25, holder("r")).expect("room"),
        first: Step { token: TokenId(65), index: 0, logprobs: None, finish: None },
    };
    let (sink, _) = Recorder::stream();
    let arrived = NewSequence {
        prompt: endless("c", 100, 1),
        source,
        sink: Box::new(sink),
        steps_wanted: u32::MAX,
        constraint: None,
    };
    assert!(node.handle.submit(arrived).is_ok(), "its KV is here: to refuse it would waste that");
}

#[tokio::test(start_paused = true)]
async fn what_can_never_fit_is_refused_at_the_door() {
    let node = start(mock(8), roomy());
    let refusal = submit(&node.handle, endless("a", 32, 100)).expect_err("8 blocks of 4 tokens");
    assert_eq!(refusal.kind, RefusalKind::TooLong);
    let mut late = endless("a", 5, 5);
    late.deadline = deadline_in(Duration::ZERO);
    assert_eq!(submit(&node.handle, late).expect_err("late").kind, RefusalKind::Deadline);
}

#[tokio::test(start_paused = true)]
async fn a_drained_worker_finishes_what_it_has() {
    let node = start(costly(), roomy());
    let (_ticket, recorded) = submit(&node.handle, endless("a", 20, 10)).expect("let in");
    node.handle.drain();
    assert_eq!(*node.handle.state().borrow(), WorkerState::Draining);
    assert_eq!(submit(&node.handle, endless("b", 5, 5)).expect_err("draining").kind, RefusalKind::Draining);
    assert_eq!(stopped(&node.handle).await, WorkerState::Stopped);
    assert_eq!(recorded.tokens().len(), 10);
    timeout(LONG, node.task).await.expect("in time").expect("the loop ended by itself");
}

#[tokio::test(start_paused = true)]
async fn without_handles_a_worker_stops() {
    let Node { handle, pool, task } = start(costly(), roomy());
    let (_ticket, recorded) = submit(&handle, endless("a", 20, 10)).expect("let in");
    drop(handle);
    timeout(LONG, task).await.expect("in time").expect("the loop ended by itself");
    assert_eq!((recorded.tokens().len(), pool.counts().leased), (10, 0));
}

#[tokio::test(start_paused = true)]
async fn a_sink_that_has_room_again_is_served() {
    let node = start(costly(), roomy());
    let (_ticket, recorded) = submit(&node.handle, endless("a", 20, 10)).expect("let in");
    recorded.get().is_full = true;
    tokio::time::sleep(Duration::from_secs(1)).await;
    assert!(recorded.tokens().is_empty());
    recorded.get().is_full = false;
    node.handle.nudge();
    until(&node.handle, || recorded.has_ended()).await;
    assert!(recorded.is_finished());
}

#[tokio::test(start_paused = true)]
async fn a_lost_device_is_told_to_everyone() {
    let lost = Flaky::new(costly(), Failures { lost_from: Some(2), ..Failures::default() });
    let node = start(lost, roomy());
    let (_ticket, recorded) = submit(&node.handle, endless("a", 20, 10)).expect("let in");
    let state = stopped(&node.handle).await;
    assert_eq!(state, WorkerState::Dead("device lost: at step 2, as told".into()));
    assert_eq!(recorded.refusal(), Some(RefusalKind::Failed));
    assert_eq!(submit(&node.handle, endless("b", 5, 5)).expect_err("dead").kind, RefusalKind::Failed);
    timeout(LONG, node.task).await.expect("in time").expect("the loop ended by itself");
    assert_eq!(node.pool.counts().leased, 0);
}

#[tokio::test(start_paused = true)]
async fn a_panic_is_told_to_everyone() {
    let panicking = Flaky::new(costly(), Failures { panic_at: Some(1), ..Failures::default() });
    let node = start(panicking, roomy());
    let (_one, running) = submit(&node.handle, endless("a", 20, 10)).expect("let in");
    assert_eq!(stopped(&node.handle).await, WorkerState::Dead("the worker panicked".into()));
    assert!(timeout(LONG, node.task).await.expect("in time").is_err(), "the task panicked");
    assert_eq!(running.refusal(), Some(RefusalKind::Failed));
    assert_eq!(node.pool.counts().leased, 0);
}

#[tokio::test(start_paused = true)]
async fn submissions_that_were_not_taken_are_ended_too() {
    let (handle, driver, _pool) = prepare(costly(), roomy());
    let (_ticket, recorded) = submit(&handle, endless("a", 20, 10)).expect("let in");
    let task = spawn_guarded(&Gate::new("test"), "worker", driver.drive_simulated());
    drop(task);
    assert_eq!(stopped(&handle).await, WorkerState::Dead("the worker was aborted".into()));
    assert_eq!(recorded.refusal(), Some(RefusalKind::Failed));
}

#[tokio::test(start_paused = true)]
async fn a_refused_sink_hears_nothing() {
    let node = start(mock(8), roomy());
    let (sink, recorded) = Recorder::stream();
    let first = Step { token: TokenId(65), index: 0, logprobs: None, finish: None };
    let source = Source::Arrived { lease: blocks(1), first };
    let new = NewSequence {
        prompt: endless("a", 17, 2),
        source,
        sink: Box::new(sink),
        steps_wanted: 1,
        constraint: None,
    };
    assert_eq!(node.handle.submit(new).expect_err("one block for 17 tokens").kind, RefusalKind::Failed);
    assert!(!recorded.has_ended());
}

/// Submits a short prompt in the middle of a step, and returns the time until its first token.
async fn joins_after(settings: SchedulerSettings) -> Duration {
    let node = start(costly(), settings);
    let (_running, recorded) = submit(&node.handle, endless("a", 20, 60)).expect("let in");
    until(&node.handle, || recorded.tokens().len() == 20).await;
    tokio::time::sleep(Duration::from_millis(3)).await;
    let came = Instant::now();
    let (_joining, joined) = submit(&node.handle, endless("b", 1, 5)).expect("let in");
    until(&node.handle, || !joined.tokens().is_empty()).await;
    let waited = came.elapsed();
    until(&node.handle, || recorded.has_ended() && joined.has_ended()).await;
    assert_eq!(recorded.tokens(), alone(&endless("a", 20, 60)));
    assert_eq!(joined.tokens(), alone(&endless("b", 1, 5)));
    waited
}

#[tokio::test(start_paused = true)]
async fn who_comes_in_the_middle_of_a_step_is_part_of_the_next() {
    let step = Duration::from_millis(10);
    let late = joins_after(roomy()).await;
    let early = joins_after(SchedulerSettings { launch_late: false, ..roomy() }).await;
    assert!(late > step && late <= step * 2, "{late:?}: the rest of one step, and one step");
    assert_eq!(early, late + step, "a step stood behind the one that ran");
}

#[tokio::test(start_paused = true)]
async fn launching_late_costs_the_device_nothing() {
    let node = start(costly(), roomy());
    let began = Instant::now();
    let (_ticket, recorded) = submit(&node.handle, endless("a", 20, 200)).expect("let in");
    until(&node.handle, || recorded.has_ended()).await;
    assert_eq!(began.elapsed(), Duration::from_millis(30 + 199 * 10), "the device was never idle");
}

/// Runs the worker on a thread with a real clock, as in production. All other tests run it as a task.
#[tokio::test]
async fn a_thread_of_its_own() {
    let mut settings = MockSettings { ..small() };
    settings.cost.step_ms = 1.0;
    let backend = Mock::new("mock", settings, 64, Pace::Sleeping).expect("memory for a few blocks");
    let (handle, driver, pool) = prepare(backend, roomy());
    let thread = driver.on_thread().expect("a thread");
    let submitted: Vec<_> =
        (0..8).map(|nth| submit(&handle, endless(&format!("p{nth}"), 20, 20)).expect("let in")).collect();
    handle.drain();
    let state = timeout(Duration::from_secs(60), handle.stopped()).await.expect("in time");
    assert_eq!(state, WorkerState::Stopped);
    let backend = thread.join().expect("it did not panic");
    assert_eq!(backend.memory().n_blocks(), 64, "and gives its backend back");
    for (nth, (_, recorded)) in submitted.iter().enumerate() {
        assert_eq!(recorded.tokens(), alone(&endless(&format!("p{nth}"), 20, 20)));
    }
    assert_eq!(pool.counts().leased, 0);
    // A late collect makes the next step look short, so the exact time is not checked.
    assert!(handle.load().borrow().node.step_ms > 0.0);
}
