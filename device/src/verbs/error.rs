//! RDMA errors.

use std::io;

use super::layout;
use crate::cuda::CudaError;

/// The error of an operation on an RDMA device.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    #[error("libibverbs is not installed (package libibverbs1 or rdma-core)")]
    NoLibrary(#[source] libloading::Error),
    #[error("libibverbs is too old: it lacks a required function")]
    OldLibrary(#[source] libloading::Error),
    #[error("there is no RDMA device on this machine")]
    NoDevice,
    #[error("there is no RDMA device called {name:?}; available: {known}")]
    UnknownDevice { name: String, known: String },
    /// A system call failed.
    #[error("{what}")]
    System {
        what: &'static str,
        #[source]
        source: io::Error,
    },
    #[error("lock {bytes} bytes of memory for RDMA (`ulimit -l` must allow it)")]
    Register {
        bytes: usize,
        #[source]
        source: io::Error,
    },
    #[error("libibverbs is too old for GPU memory (dmabuf): rdma-core 34 or later is needed")]
    NoDmabuf(#[source] libloading::Error),
    #[error("export GPU memory for RDMA")]
    Export(#[source] CudaError),
    #[error("register {bytes} bytes of GPU memory for RDMA (the RDMA device's driver must support dmabuf)")]
    RegisterDmabuf {
        bytes: usize,
        #[source]
        source: io::Error,
    },
    /// The device failed a request.
    #[error("{0}")]
    Failed(Failure),
}

/// The reason why the device failed a request.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("the peer does not answer: the process or the network is down")]
    Unreachable,
    #[error("the peer has no receive buffer left")]
    NotReady,
    #[error("the peer does not allow access to this memory")]
    NoAccess,
    #[error("the device rejected the request or the local memory")]
    OwnMemory,
    #[error("the connection was closed")]
    Flushed,
    #[error("the device failed")]
    Device,
    #[error("the device reports status {0}")]
    Other(u32),
}

impl Failure {
    /// Maps the numbers of `enum ibv_wc_status`.
    pub(super) fn of(status: u32) -> Option<Self> {
        Some(match status {
            layout::WC_SUCCESS => return None,
            layout::WC_LOC_LEN_ERR..=layout::WC_LOC_PROT_ERR => Self::OwnMemory,
            layout::WC_WR_FLUSH_ERR => Self::Flushed,
            layout::WC_REM_INV_REQ_ERR..=layout::WC_REM_OP_ERR => Self::NoAccess,
            layout::WC_RETRY_EXC_ERR => Self::Unreachable,
            layout::WC_RNR_RETRY_EXC_ERR => Self::NotReady,
            layout::WC_FATAL_ERR => Self::Device,
            other => Self::Other(other),
        })
    }

    /// Returns whether the failure only means that the connection is lost.
    pub fn is_of_the_connection(self) -> bool {
        matches!(self, Self::Unreachable | Self::NotReady | Self::Flushed)
    }
}

impl VerbsError {
    /// Makes the error of a call that sets `errno`.
    pub(super) fn last(what: &'static str) -> Self {
        Self::System { what, source: io::Error::last_os_error() }
    }

    /// Makes the result of a call that returns an error number.
    pub(super) fn check(what: &'static str, errno: i32) -> Result<(), Self> {
        match errno {
            0 => Ok(()),
            errno => Err(Self::System { what, source: io::Error::from_raw_os_error(errno.abs()) }),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_device_says_has_a_name() {
        assert_eq!(Failure::of(0), None);
        for (status, expected) in [
            (4, Failure::OwnMemory),
            (5, Failure::Flushed),
            (10, Failure::NoAccess),
            (12, Failure::Unreachable),
            (13, Failure::NotReady),
            (19, Failure::Device),
            (21, Failure::Other(21)),
        ] {
            assert_eq!(Failure::of(status), Some(expected));
        }
    }
}
