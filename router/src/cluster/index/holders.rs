//! The nodes that have one block, in order.

use thin_vec::ThinVec;

use super::Slot;

/// The number of nodes that need no memory of their own: as many as fit into the 16 bytes beside their number.
const FEW: usize = 7;

/// A sorted set of nodes, in 16 bytes. A block that few nodes have is the usual case.
#[derive(Debug)]
pub(super) enum Holders {
    Few { n: u8, slots: [Slot; FEW] },
    Many(ThinVec<Slot>),
}

impl Default for Holders {
    fn default() -> Self {
        Self::Few { n: 0, slots: [Slot(0); FEW] }
    }
}

impl Holders {
    pub(super) fn as_slice(&self) -> &[Slot] {
        match self {
            Self::Few { n, slots } => &slots[..usize::from(*n)],
            Self::Many(slots) => slots,
        }
    }

    /// Adds a node. Returns false if it is there already.
    pub(super) fn add(&mut self, slot: Slot) -> bool {
        let Err(at) = self.as_slice().binary_search(&slot) else { return false };
        match self {
            Self::Few { n, slots } if usize::from(*n) < FEW => {
                slots.copy_within(at..usize::from(*n), at + 1);
                slots[at] = slot;
                *n += 1;
            }
            Self::Few { slots, .. } => {
                let mut many = ThinVec::with_capacity(FEW + 1);
                many.extend_from_slice(slots);
                many.insert(at, slot);
                *self = Self::Many(many);
            }
            Self::Many(slots) => slots.insert(at, slot),
        }
        true
    }

    /// Removes a node. Returns false if it is not there.
    pub(super) fn remove(&mut self, slot: Slot) -> bool {
        let Ok(at) = self.as_slice().binary_search(&slot) else { return false };
        match self {
            Self::Few { n, slots } => {
                slots.copy_within(at + 1..usize::from(*n), at);
                *n -= 1;
            }
            Self::Many(slots) => {
                slots.remove(at);
                if let Ok(slots) = slots[..].try_into() {
                    *self = Self::Few { n: FEW as u8, slots };
                }
            }
        }
        true
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_set_of_few_nodes_is_small() {
        assert!(size_of::<Holders>() <= 16, "{} bytes", size_of::<Holders>());
    }

    proptest! {
        #[test]
        fn holders_are_a_sorted_set(changes in prop::collection::vec((0_u16..12, any::<bool>()), 0..120)) {
            let (mut holders, mut truth) = (Holders::default(), BTreeSet::new());
            for (slot, is_added) in changes {
                let slot = Slot(slot);
                if is_added {
                    prop_assert_eq!(holders.add(slot), truth.insert(slot));
                } else {
                    prop_assert_eq!(holders.remove(slot), truth.remove(&slot));
                }
                prop_assert!(holders.as_slice().iter().eq(&truth));
            }
        }
    }
}
