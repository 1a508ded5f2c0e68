//! Tests of the harness over real sockets. The puppet and the load share one thread and one clock, so the
//! puppet's record of its writes is the reference. Upper bounds are on the tenth percentile: a busy machine
//! only adds lateness, and the low percentiles show the harness's own error.

use std::sync::{Arc, Mutex};
use std::time::Duration;

use bench::client::exchange::ClientOptions;
use bench::client::request::{Endpoint, OptionalFields, RequestShape, ShapeParts};
use bench::client::survey::{Survey, SurveyRequest, survey};
use bench::client::{Prompt, TargetServer};
use bench::load::compose::Composer;
use bench::load::drive::{Drive, LoadResult, Pacing, drive};
use bench::puppet::server::{Casting, PlayedRequest, PreparedScript, ScriptedServer};
use bench::puppet::{Counting, Ending, Script, ScriptAction, Step};
use bench::record::{CountedBy, FailureKind, RequestRecord};
use bench::workload::{Recipe, Segment, Session, Turn, Vocabulary};
use serde_json::{Map, Value};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpListener;

use crate::millis;

const LIMIT: Duration = Duration::from_secs(60);

async fn puppet(casting: Casting, accept_delay: Duration) -> ScriptedServer {
    ScriptedServer::start("127.0.0.1:0", accept_delay, casting).await.expect("a puppet")
}

fn composer(target: &TargetServer) -> Arc<Composer> {
    let shape = RequestShape::new(&ShapeParts {
        target,
        endpoint: Endpoint::Completions,
        model: "puppet",
        extras: OptionalFields { return_token_ids: true, continuous_usage: true, ignore_eos: true },
        headers: &[],
        fields: &Map::new(),
    });
    Arc::new(Composer { shape, salt: 1, vocabulary: Vocabulary::default() })
}

fn single(ordinal: u64) -> Session {
    Session::single(Recipe::Drawn(vec![Segment { seed: ordinal, n_tokens: 8 }]), 20)
}

/// Sends sessions to an address, and returns the harness's records.
async fn load(url: &str, sessions: Vec<Session>, pacing: Pacing, timeout: Duration) -> LoadResult {
    let target = Arc::new(TargetServer::resolve(url).await.expect("it accepts"));
    let job = Drive {
        composer: composer(&target),
        target,
        sessions: Box::new(sessions.into_iter()),
        pacing,
        duration: None,
        client: ClientOptions { keeps_connections: true, timeout },
        epoch: None,
        slice: 0,
    };
    tokio::time::timeout(LIMIT, drive(job, Arc::default())).await.expect("it ends").expect("it can be driven")
}

/// Sends `n` sessions at even gaps to a puppet.
async fn load_open(puppet: &ScriptedServer, n: u64, gap: Duration) -> LoadResult {
    let times = (0..n as u32).map(move |nth| gap * nth);
    load(&puppet.url(), (0..n).map(single).collect(), Pacing::Open(Box::new(times)), LIMIT).await
}

fn played_for<'a>(played: &'a [PlayedRequest], record: &RequestRecord) -> &'a PlayedRequest {
    let suffix = format!("-{}-{}", record.session, record.turn);
    played.iter().find(|played| played.request_id.ends_with(&suffix)).expect("every request was played")
}

/// Returns how late the client saw each token, in milliseconds: the client's time minus the puppet's time of
/// the same write.
fn lateness(seen: &LoadResult, puppet: &ScriptedServer) -> Vec<f64> {
    let played = puppet.played();
    let mut all = Vec::new();
    for record in &seen.records {
        let truth = played_for(&played, record).writes.iter().filter(|(_, tokens)| *tokens > 0);
        let ours = record.chunks.iter().filter(|chunk| chunk.tokens > 0);
        for ((written, tokens), chunk) in truth.zip(ours) {
            assert_eq!(*tokens, chunk.tokens, "of request {}", record.index);
            let written_us = written.saturating_duration_since(seen.epoch).as_secs_f64() * 1e6;
            all.push((record.intended_us as f64 + f64::from(chunk.at_us) - written_us) / 1e3);
        }
    }
    all.sort_by(f64::total_cmp);
    all
}

