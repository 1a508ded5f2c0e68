//! CPU kernels for language models, with results that do not depend on the batch.
//!
//! Suggested reading order: threads and instruction sets ([`processor`], `pool`, `simd`), number formats
//! ([`number`], [`bytes`], [`matrix`], [`random`]), products (`tile`, `strips`, [`product`]), and the rest of a layer
//! ([`rows`], [`attention`]).
//! See `docs/decisions/0003-own-cpu-kernels.md`.

// Index loops are allowed here: loops over constant ranges are unrolled, and the indexed values stay in
// registers. Iterators do not guarantee that.
#![allow(clippy::needless_range_loop)]

pub mod processor;
mod pool;
mod simd;
pub mod number;
pub mod bytes;
pub mod matrix;
pub mod random;
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
pub use matrix::{FP8_BLOCK, Format, Matrix, Q8_BLOCK, WrongSize};
pub use pool::Pool;
pub use processor::{Arithmetic, Processor};
pub use product::Product;
pub use quantize::ROUND_GROUP;
pub use rows::{RopeAngles, Rotation};
pub use simd::Isa;
