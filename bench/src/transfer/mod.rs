//! How fast a connector moves KV, against a plain copy of the same bytes on the same path in the same run.
//!
//! Suggested reading order: what is varied ([`case`]), where KV lies that is not in host memory ([`cards`]), the two nodes
//! between which it goes ([`ends`]), what lies there before and after ([`contents`]), what a connector is held against
//! ([`plain`]), how one is measured ([`measure`]) and what is said of it ([`report`]).

pub mod cards;
pub mod case;
pub mod contents;
pub mod ends;
pub mod measure;
pub mod plain;
pub mod report;
