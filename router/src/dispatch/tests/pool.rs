//! Tests of prefill first with a pool node that works, fails or is absent.

use super::*;
use crate::fake_node::next_token;

fn pool(id: &str, script: &[FakeResponse]) -> FakeNode {
    FakeNode::new(id, Role::Pool, script)
}

#[tokio::test(start_paused = true)]
async fn the_pool_keeps_kv_until_a_decode_node_is_chosen() {
    let (p, d, k) = (
        prefill("p", &[FakeResponse::Serve]),
        decode("d", &[FakeResponse::Serve]),
        pool("k", &[FakeResponse::Serve]),
    );
    let test_cluster = test_cluster(Order::PrefillFirst, &[&p, &d, &k]).await;
    test_cluster.serves(6).await;
    assert_eq!(k.received(), ["put 20 tokens, Serve", "fetch, Serve"]);
    assert_eq!((p.received(), d.received().len()), (vec!["prefill 20 tokens, Serve".to_owned()], 1));
    assert_eq!(test_cluster.dispatch.parts().metrics.continuations.get(), 0);
}

#[tokio::test(start_paused = true)]
async fn the_pool_has_no_part_in_the_other_order() {
    let (p, d, k) = (
        prefill("p", &[FakeResponse::Serve]),
        decode("d", &[FakeResponse::Serve]),
        pool("k", &[FakeResponse::Serve]),
    );
    test_cluster(Order::DecodeFirst, &[&p, &d, &k]).await.serves(6).await;
    assert_eq!(k.received(), Vec::<String>::new());
}

/// The pool node refuses or fails: requests are still served, from KV that the prefill node holds.
#[tokio::test(start_paused = true)]
async fn what_the_pool_does_not_take_its_prefill_node_holds() {
    for (act, reason) in [
        (FakeResponse::Refuse(RefusalKind::Full), "full"),
        (FakeResponse::Break, "failed"),
        (FakeResponse::BreakAfter(0), "failed"),
        (FakeResponse::Hang, "failed"),
    ] {
        let (p, d, k) =
            (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Serve]), pool("k", &[act]));
        let test_cluster = test_cluster(Order::PrefillFirst, &[&p, &d, &k]).await;
        test_cluster.serves(6).await;
        let metrics = &test_cluster.dispatch.parts().metrics;
        assert_eq!(metrics.pool_fallbacks.with_label_values(&[reason]).get(), 1, "{act:?}");
        assert_eq!(p.received().last().map(String::as_str), Some("deliver"), "{act:?}");
    }
}

/// A pool node that failed is not used until its next report, so the next prompt does not wait for it.
#[tokio::test(start_paused = true)]
async fn a_pool_node_that_failed_is_not_asked_at_once() {
    let (p, d, k) = (
        prefill("p", &[FakeResponse::Serve]),
        decode("d", &[FakeResponse::Serve]),
        pool("k", &[FakeResponse::Hang]),
    );
    let test_cluster = test_cluster(Order::PrefillFirst, &[&p, &d, &k]).await;
    test_cluster.serves(6).await;
    let began = test_cluster.world.now();
    test_cluster.serves(6).await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    assert_eq!(k.received().len(), 1);
}

/// The next prompt is stored on the pool node all the same: the deadline was the client's choice.
#[tokio::test(start_paused = true)]
async fn a_pool_node_that_ends_a_prompt_at_its_deadline_has_not_failed() {
    let (p, d) = (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Serve]));
    let k = pool("k", &[FakeResponse::Refuse(RefusalKind::Landing), FakeResponse::Serve]);
    let test_cluster = test_cluster(Order::PrefillFirst, &[&p, &d, &k]).await;
    let deadline = test_cluster.world.deadline_in(Duration::from_millis(5));
    let _ = test_cluster.answer_of(Prompt { deadline, ..test_cluster.prompt(6) }).await;
    test_cluster.serves(6).await;
    assert_eq!(k.received().last().map(String::as_str), Some("fetch, Serve"), "{:?}", k.received());
}

/// Stored KV that is lost or corrupt is computed again. The client already has its first token then.
#[tokio::test(start_paused = true)]
async fn kv_that_the_pool_lost_is_computed_again() {
    for script in [
        [FakeResponse::Serve, FakeResponse::Refuse(RefusalKind::Failed), FakeResponse::Serve],
        [FakeResponse::Serve, FakeResponse::Break, FakeResponse::Serve],
    ] {
        let (p, d, k) =
            (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Serve]), pool("k", &script));
        let test_cluster = test_cluster(Order::PrefillFirst, &[&p, &d, &k]).await;
        test_cluster.serves(6).await;
        assert_eq!(test_cluster.dispatch.parts().metrics.continuations.get(), 1, "{script:?}");
        assert!(p.received().contains(&"prefill 21 tokens, Serve".to_owned()), "{:?}", p.received());
    }
}

/// The KV never arrives at the pool node, and the sender reports the reason.
#[tokio::test(start_paused = true)]
async fn kv_that_was_lost_on_the_way_to_the_pool_is_computed_again() {
    let (p, d) =
        (prefill("p", &[FakeResponse::Lose, FakeResponse::Serve]), decode("d", &[FakeResponse::Serve]));
    let k = pool("k", &[FakeResponse::Starve, FakeResponse::Serve]);
    let test_cluster = test_cluster(Order::PrefillFirst, &[&p, &d, &k]).await;
    let began = test_cluster.world.now();
    test_cluster.serves(6).await;
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
}

/// The decode node's landing is lost. The pool node still has the KV and sends it to another decode node.
#[tokio::test(start_paused = true)]
async fn what_is_stored_is_delivered_to_another_decode_node() {
    let (p, d) = (prefill("p", &[FakeResponse::Serve]), decode("d", &[FakeResponse::Serve]));
    let k = pool("k", &[FakeResponse::Serve, FakeResponse::Refuse(RefusalKind::Wire), FakeResponse::Serve]);
    let test_cluster = test_cluster(Order::PrefillFirst, &[&p, &d, &k]).await;
    test_cluster.serves(6).await;
    assert_eq!(test_cluster.dispatch.parts().metrics.continuations.get(), 0);
    assert_eq!((p.received().len(), d.received().len()), (1, 2));
}

#[tokio::test(start_paused = true)]
async fn a_pool_node_keeps_its_own_models_kv_only() {
    let (p, d, mut k) = (
        prefill("p", &[FakeResponse::Serve]),
        decode("d", &[FakeResponse::Serve]),
        pool("k", &[FakeResponse::Serve]),
    );
    k.info.model.name = "another".to_owned();
    test_cluster(Order::PrefillFirst, &[&p, &d, &k]).await.serves(6).await;
    assert_eq!(k.received(), Vec::<String>::new());
    assert_eq!(p.received().last().map(String::as_str), Some("deliver"));
}

/// A prompt with one output token is served without a decode node: prefill computes the token.
#[tokio::test(start_paused = true)]
async fn one_token_needs_no_decode_node() {
    let (p, d, k) = (
        prefill("p", &[FakeResponse::Serve]),
        decode("d", &[FakeResponse::Serve]),
        pool("k", &[FakeResponse::Serve]),
    );
    let test_cluster = test_cluster(Order::PrefillFirst, &[&p, &d, &k]).await;
    let tokens = test_cluster.ask(1).await.expect("an answer");
    assert_eq!(tokens, [next_token(&test_cluster.prompt(1).tokens)]);
    assert_eq!(d.received(), Vec::<String>::new());
}
