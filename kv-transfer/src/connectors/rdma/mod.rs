//! KV from one machine's memory into another's: the sender's device writes it where it belongs.
//!
//! A [link](super::link) over TCP, on which frames say which pages were written and what their digests are, and beside it
//! some queue pairs over which the KV itself goes, as one-sided writes whose last one brings a number. Memory is
//! registered once, for the pool: a card's by dmabuf, so that the device reaches it without a copy. A landing that fails keeps its blocks back until the sender's word that its device is
//! done with them, or until this side's queue pairs are destroyed: see `docs/decisions/0011-rdma-by-hand.md`.
//!
//! Suggested reading order: which port of which device (`port`), what a connector has of it (`adapter`), how two ends
//! find each other (`greeting`), queue pairs (`pairs`) and what they have done (`watch`), the sender (`writing`,
//! `under_way`) and the receiver (`written`), and who looks at pages that are not the processor's (`card`).

mod adapter;
mod card;
mod door;
mod greeting;
mod pairs;
pub mod port;
mod under_way;
mod watch;
mod writing;
mod written;

use std::sync::Arc;

use tracing::info;
use types::{Scheme, WireAddress};

use self::adapter::Adapter;
use self::door::Port;
use self::writing::Writing;
use super::link::check_pages;
use super::link::wire::Wire;
use super::tcp::advertised_host;
use crate::connector::ConnectorParts;
use crate::error::TransferError;
use crate::home::Home;
use crate::settings::TransferSettings;

pub const SCHEME: &str = "rdma";

/// Opens a device and listens as the settings say. Refused, with the reason, where there is no device or no library.
pub async fn listen(mut parts: ConnectorParts) -> Result<Arc<Wire>, TransferError> {
    check_pages(&parts)?;
    let adapter = Arc::new(Adapter::open(&parts)?);
    parts.settings.listen = listen_on(&parts.settings);
    let addr = parts.settings.listen.clone();
    let refused = |source| TransferError::Listen { addr: addr.clone(), source: Arc::new(source) };
    let listener = parts.world.net().listen(&addr).await.map_err(refused)?;
    let port = listener.local_addr().map_err(refused)?.port();
    let address =
        WireAddress { scheme: Scheme::new(SCHEME), endpoint: format!("{}:{port}", advertised_host(&parts)) };
    info!(endpoint = address.endpoint, device = %adapter.port, "kv transfer by rdma");
    let door = Port::new(listener, Arc::clone(&adapter), &parts);
    let medium = move |parts: &ConnectorParts| Ok(Writing::over(parts, Arc::clone(&adapter)) as _);
    Ok(Wire::start(parts, Home::shared(), (address, None), Box::new(door), Box::new(medium)))
}

/// Where peers are met: as said, or where the node listens for the others, at any port.
fn listen_on(settings: &TransferSettings) -> String {
    if !settings.rdma_listen.is_empty() {
        return settings.rdma_listen.clone();
    }
    let host = settings.listen.rsplit_once(':').map_or("127.0.0.1", |(host, _)| host);
    format!("{host}:0")
}
