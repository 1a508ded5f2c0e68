//! The registry for clusters without etcd: a table in the router, served over gRPC.

mod client;
mod server;

pub use client::EmbeddedRegistry;
pub use server::{BootstrapService, bootstrap_server};

#[cfg(test)]
mod tests;
