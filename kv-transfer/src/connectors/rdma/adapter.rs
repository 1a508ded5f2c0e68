//! A connector's RDMA device: opened once, with this node's memory registered once.

use std::path::Path;
use std::time::Duration;

use device::verbs::{Completions, Device, Domain, QueuePair, Region, Rights, Room, VerbsError};
use kv_cache::KvMemory;

use super::card::CardLook;
use super::greeting::RankThere;
use super::port::{DEVICES, PortAt, WantedPort, folders};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::landing::bad_request;

/// The longest time after which a lost packet is sent again, as an exponent: 134 ms. Later packets may reveal
/// the loss earlier.
const TIMEOUT_MAX: u8 = 15;
/// The number of times that a packet is sent again: the maximum of the device.
pub(super) const RETRIES: u8 = 7;

#[derive(Debug)]
pub(super) struct Adapter {
    pub(super) port: PortAt,
    pub(super) device: Device,
    pub(super) domain: Domain,
    pub(super) ranks: Vec<RankHere>,
    /// Computes digests on the GPU; `None` if the memory is on the host.
    pub(super) card: Option<CardLook>,
    pub(super) gid: [u8; 16],
    pub(super) lid: u16,
    pub(super) mtu: u32,
    /// The exponent of the time after which a packet is sent again: see [`device::verbs::PathTo`].
    pub(super) timeout: u8,
}

/// One rank's memory, registered with the device.
#[derive(Debug)]
pub(super) struct RankHere {
    pub(super) region: Region,
    /// The start addresses of the memory's regions, as a peer's device uses them.
    pub(super) starts: Vec<u64>,
}

impl Adapter {
    pub(super) fn open(parts: &ConnectorParts) -> Result<Self, TransferError> {
        let wanted = WantedPort::parse(&parts.settings.rdma_device)?;
        if folders(Path::new(DEVICES)).is_empty() {
            return Err(TransferError::rdma(VerbsError::NoDevice));
        }
        // The library is checked before a port is chosen, so that a missing library is reported as such.
        Device::names().map_err(TransferError::rdma)?;
        let port = wanted.find(Path::new(DEVICES))?;
        let device = Device::open(&port.device).map_err(TransferError::rdma)?;
        let state = device.port(port.port).map_err(TransferError::rdma)?;
        let gid = device.gid(port.port, port.gid_index).map_err(TransferError::rdma)?;
        let domain = Domain::new(&device).map_err(TransferError::rdma)?;
        let memory = &parts.memory;
        let ranks =
            (0..memory.n_ranks()).map(|rank| registered(&domain, memory, rank)).collect::<Result<_, _>>()?;
        let card = memory.on_card().map(|_| CardLook::at(memory, &parts.gate)).transpose()?;
        let timeout = timeout_within(parts.settings.stall());
        Ok(Self { port, device, domain, ranks, card, gid, lid: state.lid, mtu: state.mtu, timeout })
    }

    /// Returns the memory of each rank that a peer may write into.
    pub(super) fn ranks(&self) -> Vec<RankThere> {
        let rank = |rank: &RankHere| RankThere { key: rank.region.key(), starts: rank.starts.clone() };
        self.ranks.iter().map(rank).collect()
    }

    pub(super) fn completions(&self, n: u32) -> Result<Completions, TransferError> {
        Completions::new(&self.device, n).map_err(TransferError::rdma)
    }

    pub(super) fn queue_pair(
        &self,
        completions: &Completions,
        room: Room,
    ) -> Result<QueuePair, TransferError> {
        let pair = QueuePair::new(&self.domain, completions, room).map_err(TransferError::rdma)?;
        if pair.room() == room {
            Ok(pair)
        } else {
            Err(bad_request("the RDMA device's queues are too short for one frame"))
        }
    }
}

/// Registers host memory directly, and GPU memory by dmabuf.
fn registered(domain: &Domain, memory: &KvMemory, tp_rank: u16) -> Result<RankHere, TransferError> {
    if let Some(card) = memory.on_card() {
        let memory = card.memory();
        let region = domain.register_card(memory, Rights::PeersWrite).map_err(TransferError::rdma)?;
        let start = |nth| region.start() + memory.offset(nth, 0);
        return Ok(RankHere { starts: (0..memory.n_regions()).map(start).collect(), region });
    }
    check_regions(memory)?;
    let on_host = memory.rank(tp_rank).on_host();
    let memory = on_host
        .ok_or_else(|| bad_request("KV that is spread over several GPUs does not go over rdma yet"))?;
    let region = domain.register(memory, Rights::PeersWrite).map_err(TransferError::rdma)?;
    let start = |nth| region.start() + memory.file_offset(nth, 0) as u64;
    Ok(RankHere { starts: (0..memory.n_regions()).map(start).collect(), region })
}

/// Refuses host memory in which a layer has another region than with one pipeline stage: a sender finds the receiver's
/// region of a layer by its own memory.
fn check_regions(memory: &KvMemory) -> Result<(), TransferError> {
    if memory.has_regions_of_one_stage() {
        return Ok(());
    }
    Err(bad_request("KV of pipeline stages with regions of their own does not go over rdma yet"))
}

/// Returns the longest time between two attempts such that all attempts end within the stall time.
fn timeout_within(stall: Duration) -> u8 {
    const UNIT: Duration = Duration::from_nanos(4096);
    let within = |exponent: &u8| UNIT * (1 << exponent) * (u32::from(RETRIES) + 1) <= stall;
    (1..=TIMEOUT_MAX).rev().find(within).unwrap_or(1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::conformance::node::layout;
    use crate::connectors::gpu::pages::tests::memory_of_stages;

    #[test]
    fn regions_that_differ_from_those_of_one_stage_are_refused() {
        let uniform = types::KvLayout::uniform(16, types::KvDtype::Bf16, 5, 2, 8);
        for (layout, counts, is_refused) in [
            (&uniform, &[5][..], false),
            (&uniform, &[3, 2], false),
            (&layout(), &[7], false),
            (&layout(), &[1, 6], true),
        ] {
            let refusal = check_regions(&memory_of_stages(layout, counts, 2)).err();
            let expected =
                bad_request("KV of pipeline stages with regions of their own does not go over rdma yet");
            let expected = is_refused.then(|| types::in_full(&expected));
            assert_eq!(refusal.map(|error| types::in_full(&error)), expected, "{counts:?}");
        }
    }

    #[test]
    fn all_attempts_lie_within_the_stall_time() {
        for (stall_ms, expected) in [(5_000, 15), (2_000, 15), (1_000, 14), (200, 12), (0, 1)] {
            assert_eq!(timeout_within(Duration::from_millis(stall_ms)), expected, "{stall_ms}");
        }
    }
}
