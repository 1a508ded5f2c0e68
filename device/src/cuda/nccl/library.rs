//! The dozen NCCL functions in use, from a library that is loaded at run time.
//!
//! These bindings are our own, because existing ones look for file names of development packages. Users have
//! `libnccl.so.2`.

use std::ffi::{CStr, c_char, c_int, c_uint, c_void};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use libloading::os::unix::{Library, RTLD_LOCAL, RTLD_NOW};

use super::super::CudaError;

/// The library's name in every release since 2015, and its name in development packages.
const NAMES: &[&str] = &["libnccl.so.2", "libnccl.so"];
/// The folders where packages install the library, if the loader does not find it.
const USUAL_FOLDERS: &[&str] = &["/usr/lib/x86_64-linux-gnu", "/usr/local/cuda/lib64"];
/// The first release whose communicators can be created without blocking and aborted by the user.
const VERSION_MIN: c_int = 21_800;
/// The first release in which one thread may call for a communicator while its call for another has not
/// settled. Earlier releases keep a thread's call in thread-local variables, for one call at a time.
const SEVERAL_SINCE: c_int = 22_700;

pub(super) type CommHandle = *mut c_void;
type Status = c_int;

pub(super) const SUCCESS: Status = 0;
pub(super) const IN_PROGRESS: Status = 7;
/// The type of messages: bytes.
pub(super) const BYTES: c_int = 1;
/// The types of numbers that ranks add up.
pub(super) const F32: c_int = 7;
pub(super) const BF16: c_int = 9;
/// The operation that adds.
pub(super) const SUM: c_int = 0;

/// The id by which two processes find each other. It is not secret.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[repr(C)]
pub struct UniqueId(pub [u8; 128]);

/// `ncclConfig_t` of release 2.18. Later releases check its size and version, and treat further fields as not
/// set.
#[repr(C)]
pub(super) struct Config {
    size: usize,
    magic: c_uint,
    version: c_uint,
    blocking: c_int,
    cga_cluster_size: c_int,
    ctas_min: c_int,
    ctas_max: c_int,
    net_name: *const c_char,
    split_share: c_int,
}

impl Config {
    /// Returns a configuration without blocking. NCCL chooses the rest.
    pub(super) fn without_blocking() -> Self {
        let not_set = c_int::MIN;
        Self {
            size: size_of::<Self>(),
            magic: 0xcafe_beef,
            version: VERSION_MIN as c_uint,
            blocking: 0,
            cga_cluster_size: not_set,
            ctas_min: not_set,
            ctas_max: not_set,
            net_name: std::ptr::null(),
            split_share: not_set,
        }
    }

    /// Returns a configuration whose calls return when their work is queued.
    pub(super) fn blocking() -> Self {
        Self { blocking: 1, ..Self::without_blocking() }
    }
}

macro_rules! functions {
    ($($field:ident = $name:literal: fn($($argument:ty),*);)*) => {
        /// NCCL, loaded and never unloaded.
        #[derive(Debug)]
        pub struct Nccl {
            version: c_int,
            error_text: unsafe extern "C" fn(Status) -> *const c_char,
            last_error: unsafe extern "C" fn(CommHandle) -> *const c_char,
            $(pub(super) $field: unsafe extern "C" fn($($argument),*) -> Status,)*
        }

        impl Nccl {
            fn of(library: &'static Library) -> Option<Self> {
                // JUSTIFICATION: a loaded library's functions are looked up by name.
                // SAFETY: the signatures are those of nccl.h, which have not changed since the first release
                // with these names.
                unsafe {
                    Some(Self {
                        version: 0,
                        error_text: *library.get(b"ncclGetErrorString\0").ok()?,
                        last_error: *library.get(b"ncclGetLastError\0").ok()?,
                        $($field: *library.get(concat!($name, "\0").as_bytes()).ok()?,)*
                    })
                }
            }
        }
    };
}

