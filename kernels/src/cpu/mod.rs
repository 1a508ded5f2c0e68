//! Kernels for the processor: the arithmetic of a language model, exact and independent of the batch.
//!
//! Suggested reading order: the threads and instructions ([`processor`], `pool`, `simd`), the layout of numbers
//! ([`number`], [`bytes`], [`matrix`]), how products are added up (`tile`, `strips`, [`product`]), and
//! the rest of a layer ([`rows`], [`attention`]).
//! See `docs/decisions/0003-own-cpu-kernels.md`.

// Loops over constant ranges are unrolled, and what they index stays in registers; iterators do not promise that.
#![allow(clippy::needless_range_loop)]

pub mod processor;
mod pool;
mod simd;
pub mod number;
pub mod bytes;
pub mod matrix;
mod quantize;
mod tile;
mod strips;
pub mod product;
mod exp;
pub mod rows;
pub mod attention;
mod columns;
mod scratch;

pub use attention::{Attention, KvShape, Stretch};
pub use bytes::SharedBytes;
pub use matrix::{Format, Matrix, Q8_BLOCK, WrongSize};
pub use pool::Pool;
pub use processor::{Arithmetic, Processor};
pub use product::Product;
pub use rows::Angles;
pub use simd::Isa;
