//! Holds room for KV on its way, and decodes what has arrived.
//!
//! A prompt comes in through [`service`], gets room in [`reservations`], and its steps leave through a `steps` sink.
#![forbid(unsafe_code)]

pub mod service;
pub mod reservations;
mod steps;

pub use reservations::Reservations;
pub use service::DecodeService;
