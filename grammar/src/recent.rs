//! A bounded cache by grammar. The least recently used grammar is removed first.

use std::collections::VecDeque;
use std::sync::{Mutex, MutexGuard, PoisonError};

use types::Grammar;
use types::grammar::GrammarHash;

/// The grammars that were used last, each with a value.
#[derive(Debug)]
pub struct Recent<V> {
    max: usize,
    /// The grammar that was used last is at the end. Locked for a look-up or a change.
    entries: Mutex<VecDeque<(GrammarHash, V)>>,
}

impl<V: Clone> Recent<V> {
    pub fn new(max: usize) -> Self {
        Self { max, entries: Mutex::default() }
    }

    /// Returns the value of a grammar, which counts as used now.
    pub fn get(&self, grammar: &Grammar) -> Option<V> {
        let mut entries = self.entries();
        let place = entries.iter().rposition(|(hash, _)| *hash == grammar.hash())?;
        let (hash, value) = entries.remove(place)?;
        entries.push_back((hash, value.clone()));
        Some(value)
    }

    /// Sets the value of a grammar.
    pub fn keep(&self, grammar: &Grammar, value: V) {
        let mut entries = self.entries();
        entries.retain(|(hash, _)| *hash != grammar.hash());
        if entries.len() == self.max {
            entries.pop_front();
        }
        entries.push_back((grammar.hash(), value));
    }

    fn entries(&self) -> MutexGuard<'_, VecDeque<(GrammarHash, V)>> {
        self.entries.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sources;

    #[test]
    fn the_grammar_used_longest_ago_leaves_first() {
        let [a, b, c] = ["a", "b", "c"].map(sources::regex);
        let recent = Recent::new(2);
        recent.keep(&a, 1);
        recent.keep(&b, 2);
        assert_eq!(recent.get(&a), Some(1));
        recent.keep(&c, 3);
        assert_eq!([&a, &b, &c].map(|grammar| recent.get(grammar)), [Some(1), None, Some(3)]);
        recent.keep(&a, 4);
        assert_eq!([&a, &c].map(|grammar| recent.get(grammar)), [Some(4), Some(3)]);
    }
}
