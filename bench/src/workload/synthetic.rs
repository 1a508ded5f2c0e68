//! Drawn workloads: random prompts, groups that share a prefix, and conversations.

use std::time::Duration;

use crate::random::{Random, mix};
use crate::workload::lengths::Lengths;
use crate::workload::prompt::{Recipe, Segment};
use crate::workload::session::{Session, Sessions, Turn};

/// The first seed of the segments that belong to one session alone, apart from the seeds of shared segments.
const OWN: u64 = 1 << 62;

/// The settings of a workload of random token ids.
#[derive(Clone, Debug)]
pub struct Synthetic {
    /// The number of new tokens in each turn, without the shared prefix.
    pub input: Lengths,
    pub output: Lengths,
    /// The number of groups whose sessions share their first `prefix_tokens`; 0 for none.
    pub n_groups: u64,
    pub prefix_tokens: u32,
    pub n_turns: u32,
    /// The mean of the exponential wait between turns.
    pub think: Duration,
    pub seed: u64,
}

impl Synthetic {
    /// Returns an endless supply of sessions.
    pub fn sessions(self) -> Sessions {
        let mut random = Random::stream(self.seed, 0x1e46);
        Box::new((0u64..).map(move |ordinal| self.session(ordinal, &mut random)))
    }

    fn session(&self, ordinal: u64, random: &mut Random) -> Session {
        let prefix = self.prefix(random);
        let turns = (0..self.n_turns).map(|nth| {
            let own =
                Segment { seed: OWN | mix(ordinal, u64::from(nth)) >> 2, n_tokens: self.input.draw(random) };
            let segments = if nth == 0 { prefix.into_iter().chain([own]).collect() } else { vec![own] };
            let output_tokens = self.output.draw(random);
            let think = Duration::from_secs_f64(random.exponential(self.think.as_secs_f64()));
            Turn { recipe: Recipe::Drawn(segments), output_tokens, think, cancel_after: None }
        });
        Session { starts: None, turns: turns.collect() }
    }

    fn prefix(&self, random: &mut Random) -> Option<Segment> {
        let has_one = self.n_groups > 0 && self.prefix_tokens > 0;
        has_one.then(|| Segment { seed: random.below(self.n_groups), n_tokens: self.prefix_tokens })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn drawn(n_groups: u64, n_turns: u32) -> Vec<Session> {
        let synthetic = Synthetic {
            input: Lengths::Uniform(10, 20),
            output: Lengths::Fixed(5),
            n_groups,
            prefix_tokens: 64,
            n_turns,
            think: Duration::from_secs(2),
            seed: 9,
        };
        synthetic.sessions().take(300).collect()
    }

    fn segments(turn: &Turn) -> &[Segment] {
        match &turn.recipe {
            Recipe::Drawn(segments) => segments,
            Recipe::Text(_) => panic!("drawn workloads have no text"),
        }
    }

    #[test]
    fn a_seed_repeats_the_sessions() {
        assert_eq!(drawn(4, 2), drawn(4, 2));
    }

    #[test]
    fn groups_share_their_prefix_and_nothing_else() {
        let sessions = drawn(4, 1);
        let mut prefixes: Vec<_> =
            sessions.iter().map(|session| segments(&session.turns[0])[0].seed).collect();
        let mut own: Vec<_> = sessions.iter().map(|session| segments(&session.turns[0])[1].seed).collect();
        for seeds in [&mut prefixes, &mut own] {
            seeds.sort_unstable();
            seeds.dedup();
        }
        assert_eq!((prefixes, own.len()), (vec![0, 1, 2, 3], 300));
    }

    #[test]
    fn only_the_first_turn_has_the_prefix() {
        let session = &drawn(1, 3)[0];
        let n_segments: Vec<_> = session.turns.iter().map(|turn| segments(turn).len()).collect();
        assert_eq!(n_segments, [2, 1, 1]);
    }

    #[test]
    fn without_groups_there_is_no_prefix() {
        assert_eq!(segments(&drawn(0, 1)[0].turns[0]).len(), 1);
    }
}
