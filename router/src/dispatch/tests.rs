//! Tests of dispatch with fake nodes that refuse, break, hang and send wrong steps.

use std::sync::Arc;
use std::time::Duration;

use chassis::metrics::Metrics;
use chassis::net::MemoryNet;
use chassis::{Gate, Task, World, spawn_guarded};
use futures::StreamExt as _;
use registry::{Announcement, MemoryRegistry, Registry as _};
use types::prompt::Priority;
use types::{Prompt, RefusalKind, Role, Sampling, StopRules, TenantId, TokenId};

use super::*;
use crate::admission::AdmissionParts;
use crate::cluster::NodeState;
use crate::fake_node::{FakeNode, FakeResponse, answer_to};
use crate::policy::{self, Arm, ClusterView, ComputingNodes};
use crate::text::RouterModels;

/// A router with fake nodes, on a network in memory with a paused clock.
struct TestCluster {
    dispatch: Dispatch,
    world: World,
    metrics: Metrics,
    _running: Vec<(Task<()>, Announcement)>,
    _following: Task<()>,
    _lines: Task<()>,
}

async fn test_cluster(order: Order, fake_nodes: &[&FakeNode]) -> TestCluster {
    test_cluster_with(policy::by_name("round-robin").expect("in the table"), order, fake_nodes).await
}

async fn test_cluster_with(
    policy: Box<dyn RoutingPolicy>,
    order: Order,
    fake_nodes: &[&FakeNode],
) -> TestCluster {
    let world = World::seeded(1).with_net(Arc::new(MemoryNet::new()));
    let gate = Gate::new("test");
    let registry = MemoryRegistry::new(Duration::from_secs(10), world.clone(), gate.clone());
    let cluster = Cluster::new(world.clone(), gate.clone(), RouterModels::default(), None);
    let following = cluster.follow(&registry, None).await.expect("the registry is here");
    let mut running = Vec::new();
    for fake_node in fake_nodes {
        let task = fake_node.start(&world, &gate).await;
        running.push((task, registry.announce(fake_node.info.clone()).await.expect("announced")));
    }
    let is_settled = |(_, state): &(_, NodeState)| *state == NodeState::Ready || state.reason().is_some();
    while cluster.everyone().iter().filter(|node| is_settled(node)).count() < fake_nodes.len() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let metrics = Metrics::new("router");
    let router_metrics = RouterMetrics::new(&metrics);
    let admission = Admission::new(AdmissionParts {
        world: world.clone(),
        cluster: cluster.clone(),
        order,
        computing: ComputingNodes::Prefill,
        requests_max: 8,
        wait_max: Duration::from_secs(5),
        metrics: router_metrics.clone(),
    });
    let dispatch = Dispatch::new(DispatchParts {
        world: world.clone(),
        cluster,
        policy,
        admission,
        order,
        explain_share: 0.0,
        budget: Budget {
            attempts_max: 3,
            wait_max: Duration::from_secs(5),
            nodes_wait_new: Duration::from_secs(2),
            nodes_wait_begun: Duration::from_secs(30),
        },
        metrics: router_metrics,
        drain: Drain::default(),
    });
    let lines = spawn_guarded(&gate, "lines", dispatch.serve_lines());
    TestCluster { dispatch, world, metrics, _running: running, _following: following, _lines: lines }
}

impl TestCluster {
    fn prompt(&self, max_tokens: u32) -> Prompt {
        Prompt {
            id: self.world.request_id(),
            tenant: TenantId::default(),
            cache_salt: types::CacheSalt::default(),
            model: types::RequestedModel::named("mock"),
            tokens: (0..20).map(TokenId).collect(),
            n_generated: 0,
            sampling: Sampling::default(),
            stop: StopRules { max_tokens, ..StopRules::default() },
            priority: Priority(0),
            deadline: self.world.deadline_in(Duration::from_secs(20)),
        }
    }

    /// Returns the whole answer, or the error. Fails the test if the steps have a gap.
    async fn ask(&self, max_tokens: u32) -> Result<Vec<TokenId>, ServeError> {
        self.answer_of(self.prompt(max_tokens)).await
    }

