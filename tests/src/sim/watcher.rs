//! A watcher of the registry over the network, like a second router.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use chassis::{Gate, Task, World, spawn_guarded};
use futures::StreamExt as _;
use registry::{Members, RegistryParts};
use types::NodeInfo;

use super::host::REGISTRY_URL;
use super::net::SimNet;

pub const WATCHER: &str = "watcher";

/// The watcher's view of the registry. Dropping it ends the watch.
#[derive(Debug)]
pub struct Watcher {
    /// The members that the watcher knows. Never held across an await.
    members: Arc<Mutex<Members>>,
    _watching: Task<()>,
}

impl Watcher {
    pub async fn start(net: &SimNet, seed: u64, gate: &Gate) -> Self {
        let world = World::seeded(seed).with_net(net.host(WATCHER)).fork(WATCHER);
        let parts = RegistryParts { world, gate: gate.clone() };
        let registry = registry::open(REGISTRY_URL, parts).expect("a right address");
        let mut events = registry.watch().await.expect("it need not be there yet");
        let members = Arc::new(Mutex::new(Members::default()));
        let known = Arc::clone(&members);
        let watch = async move {
            while let Some(event) = events.next().await {
                locked(&known).apply(&event);
            }
        };
        Self { members, _watching: spawn_guarded(gate, WATCHER, watch) }
    }

    pub fn members(&self) -> Vec<NodeInfo> {
        locked(&self.members).iter().cloned().collect()
    }
}

fn locked(members: &Mutex<Members>) -> MutexGuard<'_, Members> {
    members.lock().unwrap_or_else(PoisonError::into_inner)
}
