//! Why RDMA does not work, or has stopped working.

use std::io;

use crate::cuda::CudaError;

/// What went wrong.
#[derive(Debug, thiserror::Error)]
pub enum VerbsError {
    #[error("libibverbs is not on this machine (package libibverbs1 or rdma-core)")]
    NoLibrary(#[source] libloading::Error),
    #[error("libibverbs lacks a function that is needed: it is too old")]
    OldLibrary(#[source] libloading::Error),
    #[error("there is no RDMA device on this machine")]
    NoDevice,
    #[error("there is no RDMA device called {name:?}; there are {known}")]
    UnknownDevice { name: String, known: String },
    /// The system refused a call.
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
    #[error("libibverbs does not know memory of other devices (dmabuf): it is older than rdma-core 34")]
    NoDmabuf(#[source] libloading::Error),
    #[error("take GPU memory for RDMA")]
    Export(#[source] CudaError),
    #[error(
        "register {bytes} bytes of another device's memory for RDMA (the RDMA device's driver must take dmabuf)"
    )]
    RegisterDmabuf {
        bytes: usize,
        #[source]
        source: io::Error,
    },
    /// The device has given up something that it was told to do.
    #[error("{0}")]
    Failed(Failure),
}

/// Why the device gave up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Failure {
    #[error("the peer does not answer: it is gone, or the network is")]
    Unreachable,
    #[error("the peer takes nothing more")]
    NotReady,
    #[error("the peer does not give access to this memory")]
    NoAccess,
    #[error("this side's own memory is not what the device was told")]
    OwnMemory,
    #[error("the connection was taken down")]
    Flushed,
    #[error("the device is broken")]
    Device,
    #[error("status {0} of the device")]
    Other(u32),
}

impl Failure {
    /// The numbers of `enum ibv_wc_status`.
    pub(super) fn of(status: u32) -> Option<Self> {
        Some(match status {
            0 => return None,
            1..=4 => Self::OwnMemory,
            5 => Self::Flushed,
            9..=11 => Self::NoAccess,
            12 => Self::Unreachable,
            13 => Self::NotReady,
            19 => Self::Device,
            other => Self::Other(other),
        })
    }

    /// Whether it says that there is no connection, and nothing worse.
    pub fn is_of_the_connection(self) -> bool {
        matches!(self, Self::Unreachable | Self::NotReady | Self::Flushed)
    }
}

impl VerbsError {
    /// For calls that set `errno`.
    pub(super) fn last(what: &'static str) -> Self {
        Self::System { what, source: io::Error::last_os_error() }
    }

    /// For calls that return it.
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
