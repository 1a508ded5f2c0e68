//! Prompts go their way through puppets that refuse, break, hang and lie.

use std::sync::Arc;
use std::time::Duration;

use chassis::metrics::Metrics;
use chassis::net::MemoryNet;
use chassis::{Gate, Task, World};
use futures::StreamExt as _;
use registry::{Announcement, MemoryRegistry, Registry as _};
use types::prompt::Priority;
use types::{Prompt, RefusalKind, Role, Sampling, StopRules, TenantId, TokenId};

use super::*;
use crate::cluster::NodeState;
use crate::policy;
use crate::puppet::{Act, Puppet, answer_to};
use crate::text::RouterModels;

/// A router over puppets, on a network in memory and a clock that is paused.
struct Stage {
    dispatch: Dispatch,
    world: World,
    metrics: Metrics,
    _running: Vec<(Task<()>, Announcement)>,
    _following: Task<()>,
}

async fn stage(order: Order, puppets: &[&Puppet]) -> Stage {
    let world = World::seeded(1).with_net(Arc::new(MemoryNet::new()));
    let gate = Gate::new("test");
    let registry = MemoryRegistry::new(Duration::from_secs(10), world.clone(), gate.clone());
    let cluster = Cluster::new(world.clone(), gate.clone(), RouterModels::default(), None);
    let following = cluster.follow(&registry).await.expect("the registry is here");
    let mut running = Vec::new();
    for puppet in puppets {
        let task = puppet.start(&world, &gate).await;
        running.push((task, registry.announce(puppet.info.clone()).await.expect("announced")));
    }
    let is_settled = |(_, state): &(_, NodeState)| *state == NodeState::Ready || state.reason().is_some();
    while cluster.everyone().iter().filter(|node| is_settled(node)).count() < puppets.len() {
        tokio::time::sleep(Duration::from_millis(1)).await;
    }
    let metrics = Metrics::new("router");
    let dispatch = Dispatch::new(Parts {
        world: world.clone(),
        cluster,
        policy: policy::by_name("round-robin").expect("in the table"),
        admission: Admission::new(8),
        order,
        budget: Budget { attempts_max: 3, wait_max: Duration::from_secs(5) },
        metrics: RouterMetrics::new(&metrics),
    });
    Stage { dispatch, world, metrics, _running: running, _following: following }
}

impl Stage {
    fn prompt(&self, max_tokens: u32) -> Prompt {
        Prompt {
            id: self.world.request_id(),
            tenant: TenantId::default(),
            model: types::PromptModel::named("mock"),
            tokens: (0..20).map(TokenId).collect(),
            n_generated: 0,
            sampling: Sampling::default(),
            stop: StopRules { max_tokens, ..StopRules::default() },
            priority: Priority(0),
            deadline: self.world.deadline_in(Duration::from_secs(20)),
        }
    }

    /// The whole answer, or why there is none. Steps must come without a gap.
    async fn ask(&self, max_tokens: u32) -> Result<Vec<TokenId>, ServeError> {
        let generation = self.dispatch.generate(self.prompt(max_tokens)).await?;
        let steps: Vec<_> = generation.steps.collect().await;
        let steps = steps.into_iter().collect::<Result<Vec<Step>, ServeError>>()?;
        assert!(steps.iter().enumerate().all(|(idx, step)| step.index as usize == idx), "{steps:?}");
        assert!(steps.last().is_some_and(|step| step.finish.is_some()));
        Ok(steps.into_iter().map(|step| step.token).collect())
    }

