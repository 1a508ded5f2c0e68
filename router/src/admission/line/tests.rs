//! The line with a virtual clock: its order, its refusals, and its fairness to tenants under overload.

use std::collections::HashMap;

use proptest::prelude::*;

use super::*;
use crate::admission::terms::{Objective, TenantWeight};

const WAIT_MAX: Duration = Duration::from_secs(40);

fn line(requests_max: usize) -> Line {
    Line::new(LineBounds { requests_max, wait_max: WAIT_MAX })
}

fn of_tenant(tenant: &str, priority: i8, work: u64, now: Instant) -> WaitingPrompt {
    let (tenant, priority) = (TenantId::new(tenant), Priority(priority));
    WaitingPrompt { tenant, priority, terms: AdmissionTerms::default(), work, arrived: now }
}

/// A line whose tickets have names, with a clock that the test sets.
struct NamedLine {
    line: Line,
    now: Instant,
    names: HashMap<TicketId, String>,
    left: Vec<String>,
}

impl NamedLine {
    fn new(requests_max: usize) -> Self {
        Self { line: line(requests_max), now: Instant::now(), names: HashMap::new(), left: Vec::new() }
    }

    fn enter(&mut self, name: &str, prompt: WaitingPrompt) {
        match self.line.enter(prompt, PredictedService::default(), self.now) {
            Ok(Entered { id, displaced, .. }) => {
                self.names.insert(id, name.to_owned());
                if let Some((id, refusal)) = displaced {
                    self.left.push(format!("{} {}", self.names[&id], refusal.reason.as_str()));
                }
            }
            Err(refusal) => self.left.push(format!("{name} {}", refusal.reason.as_str())),
        }
        self.line.integrity().expect("each ticket is in one state");
    }

    /// Serves the next `n` tickets, and returns their names.
    fn serve(&mut self, n: usize) -> String {
        let mut served = Vec::new();
        while served.len() < n
            && let Some(id) = self.line.next(self.now)
        {
            self.line.admit(id, self.now);
            self.line.integrity().expect("each ticket is in one state");
            self.line.remove(id, self.now);
            served.push(self.names[&id].clone());
        }
        served.join(" ")
    }
}

