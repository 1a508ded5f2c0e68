//! Delays a predicted move until the prediction was the same for the configured time, and pauses after every
//! change of roles.

use std::collections::BTreeMap;

use tokio::time::Instant;
use types::{NodeId, Role};

use super::BalanceSettings;
use super::prediction::Move;

/// For how long the same kind of move was predicted without a gap.
#[derive(Debug)]
pub(super) struct MoveDelay {
    settings: BalanceSettings,
    roles: BTreeMap<NodeId, Role>,
    quiet_until: Instant,
    /// The role that nodes are wanted in, and since when.
    wanted: Option<(Role, Instant)>,
}

impl MoveDelay {
    pub(super) fn new(settings: BalanceSettings, now: Instant) -> Self {
        Self { settings, roles: BTreeMap::new(), quiet_until: now, wanted: None }
    }

    /// Begins a pause.
    pub(super) fn pause(&mut self, now: Instant) {
        self.quiet_until = now + self.settings.pause;
        self.wanted = None;
    }

    /// Returns the move if it is due. `roles` are those of all nodes of the model: another router or an operator may
    /// change them too.
    pub(super) fn due(
        &mut self,
        roles: BTreeMap<NodeId, Role>,
        predicted: Option<Move>,
        now: Instant,
    ) -> Option<Move> {
        if roles != self.roles {
            self.roles = roles;
            self.pause(now);
        }
        let Some(wanted) = predicted else {
            self.wanted = None;
            return None;
        };
        let since = match self.wanted {
            Some((role, since)) if role == wanted.to => since,
            _ => now,
        };
        self.wanted = Some((wanted.to, since));
        (now >= since + self.settings.window && now >= self.quiet_until).then_some(wanted)
    }
}