    /// Requests that ended so.
    fn n_ended(&self, outcome: &str) -> u64 {
        let line = format!("baton_router_requests_total{{outcome=\"{outcome}\"}} ");
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

fn prefill(id: &str, script: &[Act]) -> Puppet {
    Puppet::new(id, Role::Prefill, script)
}

fn decode(id: &str, script: &[Act]) -> Puppet {
    Puppet::new(id, Role::Decode, script)
}

#[tokio::test(start_paused = true)]
async fn decode_is_asked_first_and_the_first_token_comes_from_prefill() {
    let (p, d) = (prefill("p", &[Act::Serve]), decode("d", &[Act::Serve]));
    stage(Order::DecodeFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(p.heard(), ["prefill 20 tokens, Serve"]);
    assert_eq!(d.heard(), ["decode 20 tokens, Serve"]);
}

#[tokio::test(start_paused = true)]
async fn prefill_first_delivers_once_the_kv_is_there() {
    let (p, d) = (prefill("p", &[Act::Serve]), decode("d", &[Act::Serve]));
    stage(Order::PrefillFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(p.heard(), ["prefill 20 tokens, Serve", "deliver"]);
}

#[tokio::test(start_paused = true)]
async fn a_decode_node_may_compute_by_itself() {
    let (p, d) = (prefill("p", &[Act::Serve]), decode("d", &[Act::Local]));
    stage(Order::DecodeFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(p.heard(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn without_a_prefill_node_decode_is_told_to() {
    let d = decode("d", &[Act::Serve]);
    stage(Order::DecodeFirst, &[&d]).await.serves(6).await;
}

#[tokio::test(start_paused = true)]
async fn a_node_that_breaks_is_left_out_of_the_next_route() {
    let puppets = [
        prefill("p0", &[Act::Break]),
        prefill("p1", &[Act::Serve]),
        decode("d0", &[Act::Break]),
        decode("d1", &[Act::Serve]),
    ];
    for order in [Order::DecodeFirst, Order::PrefillFirst] {
        stage(order, &puppets.each_ref()).await.serves(6).await;
    }
}

#[tokio::test(start_paused = true)]
async fn the_last_prefill_node_is_not_needed() {
    let (p, d) = (prefill("p", &[Act::Break]), decode("d", &[Act::Serve]));
    stage(Order::DecodeFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(p.heard().len(), 1, "left out, and decode computed by itself");
}

#[tokio::test(start_paused = true)]
async fn tries_are_bounded() {
    let (p, d) = (prefill("p", &[Act::Break]), decode("d", &[Act::Break]));
    let failed = stage(Order::DecodeFirst, &[&p, &d]).await.ask(6).await.expect_err("all break every time");
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::Failed, .. }), "{failed:?}");
    assert_eq!(p.heard().len() + d.heard().len(), 3, "{:?} {:?}", p.heard(), d.heard());
}

#[tokio::test(start_paused = true)]
async fn a_failed_wire_costs_an_attempt() {
    let (p, d) = (prefill("p", &[Act::Serve]), decode("d", &[Act::Refuse(RefusalKind::Wire)]));
    let failed = stage(Order::DecodeFirst, &[&p, &d]).await.ask(6).await.expect_err("no wire works");
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::Wire, .. }), "{failed:?}");
    assert_eq!(d.heard().len(), 3, "{:?}", d.heard());
}

#[tokio::test(start_paused = true)]
async fn a_full_node_is_waited_for() {
    let full = Act::Refuse(RefusalKind::Full);
    let (p, d) =
        (prefill("p", &[Act::Serve]), decode("d", &[full, full, full, full, full, full, Act::Serve]));
    stage(Order::DecodeFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(d.heard().len(), 7, "being full costs no attempt");
}

#[tokio::test(start_paused = true)]
async fn but_not_for_ever() {
    let (p, d) = (prefill("p", &[Act::Serve]), decode("d", &[Act::Refuse(RefusalKind::Full)]));
    let stage = stage(Order::DecodeFirst, &[&p, &d]).await;
    let began = stage.world.now();
    let failed = stage.ask(6).await.expect_err("it stays full");
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::Full, .. }), "{failed:?}");
    assert!(began.elapsed() < Duration::from_secs(6), "{:?}", began.elapsed());
}

#[tokio::test(start_paused = true)]
async fn what_fails_anywhere_is_not_tried_elsewhere() {
    let puppets = [
        prefill("p", &[Act::Serve]),
        decode("d0", &[Act::Refuse(RefusalKind::TooLong)]),
        decode("d1", &[Act::Refuse(RefusalKind::TooLong)]),
    ];
    let failed = stage(Order::DecodeFirst, &puppets.each_ref()).await.ask(6).await.expect_err("too long");
    assert!(matches!(failed, ServeError::Refused { kind: RefusalKind::TooLong, .. }), "{failed:?}");
    assert_eq!(puppets[1].heard().len() + puppets[2].heard().len(), 1);
}

#[tokio::test(start_paused = true)]
async fn a_stream_that_breaks_goes_on_elsewhere() {
    for n in 0..5 {
        let puppets = [
            prefill("p", &[Act::Serve]),
            decode("d0", &[Act::BreakAfter(n)]),
            decode("d1", &[Act::BreakAfter(n), Act::Serve]),
        ];
        for order in [Order::DecodeFirst, Order::PrefillFirst] {
            stage(order, &puppets.each_ref()).await.serves(8).await;
        }
    }
}

/// Found by simulation: the decode node got the prompt without what was generated, and went on at the wrong place.
#[tokio::test(start_paused = true)]
async fn held_kv_goes_with_the_prompt_that_it_is_of() {
    let (p, d) = (prefill("p", &[Act::Serve]), decode("d", &[Act::BreakAfter(0), Act::Serve]));
    stage(Order::PrefillFirst, &[&p, &d]).await.serves(6).await;
    assert_eq!(d.heard(), ["decode 20 tokens, BreakAfter(0)", "decode 21 tokens, Serve"]);
}

/// Found by simulation: the wire broke before the decode node heard of the transfer, and it waited until its deadline.
#[tokio::test(start_paused = true)]
async fn kv_that_was_lost_on_the_way_is_computed_again() {
    for (act, within_ms) in [(Act::Lose, 100), (Act::Vanish, 1_100)] {
        for order in [Order::DecodeFirst, Order::PrefillFirst] {
            let (p, d) = (prefill("p", &[act, Act::Serve]), decode("d", &[Act::Starve, Act::Serve]));
            let stage = stage(order, &[&p, &d]).await;
            let began = stage.world.now();
            stage.serves(6).await;
            let took = began.elapsed();
            assert!(took < Duration::from_millis(within_ms), "{act:?}, {order:?}: {took:?}");
        }
    }
}

/// Found by simulation: with no wire left, every token cost a whole prompt.
#[tokio::test(start_paused = true)]
async fn a_decode_node_whose_kv_is_lost_again_computes_by_itself() {
    for order in [Order::DecodeFirst, Order::PrefillFirst] {
        let (p, d) = (prefill("p", &[Act::Lose]), decode("d", &[Act::Starve, Act::Starve, Act::Serve]));
        stage(order, &[&p, &d]).await.serves(6).await;
        let n_computed = p.heard().iter().filter(|word| word.starts_with("prefill")).count();
        assert_eq!((n_computed, d.heard().len()), (2, 3), "{order:?}");
    }
}

#[tokio::test(start_paused = true)]
async fn a_skipped_step_is_noticed_and_mended() {
    let (p, d) = (prefill("p", &[Act::Serve]), decode("d", &[Act::Skip, Act::Serve]));
    stage(Order::DecodeFirst, &[&p, &d]).await.serves(6).await;
}

#[tokio::test(start_paused = true)]
async fn every_wait_ends_with_the_deadline() {
    for (p, d) in [(Act::Hang, Act::Serve), (Act::Serve, Act::Hang)] {
        for order in [Order::DecodeFirst, Order::PrefillFirst] {
            let (p, d) = (prefill("p", &[p]), decode("d", &[d]));
            let stage = stage(order, &[&p, &d]).await;
            let began = stage.world.now();
            let failed = stage.ask(6).await.expect_err("somebody hangs");
            assert!(matches!(failed, ServeError::DeadlinePassed { .. }), "{failed:?}");
            assert!(began.elapsed() <= Duration::from_secs(21), "{:?}", began.elapsed());
            assert_eq!(stage.dispatch.parts().admission.n_inside(), 0);
        }
    }
}

#[tokio::test(start_paused = true)]
async fn admission_is_bounded() {
    let (p, d) = (prefill("p", &[Act::Serve]), decode("d", &[Act::Serve]));
    let stage = stage(Order::DecodeFirst, &[&p, &d]).await;
    let mut inside = Vec::new();
    for _ in 0..8 {
        inside.push(stage.dispatch.generate(stage.prompt(6)).await.expect("there is room"));
    }
    let refused = stage.dispatch.generate(stage.prompt(6)).await.expect_err("eight are inside");
    assert!(matches!(refused, ServeError::Overloaded { .. }), "{refused:?}");
    inside.clear();
    stage.serves(6).await;
    let ended = ["finished", "cancelled", "overloaded"].map(|outcome| stage.n_ended(outcome));
    assert_eq!(ended, [1, 8, 1]);
}

#[tokio::test(start_paused = true)]
async fn no_node_is_said_at_once() {
    let stage = stage(Order::DecodeFirst, &[]).await;
    let began = stage.world.now();
    let failed = stage.ask(6).await.expect_err("nobody is there");
    assert!(matches!(failed, ServeError::NoNodes { .. }), "{failed:?}");
    assert_eq!(began.elapsed(), Duration::ZERO);
}

mod pool;

/// A puppet of other weights under the same name.
fn of_other_weights(mut puppet: Puppet) -> Puppet {
    let parts = [("tokenizer", "bytes"), ("weights", "other")];
    puppet.info.model.fingerprint =
        types::Fingerprint::new(parts.map(|(name, value)| (name.to_owned(), value.to_owned())));
    puppet
}

/// The node that began an answer dies; the only other one has other weights. The answer ends with an error, and no token
/// of the other weights is in it.
#[tokio::test(start_paused = true)]
async fn an_answer_is_continued_by_its_own_weights_only() {
    let mut first =
        [decode("d0", &[Act::BreakAfter(2), Act::Break]), of_other_weights(decode("e0", &[Act::Serve]))];
    first[0].info.epoch.0 -= 1;
    let failed = stage(Order::DecodeFirst, &first.each_ref()).await.ask(6).await.expect_err("it broke");
    assert!(matches!(failed, ServeError::Refused { .. } | ServeError::NoNodes { .. }), "{failed:?}");
    assert_eq!(first[1].prompts(), Vec::<String>::new());
    let both = [
        decode("d0", &[Act::BreakAfter(2)]),
        decode("d1", &[Act::BreakAfter(2), Act::Serve]),
        of_other_weights(decode("e0", &[Act::Serve])),
    ];
    stage(Order::DecodeFirst, &both.each_ref()).await.serves(6).await;
    assert_eq!(both[2].prompts(), Vec::<String>::new());
}

#[tokio::test(start_paused = true)]
async fn a_prompt_goes_to_nodes_of_its_model_only() {
    let mut another = decode("e", &[Act::Serve]);
    another.info.model.name = "another".to_owned();
    let puppets = [prefill("p", &[Act::Serve]), decode("d", &[Act::Serve]), another];
    let stage = stage(Order::DecodeFirst, &puppets.each_ref()).await;
    for _ in 0..4 {
        stage.serves(6).await;
    }
    assert_eq!(puppets[2].prompts(), Vec::<String>::new());
    let unknown = Prompt { model: PromptModel::named("none"), ..stage.prompt(6) };
    let failed = stage.dispatch.generate(unknown).await.expect_err("no such model");
    assert!(failed.to_string().contains("no decode node of `none` is ready"), "{failed}");
}
