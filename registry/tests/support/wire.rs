//! A TCP proxy between a client and a server that can be interrupted.

use chassis::net::{Listener, Net, Stream, TcpNet};
use chassis::{Gate, Task, spawn_guarded};
use tokio::sync::watch;

/// A proxy that forwards connections to one address. While it is cut, open connections are closed and new
/// ones are not answered.
#[derive(Debug)]
pub struct Wire {
    address: String,
    cut: watch::Sender<bool>,
    _forwarding: Task<()>,
}

impl Wire {
    pub async fn to(server: String) -> Self {
        let listener = TcpNet.listen("127.0.0.1:0").await.expect("a free port");
        let address = listener.local_addr().expect("it is bound").to_string();
        let (cut, is_cut) = watch::channel(false);
        let forwarding = spawn_guarded(&Gate::new("wire"), "wire", accept(listener, server, is_cut));
        Self { address, cut, _forwarding: forwarding }
    }

    pub fn address(&self) -> &str {
        &self.address
    }

    pub fn cut(&self) {
        self.cut.send_replace(true);
    }

    pub fn mend(&self) {
        self.cut.send_replace(false);
    }
}

async fn accept(mut listener: Box<dyn Listener>, server: String, is_cut: watch::Receiver<bool>) {
    let gate = Gate::new("wire connections");
    while let Ok((near, _)) = listener.accept().await {
        let forward = forward(near, server.clone(), is_cut.clone());
        spawn_guarded(&gate, "wire connection", forward).detach();
    }
}

async fn forward(mut near: Stream, server: String, mut is_cut: watch::Receiver<bool>) {
    if *is_cut.borrow_and_update() {
        return;
    }
    let Ok(mut far) = TcpNet.connect(&server).await else { return };
    tokio::select! {
        _ = is_cut.wait_for(|is_cut| *is_cut) => {}
        _ = tokio::io::copy_bidirectional(&mut near, &mut far) => {}
    }
}