    async fn answer_of(&self, prompt: Prompt) -> Result<Vec<TokenId>, ServeError> {
        let generation = self.dispatch.generate(prompt, Arrival::now()).await?;
        let steps: Vec<_> = generation.steps.collect().await;
        let steps = steps.into_iter().collect::<Result<Vec<Step>, ServeError>>()?;
        assert!(steps.iter().enumerate().all(|(idx, step)| step.index as usize == idx), "{steps:?}");
        assert!(steps.last().is_some_and(|step| step.finish.is_some()));
        Ok(steps.into_iter().map(|step| step.token).collect())
    }

    /// Returns the number of requests with this outcome.
    fn n_ended(&self, outcome: &str) -> u64 {
        let line = format!("baton_router_requests_total{{model=\"mock\",outcome=\"{outcome}\"}} ");
        let page = self.metrics.page();
        page.lines()
            .find_map(|text| text.strip_prefix(&line))
            .map_or(0, |count| count.parse().expect("a count"))
    }

    async fn serves(&self, max_tokens: u32) {
        assert_eq!(self.ask(max_tokens).await, Ok(answer_to(&self.prompt(max_tokens))));
        assert_eq!(self.dispatch.parts().admission.n_inside(), 0, "the permit is back");
    }
}

fn prefill(id: &str, script: &[FakeResponse]) -> FakeNode {
    FakeNode::new(id, Role::Prefill, script)
}

fn decode(id: &str, script: &[FakeResponse]) -> FakeNode {
    FakeNode::new(id, Role::Decode, script)
}

/// A policy whose decisions take long. It notes how many prompts the nodes that it sees are assigned.
#[derive(Debug)]
struct SlowPolicy(Arc<Mutex<Vec<u32>>>);

impl RoutingPolicy for SlowPolicy {
    fn name(&self) -> &'static str {
        "slow"
    }

    fn computing(&self) -> ComputingNodes {
        ComputingNodes::Prefill
    }

    fn route(&self, ask: &Ask<'_>, view: &ClusterView, draw: u64) -> Result<Decision, NoRoute> {
        self.0.lock().expect("no panic").push(view.nodes.iter().map(|node| node.assigned).sum());
        std::thread::sleep(Duration::from_millis(20));
        policy::by_name("round-robin").expect("in the table").route(ask, view, draw)
    }
}

/// Each decision includes the assignments of earlier decisions, also if prompts come together.
#[tokio::test(flavor = "multi_thread", worker_threads = 3)]
async fn prompts_that_come_together_do_not_take_each_other_s_node() {
    let seen = Arc::default();
    let (p, d) = (prefill("p", &[FakeResponse::Hang]), decode("d", &[FakeResponse::Hang]));
    let policy = Box::new(SlowPolicy(Arc::clone(&seen)));
    let cluster = test_cluster_with(policy, Order::DecodeFirst, &[&p, &d]).await;
    let gate = Gate::new("clients");
    let asked = [(); 3].map(|()| {
        let (dispatch, prompt) = (cluster.dispatch.clone(), cluster.prompt(3));
        spawn_guarded(&gate, "client", async move { dispatch.generate(prompt, Arrival::now()).await })
    });
    while seen.lock().expect("no panic").len() < asked.len() {
        tokio::time::sleep(Duration::from_millis(5)).await;
    }
    drop(asked);
    assert_eq!(*seen.lock().expect("no panic"), [0, 2, 4]);
}

/// A node that drains or changes its role has not failed: the request keeps its three attempts.
#[tokio::test(start_paused = true)]
async fn a_node_that_leaves_costs_no_attempt() {
    let leaving =
        ["p0", "p1", "p2", "p3"].map(|id| prefill(id, &[FakeResponse::Refuse(RefusalKind::Draining)]));
    let d = decode("d", &[FakeResponse::Serve]);
    let [p0, p1, p2, p3] = &leaving;
    test_cluster(Order::DecodeFirst, &[p0, p1, p2, p3, &d]).await.serves(6).await;
    let n_asked: usize = leaving.iter().map(|node| node.received().len()).sum();
    assert_eq!(n_asked, 4, "more nodes than attempts, then the decode node computes the prompt");
}

