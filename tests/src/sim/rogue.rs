//! An attacker on the network: it reads KV traffic and tries to write into landings with a wrong credential.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

use chassis::{Net as _, Stream};
use kv_transfer::connectors::tcp::frame::{Body, Frame, HEADER_BYTES, Header, Hello};
use kv_transfer::landing::Credentials;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::time::timeout;
use types::node::PROTOCOL;
use types::{Epoch, Grant, NodeId, TransferId};

use super::log::EventLog;
use super::net::{HostNet, KV_PORT, SimNet};

const ROGUE: &str = "rogue";
/// The time for which the attacker waits for an answer.
const PATIENCE: Duration = Duration::from_secs(1);
/// Limit of landings that the attacker tries.
const TRIES_MAX: usize = 4;

/// The part of the credential that is wrong.
#[derive(Clone, Copy, Debug)]
enum Lie {
    Grant,
    Epoch,
}

/// Tries landings that the traffic names, until there is no more traffic.
pub async fn intrude(net: SimNet, log: EventLog) {
    let (host, mut tap) = (net.host(ROGUE), net.tap(ROGUE));
    let mut ears: BTreeMap<u64, Vec<u8>> = BTreeMap::new();
    let mut n_tries = 0;
    while let Some(heard) = tap.recv().await {
        let bytes = ears.entry(heard.connection).or_default();
        bytes.extend_from_slice(&heard.bytes);
        while let Some(frame) = next_frame(bytes) {
            let Body::Open(shown) = frame.body else { continue };
            for lie in [Lie::Grant, Lie::Epoch] {
                n_tries += 1;
                try_it(&host, &heard.to, n_tries, frame.transfer, told(shown, lie), lie, &log).await;
            }
        }
        if n_tries >= 2 * TRIES_MAX {
            return;
        }
    }
}

/// Returns the next whole frame in the traffic and skips the bytes after it; `None` also if the bytes are
/// corrupt.
fn next_frame(bytes: &mut Vec<u8>) -> Option<Frame> {
    let header = Header::parse(bytes.get(..HEADER_BYTES)?).ok()?;
    let body = HEADER_BYTES..HEADER_BYTES + header.body_bytes;
    let end = body.end + header.payload_bytes;
    let frame = header.frame(bytes.get(body)?).ok()?;
    bytes.get(..end)?;
    bytes.drain(..end);
    Some(frame)
}

fn told(shown: Credentials, lie: Lie) -> Credentials {
    match lie {
        Lie::Grant => Credentials { grant: Grant::from_bytes([7; 16]), ..shown },
        Lie::Epoch => Credentials { epoch: Epoch(shown.epoch.0 ^ 1), ..shown },
    }
}

async fn try_it(
    host: &Arc<HostNet>,
    to: &str,
    link: usize,
    transfer: TransferId,
    shown: Credentials,
    lie: Lie,
    log: &EventLog,
) {
    let answer = timeout(PATIENCE, open(host, to, link as u64, transfer, shown)).await;
    let Ok(Some(answer)) = answer else { return };
    log.say(format_args!("the rogue lies about the {lie:?}: {answer:?}"));
    if !is_kept_out(&answer) {
        log.accuse(format_args!("who lies about the {lie:?} is answered {answer:?}"));
    }
}

/// Returns whether the attacker was refused. The landing may have ended; for an open one the answer is the
/// refusal of its credential, and nothing else.
fn is_kept_out(answer: &Body) -> bool {
    let Body::Failed { detail, .. } = answer else { return false };
    ["the grant does not match the landing", "another life of the node", "no such landing"]
        .iter()
        .any(|reason| detail.contains(reason))
}

async fn open(
    host: &Arc<HostNet>,
    to: &str,
    link: u64,
    transfer: TransferId,
    shown: Credentials,
) -> Option<Body> {
    let mut stream = host.connect(&format!("{to}{KV_PORT}")).await.ok()?;
    let node = NodeId::new(ROGUE);
    let hello = Hello { protocol: PROTOCOL, node, epoch: Epoch(1), link, stream: 0 };
    say(&mut stream, &Frame::of_link(Body::Hello(hello))).await?;
    hear(&mut stream).await?;
    say(&mut stream, &Frame::new(transfer, Body::Open(shown))).await?;
    loop {
        match hear(&mut stream).await? {
            Body::Alive => {}
            answer => return Some(answer),
        }
    }
}

async fn say(stream: &mut Stream, frame: &Frame) -> Option<()> {
    let mut bytes = Vec::new();
    frame.encode(&mut bytes);
    stream.write_all(&bytes).await.ok()
}

async fn hear(stream: &mut Stream) -> Option<Body> {
    let mut header = [0; HEADER_BYTES];
    stream.read_exact(&mut header).await.ok()?;
    let header = Header::parse(&header).ok()?;
    let mut body = vec![0; header.body_bytes];
    stream.read_exact(&mut body).await.ok()?;
    Some(header.frame(&body).ok()?.body)
}
