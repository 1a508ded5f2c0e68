//! Tests of the verbs in the VM of `tests/rdma-vm`, over Soft-RoCE.
//!
//! `TEST_RDMA_PORTS` names the ports, as `rxe1 rxe2`. Without such ports these tests are ignored.
#![allow(unsafe_code)]

use std::os::fd::{AsRawFd as _, BorrowedFd};
use std::time::Duration;

use device::verbs::{
    Completion, Completions, Copy, Device, Domain, Done, Failure, PathTo, QueuePair, QueuePairAddress,
    Region, Rights, Room, VerbsError,
};
use device::{HostMemory, RegionShape};
use rustix::event::{PollFd, PollFlags, Timespec, poll};

const BYTES: usize = 1 << 20;
const RETRIES: u8 = 3;
/// The GID index of RoCE v2 on these devices, with IPv4 addresses.
const GID_INDEX: u8 = 1;
const WITHIN: Duration = Duration::from_secs(30);

/// One side of a connection: its memory and one queue pair.
struct Side {
    memory: HostMemory,
    region: Region,
    completions: Completions,
    pair: QueuePair,
    address: QueuePairAddress,
}

fn side(port: &str) -> Side {
    let device = Device::open(port).expect("the port exists");
    let domain = Domain::new(&device).expect("a domain");
    let memory = HostMemory::shared(&[RegionShape { page_bytes: 4096, n_pages: (BYTES / 4096) as u32 }]);
    let memory = memory.expect("a megabyte");
    let region = domain.register(&memory, Rights::PeersWrite).expect("a megabyte can be locked");
    let completions = Completions::new(&device, 64).expect("a completion queue");
    let pair = QueuePair::new(&domain, &completions, Room { writes: 16, receives: 4 }).expect("a queue pair");
    let gid = device.gid(1, GID_INDEX).expect("it has an address");
    let address = QueuePairAddress { gid, lid: 0, number: pair.number(), first_packet: 77 };
    Side { memory, region, completions, pair, address }
}

/// Makes two connected sides, on the ports of `TEST_RDMA_PORTS`.
fn sides() -> (Side, Side) {
    let named = std::env::var("TEST_RDMA_PORTS").expect("tests/rdma-vm names the ports in TEST_RDMA_PORTS");
    let ports: Vec<_> = named.split(' ').collect();
    let (near, far) = (side(ports[0]), side(ports[ports.len() - 1]));
    for (from, to) in [(&near, &far), (&far, &near)] {
        let path = PathTo {
            peer: to.address,
            port: 1,
            gid_index: GID_INDEX,
            mtu: 3,
            first_packet: 77,
            timeout: 12,
            retries: RETRIES,
            retries_not_ready: RETRIES,
        };
        from.pair.connect(&path).expect("both ends are there");
    }
    (near, far)
}

impl Side {
    /// Waits for the descriptor like a connector, and returns the next completion.
    fn next(&self) -> Completion {
        let mut seen = Vec::new();
        while seen.is_empty() {
            self.wait();
            self.completions.take(&mut seen).expect("taken");
        }
        assert_eq!(seen.len(), 1, "{seen:?}");
        seen[0]
    }

    /// Waits until `n` requests are done or one has failed. A failed request also fails all later ones.
    fn wait_for(&self, n: usize) {
        let mut seen: Vec<Completion> = Vec::new();
        while seen.len() < n && seen.iter().all(|completion| completion.outcome.is_ok()) {
            self.wait();
            self.completions.take(&mut seen).expect("taken");
        }
    }

    /// Waits until the descriptor reports a completion that came after arming.
    fn wait(&self) {
        let within = Timespec::try_from(WITHIN).expect("a short time");
        // JUSTIFICATION: a test waits for the descriptor without a runtime.
        // SAFETY: the completions own the descriptor and outlive the call.
        let fd = unsafe { BorrowedFd::borrow_raw(self.completions.as_raw_fd()) };
        let n = poll(&mut [PollFd::new(&fd, PollFlags::IN)], Some(&within)).expect("polled");
        assert_eq!(n, 1, "nothing is completed");
        while self.completions.take_word().expect("words") {}
        self.completions.arm().expect("armed");
    }

    fn write(&self, to: &Side, copies: &[Copy], key: u32, number: u32) {
        let copies: Vec<_> =
            copies.iter().map(|copy| Copy { to: to.region.start() + copy.to, ..*copy }).collect();
        self.pair.write(u64::from(number), &self.region, key, &copies, number).expect("told");
    }
}

fn copy(from: u64, to: u64, bytes: u32) -> Copy {
    Copy { from, to, bytes }
}

