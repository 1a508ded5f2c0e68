//! Floods of connections, from a process of their own.

use std::io::{BufRead as _, BufReader};
use std::net::SocketAddr;
use std::path::Path;
use std::process::{Child, ChildStdout, Command, Stdio};

use tokio::time::timeout;

use crate::{PATIENCE, executable};

/// The bytes that the connections of a flood send.
#[derive(Clone, Copy, Debug)]
pub enum Flooding {
    /// The connections send nothing.
    Silent,
    /// The connections send a request's head, one byte each second.
    Head,
    /// The connections send a request's head, and then its body, one byte each second.
    Body,
    /// The connections send a request with a body of 8 MiB, without the last byte.
    Unfinished,
}

/// A process that holds connections open. It is killed on drop.
///
/// The process has the lowest priority, so that a probe waits for the servers and not for the flood's
/// processor time.
#[derive(Debug)]
pub struct Flood {
    child: Child,
    stdout: Option<BufReader<ChildStdout>>,
}

impl Flood {
    /// Opens `n` connections at each of `ports`, `per_second` of them in a second.
    pub fn start(ports: &[SocketAddr], flooding: Flooding, n: usize, per_second: usize) -> Self {
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("python/flood.py");
        let kind = match flooding {
            Flooding::Silent => "silent",
            Flooding::Head => "head",
            Flooding::Body => "body",
            Flooding::Unfinished => "unfinished",
        };
        let mut command = Command::new("nice");
        command.args(["-n", "19"]).arg(executable::python()).arg(script).arg(kind);
        command.args([n.to_string(), per_second.to_string()]).args(ports.iter().map(SocketAddr::to_string));
        let mut child = command.stdout(Stdio::piped()).spawn().expect("python runs");
        let stdout = child.stdout.take().map(BufReader::new);
        Self { child, stdout }
    }

    /// Waits until every connection has been open once.
    ///
    /// # Panics
    /// If the process ends earlier.
    pub async fn full(&mut self) {
        let mut stdout = self.stdout.take().expect("it is waited for once");
        let line = tokio::task::spawn_blocking(move || {
            let mut line = String::new();
            stdout.read_line(&mut line).map(|_| line)
        });
        let line = timeout(PATIENCE * 2, line).await.expect("the flood rises in time");
        assert_eq!(line.expect("it is read").expect("text"), "open\n", "the flood ended");
    }
}

impl Drop for Flood {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}
