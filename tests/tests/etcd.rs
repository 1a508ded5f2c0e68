//! A cluster whose nodes find each other through a real etcd.

use std::net::TcpListener;
use std::process::{Child, Command, Stdio};

use baton_tests::{Ask, Up, eventually};
use tempfile::TempDir;

/// An etcd of the test's own, with a folder that goes with it.
struct Etcd {
    child: Child,
    client: u16,
    peer: u16,
    data: TempDir,
}

impl Etcd {
    fn start() -> Self {
        let free =
            || TcpListener::bind("127.0.0.1:0").and_then(|bound| bound.local_addr()).expect("a port").port();
        let (client, peer) = (free(), free());
        let data = tempfile::tempdir().expect("a folder");
        Self { child: Self::spawn(client, peer, &data), client, peer, data }
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

    fn kill(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }

    fn restart(&mut self) {
        self.child = Self::spawn(self.client, self.peer, &self.data);
    }
}

impl Drop for Etcd {
    fn drop(&mut self) {
        self.kill();
    }
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn a_cluster_in_etcd_serves_with_and_without_it() {
    let mut etcd = Etcd::start();
    let url = format!("etcd://127.0.0.1:{}/walk", etcd.client);
    let up = Up::start(&["--prefill", "1", "--decode", "1", "--registry", &url]).await;
    let client = up.client();
    let ask = Ask::new((0..80).collect(), 10);
    let before = client.ask(&ask).await.expect("an answer");
    etcd.kill();
    assert_eq!(client.ask(&ask).await.expect("etcd is not on the way of a request").tokens, before.tokens);
    etcd.restart();
    assert_eq!(client.ask(&ask).await.expect("an answer").tokens, before.tokens);
    let nodes = eventually("both nodes to be ready", async || {
        let nodes = up.nodes().await;
        nodes.iter().all(|node| node.state == "ready").then_some(nodes)
    })
    .await;
    assert_eq!(nodes.len(), 2);
}
