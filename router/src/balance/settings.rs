//! The settings of the controller that moves nodes between roles.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::config::{UnknownChoice, unknown};

/// The shortest time over which demand is measured: one look at the cluster.
const FOR_MS_MIN: u64 = super::LOOK_EVERY.as_millis() as u64;

/// Moving nodes between prefill and decode (docs/operating.md).
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct BalanceSection {
    /// Moves nodes between prefill and decode with the demand, as in docs/operating.md.
    pub enabled: bool,
    /// How much higher the present load must be than that of another ratio: 0.25 is 1.25 times.
    pub margin: f64,
    /// The time over which demand is measured, and for which a prediction must stand.
    pub for_ms: u64,
    /// The time without moves after any change of nodes or roles.
    pub pause_ms: u64,
}

impl Default for BalanceSection {
    fn default() -> Self {
        Self { enabled: false, margin: 0.25, for_ms: 10_000, pause_ms: 10_000 }
    }
}

/// The checked settings of the controller.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct BalanceSettings {
    pub margin: f64,
    /// The time over which the demand is measured, and for which a prediction must stand.
    pub window: Duration,
    pub pause: Duration,
}

impl BalanceSection {
    /// Checks the section. Returns `None` if nodes are not moved.
    pub(crate) fn resolve(self) -> Result<Option<BalanceSettings>, UnknownChoice> {
        let Self { enabled, margin, for_ms, pause_ms } = self;
        if !(0.0..=10.0).contains(&margin) {
            return Err(unknown("balance.margin", margin.to_string(), &["a number from 0 to 10"]));
        }
        if for_ms < FOR_MS_MIN {
            return Err(unknown("balance.for_ms", for_ms.to_string(), &["500 or more"]));
        }
        let (window, pause) = (Duration::from_millis(for_ms), Duration::from_millis(pause_ms));
        Ok(enabled.then_some(BalanceSettings { margin, window, pause }))
    }
}
