//! Compares `device/src/verbs/layout.rs` with `ibverbs-sys`, whose declarations bindgen makes from rdma-core's
//! headers. The compiler does it: a difference is an error of `cargo check`, so nothing is linked or run.
//!
//! A field without a comparison does not compile either (the pattern in [`same!`] names all), nor does a
//! constant (it is dead code here).
#![deny(dead_code)]

use ibverbs_sys as theirs;

#[path = "../../../device/src/verbs/layout.rs"]
mod layout;

/// Returns the size of the field that `get` borrows.
const fn size_of_field<S, F>(_get: fn(*const S) -> *const F) -> usize {
    size_of::<F>()
}

/// Compares a structure's fields, by offset and size, and its own size: `==` if it is declared whole, `<=` if
/// only its first fields are, and `>=` if it has room for fields of later versions.
macro_rules! same {
    ($name:ident $size:tt $their:ident { $($field:ident: $($path:ident).+,)* } fill { $($fill:ident),* }) => {
        const _: () = {
            assert!(
                size_of::<layout::$name>() $size size_of::<theirs::$their>(),
                concat!("size of ", stringify!($name))
            );
            $(
                assert!(
                    std::mem::offset_of!(layout::$name, $field)
                        == std::mem::offset_of!(theirs::$their, $($path).+),
                    concat!("offset of ", stringify!($name.$field))
                );
                assert!(
                    // SAFETY: the address of a field is taken, and nothing is read; these are never called.
                    size_of_field(|it: *const layout::$name| unsafe { &raw const (*it).$field })
                        == size_of_field(|it: *const theirs::$their| unsafe { &raw const (*it).$($path).+ }),
                    concat!("size of ", stringify!($name.$field))
                );
            )*
            const fn _names_all(all: &layout::$name) {
                let layout::$name { $($field: _,)* $($fill: _,)* } = all;
            }
        };
    };
}

/// Compares constants.
macro_rules! equal {
    ($($name:ident: $($path:ident)::+ $(.$bits:tt)?,)*) => {
        const _: () = {
            $(
                assert!(
                    layout::$name as i64 == theirs::$($path)::+ $(.$bits)? as i64,
                    concat!("value of ", stringify!($name))
                );
            )*
        };
    };
}

same!(Context <= ibv_context {
    device: device,
    poll_cq: ops.poll_cq,
    req_notify_cq: ops.req_notify_cq,
    post_send: ops.post_send,
    post_recv: ops.post_recv,
} fill { _before, _between });

same!(Channel == ibv_comp_channel { context: context, fd: fd, refcnt: refcnt, } fill {});

same!(Mr == ibv_mr {
    context: context,
    pd: pd,
    addr: addr,
    length: length,
    handle: handle,
    lkey: lkey,
    rkey: rkey,
} fill {});

same!(Qp <= ibv_qp {
    context: context,
    qp_context: qp_context,
    pd: pd,
    send_cq: send_cq,
    recv_cq: recv_cq,
    srq: srq,
    handle: handle,
    qp_num: qp_num,
} fill {});

same!(Sge == ibv_sge { addr: addr, length: length, lkey: lkey, } fill {});

same!(SendWr == ibv_send_wr {
    wr_id: wr_id,
    next: next,
    sg_list: sg_list,
    num_sge: num_sge,
    opcode: opcode,
    send_flags: send_flags,
    imm_be: __bindgen_anon_1.imm_data,
    remote_addr: wr.rdma.remote_addr,
    rkey: wr.rdma.rkey,
} fill { _rest });

same!(RecvWr == ibv_recv_wr { wr_id: wr_id, next: next, sg_list: sg_list, num_sge: num_sge, } fill {});

// `ibverbs-sys` declares this one by hand, and hides the first fields that are filled here: 24 bytes.
same!(Wc == ibv_wc {
    imm_be: imm_data,
    qp_num: qp_num,
    src_qp: src_qp,
    flags: wc_flags,
    pkey_index: pkey_index,
    slid: slid,
    sl: sl,
    dlid_path_bits: dlid_path_bits,
} fill { wr_id, status, opcode, vendor_err, byte_len });

same!(QpCap == ibv_qp_cap {
    max_send_wr: max_send_wr,
    max_recv_wr: max_recv_wr,
    max_send_sge: max_send_sge,
    max_recv_sge: max_recv_sge,
    max_inline_data: max_inline_data,
} fill {});

same!(QpInit == ibv_qp_init_attr {
    qp_context: qp_context,
    send_cq: send_cq,
    recv_cq: recv_cq,
    srq: srq,
    cap: cap,
    qp_type: qp_type,
    sq_sig_all: sq_sig_all,
} fill {});

same!(AhAttr == ibv_ah_attr {
    dgid: grh.dgid,
    flow_label: grh.flow_label,
    sgid_index: grh.sgid_index,
    hop_limit: grh.hop_limit,
    traffic_class: grh.traffic_class,
    dlid: dlid,
    sl: sl,
    src_path_bits: src_path_bits,
    static_rate: static_rate,
    is_global: is_global,
    port_num: port_num,
} fill {});