#[tokio::test]
async fn tokens_are_timed_as_they_were_written() {
    let mut script = Script::even(20, millis(60), millis(10));
    script.steps[10].after = millis(120);
    script.steps.insert(0, Step { after: millis(1), act: ScriptAction::Empty });
    script.steps.extend([
        Step { after: millis(40), act: ScriptAction::Tokens(5) },
        Step { after: millis(9), act: ScriptAction::Unseen(1) },
    ]);
    let puppet = puppet(ScriptedServer::always(&script), Duration::ZERO).await;
    let seen = load_open(&puppet, 40, millis(7)).await;
    assert!(seen.records.iter().all(RequestRecord::is_finished));
    let late = lateness(&seen, &puppet);
    assert_eq!(late.len(), 40 * 22);
    // Two microseconds are allowed, because two times are rounded to whole ones.
    assert!(late[0] >= -0.002, "a token was seen {} ms before it was sent", -late[0]);
    // A delay of the client's own would show in every token, and one of a busy machine not in the earliest ones.
    let earliest = late[late.len() / 100];
    assert!(earliest < 0.5, "tokens are seen {earliest} ms late");
}

#[tokio::test]
async fn the_schedule_is_kept_whatever_the_server_does() {
    let puppet =
        puppet(ScriptedServer::always(&Script::even(2, millis(500), millis(1))), Duration::ZERO).await;
    let seen = load_open(&puppet, 30, millis(5)).await;
    let intended: Vec<_> = seen.records.iter().map(|record| record.intended_us).collect();
    assert_eq!(intended, (0..30).map(|nth| nth * 5_000).collect::<Vec<_>>());
    let mut lags: Vec<_> = seen.records.iter().map(|record| record.lag_us).collect();
    lags.sort_unstable();
    assert!(lags[0] < 500, "requests are sent {} µs late", lags[0]);
    // The send time counts from the intended time, so it includes the lag.
    assert!(seen.records.iter().all(|record| record.sent_us >= record.lag_us));
}

#[tokio::test]
async fn a_slow_accept_is_part_of_the_wait() {
    let delay = millis(100);
    let puppet = puppet(ScriptedServer::always(&Script::even(2, millis(10), millis(5))), delay).await;
    let seen = load_open(&puppet, 3, Duration::ZERO).await;
    // All three connect at once. The second is accepted one delay after the first, and the third two.
    let mut ttft: Vec<_> = seen.records.iter().filter_map(|record| record.token_us(0)).collect();
    ttft.sort_unstable();
    assert!(ttft[0] >= 9_990 && ttft[1] >= 109_990 && ttft[2] >= 209_990, "{ttft:?}");
    assert!(lateness(&seen, &puppet)[0] >= -0.002);
}

#[tokio::test]
async fn failures_are_told_apart() {
    let even = Script::even(5, millis(10), millis(5));
    let scripts = [
        Script { status: 503, ..even.clone() },
        Script { ending: Ending::Cut, ..even.clone() },
        Script { ending: Ending::Silence, ..even.clone() },
        even,
    ];
    let parts: Vec<_> = scripts.iter().map(PreparedScript::from).collect();
    let puppet = puppet(Arc::new(move |nth, _| parts[nth % 4].clone()), Duration::ZERO).await;
    let pacing = Pacing::Closed { concurrency: 1, ramp: Duration::ZERO };
    // The limit is long, because a machine may stop this process for a second.
    let seen = load(&puppet.url(), (0..4).map(single).collect(), pacing, millis(3_000)).await;
    let kinds: Vec<_> =
        seen.records.iter().map(|record| record.failure().map(|failure| failure.kind)).collect();
    assert_eq!(
        kinds,
        [Some(FailureKind::Status), Some(FailureKind::Broken), Some(FailureKind::Timeout), None]
    );
    assert!(seen.records[2].end_us >= 3_000_000);
}

