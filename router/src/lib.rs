//! The front door: text in, text out; the one place that knows the whole path.
//!
//! Suggested reading order, which is a request's own: it comes in through a door ([`http`] or [`grpc`]), becomes tokens
//! ([`text`]) and, for its tenant ([`tenants`]), a prompt ([`accept`]), is let in ([`admission`]), gets a route ([`policy`] over a view of the
//! [`cluster`]), is sent to the nodes ([`dispatch`] through [`rpc`]), and is kept alive until its last token
//! ([`continuation`]); that all of them move is watched ([`watchdog`]). [`serve`] is what the doors know of
//! the cluster; [`server`] starts and stops the router, and [`drain`] has the phases of its stop.
#![forbid(unsafe_code)]

pub mod http;
pub mod grpc;
pub mod text;
pub mod tenants;
pub mod accept;
pub mod serve;
pub mod choice;
pub mod admission;
pub mod policy;
pub mod cluster;
pub mod dispatch;
pub mod drain;
pub mod continuation;
pub mod watchdog;
pub mod rpc;
pub mod server;
pub mod config;
pub mod debug;
mod pairs;
pub mod metrics;
pub mod error;

#[cfg(test)]
mod fake_node;

pub use cluster::{Cluster, NodeState};
pub use config::{RawRouterConfig, RouterConfig};
pub use server::Router;
