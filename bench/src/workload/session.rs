//! One conversation as planned: turns that follow each other. Most have one.

use std::time::Duration;

use crate::workload::prompt::Recipe;

/// Turns in order. A turn is sent when the one before it has ended and its `think` time is over.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// When a trace says that it starts, since the trace's beginning; `None` leaves that to the arrivals.
    pub starts: Option<Duration>,
    pub turns: Vec<Turn>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// What this turn adds to the conversation.
    pub recipe: Recipe,
    pub output_tokens: u32,
    /// How long the user waits before sending it; for a first turn it has no meaning.
    pub think: Duration,
    /// When the user loses patience, since the intended send time.
    pub cancel_after: Option<Duration>,
}

impl Session {
    pub fn single(recipe: Recipe, output_tokens: u32) -> Self {
        let turn = Turn { recipe, output_tokens, think: Duration::ZERO, cancel_after: None };
        Self { starts: None, turns: vec![turn] }
    }
}

/// An endless or finite supply of sessions.
pub type Sessions = Box<dyn Iterator<Item = Session> + Send>;