#[tokio::test]
async fn a_server_that_has_gone_is_a_failed_connection() {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let target = Arc::new(TargetServer::resolve(&url).await.expect("it accepts"));
    drop(listener);
    let job = Drive {
        composer: composer(&target),
        target,
        sessions: Box::new(std::iter::once(single(0))),
        pacing: Pacing::Closed { concurrency: 1, ramp: Duration::ZERO },
        duration: None,
        client: ClientOptions { keeps_connections: true, timeout: LIMIT },
        epoch: None,
        slice: 0,
    };
    let seen = drive(job, Arc::default()).await.expect("it can be driven");
    assert_eq!(seen.records[0].failure().map(|failure| failure.kind), Some(FailureKind::Connect));
}

/// Starts a server that closes every connection after one answer, without a header that announces it.
async fn rude_server() -> (String, tokio::task::JoinSet<()>) {
    let listener = TcpListener::bind("127.0.0.1:0").await.expect("a port");
    let url = format!("http://{}", listener.local_addr().expect("bound"));
    let answer: Vec<u8> =
        Script::even(3, millis(0), millis(0)).writes().into_iter().flat_map(|w| w.bytes).collect();
    let mut tasks = tokio::task::JoinSet::new();
    tasks.spawn(async move {
        while let Ok((mut stream, _)) = listener.accept().await {
            if stream.read(&mut [0; 4096]).await.is_ok_and(|n| n > 0) {
                let _ = stream.write_all(&answer).await;
            }
        }
    });
    (url, tasks)
}

#[tokio::test]
async fn a_kept_connection_that_was_closed_is_replaced() {
    let (url, _tasks) = rude_server().await;
    let pacing = Pacing::Closed { concurrency: 1, ramp: Duration::ZERO };
    let seen = load(&url, (0..20).map(single).collect(), pacing, LIMIT).await;
    assert!(seen.records.iter().all(RequestRecord::is_finished), "{:?}", seen.records[1].outcome);
}

#[tokio::test]
async fn a_closed_loop_keeps_its_places_and_never_more() {
    let under_way = Arc::new(Mutex::new(Vec::new()));
    let puppet =
        puppet(ScriptedServer::always(&Script::even(3, millis(20), millis(5))), Duration::ZERO).await;
    let pacing = Pacing::Closed { concurrency: 4, ramp: Duration::ZERO };
    let seen = load(&puppet.url(), (0..24).map(single).collect(), pacing, LIMIT).await;
    for record in &seen.records {
        let during = |other: &&RequestRecord| {
            other.intended_us <= record.intended_us && record.intended_us < other.ended_at_us()
        };
        under_way.lock().expect("one thread").push(seen.records.iter().filter(during).count());
    }
    let under_way = under_way.lock().expect("one thread");
    assert_eq!((under_way.len(), under_way.iter().max()), (24, Some(&4)));
}

#[tokio::test]
async fn users_who_give_up_are_cancelled_and_the_server_notices() {
    let puppet =
        puppet(ScriptedServer::always(&Script::even(2000, millis(10), millis(5))), Duration::ZERO).await;
    let mut session = single(0);
    session.turns[0].cancel_after = Some(millis(80));
    let pacing = Pacing::Closed { concurrency: 1, ramp: Duration::ZERO };
    let seen = load(&puppet.url(), vec![session], pacing, LIMIT).await;
    assert!(seen.records[0].is_cancelled() && seen.records[0].end_us >= 80_000);
    let noticed = async {
        while !puppet.played().iter().any(|played| played.is_abandoned) {
            tokio::task::yield_now().await;
        }
    };
    tokio::time::timeout(LIMIT, noticed).await.expect("the stream is ended");
}

/// Returns a casting that plays `script`, and the list of the prompts that it receives.
fn listening(script: &Script) -> (Casting, Arc<Mutex<Vec<Vec<u64>>>>) {
    let prompts = Arc::new(Mutex::new(Vec::new()));
    let (part, heard) = (PreparedScript::from(script), Arc::clone(&prompts));
    let casting = move |_: usize, body: &Value| {
        let ids = body["prompt"].as_array().into_iter().flatten().filter_map(Value::as_u64).collect();
        heard.lock().expect("one thread").push(ids);
        part.clone()
    };
    (Arc::new(casting), prompts)
}

