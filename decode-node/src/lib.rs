//! Reserves room for incoming KV and decodes the sequences.
//!
//! A prompt comes in through [`service`] and gets room in [`reservations`]. Its steps leave through a `steps` sink.
#![forbid(unsafe_code)]

pub mod service;
pub mod reservations;
mod steps;

pub use reservations::Reservations;
pub use service::DecodeService;