#[test]
fn tickets_are_served_by_priority_then_by_turns_of_tenants() {
    // Tickets as TENANT, weight, priority, work; the name is the tenant and the number of the ticket.
    type Entry = (&'static str, u32, i8, u64);
    let cases: [(&str, Vec<Entry>, &str); 6] = [
        ("one tenant, in order of arrival", vec![("a", 1, 0, 900), ("a", 1, 0, 10)], "a0 a1"),
        ("higher priorities first", vec![("a", 1, 0, 10), ("b", 1, -3, 10), ("c", 1, 2, 10)], "c2 a0 b1"),
        (
            "tenants alternate",
            vec![("a", 1, 0, 1024), ("a", 1, 0, 1024), ("a", 1, 0, 1024), ("b", 1, 0, 1024)],
            "a0 b3 a1 a2",
        ),
        (
            "by work, not by number",
            vec![
                ("a", 1, 0, 2048),
                ("a", 1, 0, 2048),
                ("b", 1, 0, 1024),
                ("b", 1, 0, 1024),
                ("b", 1, 0, 1024),
            ],
            "b2 a0 b3 b4 a1",
        ),
        (
            "by weight",
            vec![
                ("a", 3, 0, 1024),
                ("a", 3, 0, 1024),
                ("a", 3, 0, 1024),
                ("a", 3, 0, 1024),
                ("b", 1, 0, 1024),
                ("b", 1, 0, 1024),
            ],
            "a0 a1 a2 b4 a3 b5",
        ),
        (
            "a prompt of many turns waits for its turns only",
            vec![("a", 1, 0, 1024 * 1024), ("b", 1, 0, 1024), ("b", 1, 0, 1024)],
            "b1 b2 a0",
        ),
    ];
    for (what, entries, expected) in cases {
        let mut named = NamedLine::new(100);
        for (nth, (tenant, weight, priority, work)) in entries.into_iter().enumerate() {
            let mut prompt = of_tenant(tenant, priority, work, named.now);
            prompt.terms.weight = TenantWeight(weight.try_into().expect("a weight"));
            named.enter(&format!("{tenant}{nth}"), prompt);
        }
        assert_eq!(named.serve(usize::MAX), expected, "{what}");
    }
}

#[test]
fn age_comes_before_all_in_one_of_sixteen_admitted() {
    let mut named = NamedLine::new(100);
    named.enter("old", of_tenant("a", -100, 10, named.now));
    named.now += WAIT_MAX / 4 - Duration::from_millis(1);
    for nth in 0..60 {
        named.enter(&format!("new{nth}"), of_tenant("b", 100, 10, named.now));
    }
    let before = named.serve(20);
    assert!(!before.contains("old"), "it has not aged: {before}");
    named.now += Duration::from_millis(1);
    assert_eq!(named.serve(1), "old", "more than 15 admissions went to others");
    named.enter("old again", of_tenant("a", -100, 10, named.now));
    named.now += WAIT_MAX;
    // The prompts of the higher priority are older now: one admission by age goes to each of them in turn.
    assert!(named.serve(40).starts_with("new20 new21"));
    assert_eq!(named.serve(1), "old again");
}

#[test]
fn a_full_line_lets_one_go_or_refuses() {
    let first = Shedding::First;
    let last = Shedding::Last;
    // Tickets as tenant, priority, shedding. The line has three places.
    let cases = [
        ("a full line refuses", vec![("a", 0, last); 4], "a3 full"),
        (
            "sheddable goes first",
            vec![("a", 0, last), ("b", 0, first), ("b", 0, first), ("a", 0, last)],
            "b2 shed",
        ),
        (
            "but not for a lower priority",
            vec![("b", 1, first), ("b", 1, first), ("b", 1, first), ("a", 0, last)],
            "a3 full",
        ),
        (
            "nor for another one",
            vec![("b", 0, first), ("b", 0, first), ("b", 0, first), ("a", 0, first)],
            "a3 full",
        ),
        (
            "a higher priority comes in",
            vec![("a", 0, last), ("a", 1, last), ("a", 2, last), ("a", 1, last)],
            "a0 displaced",
        ),
        (
            "the tenant with the most places gives the newest",
            vec![("a", 0, last), ("a", 0, last), ("a", 0, last), ("b", 0, last), ("b", 0, last)],
            "a2 displaced, b4 full",
        ),
    ];
    for (what, entries, expected) in cases {
        let mut named = NamedLine::new(3);
        for (nth, (tenant, priority, shedding)) in entries.into_iter().enumerate() {
            let mut prompt = of_tenant(tenant, priority, 10, named.now);
            prompt.terms.shedding = shedding;
            named.enter(&format!("{tenant}{nth}"), prompt);
        }
        assert_eq!(named.left.join(", "), expected, "{what}");
    }
}

#[test]
fn a_prompt_that_would_be_late_is_refused_with_the_time_to_come_back() {
    let start = Instant::now();
    let at = |ms| start + Duration::from_millis(ms);
    let objective = |text: &str| text.parse::<Objective>().expect("an objective");
    // The line serves 100 tokens per second, and 300 wait.
    let busy = || {
        let mut line = line(100);
        let ids: Vec<TicketId> = (0..9)
            .map(|_| {
                line.enter(of_tenant("a", 0, 100, at(0)), PredictedService::default(), at(0))
                    .expect("a place")
                    .id
            })
            .collect();
        for (nth, id) in ids.into_iter().take(6).enumerate() {
            line.admit(id, at(1_000 * (nth as u64 + 1)));
        }
        line
    };
    let service =
        PredictedService { first_token: Duration::from_millis(500), token_gap: Duration::from_millis(30) };
    for (what, tenant, slo, expected) in [
        ("no objective", "a", "ttft=100s", None),
        ("behind 300 tokens of its own tenant", "a", "ttft=2s", Some(("late_first_token", 2..4))),
        ("another tenant waits for one turn", "b", "ttft=3s", None),
        ("and not less", "b", "ttft=2s", Some(("late_first_token", 1..2))),
        ("slow tokens", "a", "tbt=20ms", Some(("late_tokens", 2..4))),
        ("fast enough tokens", "a", "tbt=30ms", None),
    ] {
        let mut prompt = of_tenant(tenant, 0, 100, at(6_000));
        prompt.terms.objective = objective(slo);
        let refusal = busy().enter(prompt, service, at(6_000)).err();
        let found = refusal.as_ref().map(|refusal| refusal.reason.as_str());
        assert_eq!(found, expected.as_ref().map(|(reason, _)| *reason), "{what}: {refusal:?}");
        if let (Some(refusal), Some((_, seconds))) = (refusal, expected) {
            assert!(seconds.contains(&refusal.retry_after.as_secs()), "{what}: {refusal:?}");
        }
    }
}

#[test]
fn a_ticket_leaves_when_its_objective_is_lost_or_after_the_longest_wait() {
    let start = Instant::now();
    let service = PredictedService { first_token: Duration::from_millis(500), token_gap: Duration::ZERO };
    let first_token = |first_token| Objective { first_token: Some(first_token), token_gap: None };
    for (objective, leaves_after, reason) in [
        (first_token(Duration::from_secs(2)), Duration::from_millis(1_500), "late_first_token"),
        (first_token(Duration::MAX), WAIT_MAX, "waited"),
        (Objective { first_token: None, token_gap: Some(Duration::from_secs(1)) }, WAIT_MAX, "waited"),
    ] {
        let mut line = line(10);
        let mut prompt = of_tenant("a", 0, 10, start);
        prompt.terms.objective = objective;
        let Entered { id, leaves_at, .. } = line.enter(prompt, service, start).expect("a place");
        assert_eq!(leaves_at, start + leaves_after);
        assert_eq!(line.timed_out(id, leaves_at).expect("it waits").reason.as_str(), reason);
        line.admit(id, leaves_at);
        assert_eq!(line.timed_out(id, leaves_at), None, "it was admitted in time");
    }
}

/// An event in a line.
#[derive(Clone, Debug)]
enum Action {
    Enter {
        tenant: u8,
        priority: i8,
        work: u64,
        sheddable: bool,
    },
    Admit,
    /// Drops the nth ticket that is inside.
    Leave(usize),
    Wait(u64),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        4 => (0u8..4, -1i8..2, 1u64..50_000, any::<bool>())
            .prop_map(|(tenant, priority, work, sheddable)| Action::Enter { tenant, priority, work, sheddable }),
        3 => Just(Action::Admit),
        2 => (0usize..64).prop_map(Action::Leave),
        1 => (1u64..5_000).prop_map(Action::Wait),
    ]
}

