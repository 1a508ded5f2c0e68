//! One etcd process, on free ports, with its data in a temporary folder. It ends when the value is dropped.

use std::fs::File;
use std::net::TcpListener;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Duration;

use baton_registry::etcd::client::v3::RangeRequest;
use baton_registry::etcd::{EtcdClient, EtcdSettings, TlsFiles};
use tempfile::TempDir;
use tokio::process::{Child, Command};
use tokio::time::timeout;
use tonic::Code;

const STARTS_WITHIN: Duration = Duration::from_secs(30);
const LOOK_EVERY: Duration = Duration::from_millis(20);
/// How often a start is tried: another process may take the port before etcd binds it.
const PORT_ATTEMPTS: usize = 5;

#[derive(Debug)]
pub struct Etcd {
    folder: TempDir,
    client_port: u16,
    peer_port: u16,
    /// Further command-line arguments of etcd.
    arguments: Vec<String>,
    tls: Option<TlsFiles>,
    /// The running process; `None` while etcd is stopped.
    process: Option<Child>,
}

impl Etcd {
    pub async fn start() -> Self {
        Self::start_with(Vec::new(), None).await
    }

    pub async fn start_with(arguments: Vec<String>, tls: Option<TlsFiles>) -> Self {
        let folder = tempfile::tempdir().expect("a temporary folder");
        let mut etcd = Self { folder, client_port: 0, peer_port: 0, arguments, tls, process: None };
        for _ in 0..PORT_ATTEMPTS {
            (etcd.client_port, etcd.peer_port) = (free_port(), free_port());
            if etcd.resume().await {
                return etcd;
            }
        }
        panic!("etcd does not start: {}", etcd.log());
    }

    /// Returns etcd's address for clients as `host:port`.
    pub fn endpoint(&self) -> String {
        format!("127.0.0.1:{}", self.client_port)
    }

    /// Returns a client that authenticates as no user.
    pub async fn client(&self) -> EtcdClient {
        let mut settings = EtcdSettings::new(vec![self.endpoint()], "test");
        settings.tls = self.tls.clone();
        EtcdClient::connect(&settings).await.expect("nothing is sent yet")
    }

    /// Kills the process. Its data stay for a restart.
    pub async fn stop(&mut self) {
        let mut process = self.process.take().expect("it runs");
        process.kill().await.expect("it is ours");
    }

    pub async fn restart(&mut self) {
        assert!(self.resume().await, "etcd does not start again: {}", self.log());
    }

    pub async fn restart_empty(&mut self) {
        std::fs::remove_dir_all(self.data()).expect("etcd has made it");
        self.restart().await;
    }

    /// Suspends the process: connections stay open and nothing answers.
    pub fn freeze(&self) {
        self.signal(rustix::process::Signal::STOP);
    }

    pub fn thaw(&self) {
        self.signal(rustix::process::Signal::CONT);
    }

    fn signal(&self, signal: rustix::process::Signal) {
        let pid = self.process.as_ref().and_then(Child::id).expect("it runs");
        let pid = rustix::process::Pid::from_raw(pid as i32).expect("a process id is not zero");
        rustix::process::kill_process(pid, signal).expect("it is ours");
    }

    /// Starts the process and waits until it serves. Returns false if it ended at once, as when a port is
    /// taken.
    async fn resume(&mut self) -> bool {
        self.process = Some(self.command().spawn().expect("the binary is there"));
        timeout(STARTS_WITHIN, self.is_up()).await.expect("etcd starts in time")
    }

    async fn is_up(&mut self) -> bool {
        while !self.answers().await {
            let process = self.process.as_mut().expect("it was just started");
            if process.try_wait().expect("it is ours").is_some() {
                return false;
            }
            tokio::time::sleep(LOOK_EVERY).await;
        }
        true
    }

    /// Returns whether etcd answers a read, even with a refusal.
    async fn answers(&self) -> bool {
        let read = RangeRequest { key: b"test".to_vec(), ..RangeRequest::default() };
        match timeout(Duration::from_secs(1), self.client().await.kv().range(read)).await {
            Ok(Err(status)) => matches!(status.code(), Code::InvalidArgument | Code::PermissionDenied),
            Ok(Ok(_)) => true,
            Err(_elapsed) => false,
        }
    }

    fn command(&self) -> Command {
        let scheme = if self.tls.is_some() { "https" } else { "http" };
        let client = format!("{scheme}://{}", self.endpoint());
        let peer = format!("http://127.0.0.1:{}", self.peer_port);
        let log = File::create(self.folder.path().join("log")).expect("the folder is ours");
        let mut command = Command::new(etcd_bin_vendored::etcd_bin_path().expect("etcd for this platform"));
        command
            .args(["--name", "one", "--data-dir"])
            .arg(self.data())
            .args(["--listen-client-urls", &client, "--advertise-client-urls", &client])
            .args(["--listen-peer-urls", &peer, "--initial-advertise-peer-urls", &peer])
            .args(["--initial-cluster", &format!("one={peer}"), "--unsafe-no-fsync"])
            // Short election timeouts allow short leases: etcd refuses a lease shorter than them.
            .args(["--heartbeat-interval", "50", "--election-timeout", "500"])
            .args(&self.arguments)
            .stdin(Stdio::null())
            .stdout(Stdio::null())
            .stderr(log)
            .kill_on_drop(true);
        command
    }

    fn data(&self) -> PathBuf {
        self.folder.path().join("data")
    }

    fn log(&self) -> String {
        std::fs::read_to_string(self.folder.path().join("log")).unwrap_or_default()
    }
}

fn free_port() -> u16 {
    let listener = TcpListener::bind("127.0.0.1:0").expect("a free port");
    listener.local_addr().expect("it is bound").port()
}
