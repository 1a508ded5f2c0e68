//! The costs that a router has learned from its own requests: the connectors' rates, and the time of calls.
//!
//! Every value is a decaying mean within bounds, so that one request with a fault changes little.

use types::{NodeInfo, Scheme};

use super::Arm;

/// The weight of a new value.
const NEWS: f64 = 0.05;
/// The weight of a rate that is higher than the known one. A transfer may wait for the computation, so a low rate says
/// little.
const FASTER_NEWS: f64 = 0.3;

/// The smallest transfer whose rate is learned. The time of a smaller one is that of messages.
const RATE_BYTES_MIN: u64 = 1 << 20;

/// The bounds of learned values. A value beyond them is cut.
const RATE_BYTES_PER_MS: std::ops::RangeInclusive<f64> = 1e2..=1e9;
const TAIL_MS_MAX: f64 = 1_000.0;
const CALLS_MS_MAX: f64 = 100.0;

/// The rate that a connector without transfers is expected to have, so that it is tried: 25 GB/s.
const RATE_AT_FIRST: f64 = 25e6;

/// The largest number of connectors. A name beyond them is not learned.
const CONNECTORS_MAX: usize = 16;

/// Learned costs. Policies read a version of them that does not change.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct RouteCosts {
    connectors: Vec<(Scheme, ConnectorCosts)>,
    remote_calls: CallTime,
    local_calls: CallTime,
}

/// The costs of KV transfers over one connector.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ConnectorCosts {
    /// Bytes per millisecond while bytes flow.
    pub rate: f64,
    /// The time that is left after the computation of a prompt that hides its transfer: the last layers, and the
    /// message that they have arrived.
    pub tail_ms: f64,
    /// The number of transfers learned from.
    pub n_transfers: u64,
    /// The number of those that have changed the rate.
    pub n_rates: u64,
}

/// The time of the calls of one arm: the measured time to the first token, less the time that nodes report.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct CallTime {
    pub ms: f64,
    pub n_requests: u64,
}

/// One transfer of KV.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct SeenTransfer {
    pub bytes: u64,
    /// The time from the first byte to the last.
    pub moved_ms: f64,
    /// The time for which the sender computed.
    pub computed_ms: f64,
    /// The time from the first token to the arrival of all KV.
    pub tail_ms: f64,
}

impl Default for ConnectorCosts {
    fn default() -> Self {
        Self { rate: RATE_AT_FIRST, tail_ms: 0.0, n_transfers: 0, n_rates: 0 }
    }
}

impl ConnectorCosts {
    /// Returns the predicted part of a transfer that the computation does not hide.
    pub fn unhidden_ms(&self, bytes: u64, computed_ms: f64) -> f64 {
        self.tail_ms + (bytes as f64 / self.rate - computed_ms).max(0.0)
    }

    fn learn(&mut self, seen: SeenTransfer) {
        let rate = seen.bytes as f64 / seen.moved_ms.max(1e-3);
        let rate = rate.clamp(*RATE_BYTES_PER_MS.start(), *RATE_BYTES_PER_MS.end());
        let is_transfer_bound = seen.moved_ms > 2.0 * seen.computed_ms;
        if seen.bytes >= RATE_BYTES_MIN {
            let news = match (rate > self.rate, is_transfer_bound) {
                (_, true) if self.n_rates == 0 => 1.0,
                (true, _) => FASTER_NEWS,
                (false, true) => NEWS,
                (false, false) => 0.0,
            };
            self.rate += news * (rate - self.rate);
            self.n_rates += u64::from(news > 0.0);
        }
        let tail = (seen.tail_ms - (self.unhidden_ms(seen.bytes, seen.computed_ms) - self.tail_ms)).max(0.0);
        let news = if self.n_transfers == 0 { 1.0 } else { NEWS };
        self.tail_ms += news * (tail.min(TAIL_MS_MAX) - self.tail_ms);
        self.n_transfers += 1;
    }
}

impl CallTime {
    fn learn(&mut self, ms: f64) {
        let news = if self.n_requests == 0 { 1.0 } else { NEWS };
        self.ms += news * (ms.clamp(0.0, CALLS_MS_MAX) - self.ms);
        self.n_requests += 1;
    }
}

impl RouteCosts {
    /// Returns the costs of transfers between these nodes.
    pub fn between(&self, from: &NodeInfo, to: &NodeInfo) -> ConnectorCosts {
        let shared = to.wires.iter().find(|wire| {
            let is_reachable = !wire.within_host || from.host == to.host;
            is_reachable && from.wires.iter().any(|other| other.scheme == wire.scheme)
        });
        shared.and_then(|wire| self.of(&wire.scheme)).unwrap_or_default()
    }

