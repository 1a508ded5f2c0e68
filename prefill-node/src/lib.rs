//! Computes the KV of prompts and sends it where it is wanted.
//!
//! A prompt comes in through [`service`], runs in the scheduler's worker, and its KV leaves through the `outbox`;
//! `held_transfers` keeps KV whose landing is not known yet.
#![forbid(unsafe_code)]

pub mod service;
mod held_transfers;
mod outbox;

pub use service::PrefillService;
