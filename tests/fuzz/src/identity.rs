//! What a stranger shows to prove its identity: the name in a certificate, the signature of a registry entry, and the
//! beginning of a KV link.

use chassis::World;
use chassis::identity::{CertName, ClusterSecret, Identity, link};
use chassis::net::{MemoryNet, Net as _};
use tokio::io::AsyncWriteExt as _;

/// The first byte chooses the kind of proof. Nothing that is made without the secret is accepted.
pub fn identity(bytes: &[u8]) {
    let Some((what, shown)) = bytes.split_first() else { return };
    match what % 3 {
        0 => name(shown),
        1 => entry(shown),
        _ => super::in_paused_time(dials(shown)),
    }
}

fn secret() -> Identity {
    Identity::of_cluster(ClusterSecret::new(b"a secret of sixteen bytes and more"))
}

fn name(shown: &[u8]) {
    let Some(name) = std::str::from_utf8(shown).ok().and_then(CertName::parse) else { return };
    assert_eq!(CertName::parse(&name.to_string()), Some(name));
}

fn entry(shown: &[u8]) {
    let identity = secret();
    assert!(identity.check_entry(b"key", shown).is_err(), "a signature without the secret");
    let signed = identity.sign_entry(b"key", shown.to_vec());
    assert_eq!(identity.check_entry(b"key", &signed), Ok(()));
    assert!(identity.check_entry(b"another", &signed).is_err(), "a signature for another key");
    let other = Identity::of_cluster(ClusterSecret::new(b"the secret of another cluster"));
    assert!(other.check_entry(b"key", &signed).is_err(), "a signature of another cluster");
}

async fn dials(shown: &[u8]) {
    let net = MemoryNet::new();
    let mut listener = net.listen("kv").await.expect("a name of its own");
    let mut dialer = net.connect("kv").await.expect("it listens");
    let (stream, _) = listener.accept().await.expect("a connection");
    let world = World::seeded(1).with_identity(secret());
    let say = async {
        // The receiver may have refused already, so that a failed write is no fault.
        let _ = dialer.write_all(shown).await;
        let _ = dialer.shutdown().await;
        dialer
    };
    let (admitted, _dialer) = tokio::join!(link::admit(&world, stream), say);
    assert!(admitted.is_err(), "a link without the secret");
}
