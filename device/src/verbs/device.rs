//! RDMA devices and their ports.

use std::ffi::CStr;
use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use super::error::VerbsError;
use super::layout::{Context, DeviceAttr, PORT_ACTIVE, PortAttr};
use super::sys::{DeviceEntry, Functions, functions};

/// An open device. Clones share it. It is closed when the last clone and all objects made from it are
/// dropped.
#[derive(Clone)]
pub struct Device {
    pub(super) inner: Arc<DeviceHandle>,
}

pub(super) struct DeviceHandle {
    pub(super) functions: &'static Functions,
    pub(super) context: NonNull<Context>,
    name: String,
}

// JUSTIFICATION: a pointer is neither Send nor Sync.
// SAFETY: libibverbs allows concurrent calls from all threads; it takes its own locks.
unsafe impl Send for DeviceHandle {}
// SAFETY: libibverbs takes its own locks.
unsafe impl Sync for DeviceHandle {}

/// The current state of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct PortState {
    pub is_active: bool,
    /// The largest packet that it can send now, as the interface's code: 1 is 256 bytes, 5 is 4096.
    pub mtu: u32,
    /// The port's address within an InfiniBand subnet; zero on Ethernet.
    pub lid: u16,
}

impl Device {
    /// Returns the names of all devices. If there is none, the error says whether the library or the device
    /// is missing.
    pub fn names() -> Result<Vec<String>, VerbsError> {
        let list = List::get()?;
        Ok(list.entries().map(|entry| list.name(entry)).collect())
    }

    pub fn open(name: &str) -> Result<Self, VerbsError> {
        let list = List::get()?;
        let Some(entry) = list.entries().find(|entry| list.name(*entry) == name) else {
            let known: Vec<_> = list.entries().map(|entry| list.name(entry)).collect();
            return Err(VerbsError::UnknownDevice { name: name.to_owned(), known: known.join(", ") });
        };
        // JUSTIFICATION: a call into C.
        // SAFETY: the entry is from a list that lives until the end of this function.
        let context = unsafe { (list.functions.ibv_open_device)(entry) };
        let context = NonNull::new(context).ok_or_else(|| VerbsError::last("open the RDMA device"))?;
        Ok(Self {
            inner: Arc::new(DeviceHandle { functions: list.functions, context, name: name.to_owned() }),
        })
    }

    pub fn name(&self) -> &str {
        &self.inner.name
    }

    pub fn port(&self, port: u8) -> Result<PortState, VerbsError> {
        let mut attr = PortAttr::ZERO;
        let (functions, context) = self.parts();
        // JUSTIFICATION: a call into C.
        // SAFETY: the context is open, and the structure is larger than in any version of the library.
        let errno = unsafe { (functions.ibv_query_port)(context, port, &mut attr) };
        VerbsError::check("ask for a port of the RDMA device", errno)?;
        Ok(PortState { is_active: attr.state == PORT_ACTIVE, mtu: attr.active_mtu, lid: attr.lid })
    }

    /// Returns one of the port's addresses.
    pub fn gid(&self, port: u8, index: u8) -> Result<[u8; 16], VerbsError> {
        let mut gid = [0; 16];
        let (functions, context) = self.parts();
        // JUSTIFICATION: a call into C.
        // SAFETY: the context is open, and a GID has 16 bytes.
        let errno = unsafe { (functions.ibv_query_gid)(context, port, index.into(), &mut gid) };
        VerbsError::check("ask for a GID of the RDMA device", errno)?;
        Ok(gid)
    }

    /// Returns the maximum number of requests in a queue.
    pub(super) fn requests_max(&self) -> Result<u32, VerbsError> {
        let mut attr = DeviceAttr::ZERO;
        let (functions, context) = self.parts();
        // JUSTIFICATION: a call into C.
        // SAFETY: the context is open, and the structure is larger than the library's.
        let errno = unsafe { (functions.ibv_query_device)(context, &mut attr) };
        VerbsError::check("ask for the limits of the RDMA device", errno)?;
        Ok(u32::try_from(attr.max_qp_wr).unwrap_or(0))
    }

    pub(super) fn parts(&self) -> (&'static Functions, *mut Context) {
        (self.inner.functions, self.inner.context.as_ptr())
    }
}

impl Drop for DeviceHandle {
    fn drop(&mut self) {
        // JUSTIFICATION: a call into C.
        // SAFETY: all objects made from the context hold this value, so none is left.
        unsafe { (self.functions.ibv_close_device)(self.context.as_ptr()) };
    }
}

impl fmt::Debug for Device {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Device({})", self.name())
    }
}

/// The library's list of devices. Dropping it frees the list.
struct List {
    functions: &'static Functions,
    first: NonNull<*mut DeviceEntry>,
    n: usize,
}

impl List {
    fn get() -> Result<Self, VerbsError> {
        let functions = functions()?;
        let mut n = 0;
        // JUSTIFICATION: a call into C.
        // SAFETY: the pointer is to a number that outlives the call.
        let first = unsafe { (functions.ibv_get_device_list)(&mut n) };
        // A missing list means no device: without the kernel's RDMA modules there is no list.
        let first = NonNull::new(first).ok_or(VerbsError::NoDevice)?;
        let list = Self { functions, first, n: usize::try_from(n).unwrap_or(0) };
        if list.n == 0 { Err(VerbsError::NoDevice) } else { Ok(list) }
    }

    fn entries(&self) -> impl Iterator<Item = *mut DeviceEntry> + '_ {
        // JUSTIFICATION: a C array.
        // SAFETY: the library reported `n` entries, and the list lives as long as `self`.
        (0..self.n).map(|nth| unsafe { *self.first.as_ptr().add(nth) })
    }

    fn name(&self, entry: *mut DeviceEntry) -> String {
        // JUSTIFICATION: a C string.
        // SAFETY: the entry is from this list. Its name ends with a zero byte and lives as long as the list.
        let name = unsafe { CStr::from_ptr((self.functions.ibv_get_device_name)(entry)) };
        name.to_string_lossy().into_owned()
    }
}

impl Drop for List {
    fn drop(&mut self) {
        // JUSTIFICATION: a call into C.
        // SAFETY: the list is from the library, and no entry of it is in use.
        unsafe { (self.functions.ibv_free_device_list)(self.first.as_ptr()) };
    }
}
