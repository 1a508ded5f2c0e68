//! The router's request that a node takes another role.

use std::time::Duration;

use proto::v1;
use proto::v1::node_status_client::NodeStatusClient;
use types::{Refusal, RefusalKind, Role};

use super::{Failure, NodeClient};

/// The longest wait until a node begins to change its role. It may wait for the change of another node first.
const BEGINS_WITHIN: Duration = Duration::from_secs(10);

impl NodeClient {
    /// Asks the node to take another role. Returns when the node begins to drain.
    pub async fn change_role(&self, role: Role) -> Result<(), Failure> {
        let role = v1::Role::from(role).into();
        let request = v1::ChangeRoleRequest { epoch: self.info.epoch.0, role };
        let mut client = NodeStatusClient::new(self.channel.clone());
        let call = tokio::time::timeout(BEGINS_WITHIN, client.change_role(request));
        let silent = |_| {
            let reason = format!("no answer within {BEGINS_WITHIN:?}");
            Failure { node: self.info.clone(), refusal: Refusal::new(RefusalKind::Failed, reason) }
        };
        call.await.map_err(silent)?.map_err(|status| self.failure(&status))?;
        Ok(())
    }
}
