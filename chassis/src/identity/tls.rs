//! TLS between processes: each end shows a certificate of the cluster's CA, and checks the other's name and role.
//!
//! [`Tls`] holds the content of the `[tls]` files and takes over changed files for new connections.
//! docs/decisions/0026 explains what a certificate proves, and what the cluster's secret still proves.

mod files;
mod refused;
mod stream;
mod verify;

use std::fmt;
use std::io;
use std::sync::{Arc, PoisonError, RwLock};
use std::time::Duration;

use rustls::ServerConfig;
use rustls::pki_types::{CertificateDer, ServerName};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _, BufReader};
use tokio_rustls::{TlsAcceptor, TlsConnector, TlsStream, server};
use tracing::{error, info};

use self::files::Certificates;
pub use self::files::{TlsFileError, TlsFiles, TlsPem};
pub use self::refused::TlsRefused;
use self::stream::SecureStream;
use super::certificate::{CertName, ExpectedPeer, Expiry};
use crate::net::Stream;
use crate::reload;
use crate::world::World;

/// The buffer below TLS. rustls reads 4 KiB at a time.
const READ_BYTES: usize = 128 << 10;
/// The time and the bytes for which a refused connection is still read, so that the peer receives the alert and no
/// reset.
const LINGER: Duration = Duration::from_millis(500);
const LINGER_BYTES: u64 = 64 << 10;

/// The certificates of a process. Clones share them.
#[derive(Clone)]
pub struct Tls(Arc<Inner>);

struct Inner {
    /// `None`: they were given as text, and never change.
    files: Option<TlsFiles>,
    /// Locked for a clone, never across an await.
    current: RwLock<Arc<Certificates>>,
}

impl Tls {
    /// Reads the files. An expired certificate, or one of another CA, is loaded; see [`Tls::check`].
    pub fn load(files: TlsFiles) -> Result<Self, TlsFileError> {
        let current = Certificates::parse(&files.read()?)?;
        Ok(Self(Arc::new(Inner { files: Some(files), current: RwLock::new(Arc::new(current)) })))
    }

    /// The same from the content of files.
    pub fn of_pem(pem: &TlsPem) -> Result<Self, TlsFileError> {
        let current = RwLock::new(Arc::new(Certificates::parse(pem)?));
        Ok(Self(Arc::new(Inner { files: None, current })))
    }

    /// The name in this process's certificate.
    pub fn name(&self) -> CertName {
        self.current().name.clone()
    }

    /// Refuses an own certificate that a peer with the same CA refuses. `now` is the time since 1970.
    pub fn check(&self, now: Duration) -> Result<(), TlsFileError> {
        self.current().check(now)
    }

    /// The end of the validity of the own certificate, as the time since 1970.
    pub fn not_after(&self) -> Option<Duration> {
        self.current().not_after()
    }

    /// The ends of the own certificate's and of the CA's validity.
    pub fn expiries(&self) -> Vec<Expiry> {
        let current = self.current();
        let ends = [("tls.cert", current.not_after()), ("tls.ca", current.ca_not_after())];
        ends.into_iter().filter_map(|(setting, end)| Some(Expiry { setting, end: end? })).collect()
    }

    fn current(&self) -> Arc<Certificates> {
        Arc::clone(&self.0.current.read().unwrap_or_else(PoisonError::into_inner))
    }

    // === handshakes ===

    /// Runs the dialer's handshake. The caller sets the deadline.
    pub(crate) async fn connect(&self, stream: Stream, expected: ExpectedPeer) -> Result<Stream, TlsRefused> {
        let config = self.current().dialer(expected);
        let config = config.map_err(|error| TlsRefused::Handshake(error.to_string()))?;
        let connector = TlsConnector::from(Arc::new(config));
        let host = ServerName::try_from("baton").expect("a host name");
        let connected = connector.connect(host, BufReader::with_capacity(READ_BYTES, stream)).await;
        let connected = connected.map_err(|error| TlsRefused::of(&error))?;
        Ok(Stream::other(SecureStream::new(TlsStream::Client(connected))))
    }