#[tokio::test(start_paused = true)]
async fn decode_is_asked_first_and_the_first_token_comes_from_prefill() {
    let (p, d) = (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Serve]));
    let test_cluster = test_cluster(Order::DecodeFirst, &[&p, &d]).await;
    test_cluster.serves(6).await;
    let record = test_cluster.dispatch.requests().last().remove(0);
    let decision = record.explanation().decision.expect("a route was chosen");
    assert_eq!((decision.arm, decision.route.decode.id.as_str()), (Arm::Remote, "d"));
    let costs = test_cluster.dispatch.parts().cluster.learner().costs();
    assert_eq!(costs.calls(Arm::Remote).n_requests, 1, "the request's times are learned from");
    assert_eq!(p.received(), ["prefill 20 tokens, Serve"]);
    assert_eq!(d.received(), ["decode 20 tokens, Serve"]);
}

#[tokio::test(start_paused = true)]
async fn prefill_first_delivers_once_the_kv_is_there() {
    let (p, d) = (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Serve]));
    test_cluster(Order::PrefillFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(p.received(), ["prefill 20 tokens, Serve", "deliver"]);
}

#[tokio::test(start_paused = true)]
async fn a_decode_node_may_compute_by_itself() {
    let (p, d) = (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Local]));
    test_cluster(Order::DecodeFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(p.received(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn without_a_prefill_node_decode_is_told_to() {
    for order in [Order::DecodeFirst, Order::PrefillFirst] {
        let d = decode("d", &[FakeResponse::Serve]);
        let cluster = test_cluster(order, &[&d]).await;
        assert_eq!(cluster.dispatch.ready(), Ok(()), "{order:?}");
        cluster.serves(6).await;
    }
}

#[tokio::test(start_paused = true)]
async fn a_node_that_breaks_is_left_out_of_the_next_route() {
    let fake_nodes = [
        prefill("p0", &[FakeResponse::Break]),
        prefill("p1", &[FakeResponse::Serve]),
        decode("d0", &[FakeResponse::Break]),
        decode("d1", &[FakeResponse::Serve]),
    ];
    for order in [Order::DecodeFirst, Order::PrefillFirst] {
        test_cluster(order, &fake_nodes.each_ref()).await.serves(6).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_prefill_node_is_not_needed() {
    let (p, d) = (prefill("p", &[FakeResponse::Break]), decode("d", &[FakeResponse::Serve]));
    test_cluster(Order::DecodeFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(p.received().len(), 1, "left out, and decode computed by itself");
}

#[tokio::test(start_paused = true)]
async fn tries_are_bounded() {
    let (p, d) = (prefill("p", &[FakeResponse::Break]), decode("d", &[FakeResponse::Break]));
    let failed =
        test_cluster(Order::DecodeFirst, &[&p, &d]).await.ask(6).await.expect_err("all break every time");
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::Failed, .. }), "{failed:?}");
    assert_eq!(p.received().len() + d.received().len(), 3, "{:?} {:?}", p.received(), d.received());
}

/// Half of the prefill nodes fail every prompt. All requests are answered with few attempts: the breakers of the
/// failing nodes open.
#[tokio::test(start_paused = true)]
async fn half_of_the_prefill_nodes_fail_and_attempts_stay_few() {
    for order in [Order::DecodeFirst, Order::PrefillFirst] {
        let bad = ["p0", "p1"].map(|id| prefill(id, &[FakeResponse::Break]));
        let good = ["p2", "p3"].map(|id| prefill(id, &[FakeResponse::Serve]));
        let d = decode("d", &[FakeResponse::Serve]);
        let test_cluster = test_cluster(order, &[&bad[0], &good[0], &bad[1], &good[1], &d]).await;
        for _ in 0..40 {
            test_cluster.serves(6).await;
        }
        let computed = |fake_node: &FakeNode| {
            fake_node.prompts().iter().filter(|word| word.starts_with("prefill")).count()
        };
        let failed = bad.iter().map(computed).sum::<usize>();
        assert!(
            (2 * 3..=2 * 6).contains(&failed),
            "{order:?}: {failed} attempts failed: three open a breaker, and then one request at a time tries the node"
        );
        let counts = good.iter().map(computed).collect::<Vec<_>>();
        assert!(counts.iter().all(|count| *count >= 15), "{order:?}: both get their turns: {counts:?}");
        assert_eq!(good.iter().map(computed).sum::<usize>(), 40, "{order:?}: one prompt is computed once");
    }
}

#[tokio::test(start_paused = true)]
async fn a_failed_wire_costs_an_attempt() {
    let (p, d) =
        (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Refuse(RefusalKind::Wire)]));
    let failed = test_cluster(Order::DecodeFirst, &[&p, &d]).await.ask(6).await.expect_err("no wire works");
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::Wire, .. }), "{failed:?}");
    assert_eq!(d.received().len(), 3, "{:?}", d.received());
}

