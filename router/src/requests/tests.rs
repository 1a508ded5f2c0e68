use tokio::time::Instant;
use types::{Deadline, Prompt, RequestId, RequestedModel, Sampling, StopRules, TenantId, TokenId, Usage};

use super::*;
use crate::rpc::StepReport;

fn prompt(id: &str) -> Prompt {
    Prompt {
        id: RequestId::new(id),
        tenant: TenantId::default(),
        cache_salt: types::CacheSalt::default(),
        model: RequestedModel::named("mock"),
        tokens: (0..20).map(TokenId).collect(),
        n_generated: 0,
        sampling: Sampling::default(),
        stop: StopRules::default(),
        priority: types::prompt::Priority(0),
        deadline: Deadline::at(Instant::now().into()),
    }
}

fn begin(requests: &Requests, id: &str) -> OpenRecord {
    requests.begin(RecordHead::of(&prompt(id)), &Arrival::now(), Duration::ZERO)
}

async fn ms(ms: u64) {
    tokio::time::sleep(Duration::from_millis(ms)).await;
}

fn ids(records: &[RequestRecord]) -> Vec<&str> {
    records.iter().map(|record| record.id().as_str()).collect()
}

#[tokio::test(start_paused = true)]
async fn the_times_of_all_places_add_up() {
    let requests = Requests::default();
    let mut open = begin(&requests, "r");
    let record = open.record().clone();
    for place in Place::ALL {
        record.enter(place);
        ms(1 + place as u64).await;
    }
    record.first_token(Usage { prompt_tokens: 20, cached_tokens: 16 });
    record.enter(Place::Decode);
    ms(10).await;
    let now = record.summary();
    assert_eq!((now.outcome, now.took), (None, now.places.iter().sum()));
    assert_eq!(requests.count(str::to_owned)["mock"][Place::Decode as usize], 1);
    ms(5).await;
    open.set_outcome("finished");
    drop(open);
    ms(100).await;
    let ended = record.summary();
    let in_each: Vec<u128> = ended.places.iter().map(Duration::as_millis).collect();
    assert_eq!(in_each, [1, 2, 3, 4, 5, 6 + 15, 7]);
    assert_eq!(ended.took.as_millis(), 43);
    assert_eq!((ended.outcome, ended.cached_tokens), (Some("finished"), 16));
    assert_eq!(ended.first_token.map(|first| first.as_millis()), Some(28));
    assert!(requests.under_way().is_empty() && requests.count(str::to_owned).is_empty());
}

#[tokio::test(start_paused = true)]
async fn the_last_and_the_slowest_are_kept() {
    let requests = Requests::default();
    let slow = begin(&requests, "slow");
    ms(500).await;
    drop(slow);
    for nth in 0..LAST_MAX + 10 {
        drop(begin(&requests, &format!("r{nth}")));
    }
    assert_eq!((requests.last().len(), requests.slowest().len()), (LAST_MAX, SLOWEST_MAX));
    assert_eq!(ids(&requests.last())[..2], ["r1009", "r1008"]);
    assert_eq!(ids(&requests.slowest())[0], "slow");
    assert_eq!(ids(&requests.find("slow")), ["slow"], "it is not among the last any more");
    assert!(requests.find("r5").is_empty());
}

#[tokio::test(start_paused = true)]
async fn a_request_is_found_with_all_its_answers() {
    let requests = Requests::default();
    let open: Vec<OpenRecord> =
        ["a-0", "a-1", "a", "a-b", "ab"].into_iter().map(|id| begin(&requests, id)).collect();
    assert_eq!(ids(&requests.find("a")), ["a", "a-1", "a-0"]);
    drop(open);
    assert_eq!(requests.find("a").len(), 3, "each stands once, though it is among the last and the slowest");
}

#[tokio::test(start_paused = true)]
async fn events_are_counted_and_bounded() {
    let requests = Requests::default();
    let open = begin(&requests, "r");
    for _ in 0..20 {
        open.record().note(RequestEvent::Try { prefill: None, decode: None });
        open.record().note(RequestEvent::Continue { code: "failed" });
    }
    let summary = open.record().summary();
    assert_eq!((summary.tries, summary.continuations), (20, 20));
    assert_eq!((summary.events.len(), summary.events_left_out), (32, 8));
}

