//! The plan of one conversation: turns that follow each other. Most sessions have one turn.

use std::time::Duration;

use crate::workload::prompt::Recipe;

/// A conversation to play. A turn is sent after the end of the turn before it and its `think` time.
#[derive(Clone, Debug, PartialEq)]
pub struct Session {
    /// The start time since the trace's beginning; `None` if the settings of the load decide.
    pub starts: Option<Duration>,
    pub turns: Vec<Turn>,
}

#[derive(Clone, Debug, PartialEq)]
pub struct Turn {
    /// The new part of the prompt in this turn.
    pub recipe: Recipe,
    pub output_tokens: u32,
    /// The user's wait before sending the turn; unused for a first turn.
    pub think: Duration,
    /// The time after the intended send time at which the user cancels; `None`: never.
    pub cancel_after: Option<Duration>,
}

impl Session {
    pub fn single(recipe: Recipe, output_tokens: u32) -> Self {
        let turn = Turn { recipe, output_tokens, think: Duration::ZERO, cancel_after: None };
        Self { starts: None, turns: vec![turn] }
    }
}

/// A supply of sessions, which may be endless.
pub type Sessions = Box<dyn Iterator<Item = Session> + Send>;
