//! KV memory, kernels and all code that needs `unsafe`.
//!
//! No crate above this one sees a raw pointer.
#![allow(unsafe_code)]

pub mod borrow;
pub mod cpu;
pub mod cuda;
pub mod memory;
mod page;
mod regions;
pub mod verbs;
pub mod xxh3;

pub use borrow::PageBusy;
pub use cuda::memory::DeviceMemory;
pub use memory::peer::{OutsidePeer, PeerMemory, PeerMemoryError};
pub use memory::{HostMemory, MemoryError};
pub use page::{PageMut, PageRef};
pub use regions::RegionShape;
pub use xxh3::{Parts, Stores};
