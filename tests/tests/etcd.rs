//! A cluster whose nodes find each other through a real etcd.

use baton_tests::logs::THE_REGISTRY_IS_AWAY;
use baton_tests::{Ask, Etcd, Up, eventually};

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_in_etcd_serves_with_and_without_it() {
    let mut etcd = Etcd::start();
    let url = etcd.url("walk");
    let up = Up::start(&["--prefill", "1", "--decode", "1", "--registry", &url]).await;
    up.expect_log(THE_REGISTRY_IS_AWAY);
    let client = up.client();
    let ask = Ask::new((0..80).collect(), 10);
    let before = client.ask(&ask).await.expect("an answer");
    etcd.kill();
    assert_eq!(client.ask(&ask).await.expect("etcd is not on the way of a request").tokens, before.tokens);
    etcd.restart();
    assert_eq!(client.ask(&ask).await.expect("an answer").tokens, before.tokens);
    let nodes = eventually("both nodes to be ready", async || {
        let nodes = up.nodes().await;
        nodes.iter().all(|node| node.state == "ready").then_some(nodes)
    })
    .await;
    assert_eq!(nodes.len(), 2);
}
