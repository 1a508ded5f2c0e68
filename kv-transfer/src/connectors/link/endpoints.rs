//! The processes of a receiver, and where they listen.

use super::frame::ProcessAddress;

/// The endpoints of one receiver.
#[derive(Debug)]
pub(super) struct Endpoints {
    /// Leads to the process that grants landings, and takes the KV that no other process has.
    pub(super) head: String,
    pub(super) others: Vec<ProcessAddress>,
}

impl Endpoints {
    /// Returns the process that takes a rank's KV of a layer (number in the model); `None` for the head.
    pub(super) fn process_of(&self, layer: u16, rank: u16) -> Option<usize> {
        let takes =
            |process: &ProcessAddress| process.layers.contains(&layer) && process.ranks.contains(&rank);
        self.others.iter().position(takes)
    }

    /// Returns the endpoint that takes a rank's KV of a layer (number in the model).
    pub(super) fn endpoint_of(&self, layer: u16, rank: u16) -> &str {
        self.process_of(layer, rank).map_or(&self.head, |process| &self.others[process].endpoint)
    }
}
