//! The tokens of pieces of text that were seen, bounded by bytes.

use std::collections::HashMap;
use std::fmt;
use std::hash::{BuildHasher, RandomState};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use types::{CacheSalt, TenantId, TokenId};

/// The requests that share pieces: those of one tenant with one salt. So the time of a request does not reveal what
/// other tenants have sent.
#[derive(Clone, Debug, Default, PartialEq, Eq, Hash)]
pub struct CacheScope {
    pub tenant: TenantId,
    pub salt: CacheSalt,
}

/// A piece of a text with its tokens.
pub(super) struct SeenPiece {
    scope: CacheScope,
    text: Box<str>,
    pub(super) tokens: Box<[TokenId]>,
}

/// The bytes of an entry besides its texts and tokens: two places in a table, counts and sizes.
const ENTRY_BYTES: usize = 128;

/// The pieces that one tokenizer has seen. The least recently used ones are removed first.
pub(super) struct SeenPieces {
    /// The hash's key, random for each tokenizer and process.
    key: RandomState,
    /// The largest size of one generation.
    bytes_max: usize,
    /// Locked for one look-up or change.
    generations: Mutex<Generations>,
}

/// Recently used pieces, and older ones. When the recent ones are full, the older ones are dropped, and the recent ones
/// take their place.
#[derive(Default)]
struct Generations {
    recent: Generation,
    older: Generation,
}

/// Pieces by their hash. If two have the same hash, the later one stays.
#[derive(Default)]
struct Generation {
    pieces: HashMap<u64, Arc<SeenPiece>>,
    bytes: usize,
}

impl SeenPieces {
    pub(super) fn new(bytes_max: usize) -> Self {
        Self { key: RandomState::new(), bytes_max: bytes_max / 2, generations: Mutex::default() }
    }

    pub(super) fn get(&self, scope: &CacheScope, text: &str) -> Option<Arc<SeenPiece>> {
        let hash = self.hash(scope, text);
        let (found, dropped) = self.generations().get(hash, self.bytes_max);
        drop(dropped);
        found.filter(|piece| *piece.text == *text && piece.scope == *scope)
    }

    /// Stores the tokens of a piece, unless the piece alone is larger than the limit of all pieces.
    pub(super) fn keep(&self, scope: &CacheScope, text: &str, tokens: &[TokenId]) {
        let piece = SeenPiece { scope: scope.clone(), text: text.into(), tokens: tokens.into() };
        if piece.bytes() <= self.bytes_max {
            let hash = self.hash(scope, text);
            let dropped = self.generations().insert(hash, Arc::new(piece), self.bytes_max);
            drop(dropped);
        }
    }

    /// Returns the bytes of all pieces.
    pub(super) fn bytes(&self) -> usize {
        let generations = self.generations();
        generations.recent.bytes + generations.older.bytes
    }

    fn hash(&self, scope: &CacheScope, text: &str) -> u64 {
        self.key.hash_one((scope, text))
    }

    fn generations(&self) -> MutexGuard<'_, Generations> {
        self.generations.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Generations {
    /// Returns a piece, which counts as used now, and the pieces that are removed for it. The caller drops them
    /// without the lock.
    fn get(&mut self, hash: u64, bytes_max: usize) -> (Option<Arc<SeenPiece>>, Option<Generation>) {
        if let Some(piece) = self.recent.pieces.get(&hash) {
            return (Some(Arc::clone(piece)), None);
        }
        let Some(piece) = self.older.remove(hash) else { return (None, None) };
        let dropped = self.insert(hash, Arc::clone(&piece), bytes_max);
        (Some(piece), dropped)
    }

    fn insert(&mut self, hash: u64, piece: Arc<SeenPiece>, bytes_max: usize) -> Option<Generation> {
        self.older.remove(hash);
        self.recent.remove(hash);
        let is_full = self.recent.bytes + piece.bytes() > bytes_max;
        let dropped = is_full.then(|| std::mem::replace(&mut self.older, std::mem::take(&mut self.recent)));
        self.recent.bytes += piece.bytes();
        self.recent.pieces.insert(hash, piece);
        dropped
    }
}

impl Generation {
    fn remove(&mut self, hash: u64) -> Option<Arc<SeenPiece>> {
        let piece = self.pieces.remove(&hash)?;
        self.bytes -= piece.bytes();
        Some(piece)
    }
}

impl SeenPiece {
    fn bytes(&self) -> usize {
        let CacheScope { tenant, salt } = &self.scope;
        let texts = tenant.as_str().len() + salt.as_str().len() + self.text.len();
        ENTRY_BYTES + texts + size_of_val(&*self.tokens)
    }
}

/// Without the pieces, because no log has prompts.
impl fmt::Debug for SeenPieces {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SeenPieces").field("bytes", &self.bytes()).finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn scope(tenant: &str, salt: &str) -> CacheScope {
        CacheScope { tenant: TenantId::new(tenant), salt: CacheSalt::new(salt) }
    }

