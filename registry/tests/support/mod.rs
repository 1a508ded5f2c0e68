//! A real etcd, and a wire to it that can be cut.

pub mod certificates;
pub mod etcd;
pub mod wire;
