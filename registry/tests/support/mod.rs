//! A real etcd, and a TCP proxy to it that can be interrupted.

pub mod certificates;
pub mod etcd;
pub mod wire;
