//! The work that clients have requested of a model, for the controller that moves nodes between roles.

/// The work that has arrived for a model since the router started, admitted or not, and the part that waits
/// in its line.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Arrived {
    /// The tokens of prompts that no node has cached.
    pub prompt_tokens: u64,
    /// The predicted tokens of answers.
    pub answer_tokens: u64,
    /// The uncached tokens of the prompts in the line.
    pub waiting_tokens: u64,
    /// The predicted tokens of the answers to the prompts in the line.
    pub waiting_answer_tokens: u64,
}
