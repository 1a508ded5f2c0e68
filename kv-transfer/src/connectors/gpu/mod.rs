//! What the connectors between GPUs share: a thread that waits for copy jobs, and pages as a GPU is told of them.

pub(super) mod copy_thread;
pub(super) mod pages;
