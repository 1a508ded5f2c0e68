//! Every call that a process of the cluster serves to another, for tests of callers that it must refuse.

use chassis::rpc::RpcChannel;
use proto::v1;
use proto::v1::bootstrap_client::BootstrapClient;
use proto::v1::decode_client::DecodeClient;
use proto::v1::node_status_client::NodeStatusClient;
use proto::v1::pool_client::PoolClient;
use proto::v1::prefill_client::PrefillClient;
use tonic::Status;

/// The calls, each with the roles of certificates that may make it. A router makes all but `announce`.
pub const CALLS: [(&str, &[&str]); 14] = [
    ("prefill", &["router"]),
    ("deliver", &["router"]),
    ("decode", &["router", "operator"]),
    ("put", &["router"]),
    ("deliver from the pool", &["router"]),
    ("watch a node", &["router", "operator"]),
    ("set the standing", &["router"]),
    ("change the role", &["router"]),
    ("list the blocks", &["router", "operator"]),
    ("announce", &["prefill", "decode", "pool"]),
    ("lock", &["router", "prefill", "decode", "pool"]),
    ("keep alive", &["router", "prefill", "decode", "pool"]),
    ("withdraw", &["router", "prefill", "decode", "pool"]),
    ("watch the members", &["router", "prefill", "decode", "pool", "operator"]),
];

/// Makes one of [`CALLS`], with an empty message.
pub async fn call(name: &str, channel: RpcChannel) -> Result<(), Status> {
    let mut prefill = PrefillClient::new(channel.clone());
    let mut decode = DecodeClient::new(channel.clone());
    let mut pool = PoolClient::new(channel.clone());
    let mut status = NodeStatusClient::new(channel.clone());
    let mut registry = BootstrapClient::new(channel);
    match name {
        "prefill" => prefill.run(v1::PrefillRequest::default()).await.map(drop),
        "deliver" => prefill.deliver(v1::DeliverRequest::default()).await.map(drop),
        "decode" => decode.run(v1::DecodeRequest::default()).await.map(drop),
        "put" => pool.put(v1::PutRequest::default()).await.map(drop),
        "deliver from the pool" => pool.deliver(v1::DeliverRequest::default()).await.map(drop),
        "watch a node" => status.watch(v1::StatusRequest::default()).await.map(drop),
        "set the standing" => status.set_standing(v1::StandingRequest::default()).await.map(drop),
        "change the role" => status.change_role(v1::ChangeRoleRequest::default()).await.map(drop),
        "list the blocks" => status.ledger(v1::LedgerRequest { blocks: true }).await.map(drop),
        "announce" => registry.announce(v1::AnnounceRequest::default()).await.map(drop),
        "lock" => registry.lock(v1::LockRequest::default()).await.map(drop),
        "keep alive" => registry.keep_alive(v1::KeepAliveRequest { lease: 1 }).await.map(drop),
        "withdraw" => registry.withdraw(v1::WithdrawRequest { lease: 1 }).await.map(drop),
        "watch the members" => registry.watch(v1::WatchRequest {}).await.map(drop),
        other => panic!("no call is named {other}"),
    }
}
