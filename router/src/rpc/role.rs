//! The router's request that a node takes another role.

use std::time::Duration;

use chassis::rpc::check_health;
use proto::v1;
use proto::v1::node_status_client::NodeStatusClient;
use types::Role;

use super::NodeClient;

/// The longest wait until a node begins to change its role. It may wait for the change of another node first.
const BEGINS_WITHIN: Duration = Duration::from_secs(10);
/// The longest wait for an answer of a node that changes its role.
const ANSWERS_WITHIN: Duration = Duration::from_secs(1);

impl NodeClient {
    /// Asks the node to take another role. Returns when the node begins to drain; an error is the reason why it does not.
    pub async fn change_role(&self, role: Role) -> Result<(), String> {
        let role = v1::Role::from(role).into();
        let request = v1::ChangeRoleRequest { epoch: self.info.epoch.0, role };
        let mut client = NodeStatusClient::new(self.channel.clone());
        let call = tokio::time::timeout(BEGINS_WITHIN, client.change_role(request)).await;
        let answer = call.map_err(|_| format!("no answer within {BEGINS_WITHIN:?}"))?;
        answer.map(|_| ()).map_err(|status| status.message().to_owned())
    }

    /// Returns whether the node's process answers, also while the node drains.
    pub async fn answers(&self) -> bool {
        check_health(self.channel.clone(), ANSWERS_WITHIN).await.is_ok()
    }
}