#[test]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
fn what_was_written_is_there_with_its_number() {
    let (near, far) = sides();
    near.memory
        .write(0, 0..256)
        .expect("idle")
        .iter_mut()
        .enumerate()
        .for_each(|(at, byte)| *byte = at as u8 ^ (at >> 12) as u8);
    far.pair.receive(5).expect("room");
    near.write(
        &far,
        &[copy(0, 8192, 4096), copy(65_536, 0, 8192), copy(4096, 500_000, 100_000)],
        far.region.key(),
        0xabc,
    );
    let told = near.next();
    assert_eq!((told.id, told.outcome), (0xabc, Ok(Done::Written)));
    let received = far.next();
    assert_eq!((received.id, received.outcome), (5, Ok(Done::Received { number: 0xabc })));
    assert_eq!(received.queue_pair, far.pair.number());
    let (ours, theirs) =
        (near.memory.read(0, 0..256).expect("idle"), far.memory.read(0, 0..256).expect("idle"));
    assert_eq!(ours[..4096], theirs[8192..12_288]);
    assert_eq!(ours[65_536..73_728], theirs[..8192]);
    assert_eq!(ours[4096..104_096], theirs[500_000..600_000]);
    assert!(theirs[12_288..500_000].iter().all(|byte| *byte == 0), "nothing else was written");
}

#[test]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
fn a_wrong_key_opens_nothing_and_ends_the_connection() {
    let (near, far) = sides();
    far.pair.receive(1).expect("room");
    near.memory.write(0, 0..1).expect("idle").fill(9);
    near.write(&far, &[copy(0, 0, 64)], far.region.key() ^ 0x5500, 1);
    assert_eq!(near.next().outcome, Err(Failure::NoAccess));
    near.write(&far, &[copy(0, 0, 64)], far.region.key(), 2);
    assert_eq!(near.next().outcome, Err(Failure::Flushed), "a right key comes too late");
    assert!(far.memory.read(0, 0..256).expect("idle").iter().all(|byte| *byte == 0));
}

#[test]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
fn nothing_is_written_outside_of_the_region() {
    let (near, far) = sides();
    far.pair.receive(1).expect("room");
    near.write(&far, &[copy(0, BYTES as u64 - 32, 64)], far.region.key(), 1);
    assert_eq!(near.next().outcome, Err(Failure::NoAccess));
}

#[test]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
fn a_peer_without_room_for_a_number_is_asked_again_and_then_given_up() {
    let (near, far) = sides();
    near.write(&far, &[copy(0, 0, 64)], far.region.key(), 1);
    assert_eq!(near.next().outcome, Err(Failure::NotReady));
}

#[test]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
fn a_destroyed_queue_pair_lets_nobody_write_and_is_found_dead() {
    let (near, far) = sides();
    near.memory.write(0, 0..256).expect("idle").fill(7);
    let Side { memory, region, pair, .. } = far;
    let (start, key) = (region.start(), region.key());
    drop(pair);
    let to = Copy { from: 0, to: start, bytes: BYTES as u32 };
    near.pair.write(3, &near.region, key, &[to], 3).expect("told");
    assert_eq!(near.next().outcome, Err(Failure::Unreachable));
    assert!(
        memory.read(0, 0..256).expect("idle").iter().all(|byte| *byte == 0),
        "it was written all the same"
    );
}

/// Destroying the queue pair proves quiet. It cuts off a stream of writes (or comes after the stream, if both
/// ends are one device), and no byte changes afterwards.
#[test]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
fn after_the_destruction_not_a_byte_changes() {
    let (near, far) = sides();
    let Side { memory, region, pair, completions, .. } = far;
    for nth in 0..4 {
        pair.receive(nth).expect("room");
    }
    near.memory.write(0, 0..256).expect("idle").fill(7);
    let whole = Copy { from: 0, to: region.start(), bytes: BYTES as u32 };
    for number in 0..4 {
        near.pair.write(number, &near.region, region.key(), &[whole], number as u32).expect("told");
    }
    drop((pair, completions));
    memory.write(0, 0..256).expect("no other borrow").fill(1);
    near.wait_for(4);
    assert!(memory.read(0, 0..256).expect("idle").iter().all(|byte| *byte == 1), "it changed");
}

#[test]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
fn a_device_that_is_not_there_is_named_with_those_that_are() {
    let error = Device::open("mlx9_9").expect_err("there is none");
    assert!(matches!(&error, VerbsError::UnknownDevice { known, .. } if known.contains("rxe")), "{error}");
}

/// Soft-RoCE does not support memory of other devices, and its library reports that. This test reaches no
/// further than this error.
#[test]
#[ignore = "wants RDMA devices: tests/rdma-vm/run.sh runs it in a VM"]
fn memory_by_dmabuf_is_refused_by_a_driver_that_does_not_take_it() {
    let (near, _) = sides();
    let name = Device::names().expect("there are some").remove(0);
    let domain = Domain::new(&Device::open(&name).expect("it is there")).expect("a domain");
    let file = near.memory.file().expect("it is shared");
    let refused =
        domain.register_dmabuf(file, 1 << 21, BYTES, Rights::PeersWrite).expect_err("it is no dmabuf");
    let VerbsError::RegisterDmabuf { bytes, source } = refused else { panic!("{refused}") };
    assert_eq!((bytes, source.raw_os_error()), (BYTES, Some(rustix::io::Errno::OPNOTSUPP.raw_os_error())));
}
