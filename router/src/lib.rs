//! The front door: text in, text out; the one place that knows the whole path.
//!
//! Suggested reading order, which is a request's own: it comes in through a door ([`http`] or [`grpc`]), becomes tokens
//! ([`text`]) and a prompt ([`accept`]), is let in ([`admission`]), gets a route ([`policy`] over a view of the
//! [`cluster`]), is sent to the nodes ([`dispatch`] through [`rpc`]), and is kept alive until its last token
//! ([`continuation`]); that all of them move is watched ([`watchdog`]). [`serve`] is the border between the doors and the house; [`house`] is the router's own life.
#![forbid(unsafe_code)]

pub mod http;
pub mod grpc;
pub mod text;
pub mod accept;
pub mod serve;
pub mod choice;
pub mod admission;
pub mod policy;
pub mod cluster;
pub mod dispatch;
pub mod continuation;
pub mod watchdog;
pub mod rpc;
pub mod house;
pub mod config;
pub mod debug;
mod pairs;
pub mod metrics;
pub mod error;

#[cfg(test)]
mod puppet;

pub use cluster::{Cluster, NodeState};
pub use config::{RawRouterConfig, RouterConfig};
pub use house::Router;