#[tokio::test(start_paused = true)]
async fn a_full_node_is_waited_for() {
    let full = FakeResponse::Refuse(RefusalKind::Full);
    let (p, d) = (
        prefill("p", &[FakeResponse::Serve]),
        decode("d", &[full, full, full, full, full, full, FakeResponse::Serve]),
    );
    test_cluster(Order::DecodeFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(d.received().len(), 7, "being full costs no attempt");
}

#[tokio::test(start_paused = true)]
async fn but_not_for_ever() {
    let (p, d) =
        (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Refuse(RefusalKind::Full)]));
    let test_cluster = test_cluster(Order::DecodeFirst, &[&p, &d]).await;
    let began = test_cluster.world.now();
    let failed = test_cluster.ask(6).await.expect_err("it stays full");
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::Full, .. }), "{failed:?}");
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn what_fails_anywhere_is_not_tried_elsewhere() {
    let fake_nodes = [
        prefill("p", &[FakeResponse::Serve]),
        decode("d0", &[FakeResponse::Refuse(RefusalKind::TooLong)]),
        decode("d1", &[FakeResponse::Refuse(RefusalKind::TooLong)]),
    ];
    let failed =
        test_cluster(Order::DecodeFirst, &fake_nodes.each_ref()).await.ask(6).await.expect_err("too long");
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::TooLong, .. }), "{failed:?}");
    assert_eq!(fake_nodes[1].received().len() + fake_nodes[2].received().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_breaks_goes_on_elsewhere() {
    for n in 0..5 {
        let fake_nodes = [
            prefill("p", &[FakeResponse::Serve]),
            decode("d0", &[FakeResponse::BreakAfter(n)]),
            decode("d1", &[FakeResponse::BreakAfter(n), FakeResponse::Serve]),
        ];
        for order in [Order::DecodeFirst, Order::PrefillFirst] {
            test_cluster(order, &fake_nodes.each_ref()).await.serves(8).await;
        }
    }
}

/// Found by simulation: the decode node once got the prompt without the generated tokens, and continued at a
/// wrong index.
#[tokio::test(start_paused = true)]
async fn held_kv_goes_with_the_prompt_that_it_is_of() {
    let (p, d) = (
        prefill("p", &[FakeResponse::Serve]),
        decode("d", &[FakeResponse::BreakAfter(0), FakeResponse::Serve]),
    );
    test_cluster(Order::PrefillFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(d.received(), ["decode 20 tokens, BreakAfter(0)", "decode 21 tokens, Serve"]);
}

/// Found by simulation: the connection broke before the decode node knew of the transfer, and the node waited
/// until its deadline.
#[tokio::test(start_paused = true)]
async fn kv_that_was_lost_on_the_way_is_computed_again() {
    for (act, within_ms) in [(FakeResponse::Lose, 100), (FakeResponse::Vanish, 1_100)] {
        for order in [Order::DecodeFirst, Order::PrefillFirst] {
            let (p, d) = (
                prefill("p", &[act, FakeResponse::Serve]),
                decode("d", &[FakeResponse::Starve, FakeResponse::Serve]),
            );
            let test_cluster = test_cluster(order, &[&p, &d]).await;
            let began = test_cluster.world.now();
            test_cluster.serves(6).await;
            let took = began.elapsed();
            assert!(took < Duration::from_millis(within_ms), "{act:?}, {order:?}: {took:?}");
        }
    }
}

/// Found by simulation: without a working connector, a whole prompt was computed for every token.
#[tokio::test(start_paused = true)]
async fn a_decode_node_whose_kv_is_lost_again_computes_by_itself() {
    for order in [Order::DecodeFirst, Order::PrefillFirst] {
        let (p, d) = (
            prefill("p", &[FakeResponse::Lose]),
            decode("d", &[FakeResponse::Starve, FakeResponse::Starve, FakeResponse::Serve]),
        );
        test_cluster(order, &[&p, &d]).await.serves(6).await;
        let n_computed = p.received().iter().filter(|word| word.starts_with("prefill")).count();
        assert_eq!((n_computed, d.received().len()), (2, 3), "{order:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_skipped_step_is_noticed_and_mended() {
    let (p, d) =
        (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Skip, FakeResponse::Serve]));
    test_cluster(Order::DecodeFirst, &[&p, &d]).await.serves(6).await;
}

#[tokio::test(start_paused = true)]
async fn every_wait_ends_with_the_deadline() {
    for (p, d) in [(FakeResponse::Hang, FakeResponse::Serve), (FakeResponse::Serve, FakeResponse::Hang)] {
        for order in [Order::DecodeFirst, Order::PrefillFirst] {
            let (p, d) = (prefill("p", &[p]), decode("d", &[d]));
            let test_cluster = test_cluster(order, &[&p, &d]).await;
            let deadline = test_cluster.world.deadline_in(Duration::from_secs(4));
            let began = test_cluster.world.now();
            let failed = test_cluster
                .answer_of(Prompt { deadline, ..test_cluster.prompt(6) })
                .await
                .expect_err("one hangs");
            assert!(matches!(failed, ServeError::DeadlinePassed { .. }), "{failed:?}");
            assert!(began.elapsed() <= Duration::from_secs(5), "{:?}", began.elapsed());
            assert_eq!(test_cluster.dispatch.parts().admission.n_inside(), 0);
        }
    }
}

/// The prompt waits for room on the node. The wait counts as one attempt, and the router's `wait_max` limits
/// it.
#[tokio::test(start_paused = true)]
async fn a_wait_for_room_is_one_attempt_and_has_a_bound() {
    let (p, d) = (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Hang]));
    let test_cluster = test_cluster(Order::DecodeFirst, &[&p, &d]).await;
    let began = test_cluster.world.now();
    let failed = test_cluster.ask(6).await.expect_err("no room comes");
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::Full, .. }), "{failed:?}");
    assert_eq!(began.elapsed().as_secs(), 5, "the stage's wait");
    assert_eq!(d.prompts().len(), 1, "{:?}", d.prompts());
}

