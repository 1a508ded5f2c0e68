//! The functions of libibverbs, looked up by name.
//!
//! In C, posting and polling are inline functions that call through pointers in the context. This code does
//! the same.

use std::ffi::{c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use libloading::os::unix::Library;

use super::error::VerbsError;
use super::layout::{Channel, Context, DeviceAttr, Mr, PortAttr, Qp, QpAttr, QpInit};

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
    pub(super) _opaque: [u8; 0],
}
