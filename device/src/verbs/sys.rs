//! C declarations of libibverbs: its functions, looked up by name, and its structures with the layout of
//! `verbs.h`.
//!
//! The layouts are those of the stable ABI (`IBVERBS_1.1`, since 2008) on machines with 64-bit pointers. In
//! C, posting and polling are inline functions that call through pointers in the context. This code does the
//! same.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::os::unix::Library;

use super::error::VerbsError;

/// The library's file name with the version of its ABI.
const LIBRARY: &str = "libibverbs.so.1";

macro_rules! functions {
    ($($(#[$about:meta])* $name:ident: fn($($arg:ty),*) $(-> $ret:ty)?;)*) => {
        /// The functions, looked up once for the life of the process.
        pub(super) struct Functions {
            $($(#[$about])* pub(super) $name: unsafe extern "C" fn($($arg),*) $(-> $ret)?,)*
        }

        impl Functions {
            fn find(library: &Library) -> Result<Self, libloading::Error> {
                Ok(Self {
                    $(
                        // JUSTIFICATION: the library may be missing, so its functions are looked up at run
                        // time.
                        // SAFETY: the type is that of the function of this name in `verbs.h`.
                        $name: unsafe {
                            *library.get::<unsafe extern "C" fn($($arg),*) $(-> $ret)?>(stringify!($name))?
                        },
                    )*
                })
            }
        }
    };
}

functions! {
    ibv_get_device_list: fn(*mut c_int) -> *mut *mut DeviceEntry;
    ibv_free_device_list: fn(*mut *mut DeviceEntry);
    ibv_get_device_name: fn(*mut DeviceEntry) -> *const c_char;
    ibv_open_device: fn(*mut DeviceEntry) -> *mut Context;
    ibv_close_device: fn(*mut Context) -> c_int;
    ibv_query_port: fn(*mut Context, u8, *mut PortAttr) -> c_int;
    ibv_query_device: fn(*mut Context, *mut DeviceAttr) -> c_int;
    ibv_query_gid: fn(*mut Context, u8, c_int, *mut [u8; 16]) -> c_int;
    ibv_alloc_pd: fn(*mut Context) -> *mut c_void;
    ibv_dealloc_pd: fn(*mut c_void) -> c_int;
    ibv_reg_mr: fn(*mut c_void, *mut c_void, usize, c_int) -> *mut Mr;
    ibv_dereg_mr: fn(*mut Mr) -> c_int;
    ibv_create_comp_channel: fn(*mut Context) -> *mut Channel;
    ibv_destroy_comp_channel: fn(*mut Channel) -> c_int;
    ibv_create_cq: fn(*mut Context, c_int, *mut c_void, *mut Channel, c_int) -> *mut c_void;
    ibv_destroy_cq: fn(*mut c_void) -> c_int;
    ibv_get_cq_event: fn(*mut Channel, *mut *mut c_void, *mut *mut c_void) -> c_int;
    ibv_ack_cq_events: fn(*mut c_void, c_uint);
    ibv_create_qp: fn(*mut c_void, *mut QpInit) -> *mut Qp;
    ibv_destroy_qp: fn(*mut Qp) -> c_int;
    ibv_modify_qp: fn(*mut Qp, *mut QpAttr, c_int) -> c_int;
}

/// Loads the library. It stays loaded.
pub(super) fn functions() -> Result<&'static Functions, VerbsError> {
    static FUNCTIONS: OnceLock<Functions> = OnceLock::new();
    if let Some(functions) = FUNCTIONS.get() {
        return Ok(functions);
    }
    // JUSTIFICATION: if it were linked, the executable would not start without it.
    // SAFETY: the initializers of libibverbs and its providers take no arguments.
    let library = unsafe { Library::new(LIBRARY) }.map_err(VerbsError::NoLibrary)?;
    let functions = Functions::find(&library).map_err(VerbsError::OldLibrary)?;
    std::mem::forget(library);
    Ok(FUNCTIONS.get_or_init(|| functions))
}

/// Registers memory of another device: domain, offset in the file, bytes, address, file, rights.
pub(super) type RegisterDmabuf = unsafe extern "C" fn(*mut c_void, u64, usize, u64, c_int, c_int) -> *mut Mr;

/// Returns the function that registers dmabuf memory. An older library may lack it: it came with rdma-core
/// 34.
pub(super) fn register_dmabuf() -> Result<RegisterDmabuf, VerbsError> {
    static FUNCTION: OnceLock<RegisterDmabuf> = OnceLock::new();
    if let Some(function) = FUNCTION.get() {
        return Ok(*function);
    }
    // JUSTIFICATION: the library may be missing, so it is loaded at run time.
    // SAFETY: the initializers of libibverbs and its providers take no arguments.
    let library = unsafe { Library::new(LIBRARY) }.map_err(VerbsError::NoLibrary)?;
    // JUSTIFICATION: the function may be missing, so it is looked up at run time.
    // SAFETY: the type is that of the function of this name in `verbs.h`.
    let function = unsafe { library.get::<RegisterDmabuf>("ibv_reg_dmabuf_mr") };
    let function = *function.map_err(VerbsError::NoDmabuf)?;
    std::mem::forget(library);
    Ok(*FUNCTION.get_or_init(|| function))
}

/// An opaque type, used only behind a pointer.
#[repr(C)]
pub(super) struct DeviceEntry {
    _opaque: [u8; 0],
}

#[repr(C)]
pub(super) struct Context {
    device: *mut c_void,
    _before: [*mut c_void; 11],
    pub(super) poll_cq: unsafe extern "C" fn(*mut c_void, c_int, *mut Wc) -> c_int,
    pub(super) req_notify_cq: unsafe extern "C" fn(*mut c_void, c_int) -> c_int,
    _between: [*mut c_void; 12],
    pub(super) post_send: unsafe extern "C" fn(*mut Qp, *mut SendWr, *mut *mut SendWr) -> c_int,
    pub(super) post_recv: unsafe extern "C" fn(*mut Qp, *mut RecvWr, *mut *mut RecvWr) -> c_int,
}

#[repr(C)]
pub(super) struct Channel {
    context: *mut Context,
    pub(super) fd: c_int,
    refcnt: c_int,
}

#[repr(C)]
pub(super) struct Mr {
    context: *mut Context,
    pd: *mut c_void,
    addr: *mut c_void,
    length: usize,
    handle: u32,
    pub(super) lkey: u32,
    pub(super) rkey: u32,
}

/// The first fields of `ibv_qp`, which are all that this code reads.
#[repr(C)]
pub(super) struct Qp {
    context: *mut Context,
    qp_context: *mut c_void,
    pd: *mut c_void,
    send_cq: *mut c_void,
    recv_cq: *mut c_void,
    srq: *mut c_void,
    handle: u32,
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
    vendor_err: u32,
    byte_len: u32,
    pub(super) imm_be: u32,
    pub(super) qp_num: u32,
    src_qp: u32,
    pub(super) flags: c_uint,
    pkey_index: u16,
    slid: u16,
    sl: u8,
    dlid_path_bits: u8,
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
    pub(super) qp_access_flags: c_uint,
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
    max_mtu: c_uint,
    pub(super) active_mtu: c_uint,
    gid_tbl_len: c_int,
    port_cap_flags: u32,
    max_msg_sz: u32,
    bad_pkey_cntr: u32,
    qkey_viol_cntr: u32,
    pkey_tbl_len: u16,
    pub(super) lid: u16,
    sm_lid: u16,
    bytes: [u8; 8],
    pub(super) link_layer: u8,
    _rest: [u8; 81],
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
    _before: [u8; 112],
    pub(super) max_qp_wr: c_int,
    _rest: [u8; 396],
}

impl DeviceAttr {
    pub(super) const ZERO: Self = Self { _before: [0; 112], max_qp_wr: 0, _rest: [0; 396] };
}

/// The layouts equal those of C compilers on x86_64 and aarch64.
const _: () = {
    assert!(std::mem::size_of::<usize>() == 8, "the layouts are those of 64-bit machines");
    assert!(std::mem::offset_of!(Context, poll_cq) == 96);
    assert!(std::mem::offset_of!(Context, post_send) == 208);
    assert!(std::mem::offset_of!(Channel, fd) == 8);
    assert!(std::mem::offset_of!(Mr, lkey) == 36);
    assert!(std::mem::offset_of!(Qp, qp_num) == 52);
    assert!(std::mem::size_of::<SendWr>() == 128);
    assert!(std::mem::size_of::<RecvWr>() == 32);
    assert!(std::mem::size_of::<Wc>() == 48);
    assert!(std::mem::size_of::<QpInit>() == 64);
    assert!(std::mem::size_of::<AhAttr>() == 32);
    assert!(std::mem::size_of::<QpAttr>() == 144);
    assert!(std::mem::offset_of!(PortAttr, lid) == 34);
    assert!(std::mem::offset_of!(PortAttr, link_layer) == 46);
    assert!(std::mem::offset_of!(DeviceAttr, max_qp_wr) == 112);
};