#[tokio::test(start_paused = true)]
async fn admission_is_bounded() {
    let (p, d) = (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Serve]));
    let test_cluster = test_cluster(Order::DecodeFirst, &[&p, &d]).await;
    let mut inside = Vec::new();
    for _ in 0..8 {
        inside.push(
            test_cluster
                .dispatch
                .generate(test_cluster.prompt(6), Arrival::now())
                .await
                .expect("there is room"),
        );
    }
    let refused = test_cluster
        .dispatch
        .generate(test_cluster.prompt(6), Arrival::now())
        .await
        .expect_err("eight are inside");
    assert!(matches!(refused, ServeError::Overloaded { .. }), "{refused:?}");
    inside.clear();
    test_cluster.serves(6).await;
    let ended = ["finished", "cancelled", "overloaded"].map(|outcome| test_cluster.n_ended(outcome));
    assert_eq!(ended, [1, 8, 1]);
}

#[tokio::test(start_paused = true)]
async fn no_node_is_said_at_once() {
    let test_cluster = test_cluster(Order::DecodeFirst, &[]).await;
    let began = test_cluster.world.now();
    let failed = test_cluster.ask(6).await.expect_err("no node is there");
    assert!(matches!(failed, ServeError::NoNodes { .. }), "{failed:?}");
    assert_eq!(began.elapsed(), Duration::ZERO);
}

mod pool;

/// Returns a fake node with other weights under the same model name.
fn of_other_weights(mut fake_node: FakeNode) -> FakeNode {
    let parts = [("tokenizer", "bytes"), ("weights", "other")];
    fake_node.info.model.fingerprint =
        types::Fingerprint::new(parts.map(|(name, value)| (name.to_owned(), value.to_owned())));
    fake_node
}

