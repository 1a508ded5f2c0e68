//! Tests of nodes that change their role: under load, by the router, with their prefix cache, killed meanwhile, and
//! refused.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::Duration;

use baton_tests::check::prompts;
use baton_tests::fleet::{Fleet, FleetNode, PACED, round_robin};
use baton_tests::logs::{A_NODE_DIES, THE_REGISTRY_IS_AWAY};
use baton_tests::{Ask, Client, eventually, executable, undisturbed};
use futures::future::join_all;
use rustix::process::Signal;

/// The number of streams at one time.
const CLIENTS: usize = 6;

/// Returns a node's epoch, role and state as the router sees them.
async fn seen(fleet: &Fleet, node: &FleetNode) -> Option<[String; 3]> {
    let cluster = fleet.client().get_json("/debug/cluster").await;
    let nodes = cluster["nodes"].as_array().expect("a list of nodes");
    let known = nodes.iter().find(|known| known["id"] == node.name.as_str())?;
    Some(["epoch", "role", "state"].map(|field| known[field].as_str().expect("a word").to_owned()))
}

/// Waits until the router uses the node in this role. Returns the node's epoch.
async fn used_as(fleet: &Fleet, node: &FleetNode, role: &str) -> String {
    eventually(&format!("{} to be used as a {role} node", node.name), async || {
        let [epoch, known, state] = seen(fleet, node).await?;
        (known == role && state == "ready").then_some(epoch)
    })
    .await
}

