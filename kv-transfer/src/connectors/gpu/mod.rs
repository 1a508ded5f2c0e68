//! The code that the connectors between GPUs share: a thread that waits for copy jobs (`copy_thread`), the format of
//! pages for a GPU (`pages`), the slots in which KV travels (`staging`, `slot_set`, `free_slots`, `slot_pool`), and a double of a GPU
//! for tests (`double`).

pub(super) mod copy_thread;
pub(super) mod double;
pub(super) mod free_slots;
pub(super) mod pages;
pub(super) mod slot_pool;
pub(super) mod slot_set;
pub(super) mod staging;
#[cfg(test)]
mod tests;