same!(QpAttr == ibv_qp_attr {
    qp_state: qp_state,
    cur_qp_state: cur_qp_state,
    path_mtu: path_mtu,
    path_mig_state: path_mig_state,
    qkey: qkey,
    rq_psn: rq_psn,
    sq_psn: sq_psn,
    dest_qp_num: dest_qp_num,
    qp_access_flags: qp_access_flags,
    cap: cap,
    ah_attr: ah_attr,
    alt_ah_attr: alt_ah_attr,
    pkey_index: pkey_index,
    alt_pkey_index: alt_pkey_index,
    en_sqd_async_notify: en_sqd_async_notify,
    sq_draining: sq_draining,
    max_rd_atomic: max_rd_atomic,
    max_dest_rd_atomic: max_dest_rd_atomic,
    min_rnr_timer: min_rnr_timer,
    port_num: port_num,
    timeout: timeout,
    retry_cnt: retry_cnt,
    rnr_retry: rnr_retry,
    alt_port_num: alt_port_num,
    alt_timeout: alt_timeout,
    rate_limit: rate_limit,
} fill {});

same!(PortAttr >= ibv_port_attr {
    state: state,
    max_mtu: max_mtu,
    active_mtu: active_mtu,
    gid_tbl_len: gid_tbl_len,
    port_cap_flags: port_cap_flags,
    max_msg_sz: max_msg_sz,
    bad_pkey_cntr: bad_pkey_cntr,
    qkey_viol_cntr: qkey_viol_cntr,
    pkey_tbl_len: pkey_tbl_len,
    lid: lid,
    sm_lid: sm_lid,
    link_layer: link_layer,
} fill { bytes, _rest });

const _: layout::PortAttr = layout::PortAttr::ZERO;

same!(DeviceAttr >= ibv_device_attr { max_qp_wr: max_qp_wr, } fill { _before, _rest });

const _: layout::DeviceAttr = layout::DeviceAttr::ZERO;

equal! {
    QPT_RC: ibv_qp_type::IBV_QPT_RC,
    QPS_INIT: ibv_qp_state::IBV_QPS_INIT,
    QPS_RTR: ibv_qp_state::IBV_QPS_RTR,
    QPS_RTS: ibv_qp_state::IBV_QPS_RTS,
    QP_STATE: ibv_qp_attr_mask::IBV_QP_STATE.0,
    QP_ACCESS_FLAGS: ibv_qp_attr_mask::IBV_QP_ACCESS_FLAGS.0,
    QP_PKEY_INDEX: ibv_qp_attr_mask::IBV_QP_PKEY_INDEX.0,
    QP_PORT: ibv_qp_attr_mask::IBV_QP_PORT.0,
    QP_AV: ibv_qp_attr_mask::IBV_QP_AV.0,
    QP_PATH_MTU: ibv_qp_attr_mask::IBV_QP_PATH_MTU.0,
    QP_TIMEOUT: ibv_qp_attr_mask::IBV_QP_TIMEOUT.0,
    QP_RETRY_CNT: ibv_qp_attr_mask::IBV_QP_RETRY_CNT.0,
    QP_RNR_RETRY: ibv_qp_attr_mask::IBV_QP_RNR_RETRY.0,
    QP_RQ_PSN: ibv_qp_attr_mask::IBV_QP_RQ_PSN.0,
    QP_MAX_QP_RD_ATOMIC: ibv_qp_attr_mask::IBV_QP_MAX_QP_RD_ATOMIC.0,
    QP_MIN_RNR_TIMER: ibv_qp_attr_mask::IBV_QP_MIN_RNR_TIMER.0,
    QP_SQ_PSN: ibv_qp_attr_mask::IBV_QP_SQ_PSN.0,
    QP_MAX_DEST_RD_ATOMIC: ibv_qp_attr_mask::IBV_QP_MAX_DEST_RD_ATOMIC.0,
    QP_DEST_QPN: ibv_qp_attr_mask::IBV_QP_DEST_QPN.0,
    ACCESS_LOCAL_WRITE: ibv_access_flags::IBV_ACCESS_LOCAL_WRITE.0,
    ACCESS_REMOTE_WRITE: ibv_access_flags::IBV_ACCESS_REMOTE_WRITE.0,
    WR_RDMA_WRITE: ibv_wr_opcode::IBV_WR_RDMA_WRITE,
    WR_RDMA_WRITE_WITH_IMM: ibv_wr_opcode::IBV_WR_RDMA_WRITE_WITH_IMM,
    SEND_SIGNALED: ibv_send_flags::IBV_SEND_SIGNALED.0,
    WC_RECV_RDMA_WITH_IMM: ibv_wc_opcode::IBV_WC_RECV_RDMA_WITH_IMM,
    WC_SUCCESS: ibv_wc_status::IBV_WC_SUCCESS,
    WC_LOC_LEN_ERR: ibv_wc_status::IBV_WC_LOC_LEN_ERR,
    WC_LOC_PROT_ERR: ibv_wc_status::IBV_WC_LOC_PROT_ERR,
    WC_WR_FLUSH_ERR: ibv_wc_status::IBV_WC_WR_FLUSH_ERR,
    WC_REM_INV_REQ_ERR: ibv_wc_status::IBV_WC_REM_INV_REQ_ERR,
    WC_REM_OP_ERR: ibv_wc_status::IBV_WC_REM_OP_ERR,
    WC_RETRY_EXC_ERR: ibv_wc_status::IBV_WC_RETRY_EXC_ERR,
    WC_RNR_RETRY_EXC_ERR: ibv_wc_status::IBV_WC_RNR_RETRY_EXC_ERR,
    WC_FATAL_ERR: ibv_wc_status::IBV_WC_FATAL_ERR,
    PORT_ACTIVE: ibv_port_state::IBV_PORT_ACTIVE,
}
