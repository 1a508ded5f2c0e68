//! Hot path.
//! One end of a reliable connection, and the requests on it.

use std::fmt;
use std::ptr::NonNull;

use super::completions::Completions;
use super::error::VerbsError;
use super::layout::{self, Qp, QpCap, QpInit, RecvWr, SendWr, Sge};
use super::region::{Domain, Region};

/// One end of a connection. Dropping it destroys the queue pair. Afterwards the peer writes nothing here,
/// even if writes were in flight.
pub struct QueuePair {
    qp: NonNull<Qp>,
    room: Room,
    domain: Domain,
    #[expect(dead_code, reason = "held for its Drop: after this value's own")]
    completions: Completions,
}

// JUSTIFICATION: a pointer is neither Send nor Sync.
// SAFETY: the library takes its own locks, as for `Device`.
unsafe impl Send for QueuePair {}
// SAFETY: the library takes its own locks, as for `Device`.
unsafe impl Sync for QueuePair {}

/// The maximum numbers of requests in flight.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    pub writes: u32,
    /// The number of receives for numbers from the peer.
    pub receives: u32,
}

/// The address of one end of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct QueuePairAddress {
    pub gid: [u8; 16],
    /// The address within an InfiniBand subnet; zero on Ethernet.
    pub lid: u16,
    pub number: u32,
    /// The number of the first packet that this end sends: 24 bits.
    pub first_packet: u32,
}

/// The path to the other end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PathTo {
    pub peer: QueuePairAddress,
    pub port: u8,
    pub gid_index: u8,
    /// The smaller MTU of both ends.
    pub mtu: u32,
    /// The number of this end's first packet.
    pub first_packet: u32,
    /// The exponent of the time after which a packet without an answer is sent again: 4.096 µs times two to
    /// the power of this.
    pub timeout: u8,
    /// The maximum number of retries, at most 7.
    pub retries: u8,
    /// The number of retries to a peer without a receive for a number, at most 6; 7 means no limit.
    pub retries_not_ready: u8,
}

/// A range to copy from this side to the peer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Copy {
    /// The offset within this side's region.
    pub from: u64,
    /// The peer's address.
    pub to: u64,
    pub bytes: u32,
}

impl QueuePair {
    /// Creates a queue pair that is not connected yet. It has the requested room, or less if the device has
    /// less.
    pub fn new(domain: &Domain, completions: &Completions, room: Room) -> Result<Self, VerbsError> {
        let max = domain.inner.device.requests_max()?;
        let room = Room { writes: room.writes.min(max), receives: room.receives.min(max) };
        let cq = completions.inner.cq.as_ptr();
        let cap = QpCap {
            max_send_wr: room.writes,
            max_recv_wr: room.receives,
            max_send_sge: 1,
            max_recv_sge: 1,
            max_inline_data: 0,
        };
        let null = std::ptr::null_mut();
        let (qp_context, srq) = (null, null);
        let mut init =
            QpInit { qp_context, send_cq: cq, recv_cq: cq, srq, cap, qp_type: layout::QPT_RC, sq_sig_all: 0 };
        // JUSTIFICATION: a call into C.
        // SAFETY: domain and completions live as long as the queue pair, which holds both.
        let qp = unsafe {
            (domain.inner.device.inner.functions.ibv_create_qp)(domain.inner.pd.as_ptr(), &mut init)
        };
        let qp = NonNull::new(qp).ok_or_else(|| VerbsError::last("make a queue pair"))?;
        Ok(Self { qp, room, domain: domain.clone(), completions: completions.clone() })
    }

    pub fn number(&self) -> u32 {
        // JUSTIFICATION: a field of a C structure.
        // SAFETY: the structure lives until the queue pair is destroyed.
        unsafe { self.qp.as_ref().qp_num }
    }

    /// Returns the room that the device has granted.
    pub fn room(&self) -> Room {
        self.room
    }

    /// Connects the queue pair to the other end. Afterwards it receives and sends.
    pub fn connect(&self, path: &PathTo) -> Result<(), VerbsError> {
        self.modify("prepare a queue pair", step::initial(path))?;
        self.modify("let a queue pair receive", step::receiving(path))?;
        self.modify("let a queue pair send", step::sending(path))
    }

    fn modify(&self, what: &'static str, step: step::PairStep) -> Result<(), VerbsError> {
        let step::PairStep { mut attr, mask } = step;
        // JUSTIFICATION: a call into C.
        // SAFETY: the queue pair lives, and the structure is as large as the library's.
        let errno = unsafe { (self.functions().ibv_modify_qp)(self.qp.as_ptr(), &mut attr, mask) };
        VerbsError::check(what, errno)
    }

    /// Queues the copies in this order, and then `number` for the peer. One completion with this `id` reports
    /// that all is done.
    ///
    /// The ranges in `region` must not change until then, because the device reads them at any time.
    ///
    /// # Panics
    /// If there are no copies, or one is outside of the region.
    pub fn write(
        &self,
        id: u64,
        region: &Region,
        key: u32,
        copies: &[Copy],
        number: u32,
    ) -> Result<(), VerbsError> {
        assert!(!copies.is_empty(), "the last copy carries the number");
        let mut pieces: Vec<Sge> = copies.iter().map(|copy| piece(region, copy)).collect();
        let mut requests: Vec<SendWr> =
            copies.iter().zip(&mut pieces).map(|(copy, piece)| request(piece, copy.to, key)).collect();
        let last = requests.last_mut().expect("there is at least one copy");
        (last.wr_id, last.opcode, last.send_flags) =
            (id, layout::WR_RDMA_WRITE_WITH_IMM, layout::SEND_SIGNALED);
        last.imm_be = number.to_be();
        self.post(&mut requests)
    }

