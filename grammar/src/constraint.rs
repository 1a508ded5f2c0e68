//! Hot path.
//! One sequence's state in its grammar.
//!
//! The state follows from the grammar and the generated tokens. So a sequence that is continued, preempted or handed over
//! needs nothing else: the tokens are read again.

use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use llguidance::Matcher;
use llguidance::toktrie::SimpleVob;
use types::TokenId;

use crate::error::ConstraintError;
use crate::limits::{DEAD_END, plain};

/// A compiled grammar at its beginning. Sequences share its lexer's cache.
pub(crate) struct Compiled {
    beginning: Mutex<Matcher>,
    /// Whether a sequence has failed. The shared lexer may be at its limit, so the next prompt compiles anew.
    is_spent: AtomicBool,
}

/// Decides which tokens a sequence may have next. Clones share one state.
#[derive(Clone)]
pub struct Constraint {
    /// Locked while a mask is computed, by the thread that samples. No other thread waits for it.
    state: Arc<Mutex<State>>,
}

struct State {
    matcher: Matcher,
    /// The tokens that the matcher has read.
    read: Vec<TokenId>,
    compiled: Arc<Compiled>,
}

/// The tokens that may come next, one bit each.
pub struct Mask(SimpleVob);

impl fmt::Debug for Constraint {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Constraint").finish_non_exhaustive()
    }
}

impl fmt::Debug for Mask {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Mask({} of {} tokens)", self.0.num_set(), self.0.len())
    }
}

impl Constraint {
    pub(crate) fn new(compiled: Arc<Compiled>) -> Self {
        let matcher = compiled.beginning();
        Self { state: Arc::new(Mutex::new(State { matcher, read: Vec::new(), compiled })) }
    }

    /// Returns the tokens that may follow the generated tokens `generated`. After the end of the answer it allows the
    /// tokens that end it.
    pub fn mask(&self, generated: &[TokenId]) -> Result<Mask, ConstraintError> {
        let mut state = self.lock();
        let mask = state.follow(generated).and_then(|()| state.mask());
        mask.inspect_err(|_| state.compiled.is_spent.store(true, Ordering::Relaxed))
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl State {
    /// Brings the matcher to the end of `generated`. It begins again if it has read other tokens.
    fn follow(&mut self, generated: &[TokenId]) -> Result<(), ConstraintError> {
        if !generated.starts_with(&self.read) || self.matcher.is_error() {
            self.matcher = self.compiled.beginning();
            self.read.clear();
        }
        for token in &generated[self.read.len()..] {
            self.read.push(*token);
            // Tokens after the end belong to a step that was launched before the end was known.
            if !self.matcher.is_stopped() {
                self.matcher.consume_token(token.0).map_err(failed)?;
            }
        }
        Ok(())
    }

    fn mask(&mut self) -> Result<Mask, ConstraintError> {
        self.matcher.compute_mask_or_eos().map(Mask).map_err(failed)
    }
}

/// Tells a dead end from other errors of llguidance.
pub(crate) fn failed(error: impl ToString) -> ConstraintError {
    let reason = plain(&error);
    if reason.contains(DEAD_END) { ConstraintError::DeadEnd } else { ConstraintError::Failed(reason) }
}

impl Compiled {
    pub(crate) fn new(beginning: Matcher) -> Self {
        Self { beginning: Mutex::new(beginning), is_spent: AtomicBool::new(false) }
    }

    /// Returns whether a sequence has failed.
    pub(crate) fn is_spent(&self) -> bool {
        self.is_spent.load(Ordering::Relaxed)
    }

    fn beginning(&self) -> Matcher {
        self.beginning.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

impl Mask {
    pub fn allows(&self, token: TokenId) -> bool {
        (token.0 as usize) < self.0.len() && self.0.is_allowed(token.0)
    }

    /// Returns the mask as words of 32 tokens each, the first token in the lowest bit.
    pub fn words(&self) -> &[u32] {
        self.0.as_slice()
    }

    /// Makes all logits of other tokens negative infinity.
    pub fn apply(&self, logits: &mut [f32]) {
        let words = self.0.as_slice();
        for (chunk, word) in logits.chunks_mut(u32::BITS as usize).zip(words) {
            match *word {
                0 => chunk.fill(f32::NEG_INFINITY),
                u32::MAX => {}
                word => mask_chunk(chunk, word),
            }
        }
        let n_masked = (words.len() * u32::BITS as usize).min(logits.len());
        logits[n_masked..].fill(f32::NEG_INFINITY);
    }
}

fn mask_chunk(chunk: &mut [f32], word: u32) {
    for (bit, logit) in chunk.iter_mut().enumerate() {
        if word >> bit & 1 == 0 {
            *logit = f32::NEG_INFINITY;
        }
    }
}
