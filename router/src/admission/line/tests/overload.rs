//! Overload in virtual time: a cluster with room for some prompts at a time, and more arrivals than it serves.

use std::collections::BinaryHeap;

use super::*;

/// The number of prompts that the cluster serves at one time.
const ROOMS: usize = 16;
/// The time for which a prompt has its room.
const SERVED_FOR: Duration = Duration::from_millis(640);
/// The time from the admission to the first token.
const FIRST_TOKEN: Duration = Duration::from_millis(200);
/// The prompts per second that the cluster serves.
const CAPACITY: f64 = ROOMS as f64 / 0.64;
const OBJECTIVE: Duration = Duration::from_secs(2);
const WORK: u64 = 8_192;

/// The arrivals of one tenant.
#[derive(Clone, Copy)]
struct Load {
    tenant: &'static str,
    per_second: f64,
    /// Whether refused clients come back at once, and again and again.
    storms: bool,
}

/// The results of one tenant's prompts.
#[derive(Clone, Debug, Default)]
struct Served {
    n_arrived: usize,
    n_served: usize,
    n_in_time: usize,
    first_tokens: Vec<Duration>,
}

impl Served {
    fn p99(&self) -> Duration {
        let mut sorted = self.first_tokens.clone();
        sorted.sort();
        sorted[sorted.len() * 99 / 100]
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
enum Event {
    Arrive { load: usize, is_retry: bool },
    GiveUp(TicketId),
    End(TicketId),
}

/// The interval at which a stormy client comes back.
const STORM_EVERY: Duration = Duration::from_millis(50);
/// The number of times that it comes back.
const STORM_RETRIES: usize = 5;

struct Cluster {
    line: Line,
    start: Instant,
    /// Events by time, the earliest first.
    events: BinaryHeap<Reverse<(Duration, u64, Event)>>,
    n_events: u64,
    n_free: usize,
    draws: u64,
    loads: Vec<Load>,
    served: Vec<Served>,
    inside: HashMap<TicketId, (usize, Duration)>,
    objective: Objective,
}

impl Cluster {
    fn new(loads: &[Load], objective: Objective) -> Self {
        let mut cluster = Self {
            line: Line::new(LineBounds { requests_max: 4096, wait_max: Duration::from_secs(60) }),
            start: Instant::now(),
            events: BinaryHeap::new(),
            n_events: 0,
            n_free: ROOMS,
            draws: 88172645463325252,
            loads: loads.to_vec(),
            served: vec![Served::default(); loads.len()],
            inside: HashMap::new(),
            objective,
        };
        (0..loads.len()).for_each(|load| cluster.at(Duration::ZERO, Event::Arrive { load, is_retry: false }));
        cluster
    }

    fn at(&mut self, time: Duration, event: Event) {
        self.n_events += 1;
        self.events.push(Reverse((time, self.n_events, event)));
    }

    /// Draws an exponential pause.
    fn pause(&mut self, per_second: f64) -> Duration {
        self.draws ^= self.draws << 13;
        self.draws ^= self.draws >> 7;
        self.draws ^= self.draws << 17;
        let share = (self.draws >> 11) as f64 / (1u64 << 53) as f64;
        Duration::from_secs_f64(-(1.0 - share).ln() / per_second)
    }

    fn run(mut self, seconds: u64) -> Vec<Served> {
        let end = Duration::from_secs(seconds);
        while let Some(Reverse((time, _, event))) = self.events.pop() {
            if time > end {
                break;
            }
            match event {
                Event::Arrive { load, is_retry } => self.arrive(load, is_retry, time),
                Event::GiveUp(id) => {
                    if let Some(refusal) = self.line.timed_out(id, self.start + time) {
                        assert_eq!(refusal.reason, RefusalReason::LateFirstToken);
                        self.line.remove(id, self.start + time);
                        self.inside.remove(&id);
                    }
                }
                Event::End(id) => {
                    self.line.remove(id, self.start + time);
                    self.n_free += 1;
                }
            }
            self.admit(time);
        }
        self.line.integrity().expect("each ticket is in one state");
        self.served
    }

    fn arrive(&mut self, load: usize, is_retry: bool, time: Duration) {
        let Load { tenant, per_second, storms } = self.loads[load];
        if !is_retry {
            self.served[load].n_arrived += 1;
            let pause = self.pause(per_second);
            self.at(time + pause, Event::Arrive { load, is_retry: false });
        }
        let now = self.start + time;
        let mut prompt = of_tenant(tenant, 0, WORK, now);
        prompt.terms.objective = self.objective;
        let service = PredictedService { first_token: FIRST_TOKEN, token_gap: Duration::ZERO };
        match self.line.enter(prompt, service, now) {
            Ok(Entered { id, leaves_at, displaced, .. }) => {
                self.inside.insert(id, (load, time));
                self.at(leaves_at - self.start, Event::GiveUp(id));
                if let Some((displaced, _)) = displaced {
                    self.inside.remove(&displaced);
                }
            }
            Err(_) if storms && !is_retry => {
                let retries = 1..=STORM_RETRIES as u32;
                retries.for_each(|nth| {
                    self.at(time + STORM_EVERY * nth, Event::Arrive { load, is_retry: true })
                });
            }
            Err(_) => {}
        }
    }

    fn admit(&mut self, time: Duration) {
        let now = self.start + time;
        let service = PredictedService { first_token: FIRST_TOKEN, token_gap: Duration::ZERO };
        while self.n_free > 0
            && let Some(id) = self.line.next(now)
        {
            let (load, arrived) = self.inside.remove(&id).expect("it waits");
            if self.line.check_again(id, service, now).is_err() {
                self.line.remove(id, now);
                continue;
            }
            self.line.admit(id, now);
            self.n_free -= 1;
            // Service takes up to a fifth longer or shorter than usual.
            let factor = 0.8 + self.pause(1.0).as_secs_f64().min(2.0) * 0.2;
            let first_token = time - arrived + FIRST_TOKEN.mul_f64(factor);
            let served = &mut self.served[load];
            served.n_served += 1;
            served.n_in_time += usize::from(first_token <= OBJECTIVE);
            served.first_tokens.push(first_token);
            self.at(time + SERVED_FOR.mul_f64(factor), Event::End(id));
        }
    }
}

fn objective() -> Objective {
    Objective { first_token: Some(OBJECTIVE), token_gap: None }
}

fn load(per_second: f64, storms: bool) -> Load {
    Load { tenant: "a", per_second, storms }
}

#[test]
fn under_overload_first_tokens_are_in_time_and_goodput_stays() {
    let seconds = 120;
    let run = |share: f64, storms| {
        let served = Cluster::new(&[load(CAPACITY * share, storms)], objective()).run(seconds);
        let [served] = <[Served; 1]>::try_from(served).expect("one tenant");
        (served.n_in_time as f64 / seconds as f64, served.p99())
    };
    let at_rates = [0.8, 0.9, 1.0, 1.2, 1.5, 2.0].map(|share| run(share, false).0);
    let peak = at_rates.into_iter().fold(0.0, f64::max);
    for storms in [false, true] {
        let (goodput, p99) = run(3.0, storms);
        eprintln!(
            "3 x load, storm {storms}: goodput {goodput:.1}/s of {peak:.1}/s, p99 of first tokens {p99:?}"
        );
        assert!(goodput >= 0.95 * peak, "goodput {goodput} of a peak of {peak}, with a storm: {storms}");
        assert!(p99 <= OBJECTIVE.mul_f64(1.2), "p99 {p99:?}, with a storm: {storms}");
    }
}

#[test]
fn a_tenant_keeps_its_share_beside_another_with_a_hundred_times_its_load() {
    for (what, objective) in [("with an objective", objective()), ("without", Objective::default())] {
        for share in [0.2, 0.5] {
            let loads = [("light", share), ("heavy", 100.0 * share)].map(|(tenant, share)| Load {
                tenant,
                per_second: CAPACITY * share,
                storms: true,
            });
            let [light, heavy] =
                <[Served; 2]>::try_from(Cluster::new(&loads, objective).run(24)).expect("two tenants");
            let fair = (light.n_arrived as f64).min(CAPACITY * 24.0 / 2.0);
            let got = light.n_served as f64 / fair;
            eprintln!(
                "{what}, {share}: {got:.3} of its share, {} and {} served",
                light.n_served, heavy.n_served
            );
            assert!(got >= 0.9, "{what}: {got} of its fair share of {fair}: {}", light.n_served);
        }
    }
}

#[test]
fn weights_divide_the_service() {
    let tenants = [("a", 1u32), ("b", 3)];
    let mut named = NamedLine::new(4096);
    for nth in 0..200 {
        for (tenant, weight) in tenants {
            let mut prompt = of_tenant(tenant, 0, 100 + (nth * 977) % 9_000, named.now);
            prompt.terms.weight = TenantWeight(weight.try_into().expect("a weight"));
            named.enter(tenant, prompt);
        }
    }
    let served = named.serve(200);
    let n_b = served.split(' ').filter(|name| *name == "b").count();
    assert!((143..=157).contains(&n_b), "b has three quarters of the weight, and {n_b} of 200 admissions");
}
