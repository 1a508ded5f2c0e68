//! Tests of decode nodes that take no KV and compute their prompts themselves.

use super::*;

/// Returns a decode node to which no KV can be sent.
fn alone(id: &str, script: &[FakeResponse]) -> FakeNode {
    let mut node = decode(id, script);
    node.info.wires.clear();
    node
}

#[tokio::test(start_paused = true)]
async fn no_prompt_is_computed_for_a_decode_node_that_takes_no_kv() {
    for order in [Order::PrefillFirst, Order::DecodeFirst] {
        let (p, d) = (prefill("p", &[FakeResponse::Serve]), alone("d", &[FakeResponse::Local]));
        let test_cluster = test_cluster(order, &[&p, &d]).await;
        test_cluster.serves(6).await;
        assert_eq!((p.received(), d.received().len()), (Vec::new(), 1), "{order:?}");
    }
}

/// The decode node that could take held KV fails meanwhile. The other one computes the prompt at once.
#[tokio::test(start_paused = true)]
async fn held_kv_without_a_receiver_is_computed_again() {
    for with_pool in [&[][..], &[FakeResponse::Serve]] {
        let (p, k) = (prefill("p", &[FakeResponse::Serve]), FakeNode::new("k", Role::Pool, with_pool));
        let (a, d) = (alone("a", &[FakeResponse::Local]), decode("d", &[FakeResponse::Break]));
        let mut nodes = vec![&p, &a, &d];
        nodes.extend((!with_pool.is_empty()).then_some(&k));
        let test_cluster = test_cluster(Order::PrefillFirst, &nodes).await;
        let began = test_cluster.world.now();
        for _ in 0..4 {
            test_cluster.serves(6).await;
        }
        assert!(began.elapsed() < Duration::from_secs(4), "{:?}", began.elapsed());
        assert!(!p.received().is_empty() && !a.received().is_empty(), "{:?}", p.received());
    }
}
