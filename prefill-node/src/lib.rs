//! Computes the KV of prompts and sends it to landings.
//!
//! A prompt comes in through [`service`] and runs in the scheduler's worker. Its KV leaves through the
//! `outbox`. `held_transfers` keeps KV whose landing is not yet known.
#![forbid(unsafe_code)]

pub mod service;
mod held_transfers;
mod outbox;

pub use service::PrefillService;