#[tokio::test]
async fn each_turn_carries_all_that_was_said() {
    let (casting, prompts) = listening(&Script::even(4, millis(5), millis(2)));
    let puppet = puppet(casting, Duration::ZERO).await;
    let turn = |seed| Turn {
        recipe: Recipe::Drawn(vec![Segment { seed, n_tokens: 6 }]),
        output_tokens: 4,
        think: millis(10),
        cancel_after: None,
    };
    let session = Session { starts: None, turns: vec![turn(1), turn(2), turn(3)] };
    let pacing = Pacing::Closed { concurrency: 1, ramp: Duration::ZERO };
    let seen = load(&puppet.url(), vec![session], pacing, LIMIT).await;
    let prompts = prompts.lock().expect("one thread");
    assert_eq!(prompts.iter().map(Vec::len).collect::<Vec<_>>(), [6, 16, 26]);
    assert_eq!(prompts[1][..6], prompts[0]);
    // The answers of the puppet consist of tokens with id 7, which the next prompt must contain.
    assert_eq!(prompts[1][6..10], [7; 4]);
    assert_eq!(prompts[2][..16], prompts[1]);
    for pair in seen.records.windows(2) {
        assert!(pair[1].intended_us >= pair[0].ended_at_us() + 10_000, "the user thinks");
    }
}

async fn ask(puppet: &ScriptedServer) -> Survey {
    let target = Arc::new(TargetServer::resolve(&puppet.url()).await.expect("it accepts"));
    let fields = Map::new();
    let request = SurveyRequest {
        endpoint: Endpoint::Completions,
        model: None,
        headers: &[],
        fields: &fields,
        ignore_eos: true,
        probe: Prompt::TokenIds(vec![40, 41]),
    };
    survey(&target, &request).await.expect("some form is taken")
}

#[tokio::test]
async fn a_strict_server_is_asked_for_less_until_it_agrees() {
    let refusing = PreparedScript::from(&Script { status: 400, ..Script::even(0, millis(0), millis(0)) });
    let agreeing = PreparedScript::from(&Script {
        counting: Counting::Nothing,
        ..Script::even(3, millis(20), millis(15))
    });
    let casting = move |_: usize, body: &Value| {
        let is_plain = body.get("return_token_ids").is_none()
            && body["stream_options"].get("continuous_usage_stats").is_none();
        if is_plain { agreeing.clone() } else { refusing.clone() }
    };
    let puppet = puppet(Arc::new(casting), Duration::ZERO).await;
    let survey = ask(&puppet).await;
    let expected = OptionalFields { return_token_ids: false, continuous_usage: false, ignore_eos: true };
    assert_eq!(
        (survey.extras, survey.counted_by, survey.model.as_str()),
        (expected, CountedBy::Total, "puppet")
    );
    assert!(survey.cold_ttft_ms >= 20.0 && survey.cold_second_token_ms >= 35.0);
    assert!(survey.config.contains_key("/v1/models"));
}

/// Baton's router without a tokenizer is such a server: its answers have ids and no text.
#[tokio::test]
async fn a_server_that_refuses_one_field_is_asked_for_the_other() {
    let ids_only = Script {
        steps: vec![Step { after: millis(1), act: ScriptAction::Unseen(1) }; 3],
        ..Script::even(0, millis(0), millis(0))
    };
    let (agreeing, refusing) = (
        PreparedScript::from(&ids_only),
        PreparedScript::from(&Script { status: 400, ..Script::even(0, millis(0), millis(0)) }),
    );
    let casting = move |_: usize, body: &Value| {
        let refused = body["stream_options"].get("continuous_usage_stats").is_some();
        if refused { refusing.clone() } else { agreeing.clone() }
    };
    let puppet = puppet(Arc::new(casting), Duration::ZERO).await;
    let survey = ask(&puppet).await;
    let expected = OptionalFields { return_token_ids: true, continuous_usage: false, ignore_eos: true };
    assert_eq!((survey.extras, survey.counted_by), (expected, CountedBy::TokenIds));
}
