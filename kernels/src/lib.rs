//! Arithmetic on processors and GPUs.
//!
//! `device` has the memory that it works on (docs/decisions/0025).
#![allow(unsafe_code)]

pub mod cpu;
pub mod cuda;
