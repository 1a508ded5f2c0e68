//! The life of every node: announce, serve, wait, drain.

use std::sync::Arc;
use std::time::Duration;

use chassis::admin::Readiness;
use chassis::{Gate, Shutdown, spawn_guarded};
use registry::{AnnouncementState, Registry};
use tokio::sync::watch;
use tracing::info;
use types::node::PROTOCOL;
use types::{Epoch, ModelInfo, NodeId, NodeInfo, Role};

use crate::connectors::Connectors;
use crate::error::NodeError;
use crate::ports::Ports;

/// A node's announcement in the registry.
#[derive(Debug)]
pub struct Announcement<'a> {
    pub id: NodeId,
    pub role: Role,
    pub epoch: Epoch,
    pub host: Arc<str>,
    /// The advertised address of the gRPC services.
    pub address: String,
    pub admin: String,
    pub connectors: &'a Connectors,
    pub model: &'a ModelInfo,
    pub keeps_role: bool,
}

/// A node with open ports that is not yet announced.
#[derive(Debug)]
pub struct RunningNode<'a> {
    pub registry: &'a dyn Registry,
    pub readiness: Readiness,
    pub ports: Ports,
    /// The gate of all work on requests. A drain waits for it for at most `drain`.
    pub work: Gate,
    pub drain: Duration,
    /// The shutdown that starts the drain.
    pub shutdown: Shutdown,
    /// A signal that is triggered when the node stops accepting new work.
    pub draining: Shutdown,
    /// A signal that is triggered when the registry lists the node.
    pub announced: Shutdown,
}

impl Announcement<'_> {
    fn info(&self) -> NodeInfo {
        NodeInfo {
            id: self.id.clone(),
            epoch: self.epoch,
            role: self.role,
            pid: std::process::id(),
            host: self.host.to_string(),
            address: self.address.clone(),
            admin: self.admin.clone(),
            wires: self.connectors.addresses(),
            without: self.connectors.missing(),
            model: self.model.clone(),
            protocol: PROTOCOL,
            keeps_role: self.keeps_role,
        }
    }
}

impl RunningNode<'_> {
    /// Runs the node until `shutdown`, then drains it. `watch` updates the node's readiness while it is announced;
    /// `stop_work` is called when the node stops accepting new work.
    pub async fn run(
        self,
        announcement: Announcement<'_>,
        watch: impl Future<Output = ()> + Send + 'static,
        stop_work: impl FnOnce(),
    ) -> Result<(), NodeError> {
        let info = announcement.info();
        let announced = self.registry.announce(info.clone()).await.map_err(NodeError::Announce)?;
        let watch = spawn_guarded(self.ports.gate(), "watchdog", watch);
        let registration = follow_registration(
            self.readiness.clone(),
            info.id.clone(),
            announced.standings(),
            self.announced,
        );
        let registration = spawn_guarded(self.ports.gate(), "registration", registration);
        info!(node = %info.id, epoch = %info.epoch, role = %info.role, address = info.address, admin = info.admin,
            connectors = ?announcement.connectors, model = info.model.name, "node is up");
        self.shutdown.wait().await;

        info!("node is draining");
        self.draining.trigger();
        drop((watch, registration));
        self.readiness.set_unready("draining");
        announced.withdraw().await;
        stop_work();
        let drained = self.work.close(self.drain).await.map_err(NodeError::Drain);
        self.ports.close().await;
        drained
    }
}

/// Makes the node unready while another life of it is announced, or the registry refuses it. An unreachable registry changes
/// nothing, because routers keep the members that they know. Triggers `announced` when the registry lists the node.
async fn follow_registration(
    readiness: Readiness,
    id: NodeId,
    mut standing: watch::Receiver<AnnouncementState>,
    announced: Shutdown,
) {
    loop {
        match *standing.borrow_and_update() {
            AnnouncementState::Member => {
                readiness.set_registration(None);
                announced.trigger();
            }
            AnnouncementState::Superseded => readiness.set_registration(Some(format!(
                "another process has announced node {id} later: give each node its own node.id, or stop one of the two. \
                 If this machine's clock was set back, the entry is of this node's last process and expires within seconds"
            ))),
            AnnouncementState::Refused => readiness.set_registration(Some(format!(
                "the registry refuses the announcement of node {id}, and the node gets no work: its log has the reason"
            ))),
            AnnouncementState::Trying | AnnouncementState::Withdrawn => {}
        }
        if standing.changed().await.is_err() {
            return;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[tokio::test(start_paused = true)]
    async fn a_node_that_the_registry_does_not_list_is_unready() {
        let readiness = Readiness::unready("starting");
        let (standing, standings) = watch::channel(AnnouncementState::Trying);
        let gate = Gate::new("test");
        let announced = Shutdown::new();
        let following =
            follow_registration(readiness.clone(), NodeId::new("decode-0"), standings, announced.clone());
        let _following = spawn_guarded(&gate, "registration", following);
        readiness.set_ready();
        tokio::time::sleep(Duration::from_millis(1)).await;
        assert!(!announced.requested(), "no registry lists it yet");
        for (state, is_ready) in [
            (AnnouncementState::Trying, true),
            (AnnouncementState::Member, true),
            (AnnouncementState::Trying, true),
            (AnnouncementState::Superseded, false),
            (AnnouncementState::Trying, false),
            (AnnouncementState::Refused, false),
            (AnnouncementState::Trying, false),
            (AnnouncementState::Member, true),
            (AnnouncementState::Superseded, false),
        ] {
            standing.send_replace(state);
            tokio::time::sleep(Duration::from_millis(1)).await;
            // The watchdog sets the other reasons at every check.
            readiness.set(None, None);
            assert_eq!(readiness.check().is_ok(), is_ready, "{state:?}");
            assert_eq!(readiness.check_rollout().is_ok(), is_ready, "{state:?}");
        }
        assert!(announced.requested());
        let reason = readiness.check().expect_err("superseded");
        assert!(reason.contains("decode-0") && reason.contains("node.id"), "{reason}");
        assert!(reason.contains("clock was set back"), "{reason}");
    }
}
