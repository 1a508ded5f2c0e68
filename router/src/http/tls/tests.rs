use std::io;
use std::net::SocketAddr;
use std::ops::Range;
use std::time::Duration;

use axum::Router;
use axum::routing::get;
use chassis::server::{ServerLimits, serve};
use chassis::{Gate, Shutdown, Task, World, spawn_guarded};
use rcgen::{CertificateParams, KeyPair, date_time_ymd};
use rustls::pki_types::ServerName;
use rustls::{ClientConfig, RootCertStore};
use tempfile::TempDir;
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;

use super::*;

const WITHIN: Duration = Duration::from_secs(20);

/// A port with TLS that answers `/live`, and the folder of its certificate.
struct Served {
    folder: TempDir,
    certificate: Arc<Certificate>,
    addr: SocketAddr,
    shutdown: Shutdown,
    _serving: Task<Result<(), chassis::StillHeld>>,
}

/// Writes a new certificate and its key. Returns the certificate that a client must trust.
fn write(folder: &TempDir) -> RootCertStore {
    write_valid(folder, 2000..2100)
}

/// The same for a certificate that is valid in these years.
fn write_valid(folder: &TempDir, years: Range<i32>) -> RootCertStore {
    let mut params = CertificateParams::new(["localhost".to_owned()]).expect("a name");
    params.not_before = date_time_ymd(years.start, 1, 1);
    params.not_after = date_time_ymd(years.end, 1, 1);
    let key = KeyPair::generate().expect("randomness");
    let made = params.self_signed(&key).expect("a certificate");
    std::fs::write(folder.path().join("cert.pem"), made.pem()).expect("written");
    std::fs::write(folder.path().join("key.pem"), key.serialize_pem()).expect("written");
    let mut roots = RootCertStore::empty();
    roots.add(made.der().clone()).expect("an authority");
    roots
}

fn files(folder: &TempDir) -> CertificateFiles {
    CertificateFiles { certificate: folder.path().join("cert.pem"), key: folder.path().join("key.pem") }
}

async fn served() -> (Served, RootCertStore) {
    let folder = tempfile::tempdir().expect("a folder");
    let roots = write(&folder);
    let certificate = Certificate::load(files(&folder)).expect("a pair");
    let listener = World::real().net().listen("127.0.0.1:0").await.expect("a free port");
    let addr = listener.local_addr().expect("bound");
    let (shutdown, pages) = (Shutdown::new(), Router::new().route("/live", get(async || "alive")));
    let serving = serve(listener, certificate.port_tls(), pages, shutdown.clone(), ServerLimits::default());
    let serving = spawn_guarded(&Gate::new("test"), "serve", serving);
    (Served { folder, certificate, addr, shutdown, _serving: serving }, roots)
}

impl Served {
    /// The answer to `GET /live` of a client that trusts `roots`.
    async fn ask(&self, roots: &RootCertStore) -> io::Result<String> {
        let config = ClientConfig::builder_with_provider(Arc::new(default_provider()))
            .with_safe_default_protocol_versions()
            .expect("versions")
            .with_root_certificates(roots.clone())
            .with_no_client_auth();
        let tcp = TcpStream::connect(self.addr).await?;
        let name = ServerName::try_from("localhost").expect("a name");
        let mut tls = TlsConnector::from(Arc::new(config)).connect(name, tcp).await?;
        tls.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n").await?;
        let mut answer = String::new();
        tls.read_to_string(&mut answer).await?;
        Ok(answer)
    }
}

async fn in_time<T>(what: impl Future<Output = T>) -> T {
    tokio::time::timeout(WITHIN, what).await.expect("in time")
}

#[tokio::test]
async fn a_client_that_trusts_the_certificate_is_answered_and_others_are_not() {
    let (served, roots) = served().await;
    // Neither a silent client nor one without TLS delays the others.
    let _silent = TcpStream::connect(served.addr).await.expect("it listens");
    let mut plain = TcpStream::connect(served.addr).await.expect("it listens");
    plain.write_all(b"GET /live HTTP/1.1\r\nhost: localhost\r\n\r\n").await.expect("sent");
    let answer = in_time(served.ask(&roots)).await.expect("an answer");
    assert!(answer.starts_with("HTTP/1.1 200") && answer.ends_with("alive"), "{answer}");
    let mut heard = Vec::new();
    // The end may be a reset, because some of the bytes were not read.
    let _ = in_time(plain.read_to_end(&mut heard)).await;
    assert!(!heard.starts_with(b"HTTP"), "{}", String::from_utf8_lossy(&heard));
    let stranger = in_time(served.ask(&RootCertStore::empty())).await.expect_err("it trusts nothing");
    assert!(stranger.to_string().contains("certificate"), "{stranger}");
    served.shutdown.trigger();
}

#[tokio::test]
async fn a_changed_certificate_is_used_and_a_wrong_one_is_not() {
    let (served, old) = served().await;
    let following = served.certificate.clone().follow_files(World::real());
    let _following = spawn_guarded(&Gate::new("test"), "follow", following);
    for years in [2000..2001, 2099..2100] {
        write_valid(&served.folder, years);
        tokio::time::sleep(2 * reload::READ_EVERY).await;
        in_time(served.ask(&old)).await.expect("a certificate that is not valid now replaces none");
    }
    // The key of another certificate.
    let key = std::fs::read(served.folder.path().join("key.pem")).expect("it is there");
    let new = write(&served.folder);
    let right = std::fs::read(served.folder.path().join("key.pem")).expect("it is there");
    std::fs::write(served.folder.path().join("key.pem"), key).expect("written");
    let error = files(&served.folder).read().map(|_| ()).expect_err("they do not belong together");
    assert!(error.to_string().contains("key.pem: "), "{error}");
    tokio::time::sleep(2 * reload::READ_EVERY).await;
    in_time(served.ask(&old)).await.expect("the one before it is in use");
    std::fs::write(served.folder.path().join("key.pem"), right).expect("written");
    in_time(async {
        while served.ask(&new).await.is_err() {
            tokio::time::sleep(Duration::from_millis(50)).await;
        }
    })
    .await;
    in_time(served.ask(&old)).await.expect_err("it is replaced");
    served.shutdown.trigger();
}

#[test]
fn errors_name_the_file() {
    let folder = tempfile::tempdir().expect("a folder");
    let failed = || Certificate::load(files(&folder)).expect_err("refused").to_string();
    assert!(failed().contains("cert.pem: No such file"), "{}", failed());
    write(&folder);
    std::fs::write(folder.path().join("cert.pem"), "text").expect("written");
    assert!(failed().contains("cert.pem: no certificate in PEM"), "{}", failed());
    write(&folder);
    std::fs::write(folder.path().join("key.pem"), "text").expect("written");
    assert!(failed().contains("key.pem: "), "{}", failed());
}
