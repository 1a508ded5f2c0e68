//! Computes the KV of prompts and sends it where it is wanted.
//!
//! A prompt comes in through [`service`], runs in the scheduler's worker, and its KV leaves through the `outbox`;
//! `shelf` keeps KV whose landing is not known yet.
#![forbid(unsafe_code)]

pub mod service;
mod outbox;
mod shelf;

pub use service::PrefillService;
