//! The code that the connectors between GPUs share: a thread that waits for copy jobs, and the format of pages for a
//! GPU.

pub(super) mod copy_thread;
pub(super) mod pages;