/// The node that began an answer dies, and the only other node has other weights. The answer ends with an
/// error and contains no token of the other weights.
#[tokio::test(start_paused = true)]
async fn an_answer_is_continued_by_its_own_weights_only() {
    let mut first = [
        decode("d0", &[FakeResponse::BreakAfter(2), FakeResponse::Break]),
        of_other_weights(decode("e0", &[FakeResponse::Serve])),
    ];
    first[0].info.epoch.0 -= 1;
    let failed =
        test_cluster(Order::DecodeFirst, &first.each_ref()).await.ask(6).await.expect_err("it broke");
    assert!(matches!(failed, ServeError::Refused { .. } | ServeError::NoNodes { .. }), "{failed:?}");
    assert_eq!(first[1].prompts(), Vec::<String>::new());
    let both = [
        decode("d0", &[FakeResponse::BreakAfter(2)]),
        decode("d1", &[FakeResponse::BreakAfter(2), FakeResponse::Serve]),
        of_other_weights(decode("e0", &[FakeResponse::Serve])),
    ];
    test_cluster(Order::DecodeFirst, &both.each_ref()).await.serves(6).await;
    assert_eq!(both[2].prompts(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_prompt_goes_to_nodes_of_its_model_only() {
    let mut another = decode("e", &[FakeResponse::Serve]);
    another.info.model.name = "another".to_owned();
    let fake_nodes = [prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Serve]), another];
    let test_cluster = test_cluster(Order::DecodeFirst, &fake_nodes.each_ref()).await;
    for _ in 0..4 {
        test_cluster.serves(6).await;
    }
    assert_eq!(fake_nodes[2].prompts(), Vec::<String>::new());
    let unknown = Prompt { model: RequestedModel::named("none"), ..test_cluster.prompt(6) };
    let failed = test_cluster.dispatch.generate(unknown, Arrival::now()).await.expect_err("no such model");
    assert!(failed.to_string().contains("no decode node of `none` is ready"), "{failed}");
}

#[tokio::test(start_paused = true)]
async fn a_node_whose_work_fails_gets_no_work_until_one_request_succeeds_there() {
    use FakeResponse::{Break, Serve};
    let p = prefill("p", &[Serve]);
    let bad = decode("d-bad", &[Break, Break, Break, Break, Serve]);
    let good = decode("d-good", &[Serve]);
    let test_cluster = test_cluster(Order::DecodeFirst, &[&p, &bad, &good]).await;
    for _ in 0..20 {
        test_cluster.serves(2).await;
    }
    assert_eq!(bad.prompts().len(), 3, "three failures open the breaker");
    for (wait, calls) in [(1_100, 4), (2_100, 5)] {
        tokio::time::sleep(Duration::from_millis(wait)).await;
        while bad.prompts().len() < calls {
            test_cluster.serves(2).await;
        }
        test_cluster.serves(2).await;
        let open = test_cluster.metrics.page().contains("baton_router_breakers_open 1");
        assert_eq!(open, calls == 4, "the fourth call fails, the fifth is served");
    }
    let before = bad.prompts().len();
    for _ in 0..20 {
        test_cluster.serves(2).await;
    }
    assert!(bad.prompts().len() > before, "the node gets work again");
}

/// Landings end at their prompts' deadlines, which clients choose.
#[tokio::test(start_paused = true)]
async fn a_failure_at_the_deadline_says_nothing_about_the_nodes() {
    for (deadline, n_failing) in [(Duration::from_millis(5), 0), (Duration::from_secs(4), 1)] {
        let (p, d) = (
            prefill("p", &[FakeResponse::Serve]),
            decode("d", &[FakeResponse::Refuse(RefusalKind::Landing)]),
        );
        let test_cluster = test_cluster(Order::DecodeFirst, &[&p, &d]).await;
        let deadline = test_cluster.world.deadline_in(deadline);
        let prompt = Prompt { deadline, ..test_cluster.prompt(6) };
        test_cluster.answer_of(prompt).await.expect_err("the landing is lost");
        let breakers = test_cluster.dispatch.breakers();
        assert_eq!(breakers.paths().len(), n_failing, "{:?}", breakers.paths());
        assert_eq!(breakers.of(&d.info).is_some(), n_failing > 0);
    }
}
