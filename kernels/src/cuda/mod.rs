//! Kernels for NVIDIA GPUs: compiled for the installed GPU and launched with checked arguments.
//!
//! Building and starting need no CUDA. The driver and the compiler (NVRTC) are loaded when a GPU is opened;
//! [`CudaError`] names what is missing.
//!
//! Suggested reading order: loading ([`library`]), compiling ([`source`], [`compiler`], [`cache`]), the GPU
//! ([`card`], [`buffer`], [`arena`], [`pinned`], [`event`], [`graph`]), and computing (`ops`, over the
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
mod tally;
mod slate;
mod rectangles;
mod engines;
mod lanes;
pub mod nccl;
pub mod slots;
pub mod courier;
pub mod ops;
pub mod matmul;

pub use arena::Arena;
pub use buffer::{Bf16, Buffer, Element, View, ViewMut};
pub use cache::Cache;
pub use card::{Card, Marker};
pub use compiler::{Compiled, Nvrtc};
pub use courier::{Courier, CourierSize, Errand, ErrandDone, PageRuns, RemotePages, SlotAt, SomePages};
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
pub use peers::{LostFlag, PEERS_MAX, Peers, Shown, Together};
pub use pinned::Pinned;
pub use remote::RemoteMemory;
pub use slots::Slots;
