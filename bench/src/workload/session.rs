//! One conversation as planned: turns that follow each other. Most have one.

use std::time::Duration;

use crate::workload::prompt::Recipe;

/// Turns in order. A turn is sent after the end of the one before it and its `think` time.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// The start time in a trace, since the trace's beginning; `None` if the arrivals decide.
    pub starts: Option<Duration>,
    pub turns: Vec<Turn>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// The new part of the prompt in this turn.
    pub recipe: Recipe,
    pub output_tokens: u32,
    /// The user's wait before sending it; unused for a first turn.
    pub think: Duration,
    /// The time at which the user cancels, since the intended send time.
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
