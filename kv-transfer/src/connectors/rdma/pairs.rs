//! The queue pairs of one link: created, exchanged with the other end, connected, and destroyed together.

use device::verbs::{Completions, PathTo, QueuePair, QueuePairAddress, Room};

use super::adapter::{Adapter, RETRIES};
use super::greeting::{End, RankThere};
use crate::error::TransferError;

/// The number of retries when a peer has no room for a number: without limit. A peer that is gone is detected by its
/// silence on the link.
const FOR_EVER: u8 = 7;
/// The bits of a packet number: packet numbers have 24 bits.
const PACKET_BITS: u64 = (1 << 24) - 1;

/// One end of a link's queue pairs, created and not yet connected.
#[derive(Debug)]
pub(super) struct Pairs {
    pub(super) pairs: Vec<QueuePair>,
    pub(super) completions: Completions,
    first_packets: Vec<u32>,
}

impl Pairs {
    /// Creates `n` queue pairs. `draw` returns their first packet numbers, which are random, so that an old
    /// packet is not accepted by this connection.
    pub(super) fn new(
        adapter: &Adapter,
        n: u16,
        room: Room,
        draw: impl Fn() -> u64,
    ) -> Result<Self, TransferError> {
        // The completion queue has room for all requests, because after an error every request has its own
        // completion.
        let completions = adapter.completions(u32::from(n) * (room.writes + room.receives))?;
        let pairs = (0..n).map(|_| adapter.queue_pair(&completions, room)).collect::<Result<Vec<_>, _>>()?;
        let first_packets = (0..n).map(|_| (draw() & PACKET_BITS) as u32).collect();
        Ok(Self { pairs, completions, first_packets })
    }

    /// Describes this side's queue pairs for the other end. `ranks` is the memory that the other end may
    /// write into.
    pub(super) fn end(&self, adapter: &Adapter, ranks: Vec<RankThere>) -> End {
        let address = |(pair, first_packet): (&QueuePair, &u32)| QueuePairAddress {
            gid: adapter.gid,
            lid: adapter.lid,
            number: pair.number(),
            first_packet: *first_packet,
        };
        let pairs = self.pairs.iter().zip(&self.first_packets).map(address).collect();
        End { pairs, mtu: adapter.mtu, ranks }
    }

    /// Connects each queue pair to one of the other end's.
    pub(super) fn connect(&self, adapter: &Adapter, to: &End) -> Result<(), TransferError> {
        for ((pair, first_packet), peer) in self.pairs.iter().zip(&self.first_packets).zip(&to.pairs) {
            let path = PathTo {
                peer: *peer,
                port: adapter.port.port,
                gid_index: adapter.port.gid_index,
                mtu: adapter.mtu.min(to.mtu),
                first_packet: *first_packet,
                timeout: adapter.timeout,
                retries: RETRIES,
                retries_not_ready: FOR_EVER,
            };
            pair.connect(&path).map_err(TransferError::rdma)?;
        }
        Ok(())
    }
}
