//! The nodes of a cluster may start in any order.

use std::net::SocketAddr;

use baton_tests::fleet::{Fleet, PACED};
use baton_tests::{Ask, Client, eventually};
use tokio::net::TcpStream;

/// The number of running answers while the second node starts.
const REQUESTS: u32 = 8;

/// Waits until the router lists a node. Returns whether its gRPC port listens at that moment.
async fn listens_when_listed(client: &Client, id: &str) -> bool {
    let listed = async || {
        let cluster = client.get_json("/debug/cluster").await;
        let nodes = cluster["nodes"].as_array().expect("a list of nodes");
        let node = nodes.iter().find(|node| node["id"] == id)?;
        Some(node["address"].as_str().expect("an address").parse::<SocketAddr>().expect("an address"))
    };
    TcpStream::connect(eventually("the node to be listed", listed).await).await.is_ok()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_prefill_node_that_starts_after_decode_is_used_once_it_is_there() {
    let mut fleet = Fleet::start(PACED, 0, 1).await;
    let client = fleet.client();
    let ask = |nth: u32| Ask::new((0..100).map(|at| (at * 3 + nth) % 256).collect(), 30);
    let alone = client.ask(&ask(0)).await.expect("decode computes by itself");
    fleet.add("prefill", 0, PACED);
    let beside = async {
        for nth in 0..REQUESTS {
            client.ask(&ask(nth)).await.expect("an answer while the node joins");
        }
    };
    let (listens, ()) = tokio::join!(listens_when_listed(&client, "prefill-0"), beside);
    assert!(listens, "a node is announced when its port listens");
    fleet.all_ready().await;
    for nth in REQUESTS..2 * REQUESTS {
        client.ask(&ask(nth)).await.expect("an answer");
    }
    let prefill = Client::new(fleet.nodes[1].admin);
    assert!(
        prefill.counter("baton_node_prefill_tokens_total{role=\"prefill\"}").await > 0,
        "it computes prompts"
    );
    assert_eq!(client.ask(&ask(0)).await.expect("an answer").tokens, alone.tokens);
    assert_eq!(client.counter("baton_router_retries_total{reason=\"failed\"}").await, 0);
    fleet.baseline().await;
}
