//! The processes of a receiver, and where they listen.

use super::frame::ProcessAddress;

/// The endpoints of one receiver.
#[derive(Debug)]
pub(super) struct Endpoints {
    /// Leads to the process that grants landings, and takes the KV of all layers that no other process has.
    pub(super) head: String,
    pub(super) others: Vec<ProcessAddress>,
}

impl Endpoints {
    /// Returns the process that takes the KV of a layer (number in the model); `None` for the head.
    pub(super) fn process_of(&self, layer: u16) -> Option<usize> {
        self.others.iter().position(|process| process.layers.contains(&layer))
    }

    /// Returns the endpoint that takes the KV of a layer (number in the model).
    pub(super) fn of_layer(&self, layer: u16) -> &str {
        self.process_of(layer).map_or(&self.head, |process| &self.others[process].endpoint)
    }
}
