//! The router: takes clients' requests, chooses nodes, and returns text. Only the router knows the whole
//! path.
//!
//! Suggested reading order, along the path of a request: the APIs ([`http`], [`grpc`]); tokens and text
//! ([`text`]); tenants ([`tenants`]); accepted prompts ([`accept`]) and their grammars ([`grammars`]); chats (`chat`) and the answers to a request (`answers`); admission ([`admission`]); routes
//! ([`policy`] over a view of the [`cluster`], without nodes whose work fails: [`breaker`]) and the costs learned from
//! them ([`predictions`]); moves of nodes between roles ([`balance`]); calls to nodes ([`dispatch`] through [`rpc`]),
//! or to servers of other engines ([`upstream`]); the stream until its last token ([`continuation`]); and the watchdog
//! over all requests ([`watchdog`]) and their records ([`requests`]). [`serve`] is the trait between the APIs and the
//! cluster; [`server`] starts and stops the router, and [`drain`] has the phases of its stop.
#![forbid(unsafe_code)]

pub mod http;
pub mod grpc;
pub mod text;
pub mod tenants;
pub mod accept;
pub mod grammars;
pub mod serve;
mod chat;
mod answers;
pub mod choice;
pub mod admission;
pub mod policy;
pub mod predictions;
pub mod breaker;
pub mod cluster;
pub mod balance;
pub mod dispatch;
pub mod upstream;
mod trust;
pub mod drain;
pub mod continuation;
pub mod watchdog;
pub mod requests;
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
