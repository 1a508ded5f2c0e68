//! KV between the memories of two machines: the sender's RDMA device writes it into the receiver's pages.
//!
//! A [link](super::link) over TCP carries frames that name the written pages and their digests. The KV itself goes
//! over queue pairs, as one-sided writes; the last write of a frame carries a number. Memory is registered once, for
//! the whole pool. GPU memory is registered by dmabuf, so that the device reaches it without a copy. A failed landing
//! keeps its blocks until the sender reports that its device is done with them, or until this side's queue pairs are
//! destroyed: see `docs/decisions/0011-rdma-by-hand.md`.
//!
//! Suggested reading order: the port of a device (`port`), a connector's device (`adapter`), the handshake
//! (`greeting`), queue pairs (`pairs`) and their completions (`watch`), the sender (`send`, `under_way`) and the
//! receiver (`receive`, `verify`, `quiet_proofs`), and digests of pages on a GPU (`card`).

mod adapter;
mod card;
mod accept;
mod greeting;
mod pairs;
pub mod port;
mod under_way;
mod watch;
mod send;
mod receive;
mod verify;
mod quiet_proofs;

use std::sync::Arc;

use tracing::info;
use types::{Scheme, WireAddress};

use self::accept::Port;
use self::adapter::Adapter;
use self::send::RdmaSendPath;
use super::link::check_pages;
use super::link::connector::{LinkAddress, LinkConnector};
use super::tcp::advertised;
use crate::connector::{Auto, KvConnector, WireKind};
use crate::connector_parts::ConnectorParts;
use crate::error::TransferError;
use crate::settings::TransferSettings;
use crate::wire_threads::WireThreads;

pub const SCHEME: &str = "rdma";

pub(super) const WIRE: WireKind = WireKind {
    name: SCHEME,
    build: |parts| Box::pin(async { Ok(listen(parts).await? as Arc<dyn KvConnector>) }),
    auto: Auto::IfItWorks,
};

/// Opens a device and listens for streams, as the settings say. Fails with the reason if there is no device
/// or no library.
pub async fn listen(mut parts: ConnectorParts) -> Result<Arc<LinkConnector>, TransferError> {
    check_pages(&parts)?;
    let adapter = Arc::new(Adapter::open(&parts)?);
    parts.settings.listen = listen_on(&parts.settings);
    let addr = parts.settings.listen.clone();
    let refused = |source| TransferError::Listen { addr: addr.clone(), source: Arc::new(source) };
    let listener = parts.world.net().listen(&addr).await.map_err(refused)?;
    let port = listener.local_addr().map_err(refused)?.port();
    let address = WireAddress {
        scheme: Scheme::new(SCHEME),
        endpoint: advertised(&parts.settings, port),
        within_host: false,
    };
    info!(endpoint = address.endpoint, device = %adapter.port, "rdma connector listens");
    let door = Port::new(listener, Arc::clone(&adapter), &parts);
    let send_path = move |parts: &ConnectorParts| Ok(RdmaSendPath::over(parts, Arc::clone(&adapter)) as _);
    Ok(LinkConnector::start(
        parts,
        WireThreads::shared(),
        LinkAddress { wire: address, socket: None },
        Box::new(door),
        Box::new(send_path),
    ))
}

/// Returns the listening address: the setting, or the host of the tcp listener with any port.
fn listen_on(settings: &TransferSettings) -> String {
    if !settings.rdma_listen.is_empty() {
        return settings.rdma_listen.clone();
    }
    let host = settings.listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host);
    format!("{host}:0")
}
