//! Arithmetic on CPUs and GPUs.
//!
//! The `device` crate has the memory that this crate works on (docs/decisions/0025).
#![allow(unsafe_code)]

pub mod cpu;
pub mod cuda;