    /// Runs the acceptor's handshake of a gRPC connection. Returns the caller's name if it shows a certificate. The
    /// caller sets the deadline.
    pub(crate) async fn accept_calls(
        &self,
        stream: Stream,
    ) -> Result<(Stream, Option<CertName>), TlsRefused> {
        let accepted = accept(&self.current().calls, stream).await?;
        let shown = accepted.get_ref().1.peer_certificates().and_then(<[CertificateDer<'_>]>::first);
        let name = shown.and_then(CertName::of);
        Ok((Stream::other(SecureStream::new(TlsStream::Server(accepted))), name))
    }

    /// Runs the acceptor's handshake of a link: of KV, or of a process that joins its head. The caller sets the deadline.
    pub(super) async fn accept_link(
        &self,
        stream: Stream,
        dialer: &ExpectedPeer,
    ) -> Result<Stream, TlsRefused> {
        let current = self.current();
        let config = if *dialer == ExpectedPeer::NodeProcess { &current.joins } else { &current.links };
        let accepted = accept(config, stream).await?;
        Ok(Stream::other(SecureStream::new(TlsStream::Server(accepted))))
    }

    // === changed files ===

    /// Takes over changed files until the future is dropped. Running connections go on. Files with an error change
    /// nothing, and are logged once.
    ///
    /// Files that are replaced one after another do not match for a moment, so an error is logged only if two
    /// readings find it.
    pub async fn follow(self, world: World) {
        let Some(files) = self.0.files.clone() else { return };
        let mut wrong = FailedReload::default();
        loop {
            let files = files.clone();
            let read = move || files.read().and_then(|pem| Certificates::parse(&pem));
            let Some(read) = reload::next(read).await else { continue };
            match read.and_then(|read| self.take_over(read, world.unix_time())) {
                Ok(()) => wrong = FailedReload::default(),
                Err(error) => wrong.see(types::in_full(&error)),
            }
        }
    }

    fn take_over(&self, read: Certificates, now: Duration) -> Result<(), TlsFileError> {
        let current = self.current();
        if read.hash == current.hash {
            return Ok(());
        }
        if read.name != current.name {
            return Err(TlsFileError::Renamed { name: read.name, current: current.name.clone() });
        }
        read.check(now)?;
        let valid_days = read.not_after().map(|end| end.saturating_sub(now).as_secs() / (24 * 60 * 60));
        info!(name = %read.name, valid_days, "certificates reloaded");
        *self.0.current.write().unwrap_or_else(PoisonError::into_inner) = Arc::new(read);
        Ok(())
    }
}

/// The error of the last readings, and how often it was found.
#[derive(Default)]
struct FailedReload {
    text: String,
    looks: u32,
}

impl FailedReload {
    fn see(&mut self, text: String) {
        if text != self.text {
            *self = Self { text, looks: 0 };
        }
        self.looks = self.looks.saturating_add(1);
        if self.looks == 2 {
            error!(error = self.text, "certificates were not reloaded, the previous ones stay in use");
        }
    }
}

async fn accept(
    config: &Arc<ServerConfig>,
    stream: Stream,
) -> Result<server::TlsStream<BufReader<Stream>>, TlsRefused> {
    let stream = BufReader::with_capacity(READ_BYTES, stream);
    match TlsAcceptor::from(Arc::clone(config)).accept(stream).into_fallible().await {
        Ok(accepted) => Ok(accepted),
        Err((error, stream)) => {
            let refused = TlsRefused::of(&error);
            if refused != TlsRefused::Closed {
                linger(stream).await;
            }
            Err(refused)
        }
    }
}

/// Ends a refused connection so that its peer can read the alert.
async fn linger(mut stream: BufReader<Stream>) {
    let ended = async {
        stream.shutdown().await?;
        tokio::io::copy(&mut stream.take(LINGER_BYTES), &mut tokio::io::sink()).await
    };
    // The peer is refused in any case.
    let _: Result<io::Result<u64>, _> = tokio::time::timeout(LINGER, ended).await;
}

impl fmt::Debug for Tls {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Tls").field(&self.name().to_string()).finish()
    }
}
