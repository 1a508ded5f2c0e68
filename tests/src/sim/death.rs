//! The death of a node during a change of its role.
//!
//! A plan cannot say when a change begins and ends, nor which node a router moves. So it draws which change it is, and how
//! long after its begin the node dies.

use std::time::Duration;

use tokio::time::Instant;

use super::net::Crash;

/// The plan of a death.
#[derive(Clone, Copy, Debug)]
pub struct DeathInChange {
    /// The number of changes before.
    pub n_changes_before: u32,
    /// The time from the begin of the change to the death. If the change ends earlier, the node of a later one dies.
    pub after: Duration,
    pub how: Crash,
    /// The time from the death to the start of the next process.
    pub down: Duration,
}

/// The next event of a node that dies.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum DeathStep {
    Dies(String, Crash),
    StartsAgain(String),
}

/// Follows the changes of roles of a run until one node has died and was started again.
#[derive(Debug)]
pub struct DeathWatch {
    plan: DeathInChange,
    n_changes: u32,
    /// The node that changes its role, and since when.
    changing: Option<(String, Instant)>,
    /// The node that has died, and the time of its next start.
    dead: Option<(String, Instant)>,
    /// The node that has died.
    victim: Option<String>,
}

impl DeathWatch {
    pub fn new(plan: DeathInChange) -> Self {
        Self { plan, n_changes: 0, changing: None, dead: None, victim: None }
    }

    /// Returns the node that has died during its change.
    pub fn victim(&self) -> Option<&str> {
        self.victim.as_deref()
    }

    /// Takes the node that changes its role now, and returns what happens.
    pub fn look(&mut self, changing: Option<String>, now: Instant) -> Option<DeathStep> {
        if self.victim.is_some() {
            let (node, _) = self.dead.take_if(|(_, until)| *until <= now)?;
            return Some(DeathStep::StartsAgain(node));
        }
        if self.changing.as_ref().map(|(node, _)| node) != changing.as_ref() {
            self.n_changes += u32::from(self.changing.is_some());
            self.changing = changing.map(|node| (node, now));
        }
        let is_due = |(_, since): &mut (String, Instant)| {
            self.n_changes >= self.plan.n_changes_before && now >= *since + self.plan.after
        };
        let (node, _) = self.changing.take_if(is_due)?;
        self.dead = Some((node.clone(), now + self.plan.down));
        self.victim = Some(node.clone());
        Some(DeathStep::Dies(node, self.plan.how))
    }
}
