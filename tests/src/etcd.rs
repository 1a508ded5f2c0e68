//! A real etcd, of a test's own.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use tempfile::TempDir;

/// An etcd with a folder that goes with it.
#[derive(Debug)]
pub struct Etcd {
    child: Child,
    client: u16,
    peer: u16,
    data: TempDir,
}

impl Etcd {
    pub fn start() -> Self {
        let free =
            || TcpListener::bind("127.0.0.1:0").and_then(|bound| bound.local_addr()).expect("a port").port();
        let (client, peer) = (free(), free());
        let data = tempfile::tempdir().expect("a folder");
        Self { child: Self::spawn(client, peer, &data), client, peer, data }
    }

    /// What a process of this cluster has as `registry.url`.
    pub fn url(&self, cluster: &str) -> String {
        format!("etcd://127.0.0.1:{}/{cluster}", self.client)
    }

    fn spawn(client: u16, peer: u16, data: &TempDir) -> Child {
        let url = |port: u16| format!("http://127.0.0.1:{port}");
        Command::new(etcd_bin_vendored::etcd_bin_path().expect("etcd for this platform"))
            .args(["--listen-client-urls", &url(client), "--advertise-client-urls", &url(client)])
            .args(["--listen-peer-urls", &url(peer), "--initial-advertise-peer-urls", &url(peer)])
            .args(["--initial-cluster", &format!("default={}", url(peer)), "--unsafe-no-fsync"])
            .arg("--data-dir")
            .arg(data.path())
            .stdout(Stdio::null())
            .stderr(Stdio::null())
            .spawn()
            .expect("etcd starts")
    }

    pub fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    /// With the data that it had.
    pub fn restart(&mut self) {
        self.kill();
        self.child = Self::spawn(self.client, self.peer, &self.data);
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}
