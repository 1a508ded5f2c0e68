//! Memory of hosts and GPUs, its moves between processes, GPUs and hosts, and the `unsafe` code for it.
//!
//! Safe code above this crate reads and writes memory through borrowed pages, buffers and views.
#![allow(unsafe_code)]

pub mod borrow;
pub mod cuda;
pub mod memory;
pub mod number;
mod page;
pub mod polling;
mod regions;
pub mod verbs;
pub mod xxh3;

pub use borrow::PageBusy;
pub use cuda::memory::DeviceMemory;
pub use memory::peer::{PeerMemory, PeerMemoryError, PeerMemoryRangeError};
pub use memory::{HostMemory, MemoryError};
pub use page::{PageMut, PageRef};
pub use regions::RegionShape;
pub use xxh3::{Parts, Stores};