/// Changes the node's role under load and waits until it works in the new role.
async fn change(fleet: &Fleet, node: &FleetNode, role: &str, n_answered: &AtomicUsize) {
    let [epoch, ..] = seen(fleet, node).await.expect("it is a member");
    node.told(&format!("role?role={role}")).await;
    assert_eq!(node.readiness().await.0, 200, "it answers when it is ready");
    assert_eq!(used_as(fleet, node, role).await, epoch, "the same life");
    let served = format!("baton_node_steps_total{{role=\"{role}\"}}");
    let steps = || async { Client::new(node.admin).counter(&served).await };
    let before = steps().await;
    // New prompts, because a decode node computes prompts that it has cached without a prefill node.
    let mut nth = 0;
    eventually("it to serve in its new role", async || {
        nth += 1;
        let ask = Ask::new((0..200).map(|idx| (nth * 31 + idx * 7) % 256).collect(), 5);
        fleet.client().ask(&ask).await.expect("an answer");
        (steps().await > before).then_some(())
    })
    .await;
    let before = n_answered.load(Ordering::Relaxed);
    let more = async || (n_answered.load(Ordering::Relaxed) > before + CLIENTS).then_some(());
    eventually("more requests to be served", more).await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn nodes_change_their_role_under_load_and_no_request_is_lost() {
    let ask = |prompt| Ask::new(prompt, 60).with("ignore_eos", true.into());
    let asks: Vec<Ask> = prompts(53, 20, 300).into_iter().map(ask).collect();
    let expected = undisturbed(&asks).await;
    // Decode nodes get a short drain, so that their running work continues on other nodes.
    let hasty = |role| match role {
        "decode" => vec![("BATON_NODE__DRAIN_MS", "40".to_owned())],
        _ => Vec::new(),
    };
    let fleet = Fleet::start_each(PACED, 2, 2, round_robin(), hasty).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(&["drain before role change timed out"]);
    let happens = async |n_answered: &AtomicUsize| {
        let (prefill, decode) = (&fleet.nodes[1], &fleet.nodes[3]);
        for (node, role) in [
            (prefill, "decode"),
            (prefill, "prefill"),
            (decode, "prefill"),
            (decode, "both"),
            (decode, "decode"),
        ] {
            change(&fleet, node, role, n_answered).await;
        }
    };
    fleet.client().ask_while(CLIENTS, (&asks, &expected), happens).await;
    fleet.baseline().await;
    let log = fleet.nodes[3].process.log();
    assert!(log.contains("drain before role change timed out"), "its work was handed on:\n{log}");
}

/// Returns the roles of all usable nodes as the router sees them.
async fn roles(fleet: &Fleet) -> Vec<String> {
    let cluster = fleet.client().get_json("/debug/cluster").await;
    let nodes = cluster["nodes"].as_array().expect("a list of nodes");
    let ready = nodes.iter().filter(|node| node["state"] == "ready");
    ready.map(|node| node["role"].as_str().expect("a word").to_owned()).collect()
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_router_moves_one_decode_node_to_prefill_while_prompts_wait() {
    let balance = vec![
        ("BATON_BALANCE__ENABLED", "true".to_owned()),
        ("BATON_BALANCE__FOR_MS", "1000".to_owned()),
        ("BATON_BALANCE__PAUSE_MS", "1000".to_owned()),
    ];
    let fleet = Fleet::start_with(PACED, 2, 2, balance).await;
    fleet.expect_log(A_NODE_DIES);
    let (n_asked, is_moved) = (AtomicUsize::new(0), AtomicBool::new(false));
    let asker = async || {
        while !is_moved.load(Ordering::Relaxed) {
            let nth = n_asked.fetch_add(1, Ordering::Relaxed) as u32;
            let ask = Ask::new((0..1_500).map(|idx| (nth * 31 + idx * 7) % 256).collect(), 3);
            fleet.client().ask(&ask).await.expect("an answer");
        }
    };
    let watches = async {
        eventually("three prefill nodes and a decode node", async || {
            let roles = roles(&fleet).await;
            let n_prefill = roles.iter().filter(|role| *role == "prefill").count();
            (roles.len() == 4 && n_prefill == 3).then_some(())
        })
        .await;
        // The last decode node stays, whatever the load.
        tokio::time::sleep(Duration::from_secs(4)).await;
        // When the load is over, the router may move the node back.
        let seen = (roles(&fleet).await, fleet.client().get_json("/debug/cluster").await);
        is_moved.store(true, Ordering::Relaxed);
        seen
    };
    let (_, (roles, cluster)) = tokio::join!(join_all((0..2 * CLIENTS).map(|_| asker())), watches);
    assert_eq!(roles.iter().filter(|role| *role == "decode").count(), 1, "{cluster}");
    let balance = &cluster["balance"];
    assert_eq!(balance["controller"], "this router moves nodes");
    let moves = balance["moves"].as_array().expect("a list of moves");
    assert_eq!(moves.len(), 1, "{balance}");
    assert_eq!((&moves[0]["from"], &moves[0]["to"]), (&"decode".into(), &"prefill".into()), "{balance}");
    assert!(moves[0]["outcome"].as_str().is_some_and(|outcome| outcome.starts_with("moved: ")), "{balance}");
    let counted = "baton_router_role_moves_total{outcome=\"moved\"}";
    assert!(Client::new(fleet.admin).counter(counted).await >= 1);
    fleet.baseline().await;
}

/// Starts two nodes of each kind with `[balance]`, and sends prompts until the router's move of a decode node has begun.
/// Long answers make its drain take some seconds. Calls `die` with the name of that node in the middle of the move.
async fn during_a_move(die: impl AsyncFnOnce(&mut Fleet, &str)) {
    let balance = vec![
        ("BATON_BALANCE__ENABLED", "true".to_owned()),
        ("BATON_BALANCE__FOR_MS", "1000".to_owned()),
        ("BATON_BALANCE__PAUSE_MS", "1000".to_owned()),
    ];
    // Both decode nodes have long answers, whatever the time of their steps.
    let mut fleet = Fleet::start_with(PACED, 2, 2, [balance, round_robin()].concat()).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(THE_REGISTRY_IS_AWAY);
    fleet.expect_log(&["node has not moved to its new role", "streamed answer to client failed"]);
    // The router holds the registry: a new one knows no lease of the one before.
    fleet.expect_log(&["lock is lost"]);
    let (client, is_begun) = (fleet.client(), AtomicBool::new(false));
    let long = |nth: u32| Ask::new((nth..nth + 20).collect(), 1_500).with("ignore_eos", true.into());
    let mut streams = Vec::new();
    for nth in 0..4 {
        let mut stream = client.stream(&long(nth)).await.expect("an answer");
        stream.next().await.expect("a token");
        streams.push(stream);
    }
    let asker = async |client_nth: u32| {
        let mut nth = client_nth * 1_000;
        while !is_begun.load(Ordering::Relaxed) {
            nth += 1;
            let ask = Ask::new((0..1_500).map(|idx| (nth * 31 + idx * 7) % 256).collect(), 3);
            client.ask(&ask).await.expect("an answer");
        }
    };
    let watches = async {
        let moved = eventually("a move that drains its node", async || {
            let cluster = client.get_json("/debug/cluster").await;
            let last = cluster["balance"]["moves"].as_array()?.last()?.clone();
            let id = last["node"].as_str()?.to_owned();
            let nodes = cluster["nodes"].as_array().expect("a list of nodes");
            let is_ready = nodes.iter().any(|node| node["id"] == id.as_str() && node["state"] == "ready");
            (last["outcome"] == "under way" && !is_ready).then_some(id)
        })
        .await;
        is_begun.store(true, Ordering::Relaxed);
        moved
    };
    let (_, moved) = tokio::join!(join_all((0..2 * CLIENTS as u32).map(asker)), watches);
    die(&mut fleet, &moved).await;
    drop(streams);

    fleet.all_ready().await;
    let node = fleet.nodes.iter().find(|node| node.name == moved).expect("a node of the fleet");
    let [_, role, _] = seen(&fleet, node).await.expect("it is a member");
    assert!(role == "decode" || role == "prefill", "{moved} has the role {role}");
    for nth in 0..8 {
        fleet.client().ask(&Ask::new((nth..nth + 200).collect(), 5)).await.expect("requests go on");
    }
    eventually("a router to move nodes", async || {
        let cluster = fleet.client().get_json("/debug/cluster").await;
        (cluster["balance"]["controller"] == "this router moves nodes").then_some(())
    })
    .await;
    // The lock of role changes becomes free too: that of a dead node when its lease ends.
    let prefill = &fleet.nodes[0];
    let changes = async || (prefill.tell("role?role=both").await.0 == 200).then_some(());
    eventually("another node to change its role", changes).await;
    used_as(&fleet, prefill, "both").await;
    fleet.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_router_that_is_killed_during_its_move_leaves_a_usable_cluster() {
    during_a_move(async |fleet, _| {
        fleet.router.kill();
        fleet.router.revive();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_killed_during_a_move_has_its_old_role_again() {
    during_a_move(async |fleet, moved| {
        let node = fleet.nodes.iter_mut().find(|node| node.name == moved).expect("a node of the fleet");
        node.process.kill();
        node.process.revive();
    })
    .await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn two_nodes_that_change_at_once_do_not_both_go() {
    let fleet = Fleet::start(PACED, 1, 2).await;
    fleet.expect_log(A_NODE_DIES);
    let (one, two) = (&fleet.nodes[1], &fleet.nodes[2]);
    let answers = tokio::join!(one.tell("role?role=prefill"), two.tell("role?role=prefill"));
    let mut codes = [answers.0, answers.1].map(|(status, body)| (status, body["error"]["code"].to_string()));
    codes.sort();
    assert_eq!(codes, [(200, "null".to_owned()), (409, "\"last_of_kind\"".to_owned())]);
    fleet.baseline().await;
}

/// The lease of a dead node ends later, so the node is still a member.
#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_does_not_answer_is_no_other_of_its_kind() {
    let mut fleet = Fleet::start(PACED, 1, 3).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(&["node does not answer, its work does not count"]);
    fleet.nodes[2].process.kill();
    fleet.nodes[3].process.signal(Signal::STOP);
    let stopped = Client::new(fleet.nodes[3].admin);
    eventually("the process to stand still", async || {
        tokio::time::timeout(Duration::from_millis(200), stopped.get("/ready")).await.is_err().then_some(())
    })
    .await;
    let (status, body) = fleet.nodes[1].tell("role?role=prefill").await;
    assert_eq!((status, body["error"]["code"].as_str()), (409, Some("last_of_kind")), "{body}");
    let message = body["error"]["message"].as_str().unwrap_or_default();
    let silent = "no other node decodes for `mock` (no answer from decode-1, decode-2): add one";
    assert!(message.starts_with(silent), "{message}");
    fleet.nodes[3].process.signal(Signal::CONT);
    fleet.nodes[1].told("role?role=prefill").await;
    used_as(&fleet, &fleet.nodes[1], "prefill").await;
    fleet.nodes[2].process.revive();
    fleet.all_ready().await;
    fleet.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn the_prefix_cache_outlives_a_change_of_role() {
    let fleet = Fleet::start(PACED, 1, 1).await;
    fleet.expect_log(A_NODE_DIES);
    let (node, decode) = (&fleet.nodes[0], &fleet.nodes[1]);
    let ask = Ask::new((1..=300).collect(), 8).with("ignore_eos", true.into());
    // A decode node that has slept has an empty cache, so cached tokens are those of the other node.
    let cached = async || {
        decode.told("sleep").await;
        decode.told("wake").await;
        fleet.all_ready().await;
        used_as(&fleet, decode, "decode").await;
        fleet.client().ask(&ask).await.expect("an answer")
    };
    let first = fleet.client().ask(&ask).await.expect("an answer");
    assert_eq!(first.cached_tokens, 0, "the first prompt");
    let before = cached().await;
    assert!(before.cached_tokens >= 256, "{before:?}");

    node.told("role?role=decode&force=true").await;
    used_as(&fleet, node, "decode").await;
    decode.told("sleep").await;
    eventually("the router to miss it", async || seen(&fleet, decode).await.is_none().then_some(())).await;
    let alone = fleet.client().ask(&ask).await.expect("an answer");
    assert_eq!((alone.cached_tokens, &alone.tokens), (before.cached_tokens, &first.tokens));

    decode.told("wake").await;
    fleet.all_ready().await;
    node.told("role?role=prefill").await;
    used_as(&fleet, node, "prefill").await;
    let after = cached().await;
    assert_eq!((after.cached_tokens, &after.tokens), (before.cached_tokens, &first.tokens));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_node_that_is_killed_during_the_change_comes_back() {
    let ask = |prompt| Ask::new(prompt, 200).with("ignore_eos", true.into());
    let asks: Vec<Ask> = prompts(59, 12, 200).into_iter().map(ask).collect();
    let expected = undisturbed(&asks).await;
    let mut fleet = Fleet::start_with(PACED, 1, 2, round_robin()).await;
    fleet.expect_log(A_NODE_DIES);
    let (client, mut victim) = (fleet.client(), fleet.nodes.pop().expect("a decode node"));
    let drains = async |fleet: &Fleet, victim: &FleetNode| {
        eventually("the drain to begin", async || {
            let known = seen(fleet, victim).await;
            known.is_none_or(|[_, _, state]| state == "draining").then_some(())
        })
        .await;
    };
    let happens = async |n_answered: &AtomicUsize| {
        let working = async || (n_answered.load(Ordering::Relaxed) > CLIENTS).then_some(());
        eventually("requests to be served", working).await;
        let admin = Client::new(victim.admin);
        tokio::select! {
            answer = admin.post("/role?role=prefill", "") => panic!("the drain takes longer: {answer:?}"),
            () = drains(&fleet, &victim) => {}
        }
        victim.process.kill();
        victim.process.revive();
        used_as(&fleet, &victim, "decode").await;
        let before = n_answered.load(Ordering::Relaxed);
        let more = async || (n_answered.load(Ordering::Relaxed) > before + CLIENTS).then_some(());
        eventually("more requests to be served", more).await;
    };
    client.ask_while(CLIENTS, (&asks, &expected), happens).await;
    fleet.nodes.push(victim);
    fleet.baseline().await;
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_change_that_cannot_happen_is_refused_with_the_reason() {
    let mut fleet = Fleet::start(PACED, 1, 1).await;
    fleet.expect_log(A_NODE_DIES);
    fleet.expect_log(THE_REGISTRY_IS_AWAY);
    let router = format!("http://{}", fleet.http);
    let decode = &fleet.nodes[1];
    for (page, status, code) in [
        ("role", 400, "unknown_role"),
        ("role?role=pool", 400, "unknown_role"),
        ("role?role=decode", 409, "role_already"),
        ("role?role=prefill", 409, "last_of_kind"),
    ] {
        let (found, body) = decode.tell(page).await;
        assert_eq!((found, body["error"]["code"].as_str()), (status, Some(code)), "{page}: {body}");
    }
    let refused = executable::run(&["admin", "role", "decode-0", "prefill", "--router", &router]);
    let said = refused.stderr;
    assert_eq!(refused.status.code(), Some(1), "{said}");
    assert!(said.contains("no other node decodes for `mock`") && said.contains("(last_of_kind)"), "{said}");
    let unknown = executable::run(&["admin", "role", "decode-7", "prefill", "--router", &router]);
    let said = unknown.stderr;
    assert!(unknown.status.code() == Some(1) && said.contains("knows no node \"decode-7\""), "{said}");
    let unknown = executable::run(&["admin", "role", "decode-0", "pool", "--router", &router]);
    assert!(!unknown.status.success() && unknown.stderr.contains("possible values"));

    decode.told("sleep").await;
    let (status, body) = decode.tell("role?role=both").await;
    assert_eq!((status, body["error"]["code"].as_str()), (409, Some("asleep")), "{body}");
    decode.told("wake").await;
    fleet.all_ready().await;

    // The last decode node would not decode while it drains. Once it is `both`, the prefill node is not the last of its kind.
    let (status, body) = decode.tell("role?role=both").await;
    assert_eq!((status, body["error"]["code"].as_str()), (409, Some("last_of_kind")), "{body}");
    let both = executable::run(&["admin", "role", "decode-0", "both", "--force", "--router", &router]);
    let said = both.stdout;
    assert!(said.starts_with("role changed after "), "{said}{}", both.stderr);
    used_as(&fleet, decode, "both").await;
    fleet.nodes[0].told("role?role=decode").await;
    used_as(&fleet, &fleet.nodes[0], "decode").await;
    let ask = Ask::new((1..=40).collect(), 5).with("ignore_eos", true.into());
    assert_eq!(fleet.client().ask(&ask).await.expect("an answer").tokens.len(), 5);

    // Without its registry a node does not know the others.
    fleet.router.kill();
    let (status, body) = fleet.nodes[0].tell("role?role=prefill").await;
    assert_eq!((status, body["error"]["code"].as_str()), (503, Some("cannot_change_role")), "{body}");
    let message = body["error"]["message"].as_str().unwrap_or_default();
    assert!(message.starts_with("the role stays decode: the registry does not answer"), "{message}");
    fleet.nodes[0].told("role?role=prefill&force=true").await;
    fleet.router.revive();
    fleet.all_ready().await;
    used_as(&fleet, &fleet.nodes[0], "prefill").await;
    assert_eq!(fleet.client().ask(&ask).await.expect("an answer").tokens.len(), 5);
}