    fn tokens(seen: &SeenPieces, scope: &CacheScope, text: &str) -> Option<Vec<u32>> {
        seen.get(scope, text).map(|piece| piece.tokens.iter().map(|token| token.0).collect())
    }

    #[test]
    fn pieces_of_another_tenant_or_salt_are_not_found() {
        let seen = SeenPieces::new(1 << 20);
        seen.keep(&scope("a", ""), "text", &[TokenId(1)]);
        for (tenant, salt, text) in
            [("b", "", "text"), ("a", "s", "text"), ("", "a", "text"), ("at", "", "ext"), ("a", "", "tex")]
        {
            assert_eq!(tokens(&seen, &scope(tenant, salt), text), None, "{tenant} {salt} {text}");
        }
        assert_eq!(tokens(&seen, &scope("a", ""), "text"), Some(vec![1]));
    }

    #[test]
    fn a_hit_is_compared_and_not_believed() {
        let seen = SeenPieces::new(1 << 20);
        let other = SeenPiece { scope: scope("a", ""), text: "other".into(), tokens: Box::new([TokenId(9)]) };
        let hash = seen.hash(&scope("a", ""), "text");
        seen.generations().insert(hash, Arc::new(other), seen.bytes_max);
        assert_eq!(tokens(&seen, &scope("a", ""), "text"), None, "the hash alone is equal");
        seen.keep(&scope("a", ""), "text", &[TokenId(1)]);
        assert_eq!(tokens(&seen, &scope("a", ""), "text"), Some(vec![1]));
        assert_eq!(seen.generations().recent.pieces.len(), 1);
    }

    #[test]
    fn equal_texts_have_other_hashes_in_another_cache() {
        let [one, other] = [SeenPieces::new(1), SeenPieces::new(1)];
        assert_ne!(one.hash(&scope("a", ""), "text"), other.hash(&scope("a", ""), "text"));
    }

    #[test]
    fn pieces_are_bounded_by_bytes_and_used_ones_stay() {
        let (bytes_max, scope) = (64 << 10, scope("a", ""));
        let seen = SeenPieces::new(bytes_max);
        let text = |nth: usize| format!("{nth} {}", "x".repeat(nth % 700));
        seen.keep(&scope, "used", &[TokenId(7)]);
        for nth in 0..2000 {
            seen.keep(&scope, &text(nth), &vec![TokenId(nth as u32); nth % 90]);
            assert!(seen.bytes() <= bytes_max);
            assert_eq!(tokens(&seen, &scope, "used"), Some(vec![7]), "after {nth}");
        }
        let generations = seen.generations();
        for generation in [&generations.recent, &generations.older] {
            let bytes: usize = generation.pieces.values().map(|piece| piece.bytes()).sum();
            assert_eq!(bytes, generation.bytes);
        }
        drop(generations);
        assert!(tokens(&seen, &scope, &text(0)).is_none() && tokens(&seen, &scope, &text(1999)).is_some());
        seen.keep(&scope, &"x".repeat(bytes_max), &[]);
        assert!(tokens(&seen, &scope, &"x".repeat(bytes_max)).is_none(), "it would push out all others");
    }
}
