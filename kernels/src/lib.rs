//! The machine room: memory that KV lies in, and the unsafe code that reaches it.
//!
//! Nothing above this crate sees a raw pointer.
#![allow(unsafe_code)]

pub mod cpu;
pub mod cuda;
pub mod memory;

pub use memory::{HostMemory, MemoryError, PageBusy, PageMut, PageRef, RegionShape};
