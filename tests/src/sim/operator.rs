//! An operator who lets nodes sleep, wake and change their roles over their admin ports, like `baton sleep`, `baton wake`
//! and `baton admin role`.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    /// The nodes that were asked for a role and have not answered. Never held across an await.
    asked: Arc<Mutex<Vec<String>>>,
}

impl Operator {
    pub fn new(net: &SimNet, gate: &Gate) -> Self {
        Self { host: net.host(OPERATOR), log: net.log().clone(), gate: gate.clone(), asked: Arc::default() }
    }

    pub fn sleep(&self, node: &str) {
        self.ask(node, "/sleep".to_owned());
    }

    pub fn wake(&self, node: &str, role: Option<Role>) {
        self.ask(node, role.map_or("/wake".to_owned(), |role| format!("/wake?role={role}")));
    }

    /// Asks an awake node to take a role.
    pub fn role(&self, node: &str, role: Role) {
        self.ask_for_role(node, format!("/role?role={role}"));
    }

    /// Does the same, even if no other node does the work that the node stops doing.
    pub fn force_role(&self, node: &str, role: Role) {
        self.ask_for_role(node, format!("/role?role={role}&force=true"));
    }

    /// Returns whether the operator waits for a node's answer to a request for a role.
    pub fn waits_for(&self, node: &str) -> bool {
        names(&self.asked).iter().any(|asked| asked == node)
    }

    fn ask_for_role(&self, node: &str, path: String) {
        names(&self.asked).push(node.to_owned());
        let (asked, node) = (Arc::clone(&self.asked), node.to_owned());
        let ask = self.answer(node.clone(), path);
        let ask = async move {
            ask.await;
            let mut asked = names(&asked);
            let at = asked.iter().position(|asked| *asked == node).expect("it was asked");
            asked.swap_remove(at);
        };
        spawn_guarded(&self.gate, OPERATOR, ask).detach();
    }

    fn ask(&self, node: &str, path: String) {
        spawn_guarded(&self.gate, OPERATOR, self.answer(node.to_owned(), path)).detach();
    }

    /// Sends the request and waits for the answer.
    fn answer(&self, node: String, path: String) -> impl Future<Output = ()> + use<> {
        let (host, log) = (Arc::clone(&self.host), self.log.clone());
        async move {
            match post(&host, &node, &path).await {
                Ok(status) if status == "403" => log.accuse(format_args!("{node} forbids {path}")),
                Ok(status) => log.say(format_args!("{node} answers {path}: {status}")),
                Err(error) => log.say(format_args!("{node} does not answer {path}: {}", error.kind())),
            }
        }
    }
}

fn names(asked: &Mutex<Vec<String>>) -> MutexGuard<'_, Vec<String>> {
    asked.lock().unwrap_or_else(PoisonError::into_inner)
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
