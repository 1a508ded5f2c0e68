//! Kernels for NVIDIA GPUs: found, compiled for the card at hand, and launched with every argument checked.
//!
//! Nothing of CUDA is needed to build or to start: the driver and the compiler (NVRTC) are loaded when a card is
//! opened, and what is missing is said in one sentence ([`CudaError`]).
//!
//! Suggested reading order: what is found ([`library`]), what is compiled ([`source`], [`compiler`], [`cache`]), the
//! card that it runs on ([`card`], [`buffer`], [`arena`], [`pinned`], [`event`], [`graph`]), and what it computes (`ops`, over the
//! kernels in `kernels/cu`, and [`matmul`]).

pub mod error;
pub mod library;
pub mod source;
pub mod compiler;
pub mod report;
pub mod cache;
pub mod buffer;
pub mod card;
pub mod pinned;
pub mod event;
pub mod graph;
pub(crate) mod mapped;
pub mod arena;
pub(crate) mod staging;
pub mod memory;
pub mod remote;
pub mod peers;
mod tensor_map;
mod completion_counter;
mod job_buffers;
mod rectangles;
mod engines;
mod lanes;
pub mod nccl;
pub mod slots;
mod wire_kernels;
pub mod copied_pages;
pub mod page_copier_size;
pub mod page_copier;
pub mod ops;
pub mod matmul;

pub use arena::Arena;
pub use buffer::{Bf16, Buffer, Element, View, ViewMut};
pub use cache::Cache;
pub use card::{Card, Marker};
pub use compiler::{Compiled, Nvrtc};
pub use copied_pages::{PageRuns, RemotePages, SlotAt, SomePages};
pub use error::CudaError;
pub use event::Event;
pub use graph::Graph;
pub use matmul::{Answer, Next, NormedRows, ProductShape, Products};
pub use memory::DeviceMemory;
pub use ops::{
    AddedRows, DecodeAttention, DrawRow, DummyPart, EDIT_WORDS, Edit, Ending, FeedTokens, FewRowsForm,
    Fp8Rows, HeadsRows, KvNumber, KvPages, ManyRows, NOWHERE, Outcome, OwnForm, OwnProduct, PendingNorm,
    PrefillAttention, PrefillSequence, RopeWriteKv, SKINNY_FORMS, SampleTokens, SkinnyForm, SumRows, TOP_MAX,
    Weights,
};
pub use page_copier::{CopyDone, CopyJob, PageCopier};
pub use page_copier_size::PageCopierSize;
pub use peers::{LostFlag, PEERS_MAX, Peers, Shown, Together};
pub use pinned::Pinned;
pub use remote::RemoteMemory;
pub use slots::Slots;