functions! {
    get_version = "ncclGetVersion": fn(*mut c_int);
    get_unique_id = "ncclGetUniqueId": fn(*mut UniqueId);
    init_rank = "ncclCommInitRankConfig": fn(*mut CommHandle, c_int, UniqueId, c_int, *mut Config);
    async_error = "ncclCommGetAsyncError": fn(CommHandle, *mut Status);
    send = "ncclSend": fn(*const c_void, usize, c_int, c_int, CommHandle, *mut c_void);
    receive = "ncclRecv": fn(*mut c_void, usize, c_int, c_int, CommHandle, *mut c_void);
    all_reduce = "ncclAllReduce": fn(*const c_void, *mut c_void, usize, c_int, c_int, CommHandle, *mut c_void);
    finalize = "ncclCommFinalize": fn(CommHandle);
    destroy = "ncclCommDestroy": fn(CommHandle);
    abort = "ncclCommAbort": fn(CommHandle);
}

impl Nccl {
    /// Loads the library, once in this process.
    pub fn load() -> Result<&'static Self, CudaError> {
        static LOADED: OnceLock<Option<Nccl>> = OnceLock::new();
        let nccl = LOADED.get_or_init(found).as_ref().ok_or(CudaError::NoNccl)?;
        match nccl.version >= VERSION_MIN {
            true => Ok(nccl),
            false => Err(CudaError::NcclTooOld { version: nccl.version, needed: VERSION_MIN }),
        }
    }

    /// Returns the version number of the library: 22803 is 2.28.3.
    pub fn version(&self) -> i32 {
        self.version
    }

    /// Returns whether one thread can handle several communicators with calls in progress.
    pub fn takes_several(&self) -> bool {
        self.version >= SEVERAL_SINCE
    }

    /// Returns an id for one communicator. The other process connects to the process that made the id.
    pub fn unique_id(&self) -> Result<UniqueId, CudaError> {
        let mut id = UniqueId([0; 128]);
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: it writes 128 bytes.
        let status = unsafe { (self.get_unique_id)(&raw mut id) };
        self.checked("ncclGetUniqueId", status)?;
        Ok(id)
    }

    /// Returns true if a call is done, and false if it continues.
    pub(super) fn checked(&self, call: &'static str, status: Status) -> Result<bool, CudaError> {
        match status {
            SUCCESS => Ok(true),
            IN_PROGRESS => Ok(false),
            _ => Err(CudaError::Nccl { call, why: self.text_of(status) }),
        }
    }

    /// Returns NCCL's text for a status, and its own words about the last error, if it has any.
    fn text_of(&self, status: Status) -> String {
        // JUSTIFICATION: NCCL is a C library.
        // SAFETY: NCCL has a static text for every number, known or not. The last error is in memory that NCCL never frees.
        let texts = unsafe { [(self.error_text)(status), (self.last_error)(std::ptr::null_mut())] };
        // SAFETY: NCCL's texts end with a zero.
        let texts = texts.iter().filter(|text| !text.is_null()).map(|text| unsafe { CStr::from_ptr(*text) });
        let texts: Vec<_> = texts.map(|text| text.to_string_lossy().trim().to_owned()).collect();
        texts.into_iter().filter(|text| !text.is_empty()).collect::<Vec<_>>().join(": ")
    }
}

fn found() -> Option<Nccl> {
    let library: &'static Library = Box::leak(Box::new(candidates().find_map(opened)?));
    let mut nccl = Nccl::of(library)?;
    let mut version = 0;
    // JUSTIFICATION: NCCL is a C library.
    // SAFETY: it writes one number.
    (unsafe { (nccl.get_version)(&raw mut version) } == SUCCESS).then_some(())?;
    nccl.version = version;
    Some(nccl)
}

fn candidates() -> impl Iterator<Item = PathBuf> {
    let by_name = NAMES.iter().map(PathBuf::from);
    let by_place =
        USUAL_FOLDERS.iter().flat_map(|folder| NAMES.iter().map(move |name| Path::new(folder).join(name)));
    by_name.chain(by_place)
}

fn opened(path: PathBuf) -> Option<Library> {
    // JUSTIFICATION: the library may be missing, so it is loaded at run time.
    // SAFETY: loading NCCL runs its initializers, which take no arguments.
    unsafe { Library::open(Some(path), RTLD_NOW | RTLD_LOCAL) }.ok()
}
