//! Edge cases: prompts as long as a block, as long as the context, and of one token; more requests than there is room
//! for; and a very long stream.

use baton_tests::check::prompts;
use baton_tests::fleet::{Fleet, PACED};
use baton_tests::{Answer, Ask, Client, Up, in_time};
use futures::future::join_all;

/// A fast mock with room for a very long stream.
const ENDLESS: &str = concat!("mock:", env!("CARGO_MANIFEST_DIR"), "/mocks/endless.toml");
/// The number of tokens of a very long stream: more than 32k.
const LONG: u32 = 33_000;
/// The number of tokens of a block.
const BLOCK: usize = 16;
/// The number of tokens of the mock's context.
const CONTEXT: usize = 32_768;

async fn answers(client: &Client, asks: &[Ask]) -> Vec<Answer> {
    let all = join_all(asks.iter().map(|ask| client.ask(ask)));
    in_time("all answers", all).await.into_iter().map(|answer| answer.expect("an answer")).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn prompts_at_the_edges_of_blocks_are_answered_alike() {
    let lengths =
        [1, 2, BLOCK - 1, BLOCK, BLOCK + 1, 2 * BLOCK, 5 * BLOCK - 1, 5 * BLOCK, 5 * BLOCK + 1, 1_024];
    let ask = |(nth, length): (usize, usize)| {
        let prompt = (0..length).map(|at| ((at * 7 + nth * 31) % 256) as u32).collect();
        Ask::new(prompt, 1 + (nth as u32 * 9) % 40).with("ignore_eos", true.into())
    };
    let asks: Vec<Ask> = lengths.into_iter().enumerate().map(ask).collect();
    let alone = Up::start(&["--colocated"]).await;
    let expected = answers(&alone.client(), &asks).await;
    drop(alone);
    for order in ["decode-first", "prefill-first"] {
        let up = Up::start(&["--order", order]).await;
        // The requests are sent twice. The second time everything is cached, and nothing has to be sent.
        for round in ["fresh", "cached"] {
            let seen = answers(&up.client(), &asks).await;
            for (nth, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
                assert_eq!(seen.tokens, expected.tokens, "{order}, {round}, {} tokens", lengths[nth]);
            }
        }
        let client = up.client();
        let nothing = client.ask(&Ask::new(Vec::new(), 4)).await.expect_err("there is no first token");
        assert_eq!(nothing.status, Some(400), "{nothing:?}");
        let whole = client.ask(&Ask::new(vec![7; CONTEXT - 1], 1)).await.expect("a context, filled");
        assert_eq!(whole.tokens.len(), 1);
        let more = client.ask(&Ask::new(vec![7; CONTEXT + 1], 1)).await.expect_err("more than a context");
        assert_eq!(more.status, Some(400), "{more:?}");
        up.baseline().await;
    }
}

/// There are twice as many requests as landings, and more than the pool holds, so some wait. None is lost.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_burst_wider_than_the_decode_node_is_answered() {
    let ask = |prompt| Ask::new(prompt, 30).with("ignore_eos", true.into());
    let asks: Vec<Ask> = prompts(41, 200, 600).into_iter().map(ask).collect();
    let alone = Up::start(&["--colocated"]).await;
    let expected = answers(&alone.client(), &asks).await;
    drop(alone);
    let narrow = vec![
        ("BATON_EXPERT__DECODE__LANDINGS_MAX", "8".to_owned()),
        ("BATON_EXPERT__SCHEDULER__SEQUENCES_MAX", "32".to_owned()),
    ];
    let fleet = Fleet::start_narrow(PACED, 1, 1, narrow).await;
    let seen = answers(&fleet.client(), &asks).await;
    for (nth, (seen, expected)) in seen.iter().zip(&expected).enumerate() {
        assert_eq!(seen.tokens, expected.tokens, "request {nth}");
    }
    fleet.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_very_long_stream_stays_tracked() {
    let up = Up::start(&["--model", ENDLESS]).await;
    let ask = Ask::new((0..64).collect(), LONG).with("ignore_eos", true.into());
    let mut stream = up.client().stream(&ask).await.expect("a stream");
    let (mut n_tokens, mut was_held) = (0, false);
    while let Some(event) = in_time("an event", stream.next()).await.expect("the stream goes on") {
        let ids = event["choices"].get(0).and_then(|choice| choice["token_ids"].as_array().map(Vec::len));
        n_tokens += ids.unwrap_or(0);
        // The stream must hold blocks for at least half of the tokens that were read. Generated steps are
        // ahead of read ones by the contents of all buffers.
        if n_tokens > LONG as usize / 10 && !was_held {
            let kv = up.kv().await;
            was_held = kv.iter().any(|node| node["leased"].as_u64() > Some(n_tokens as u64 / 32));
            assert!(was_held, "its blocks are its own: {kv:?}");
        }
    }
    assert_eq!(n_tokens, LONG as usize);
    assert!(was_held);
    up.baseline().await;
}
