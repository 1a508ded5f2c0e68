//! The first bytes of a KV link: TLS if the process has certificates, and then each end proves that it has the cluster's
//! secret.
//!
//! | from | bytes |
//! |---|---|
//! | receiver | magic `BTID`, its challenge (32) |
//! | dialer | its challenge (32), MAC over both challenges (32) |
//! | receiver | MAC over both challenges, for the receiver's side (32) |
//!
//! The receiver draws a new challenge for each link, so a recorded exchange is refused. Without a secret none of these
//! bytes are sent. The caller sets the deadline.

use std::io;

use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};

use super::certificate::ExpectedPeer;
use super::refusals::{Reason, RefusedKind};
use super::secret::{ClusterSecret, Mac, Use};
use crate::net::Stream;
use crate::world::World;

const MAGIC: [u8; 4] = *b"BTID";
const CHALLENGE_BYTES: usize = 32;

type Challenge = [u8; CHALLENGE_BYTES];

/// Connects to `addr` and proves this side's identity. Fails if the peer cannot prove its own.
pub async fn dial(world: &World, addr: &str) -> io::Result<Stream> {
    prove(world, world.net().connect(addr).await?).await
}

/// Connects to the head of a node with several processes, as [`dial`] does to a receiver of KV.
pub async fn dial_head(world: &World, addr: &str) -> io::Result<Stream> {
    prove_to_head(world, world.net().connect(addr).await?).await
}

/// Runs the follower's side of the exchange on a stream that is connected to the head.
pub async fn prove_to_head(world: &World, stream: Stream) -> io::Result<Stream> {
    prove_to(world, stream, ExpectedPeer::NodeProcess).await
}

/// Runs the dialer's side of the exchange on a connected stream, and returns the stream for the KV.
pub async fn prove(world: &World, stream: Stream) -> io::Result<Stream> {
    prove_to(world, stream, ExpectedPeer::KvReceiver).await
}

async fn prove_to(world: &World, stream: Stream, expected: ExpectedPeer) -> io::Result<Stream> {
    let identity = world.identity();
    let mut stream = match identity.tls() {
        None => stream,
        Some(tls) => {
            let secured = tls.connect(stream, expected).await;
            secured.map_err(|refused| identity.tls_refused(RefusedKind::Link, refused))?
        }
    };
    let Some(secret) = identity.secret() else { return Ok(stream) };
    let mut magic = [0; MAGIC.len()];
    stream.read_exact(&mut magic).await.map_err(unproven)?;
    if magic != MAGIC {
        identity.refusals().count(RefusedKind::Link, Reason::Unsigned);
        return Err(refused("the peer has no cluster secret: set `cluster.secret_file` there too"));
    }
    let (mut theirs, ours) = ([0; CHALLENGE_BYTES], world.challenge());
    stream.read_exact(&mut theirs).await?;
    let mut answer = ours.to_vec();
    answer.extend(mac(secret, b"dialer", &theirs, &ours).as_bytes());
    stream.write_all(&answer).await?;
    let mut shown = [0; blake3::OUT_LEN];
    stream.read_exact(&mut shown).await.map_err(unproven)?;
    if mac(secret, b"receiver", &theirs, &ours) != shown {
        identity.refusals().count(RefusedKind::Link, Reason::Signature);
        return Err(refused("the peer has another cluster secret"));
    }
    Ok(stream)
}

/// Runs the receiver's side of the exchange on an accepted stream, and returns the stream for the KV. Before it
/// succeeds, nothing else is read.
pub async fn admit(world: &World, stream: Stream) -> io::Result<Stream> {
    admit_from(world, stream, ExpectedPeer::KvSender).await
}

/// Runs the head's side of the exchange with a process that joins its node, as [`admit`] does with a sender of KV.
pub async fn admit_process(world: &World, stream: Stream) -> io::Result<Stream> {
    admit_from(world, stream, ExpectedPeer::NodeProcess).await
}

async fn admit_from(world: &World, stream: Stream, dialer: ExpectedPeer) -> io::Result<Stream> {
    let identity = world.identity();
    let mut stream = match identity.tls() {
        None => stream,
        Some(tls) => {
            let secured = tls.accept_link(stream, &dialer).await;
            secured.map_err(|refused| identity.tls_refused(RefusedKind::Link, refused))?
        }
    };
    let Some(secret) = identity.secret() else { return Ok(stream) };
    let ours = world.challenge();
    stream.write_all(&[&MAGIC[..], &ours].concat()).await?;
    let (mut theirs, mut shown) = ([0; CHALLENGE_BYTES], [0; blake3::OUT_LEN]);
    let read = async {
        stream.read_exact(&mut theirs).await?;
        stream.read_exact(&mut shown).await
    };
    if read.await.is_err() {
        identity.refusals().count(RefusedKind::Link, Reason::Unsigned);
        return Err(refused("the peer closed the link before it proved that it has the cluster's secret"));
    }
    if mac(secret, b"dialer", &ours, &theirs) != shown {
        identity.refusals().count(RefusedKind::Link, Reason::Signature);
        return Err(refused("the peer did not prove that it has the cluster's secret"));
    }
    stream.write_all(mac(secret, b"receiver", &ours, &theirs).as_bytes()).await?;
    Ok(stream)
}

fn mac(secret: &ClusterSecret, side: &[u8], of_receiver: &Challenge, of_dialer: &Challenge) -> Mac {
    secret.mac(Use::Link, &[side, of_receiver, of_dialer])
}

fn refused(why: &str) -> io::Error {
    io::Error::new(io::ErrorKind::PermissionDenied, why)
}

fn unproven(error: io::Error) -> io::Error {
    if error.kind() == io::ErrorKind::PermissionDenied {
        return error; // TLS says more.
    }
    io::Error::new(error.kind(), "the peer refused this process's cluster secret, or has none")
}
