//! The mock's KV: checksums that it writes into memory and verifies when it reads them.
//!
//! The KV of position `p` is the [`Chain`] of all tokens up to `p`. A *cell* is one token in one head's K or
//! V of one layer. Its bytes identify the cell:
//!
//! | bytes  | content |
//! |--------|---------|
//! | 0..8   | the chain, masked by the cell's [`CellKey`] |
//! | 8..12  | the token, masked by the cell's seal |
//! | 12..   | words counted up from the seal |
//!
//! So verification fails for a cell of another layer, head, part, position or sequence, for a stale or
//! half-written cell, and for any flipped bit. The token and the chain can be read back, so a sequence can
//! continue from its KV alone.

use types::TokenId;

/// The smallest cell: room for the chain, the token, and at least one word of the seal.
pub(super) const CELL_BYTES_MIN: usize = 16;

const GOLDEN: u64 = 0x9e37_79b9_7f4a_7c15;

/// A checksum of all tokens of a sequence up to a position.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Chain(pub(super) u64);

impl Chain {
    /// The chain before the first token.
    pub(super) const START: Self = Self(0x6261_746f_6e21_6b76);

    /// Returns the chain with one more token.
    pub(super) fn then(self, token: TokenId) -> Self {
        Self(mix(self.0 ^ (u64::from(token.0) + 1).wrapping_mul(GOLDEN)))
    }
}

/// Identifies one cell of a position: the K or the V of one layer and head.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct CellKey(u64);

impl CellKey {
    /// Returns the cell of a layer and head. `part` is 0 for its K and 1 for its V.
    pub(super) fn new(layer: u16, part: usize, head: usize) -> Self {
        Self(mix(u64::from(layer) << 32 | (part as u64) << 16 | head as u64))
    }
}

/// The content of a cell for its position: the token, and the chain up to and including it.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) struct Link {
    pub(super) token: TokenId,
    pub(super) chain: Chain,
}

impl Link {
    /// Returns the link that the bytes of `cell` claim. It is not verified; [`is_in`](Self::is_in) verifies
    /// it.
    pub(super) fn claimed_by(cell: &[u8], key: CellKey) -> Self {
        let chain = Chain(word64(cell) ^ key.0);
        Self { token: TokenId(word32(&cell[8..]) ^ seal(chain, key)), chain }
    }

    pub(super) fn write(self, cell: &mut [u8], key: CellKey) {
        let seal = seal(self.chain, key);
        cell[..8].copy_from_slice(&(self.chain.0 ^ key.0).to_le_bytes());
        cell[8..12].copy_from_slice(&(self.token.0 ^ seal).to_le_bytes());
        let mut word = seal;
        for bytes in cell[12..].chunks_mut(4) {
            word = word.wrapping_add(GOLDEN as u32);
            bytes.copy_from_slice(&word.to_le_bytes()[..bytes.len()]);
        }
    }

    /// Returns whether `cell` has exactly the bytes that [`write`](Self::write) would write.
    pub(super) fn is_in(self, cell: &[u8], key: CellKey) -> bool {
        let seal = seal(self.chain, key);
        if word64(cell) != self.chain.0 ^ key.0 || word32(&cell[8..]) != self.token.0 ^ seal {
            return false;
        }
        let mut word = seal;
        cell[12..].chunks(4).all(|bytes| {
            word = word.wrapping_add(GOLDEN as u32);
            *bytes == word.to_le_bytes()[..bytes.len()]
        })
    }
}

/// Returns the check value of a cell: a hash of the tokens so far and of the place of the cell. The padding begins
/// with it.
fn seal(chain: Chain, key: CellKey) -> u32 {
    mix(chain.0.rotate_left(17) ^ key.0) as u32
}

fn word64(cell: &[u8]) -> u64 {
    u64::from_le_bytes(cell[..8].try_into().expect("the slice has eight bytes"))
}

fn word32(cell: &[u8]) -> u32 {
    u32::from_le_bytes(cell[..4].try_into().expect("the slice has four bytes"))
}

/// Mixes 64 bits (the finalizer of SplitMix64): one changed input bit changes about half of the output bits.
pub(super) fn mix(mut bits: u64) -> u64 {
    bits = bits.wrapping_add(GOLDEN);
    bits = (bits ^ (bits >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    bits = (bits ^ (bits >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    bits ^ (bits >> 31)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn link() -> Link {
        Link { token: TokenId(65), chain: Chain::START.then(TokenId(65)) }
    }

    fn cell(key: CellKey) -> [u8; 19] {
        let mut cell = [0; 19];
        link().write(&mut cell, key);
        cell
    }

    #[test]
    fn a_cell_is_known_again() {
        let key = CellKey::new(3, 1, 2);
        assert_eq!(Link::claimed_by(&cell(key), key), link());
        assert!(link().is_in(&cell(key), key));
    }

    #[test]
    fn any_flipped_bit_is_noticed() {
        let key = CellKey::new(0, 0, 0);
        for bit in 0..19 * 8 {
            let mut cell = cell(key);
            cell[bit / 8] ^= 1 << (bit % 8);
            assert!(!link().is_in(&cell, key), "bit {bit}");
        }
    }

    #[test]
    fn another_cells_bytes_are_noticed() {
        let key = CellKey::new(1, 0, 1);
        for other in [CellKey::new(0, 0, 1), CellKey::new(1, 1, 1), CellKey::new(1, 0, 0)] {
            assert!(!link().is_in(&cell(other), key), "{other:?}");
        }
    }

    #[test]
    fn a_chain_depends_on_every_token_and_their_order() {
        let chain =
            |tokens: &[u32]| tokens.iter().fold(Chain::START, |chain, token| chain.then(TokenId(*token)));
        assert_ne!(chain(&[1, 2]), chain(&[2, 1]));
        assert_ne!(chain(&[0]), chain(&[0, 0]));
        assert_eq!(chain(&[1, 2]), chain(&[1, 2]));
    }
}