    fn post(&self, requests: &mut [SendWr]) -> Result<(), VerbsError> {
        let first = requests.as_mut_ptr();
        for nth in 1..requests.len() {
            // JUSTIFICATION: a chain of C structures.
            // SAFETY: the n-th request is in the slice, which is not moved before the call returns.
            requests[nth - 1].next = unsafe { first.add(nth) };
        }
        let (_, context) = self.domain.inner.device.parts();
        let mut refused = std::ptr::null_mut();
        // JUSTIFICATION: a C function, called by pointer.
        // SAFETY: the chain and its pieces live until the call returns, which copies them. Each piece is in a
        // region of this domain. If a region is deregistered too early, the device rejects the request.
        let errno = unsafe { ((*context).post_send)(self.qp.as_ptr(), first, &mut refused) };
        VerbsError::check("tell the RDMA device to write", errno)
    }

    /// Posts a receive for one number from the peer.
    pub fn receive(&self, id: u64) -> Result<(), VerbsError> {
        let null = std::ptr::null_mut();
        let mut request = RecvWr { wr_id: id, next: null, sg_list: std::ptr::null_mut(), num_sge: 0 };
        let (_, context) = self.domain.inner.device.parts();
        let mut refused = std::ptr::null_mut();
        // JUSTIFICATION: a C function, called by pointer.
        // SAFETY: the request lives until the call returns, which copies it. It has no memory.
        let errno = unsafe { ((*context).post_recv)(self.qp.as_ptr(), &mut request, &mut refused) };
        VerbsError::check("post a receive on the RDMA device", errno)
    }

    fn functions(&self) -> &'static super::sys::Functions {
        self.domain.inner.device.inner.functions
    }
}

fn piece(region: &Region, copy: &Copy) -> Sge {
    let end = copy.from.checked_add(copy.bytes.into());
    assert!(end.is_some_and(|end| end <= region.bytes() as u64), "{copy:?} is not in {region:?}");
    Sge { addr: region.start() + copy.from, length: copy.bytes, lkey: region.own_key() }
}

fn request(piece: &mut Sge, remote_addr: u64, rkey: u32) -> SendWr {
    SendWr {
        wr_id: 0,
        next: std::ptr::null_mut(),
        sg_list: piece,
        num_sge: 1,
        opcode: layout::WR_RDMA_WRITE,
        send_flags: 0,
        imm_be: 0,
        remote_addr,
        rkey,
        _rest: [0; 19],
    }
}

/// The steps to a connection, each with its attributes and their mask bits.
mod step {
    use super::super::layout::{self, AhAttr, QpAttr};
    use super::PathTo;

    /// The delay before a retry to a peer without a receive: 2.56 ms.
    const NOT_READY_2_56_MS: u8 = 16;
    const HOPS_MAX: u8 = 64;

    pub(super) struct PairStep {
        pub(super) attr: QpAttr,
        pub(super) mask: i32,
    }

    pub(super) fn initial(path: &PathTo) -> PairStep {
        let attr = QpAttr {
            qp_state: layout::QPS_INIT,
            port_num: path.port,
            qp_access_flags: layout::ACCESS_REMOTE_WRITE,
            ..QpAttr::default()
        };
        PairStep {
            attr,
            mask: layout::QP_STATE | layout::QP_ACCESS_FLAGS | layout::QP_PKEY_INDEX | layout::QP_PORT,
        }
    }

    pub(super) fn receiving(path: &PathTo) -> PairStep {
        let attr = QpAttr {
            qp_state: layout::QPS_RTR,
            path_mtu: path.mtu,
            dest_qp_num: path.peer.number,
            rq_psn: path.peer.first_packet,
            max_dest_rd_atomic: 1,
            min_rnr_timer: NOT_READY_2_56_MS,
            ah_attr: to(path),
            ..QpAttr::default()
        };
        let mask = layout::QP_STATE
            | layout::QP_AV
            | layout::QP_PATH_MTU
            | layout::QP_DEST_QPN
            | layout::QP_RQ_PSN
            | layout::QP_MAX_DEST_RD_ATOMIC
            | layout::QP_MIN_RNR_TIMER;
        PairStep { attr, mask }
    }

    pub(super) fn sending(path: &PathTo) -> PairStep {
        let attr = QpAttr {
            qp_state: layout::QPS_RTS,
            timeout: path.timeout,
            retry_cnt: path.retries,
            rnr_retry: path.retries_not_ready,
            sq_psn: path.first_packet,
            max_rd_atomic: 1,
            ..QpAttr::default()
        };
        PairStep {
            attr,
            mask: layout::QP_STATE
                | layout::QP_TIMEOUT
                | layout::QP_RETRY_CNT
                | layout::QP_RNR_RETRY
                | layout::QP_SQ_PSN
                | layout::QP_MAX_QP_RD_ATOMIC,
        }
    }

    fn to(path: &PathTo) -> AhAttr {
        AhAttr {
            dgid: path.peer.gid,
            sgid_index: path.gid_index,
            hop_limit: HOPS_MAX,
            dlid: path.peer.lid,
            is_global: 1,
            port_num: path.port,
            ..AhAttr::default()
        }
    }
}

impl Drop for QueuePair {
    fn drop(&mut self) {
        // JUSTIFICATION: a call into C.
        // SAFETY: the queue pair is from the library and is destroyed once.
        unsafe { (self.functions().ibv_destroy_qp)(self.qp.as_ptr()) };
    }
}

impl fmt::Debug for QueuePair {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "QueuePair({})", self.number())
    }
}
