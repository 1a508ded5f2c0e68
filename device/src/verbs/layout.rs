//! The structures and numbers of `verbs.h`, declared by hand: the stable ABI (`IBVERBS_1.1`, since 2008) on
//! machines with 64-bit pointers.
//!
//! `tests/verbs-layout` compares everything here with `ibverbs-sys`. Constants have their names of C without
//! `IBV_`.

use std::ffi::{c_int, c_uint, c_void};

#[repr(C)]
pub(super) struct Context {
    pub(super) device: *mut c_void,
    pub(super) _before: [*mut c_void; 11],
    pub(super) poll_cq: unsafe extern "C" fn(*mut c_void, c_int, *mut Wc) -> c_int,
    pub(super) req_notify_cq: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    pub(super) _between: [*mut c_void; 12],
    pub(super) post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    pub(super) post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int,
}

#[repr(C)]
pub(super) struct Channel {
    pub(super) context: *mut Context,
    pub(super) fd: c_int,
    pub(super) refcnt: c_int,
}

#[repr(C)]
pub(super) struct Mr {
    pub(super) context: *mut Context,
    pub(super) pd: *mut c_void,
    pub(super) addr: *mut c_void,
    pub(super) length: usize,
    pub(super) handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// The first fields of `ibv_qp`, which are all that this code reads.
#[repr(C)]
pub(super) struct Qp {
    pub(super) context: *mut Context,
    pub(super) qp_context: *mut c_void,
    pub(super) pd: *mut c_void,
    pub(super) send_cq: *mut c_void,
    pub(super) recv_cq: *mut c_void,
    pub(super) srq: *mut c_void,
    pub(super) handle: u32,
    pub(super) qp_num: u32,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Sge {
    pub(super) addr: u64,
    pub(super) length: u32,
    pub(super) lkey: u32,
}

#[repr(C)]
pub(super) struct SendWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut SendWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
    pub(super) opcode: c_uint,
    pub(super) send_flags: c_uint,
    pub(super) imm_be: u32,
    pub(super) remote_addr: u64,
    pub(super) rkey: u32,
    pub(super) _rest: [u32; 19],
}

#[repr(C)]
pub(super) struct RecvWr {
    pub(super) wr_id: u64,
    pub(super) next: *mut RecvWr,
    pub(super) sg_list: *mut Sge,
    pub(super) num_sge: c_int,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct Wc {
    pub(super) wr_id: u64,
    pub(super) status: c_uint,
    pub(super) opcode: c_uint,
    pub(super) vendor_err: u32,
    pub(super) byte_len: u32,
    pub(super) imm_be: u32,
    pub(super) qp_num: u32,
    pub(super) src_qp: u32,
    pub(super) flags: c_uint,
    pub(super) pkey_index: u16,
    pub(super) slid: u16,
    pub(super) sl: u8,
    pub(super) dlid_path_bits: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpCap {
    pub(super) max_send_wr: u32,
    pub(super) max_recv_wr: u32,
    pub(super) max_send_sge: u32,
    pub(super) max_recv_sge: u32,
    pub(super) max_inline_data: u32,
}

#[repr(C)]
pub(super) struct QpInit {
    pub(super) qp_context: *mut c_void,
    pub(super) send_cq: *mut c_void,
    pub(super) recv_cq: *mut c_void,
    pub(super) srq: *mut c_void,
    pub(super) cap: QpCap,
    pub(super) qp_type: c_uint,
    pub(super) sq_sig_all: c_int,
}

#[repr(C, align(8))]
#[derive(Clone, Copy, Default)]
pub(super) struct AhAttr {
    pub(super) dgid: [u8; 16],
    pub(super) flow_label: u32,
    pub(super) sgid_index: u8,
    pub(super) hop_limit: u8,
    pub(super) traffic_class: u8,
    pub(super) dlid: u16,
    pub(super) sl: u8,
    pub(super) src_path_bits: u8,
    pub(super) static_rate: u8,
    pub(super) is_global: u8,
    pub(super) port_num: u8,
}

#[repr(C)]
#[derive(Clone, Copy, Default)]
pub(super) struct QpAttr {
    pub(super) qp_state: c_uint,
    pub(super) cur_qp_state: c_uint,
    pub(super) path_mtu: c_uint,
    pub(super) path_mig_state: c_uint,
    pub(super) qkey: u32,
    pub(super) rq_psn: u32,
    pub(super) sq_psn: u32,
    pub(super) dest_qp_num: u32,
    pub(super) qp_access_flags: c_int,
    pub(super) cap: QpCap,
    pub(super) ah_attr: AhAttr,
    pub(super) alt_ah_attr: AhAttr,
    pub(super) pkey_index: u16,
    pub(super) alt_pkey_index: u16,
    pub(super) en_sqd_async_notify: u8,
    pub(super) sq_draining: u8,
    pub(super) max_rd_atomic: u8,
    pub(super) max_dest_rd_atomic: u8,
    pub(super) min_rnr_timer: u8,
    pub(super) port_num: u8,
    pub(super) timeout: u8,
    pub(super) retry_cnt: u8,
    pub(super) rnr_retry: u8,
    pub(super) alt_port_num: u8,
    pub(super) alt_timeout: u8,
    pub(super) rate_limit: u32,
}

/// The first fields of `ibv_port_attr`, and room for those of later versions.
#[repr(C)]
#[derive(Clone, Copy)]
pub(super) struct PortAttr {
    pub(super) state: c_uint,
    pub(super) max_mtu: c_uint,
    pub(super) active_mtu: c_uint,
    pub(super) gid_tbl_len: c_int,
    pub(super) port_cap_flags: u32,
    pub(super) max_msg_sz: u32,
    pub(super) bad_pkey_cntr: u32,
    pub(super) qkey_viol_cntr: u32,
    pub(super) pkey_tbl_len: u16,
    pub(super) lid: u16,
    pub(super) sm_lid: u16,
    pub(super) bytes: [u8; 8],
    pub(super) link_layer: u8,
    pub(super) _rest: [u8; 81],
}

impl PortAttr {
    pub(super) const ZERO: Self = Self {
        state: 0,
        max_mtu: 0,
        active_mtu: 0,
        gid_tbl_len: 0,
        port_cap_flags: 0,
        max_msg_sz: 0,
        bad_pkey_cntr: 0,
        qkey_viol_cntr: 0,
        pkey_tbl_len: 0,
        lid: 0,
        sm_lid: 0,
        bytes: [0; 8],
        link_layer: 0,
        _rest: [0; 81],
    };
}

/// The fields of `ibv_device_attr` that are in use, and room for the others.
#[repr(C, align(8))]
#[derive(Clone, Copy)]
pub(super) struct DeviceAttr {
    pub(super) _before: [u8; 112],
    pub(super) max_qp_wr: c_int,
    pub(super) _rest: [u8; 396],
}

impl DeviceAttr {
    pub(super) const ZERO: Self = Self { _before: [0; 112], max_qp_wr: 0, _rest: [0; 396] };
}

/// Types of queue pairs: a reliable connection.
pub(super) const QPT_RC: c_uint = 2;

/// States of queue pairs: initial, receiving, and sending.
pub(super) const QPS_INIT: c_uint = 1;
pub(super) const QPS_RTR: c_uint = 2;
pub(super) const QPS_RTS: c_uint = 3;

/// The attributes that a change of a queue pair sets.
pub(super) const QP_STATE: c_int = 1;
pub(super) const QP_ACCESS_FLAGS: c_int = 1 << 3;
pub(super) const QP_PKEY_INDEX: c_int = 1 << 4;
pub(super) const QP_PORT: c_int = 1 << 5;
pub(super) const QP_AV: c_int = 1 << 7;
pub(super) const QP_PATH_MTU: c_int = 1 << 8;
pub(super) const QP_TIMEOUT: c_int = 1 << 9;
pub(super) const QP_RETRY_CNT: c_int = 1 << 10;
pub(super) const QP_RNR_RETRY: c_int = 1 << 11;
pub(super) const QP_RQ_PSN: c_int = 1 << 12;
pub(super) const QP_MAX_QP_RD_ATOMIC: c_int = 1 << 13;
pub(super) const QP_MIN_RNR_TIMER: c_int = 1 << 15;
pub(super) const QP_SQ_PSN: c_int = 1 << 16;
pub(super) const QP_MAX_DEST_RD_ATOMIC: c_int = 1 << 17;
pub(super) const QP_DEST_QPN: c_int = 1 << 20;

/// Rights to registered memory. Remote writes require local ones.
pub(super) const ACCESS_LOCAL_WRITE: c_int = 1;
pub(super) const ACCESS_REMOTE_WRITE: c_int = 2;

/// Operations of requests.
pub(super) const WR_RDMA_WRITE: c_uint = 0;
pub(super) const WR_RDMA_WRITE_WITH_IMM: c_uint = 1;

/// The flag of a request that gets a completion.
pub(super) const SEND_SIGNALED: c_uint = 2;

/// The operation of a completion: a number was received.
pub(super) const WC_RECV_RDMA_WITH_IMM: c_uint = 129;

/// Results of completions.
pub(super) const WC_SUCCESS: c_uint = 0;
pub(super) const WC_LOC_LEN_ERR: c_uint = 1;
pub(super) const WC_LOC_PROT_ERR: c_uint = 4;
pub(super) const WC_WR_FLUSH_ERR: c_uint = 5;
pub(super) const WC_REM_INV_REQ_ERR: c_uint = 9;
pub(super) const WC_REM_OP_ERR: c_uint = 11;
pub(super) const WC_RETRY_EXC_ERR: c_uint = 12;
pub(super) const WC_RNR_RETRY_EXC_ERR: c_uint = 13;
pub(super) const WC_FATAL_ERR: c_uint = 19;

/// The state of a port that is in use.
pub(super) const PORT_ACTIVE: c_uint = 4;

const _: () = assert!(size_of::<usize>() == 8, "the layouts are those of 64-bit machines");
