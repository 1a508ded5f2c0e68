//! The parts of a request's time. They are finer than its places, and nodes' reports divide some of them.

use std::time::Duration;

macro_rules! parts {
    ($($name:ident = $word:literal, $meaning:literal;)*) => {
        /// A part of a request's time. Every moment belongs to exactly one part, so the parts add up.
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        pub enum Part { $(#[doc = $meaning] $name,)* }

        impl Part {
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            pub fn as_str(self) -> &'static str {
                match self { $(Self::$name => $word,)* }
            }

            /// Returns the part's description in `docs/api.md`.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$name => $meaning,)* }
            }
        }
    };
}

parts! {
    Read = "read", "The router reads the body.";
    Tokenize = "tokenize", "The router parses and tokenizes.";
    FirstAnswer = "first_answer", "With `n`, a further answer waits for the first one's prompt.";
    Admission = "admission", "The request waits in its model's line.";
    Route = "route", "The router chooses nodes, or waits for a usable one.";
    Reserve = "reserve", "The decode node reserves KV room. A full pool shows here.";
    Store = "store", "A pool node reserves room and takes the KV.";
    Room = "room", "The prompt waits for KV room on the node that computes it.";
    PrefillQueue = "prefill_queue", "The prompt with room waits for its first step.";
    PrefillCompute = "prefill_compute", "The node computes the prompt.";
    PrefillCall = "prefill_call", "The rest of the call that computes the prompt: the network, and failed calls.";
    Transfer = "transfer", "The answer waits for KV; hidden transfer time is not counted.";
    DecodeWait = "decode_wait", "The KV waits for the first decode step.";
    FirstStep = "first_step", "The first decode step.";
    Decode = "decode", "Further steps on the decode node.";
    Client = "client", "Tokens become text and are written to the client.";
}

/// The time in each part.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct PartTimes([Duration; Part::ALL.len()]);

impl PartTimes {
    pub fn of(&self, part: Part) -> Duration {
        self.0[part as usize]
    }

    pub fn add(&mut self, part: Part, took: Duration) {
        self.0[part as usize] += took;
    }

    pub fn sum(&self) -> Duration {
        self.0.iter().sum()
    }

    /// Returns the parts with any time, in the order of a request.
    pub fn shown(&self) -> impl Iterator<Item = (Part, Duration)> + '_ {
        Part::ALL.iter().map(|part| (*part, self.of(*part))).filter(|(_, took)| !took.is_zero())
    }

    /// Returns the part with the most time; `None` if no part has any.
    pub fn largest(&self) -> Option<Part> {
        self.shown().max_by_key(|(_, took)| *took).map(|(part, _)| part)
    }

    /// Returns the times since `before`, an earlier state of the same request.
    #[must_use]
    pub fn since(&self, before: &Self) -> Self {
        let mut times = *self;
        for (own, earlier) in times.0.iter_mut().zip(before.0) {
            *own = own.saturating_sub(earlier);
        }
        times
    }
}

/// Divides the time that the router measures by a node's report about it. The node's clock may run
/// differently, and a report may cover time that passed before; so each piece is cut to the remaining time,
/// the last piece first.
///
/// Returns the pieces as they count, and the rest.
pub(super) fn divide(seen: Duration, reported: &[(Part, Duration)]) -> (Vec<(Part, Duration)>, Duration) {
    let mut left = seen;
    let mut pieces = Vec::with_capacity(reported.len());
    for (part, took) in reported.iter().rev() {
        let counts = (*took).min(left);
        left -= counts;
        pieces.push((*part, counts));
    }
    (pieces, left)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn ms(ms: u64) -> Duration {
        Duration::from_millis(ms)
    }

    #[test]
    fn the_last_piece_counts_first() {
        let reported = [(Part::Room, ms(5)), (Part::PrefillQueue, ms(10)), (Part::PrefillCompute, ms(20))];
        for (seen, expected, rest) in
            [(40, [20, 10, 5], 5), (35, [20, 10, 5], 0), (33, [20, 10, 3], 0), (12, [12, 0, 0], 0)]
        {
            let (pieces, left) = divide(ms(seen), &reported);
            let found: Vec<Duration> = pieces.iter().map(|(_, took)| *took).collect();
            assert_eq!((found, left), (expected.map(ms).to_vec(), ms(rest)), "{seen} ms");
        }
    }

    #[test]
    fn the_largest_part_is_named() {
        let mut times = PartTimes::default();
        assert_eq!(times.largest(), None);
        times.add(Part::Reserve, ms(3));
        let before = times;
        times.add(Part::Transfer, ms(4));
        assert_eq!(times.largest(), Some(Part::Transfer));
        assert_eq!(times.since(&before).shown().collect::<Vec<_>>(), [(Part::Transfer, ms(4))]);
        assert_eq!(times.sum(), ms(7));
    }

    #[test]
    fn the_page_lists_every_part() {
        let row = |part: &Part| format!("| `{}` | {} |\n", part.as_str(), part.meaning());
        let table: String = Part::ALL.iter().map(row).collect();
        let page = include_str!("../../../docs/api.md");
        assert!(page.contains(&table), "put this table into docs/api.md:\n{table}");
    }

    proptest! {
        #[test]
        fn nothing_is_lost_or_added(seen in 0u64..1_000, reports in proptest::collection::vec(0u64..1_000, 0..4)) {
            let reported: Vec<(Part, Duration)> =
                Part::ALL.iter().copied().zip(reports.into_iter().map(ms)).collect();
            let (pieces, left) = divide(ms(seen), &reported);
            prop_assert_eq!(pieces.iter().map(|(_, took)| *took).sum::<Duration>() + left, ms(seen));
        }
    }
}