proptest! {
    /// No ticket is lost, none is admitted twice, and the line always serves one that waits.
    #[test]
    fn every_ticket_is_served_refused_or_left_once(actions in proptest::collection::vec(action(), 1..300)) {
        let (mut line, mut now) = (line(16), Instant::now());
        let (mut waiting, mut served) = (Vec::new(), Vec::new());
        for action in actions {
            match action {
                Action::Enter { tenant, priority, work, sheddable } => {
                    let mut prompt = of_tenant(&tenant.to_string(), priority, work, now);
                    prompt.terms.shedding = if sheddable { Shedding::First } else { Shedding::Last };
                    if let Ok(Entered { id, displaced, .. }) = line.enter(prompt, PredictedService::default(), now) {
                        waiting.push(id);
                        let displaced = displaced.map(|(id, _)| id);
                        prop_assert!(displaced.is_none_or(|id| waiting.contains(&id)));
                        waiting.retain(|id| Some(*id) != displaced);
                    }
                }
                Action::Admit => {
                    let next = line.next(now);
                    prop_assert_eq!(next.is_some(), !waiting.is_empty());
                    if let Some(id) = next {
                        prop_assert!(waiting.contains(&id) && !served.contains(&id));
                        prop_assert!(line.admit(id, now).is_some());
                        waiting.retain(|other| *other != id);
                        served.push(id);
                    }
                }
                Action::Leave(nth) => {
                    let inside: Vec<TicketId> = waiting.iter().chain(&served).copied().collect();
                    if let Some(id) = inside.get(nth % inside.len().max(1)).copied() {
                        line.remove(id, now);
                        waiting.retain(|other| *other != id);
                        served.retain(|other| *other != id);
                    }
                }
                Action::Wait(ms) => now += Duration::from_millis(ms),
            }
            prop_assert_eq!((line.n_waiting(), line.n_served()), (waiting.len(), served.len()));
            prop_assert_eq!(line.integrity(), Ok(()));
        }
    }

    /// The n-th oldest ticket is served at the latest n × 16 admissions after it has aged, whatever comes meanwhile.
    #[test]
    fn no_ticket_starves(older in 0usize..6, works in proptest::collection::vec(1u64..20_000, 200)) {
        let (mut line, start) = (line(1_000), Instant::now());
        let enter = |line: &mut Line, tenant: &str, priority, work| {
            line.enter(of_tenant(tenant, priority, work, start), PredictedService::default(), start).expect("a place").id
        };
        for _ in 0..older {
            enter(&mut line, "a", 0, 5_000);
        }
        let last = enter(&mut line, "a", 0, 5_000);
        let now = start + WAIT_MAX / 4;
        for (n_admitted, work) in (1..).zip(works) {
            enter(&mut line, "b", 5, work);
            let id = line.next(now).expect("tickets wait");
            line.admit(id, now);
            if id == last {
                return Ok(());
            }
            prop_assert!(n_admitted < (older + 1) * AGED_EVERY as usize, "the ticket still waits after {} admissions", n_admitted);
        }
    }
}

mod overload;