/// Returns the parts in milliseconds.
fn parts(times: &PartTimes) -> Vec<(&'static str, u128)> {
    times.shown().map(|(part, took)| (part.as_str(), took.as_millis())).collect()
}

fn report(queued: u64, computed: u64, rows: u32) -> StepReport {
    let (queued, computed) = (Duration::from_millis(queued), Duration::from_millis(computed));
    let (room, took) = (Duration::ZERO, Duration::from_millis(5));
    StepReport { room, queued, computed, steps: 1, prefill_tokens: 0, rows, took, preemptions: 0 }
}

fn prefilled(room: u64, queued: u64, computed: u64) -> types::ComputedPrompt {
    let [room, queued, computed] = [room, queued, computed].map(Duration::from_millis);
    let first = types::Step { token: TokenId(1), index: 0, logprobs: None, finish: None };
    types::ComputedPrompt {
        first,
        prompt_logprobs: Vec::new(),
        usage: Usage { prompt_tokens: 20, cached_tokens: 0 },
        room,
        queued,
        computed,
    }
}

#[tokio::test(start_paused = true)]
async fn nodes_reports_divide_the_time_and_the_worst_gap_names_its_step() {
    let arrival = Arrival::now();
    ms(2).await;
    let read = Instant::now();
    ms(3).await;
    let arrival = Arrival { read, accepted: Instant::now(), ..arrival };
    let requests = Requests::default();
    let open = requests.begin(RecordHead::of(&prompt("r")), &arrival, Duration::ZERO);
    let record = open.record().clone();
    record.enter_part(Part::Admission);
    ms(1).await;
    record.enter(Place::Reserve);
    ms(7).await;
    record.enter(Place::Prefill);
    ms(40).await;
    record.prefilled(&prefilled(4, 10, 25));
    record.enter(Place::Client);
    assert_eq!(record.first_token(Usage::default()).as_millis(), 53);
    record.gave_token();
    record.enter(Place::Decode);
    ms(30).await;
    record.kv_arrived("tcp".to_owned(), 1_000, Duration::from_millis(60), Duration::from_millis(50));
    ms(9).await;
    record.stepped(Some(report(2, 6, 3)));
    record.enter(Place::Client);
    record.gave_token();
    record.enter(Place::Decode);
    ms(5).await;
    record.stepped(Some(report(2, 11, 4)));
    record.enter(Place::Client);
    record.gave_token();
    let explanation = record.explanation();
    let before = [
        ("read", 2),
        ("tokenize", 3),
        ("admission", 1),
        ("reserve", 7),
        ("room", 4),
        ("prefill_queue", 6),
        ("prefill_compute", 25),
        ("prefill_call", 5),
    ];
    assert_eq!(parts(&explanation.before), before);
    let after = [("transfer", 30), ("decode_wait", 3), ("first_step", 6), ("decode", 5)];
    assert_eq!(parts(&explanation.after), after);
    assert_eq!(explanation.before.sum() + explanation.after.sum(), explanation.total);
    assert_eq!(explanation.largest, Some(Part::Transfer));
    assert!(explanation.in_words().starts_with("transfer 30.0 ms, prefill_compute 25.0 ms"));
    let transfer = &explanation.transfers[0];
    assert_eq!((transfer.connector.as_str(), transfer.rate()), ("tcp", Some(20_000.0)));
    let gap = explanation.worst_gap.expect("there are three tokens");
    assert_eq!((gap.token, gap.took.as_millis(), gap.parts.largest()), (1, 39, Some(Part::Transfer)));
    assert_eq!(gap.report.map(|report| report.rows), Some(3));
}

#[tokio::test(start_paused = true)]
async fn a_prompt_that_the_decode_node_computes_is_divided_too() {
    let requests = Requests::default();
    let open = begin(&requests, "r");
    let record = open.record().clone();
    record.enter(Place::Decode);
    record.computed_locally();
    ms(20).await;
    record.stepped(Some(StepReport { room: Duration::from_millis(5), ..report(8, 11, 1) }));
    record.first_token(Usage::default());
    let before = [("room", 5), ("prefill_queue", 3), ("prefill_compute", 11), ("prefill_call", 1)];
    assert_eq!(parts(&record.explanation().before), before);
}
