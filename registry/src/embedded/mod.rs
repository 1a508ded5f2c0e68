//! The registry for those who run no etcd: a table in the router, and a small gRPC service in front of it.

mod client;
mod server;

pub use client::EmbeddedRegistry;
pub use server::{BootstrapService, bootstrap_server};

#[cfg(test)]
mod tests;
