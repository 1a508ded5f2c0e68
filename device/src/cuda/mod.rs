//! NVIDIA GPUs: their libraries, their memory, and the kernels that move pages between them.
//!
//! Building and starting need no CUDA. The driver and the compiler (NVRTC) are loaded when a GPU is opened;
//! [`CudaError`] names what is missing.
//!
//! Suggested reading order: libraries ([`library`]), programs ([`source`], [`compiler`], [`cache`]), the GPU
//! that runs them ([`card`], [`buffer`], [`arena`], [`pinned`], [`host_words`], [`event`],
//! [`pinned_rows`], [`graph`], [`hand_over`](mod@hand_over), [`host_ring`](mod@host_ring), [`reach`](mod@reach)), memory for
//! KV ([`memory`], [`remote`], [`slots`]), and the copies between GPUs ([`page_copier`], [`nccl`]).

pub mod error;
pub mod library;
pub mod source;
pub mod compiler;
pub mod report;
pub mod cache;
pub mod buffer;
pub mod card;
pub mod pinned;
pub mod host_words;
pub mod event;
pub mod pinned_rows;
pub mod graph;
pub mod hand_over;
pub mod host_ring;
pub mod reach;
pub(crate) mod mapped;
pub mod arena;
pub(crate) mod staging;
pub mod memory;
pub mod remote;
mod completion_counter;
mod job_buffers;
mod rectangles;
mod engines;
mod lanes;
pub mod nccl;
pub mod slots;
mod host_path;
mod wire_kernels;
pub mod copied_pages;
pub mod page_copier_size;
pub mod page_copier;

pub use arena::Arena;
pub use buffer::{Bf16, Buffer, Element, View, ViewMut};
pub use cache::Cache;
pub use card::{Card, Columns, Marker, MemoryBytes};
pub use compiler::{CompiledCode, Nvrtc};
pub use copied_pages::{PageRuns, RemotePages, SlotAt, SomePages};
pub use error::CudaError;
pub use event::Event;
pub use graph::Graph;
pub use hand_over::{Inbox, Outbox, hand_over};
pub use host_path::HostPath;
pub use host_ring::{HostInbox, HostOutbox, host_ring};
pub use host_words::HostWords;
pub use library::gpu_uuids;
pub use memory::DeviceMemory;
pub use page_copier::{CopyDone, CopyJob, PageCopier, PageDigests};
pub use page_copier_size::PageCopierSize;
pub use pinned::PinnedNumbers;
pub use pinned_rows::{PinnedRows, RowShare};
pub use reach::reach;
pub use remote::RemoteMemory;
pub use slots::Slots;
pub use source::Programs;