    /// Returns the time of calls; zero while unknown. Held KV is delivered without a prompt's computation.
    pub fn calls(&self, arm: Arm) -> CallTime {
        match arm {
            Arm::Remote => self.remote_calls,
            Arm::Local => self.local_calls,
            Arm::Held => CallTime::default(),
        }
    }

    pub fn connectors(&self) -> impl Iterator<Item = &(Scheme, ConnectorCosts)> {
        self.connectors.iter()
    }

    fn of(&self, scheme: &Scheme) -> Option<ConnectorCosts> {
        self.connectors.iter().find(|(known, _)| known == scheme).map(|(_, costs)| *costs)
    }

    pub fn learn_calls(&mut self, arm: Arm, ms: f64) {
        match arm {
            Arm::Remote => self.remote_calls.learn(ms),
            Arm::Local => self.local_calls.learn(ms),
            Arm::Held => {}
        }
    }

    pub fn learn_transfer(&mut self, scheme: &Scheme, seen: SeenTransfer) {
        if let Some((_, costs)) = self.connectors.iter_mut().find(|(known, _)| known == scheme) {
            costs.learn(seen);
        } else if self.connectors.len() < CONNECTORS_MAX {
            let mut costs = ConnectorCosts::default();
            costs.learn(seen);
            self.connectors.push((scheme.clone(), costs));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn seen(bytes: u64, moved_ms: f64, computed_ms: f64, tail_ms: f64) -> SeenTransfer {
        SeenTransfer { bytes, moved_ms, computed_ms, tail_ms }
    }

    /// Returns the costs learned from these transfers, each repeated by its number.
    fn learned(transfers: &[(SeenTransfer, usize)]) -> ConnectorCosts {
        let (mut costs, tcp) = (RouteCosts::default(), Scheme::new("tcp"));
        for (one, times) in transfers {
            (0..*times).for_each(|_| costs.learn_transfer(&tcp, *one));
        }
        costs.of(&tcp).expect("learned")
    }

    #[test]
    fn rates_come_from_transfers_that_wait_for_no_computation() {
        let of = |moved_ms, computed_ms, tail_ms| seen(2_000_000, moved_ms, computed_ms, tail_ms);
        let (usual, hidden) = (of(100.0, 10.0, 91.0), of(500.0, 500.0, 1.0));
        for (what, transfers, rate, tail) in [
            ("the first transfer counts fully", vec![(usual, 1)], 2e4, 1.0),
            ("it stays", vec![(usual, 50)], 2e4, 1.0),
            ("a hidden transfer changes no rate", vec![(usual, 1), (hidden, 50)], 2e4, 1.0),
            ("a slower link is learned", vec![(usual, 1), (of(200.0, 0.0, 201.0), 200)], 1e4, 1.0),
            ("a faster one sooner", vec![(usual, 1), (of(10.0, 10.0, 1.0), 20)], 2e5, 1.0),
            ("messages have no rate", vec![(usual, 1), (seen(9_000, 3.0, 0.0, 1.0), 90)], 2e4, 1.0),
        ] {
            let costs = learned(&transfers);
            assert!((costs.rate / rate - 1.0).abs() < 0.01, "{what}: {costs:?}");
            assert!((costs.tail_ms - tail).abs() < 1.0, "{what}: {costs:?}");
        }
    }

    #[test]
    fn values_are_bounded() {
        let wild = learned(&[(seen(2 << 20, 1e12, 0.0, 1e12), 9), (seen(u64::MAX, 0.0, 0.0, 1e12), 200)]);
        assert!(RATE_BYTES_PER_MS.contains(&wild.rate) && wild.tail_ms <= TAIL_MS_MAX, "{wild:?}");
        let mut costs = RouteCosts::default();
        (0..100)
            .for_each(|nth| costs.learn_transfer(&Scheme::new(format!("s{nth}")), seen(1, 1.0, 0.0, 0.0)));
        assert_eq!(costs.connectors().count(), CONNECTORS_MAX);
        for ms in [-5.0, 1e9] {
            costs.learn_calls(Arm::Local, ms);
        }
        assert!((0.0..=CALLS_MS_MAX).contains(&costs.calls(Arm::Local).ms));
        assert_eq!(costs.calls(Arm::Remote), CallTime::default());
    }

    #[test]
    fn a_transfer_costs_what_the_computation_does_not_hide() {
        let costs = ConnectorCosts { rate: 1e3, tail_ms: 2.0, ..ConnectorCosts::default() };
        for (bytes, computed_ms, expected) in [(0, 0.0, 2.0), (50_000, 100.0, 2.0), (50_000, 20.0, 32.0)] {
            assert_eq!(costs.unhidden_ms(bytes, computed_ms), expected);
        }
    }
}
