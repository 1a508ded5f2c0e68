use types::{Deadline, RequestId, RequestedModel, Sampling, StopRules, TenantId, TokenId, Usage};

use super::*;

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
    requests.begin(&prompt(id), Instant::now(), Duration::ZERO)
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
