//! An operator who lets nodes sleep, wake and change their roles over their admin ports, like `baton sleep`, `baton wake`
//! and `baton admin role`.

use std::io;
use std::sync::Arc;

use chassis::{Gate, Net as _, spawn_guarded};
use tokio::io::{AsyncReadExt as _, AsyncWriteExt as _};
use types::Role;

use super::log::EventLog;
use super::net::{HostNet, SimNet};

const OPERATOR: &str = "operator";
/// The largest head of an answer, in bytes.
const HEAD_BYTES_MAX: u64 = 4096;

#[derive(Debug)]
pub struct Operator {
    host: Arc<HostNet>,
    log: EventLog,
    gate: Gate,
}

impl Operator {
    pub fn new(net: &SimNet, gate: &Gate) -> Self {
        Self { host: net.host(OPERATOR), log: net.log().clone(), gate: gate.clone() }
    }

    pub fn sleep(&self, node: &str) {
        self.ask(node, "/sleep".to_owned());
    }

    pub fn wake(&self, node: &str, role: Option<Role>) {
        self.ask(node, role.map_or("/wake".to_owned(), |role| format!("/wake?role={role}")));
    }

    /// Asks an awake node to take a role.
    pub fn role(&self, node: &str, role: Role) {
        self.ask(node, format!("/role?role={role}"));
    }

    /// Does the same, even if no other node does the work that the node stops doing.
    pub fn force_role(&self, node: &str, role: Role) {
        self.ask(node, format!("/role?role={role}&force=true"));
    }

    /// Waits for the answer in a task of its own.
    fn ask(&self, node: &str, path: String) {
        let (host, log, node) = (Arc::clone(&self.host), self.log.clone(), node.to_owned());
        let ask = async move {
            match post(&host, &node, &path).await {
                Ok(status) if status == "403" => log.accuse(format_args!("{node} forbids {path}")),
                Ok(status) => log.say(format_args!("{node} answers {path}: {status}")),
                Err(error) => log.say(format_args!("{node} does not answer {path}: {}", error.kind())),
            }
        };
        spawn_guarded(&self.gate, OPERATOR, ask).detach();
    }
}

/// Reads the status of the answer.
async fn post(host: &HostNet, node: &str, path: &str) -> io::Result<String> {
    let mut stream = host.connect(&format!("{node}:7001")).await?;
    let ask =
        format!("POST {path} HTTP/1.1\r\nhost: {node}\r\nconnection: close\r\ncontent-length: 0\r\n\r\n");
    stream.write_all(ask.as_bytes()).await?;
    let mut answer = Vec::new();
    stream.take(HEAD_BYTES_MAX).read_to_end(&mut answer).await?;
    let head = String::from_utf8_lossy(&answer);
    let status = head.split_whitespace().nth(1).ok_or(io::ErrorKind::UnexpectedEof)?;
    Ok(status.to_owned())
}
