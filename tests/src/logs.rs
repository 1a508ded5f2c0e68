//! Checks the logs of processes: a warning or an error that a test does not expect fails it.
//!
//! A test names the warnings that it causes: `up.expect_log(&["status stream from node lost"])`. Every other line at
//! `WARN` or `ERROR` fails the test.

use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use crate::Stopwatch;

/// Warnings that come from the machines on which tests run.
const OF_THIS_MACHINE: &[&str] = &["no GPU can be used, the CPU computes the model"];
/// Warnings of a process that is stopped while it works, as at the end of every test.
const WHEN_STOPPED: &[&str] = &[
    "a port of the node was closed with open connections",
    "client connection closed with unfinished requests",
    "router tasks are still running",
];
/// Warnings about a killed node, from other processes and from `baton up`.
///
/// A request that was routed just before may find the node's shared memory gone, and use another connector. A
/// connection that was just being opened ends in its TLS handshake.
pub const A_NODE_DIES: &[&str] = &[
    "node process ended",
    "status stream from node lost",
    "leases expired: members sent no keep-alive",
    "connector cannot be used with the peer, falling back",
    "the peer closed the connection in the TLS handshake",
];
/// Warnings of a router about a pool node that fails, and of that node about a link that was just being opened.
pub const THE_POOL_FAILS: &[&str] = &["pool node failed", "KV stream from peer refused"];
/// Warnings about a process that is stopped with open connections, from that process and from others.
pub const A_NODE_STANDS_STILL: &[&str] = &[
    "status stream from node lost",
    "leases expired: members sent no keep-alive",
    "registry is unreachable",
    "registry watch failed",
    "members are missing in the registry",
    "announcement in the registry failed, trying again",
    "streamed answer to client failed",
    "the node makes no progress",
    "no request makes progress",
];
/// Warnings of all processes while the registry is away.
pub const THE_REGISTRY_IS_AWAY: &[&str] = &[
    "registry is unreachable",
    "registry watch failed",
    "members are missing in the registry",
    "announcement in the registry failed, trying again",
    "withdrawal from the registry failed",
];

/// A router's warning about a model folder without a tokenizer.
pub const NO_TOKENIZER: &[&str] = &["model has no tokenizer.json"];

/// If the machine stopped the test for this long, processes may warn that others were silent.
const LONG_STOP: Duration = Duration::from_secs(1);

/// The warnings that one test expects, as parts of lines.
#[derive(Debug)]
pub struct ExpectedPeer {
    parts: Mutex<Vec<&'static str>>,
    watch: Stopwatch,
}

impl Default for ExpectedPeer {
    fn default() -> Self {
        Self { parts: Mutex::default(), watch: Stopwatch::start() }
    }
}

impl ExpectedPeer {
    pub fn add(&self, parts: &[&'static str]) {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).extend(parts);
    }

    /// Fails the test if `log` has an unexpected warning or error, unless the test is failing already.
    ///
    /// # Panics
    /// If `log` has such lines. The panic lists them.
    pub fn check(&self, log: &str) {
        if std::thread::panicking() {
            return;
        }
        if self.watch.longest_stop() >= LONG_STOP {
            self.add(A_NODE_STANDS_STILL);
            self.add(THE_POOL_FAILS);
        }
        let unexpected = self.unexpected(log);
        assert!(unexpected.is_empty(), "unexpected lines in the log:\n{}", unexpected.join("\n"));
    }

    fn unexpected<'a>(&self, log: &'a str) -> Vec<&'a str> {
        let parts = self.parts.lock().unwrap_or_else(PoisonError::into_inner);
        let is_expected = |line: &str| {
            parts.iter().chain(WHEN_STOPPED).chain(OF_THIS_MACHINE).any(|part| line.contains(part))
        };
        log.lines().filter(|line| is_alarm(line) && !is_expected(line)).collect()
    }
}

/// Returns whether a line, in either format, is a warning or an error.
fn is_alarm(line: &str) -> bool {
    // A text line has the form `process time LEVEL target: message`.
    let level = line.split_whitespace().nth(2);
    let in_text = matches!(level, Some("WARN" | "ERROR"));
    in_text || line.contains("\"level\":\"WARN\"") || line.contains("\"level\":\"ERROR\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
        router  2026-11-20T17:46:03Z  INFO baton_router::server: router is up\n\
        router  2026-11-20T17:46:04Z  WARN baton_router::cluster: status stream from node lost node=d\n\
        {\"level\":\"ERROR\",\"message\":\"panicked\"}\n\
        ready http=http://127.0.0.1:1 grpc=http://127.0.0.1:2";

    #[test]
    fn alarms_are_found_in_both_formats() {
        let expected = ExpectedPeer::default();
        assert_eq!(expected.unexpected(LOG).len(), 2);
        expected.add(&["status stream from node lost"]);
        assert_eq!(expected.unexpected(LOG), ["{\"level\":\"ERROR\",\"message\":\"panicked\"}"]);
        expected.add(&["panicked"]);
        assert!(expected.unexpected(LOG).is_empty());
    }

    #[test]
    #[should_panic(expected = "unexpected lines in the log")]
    fn an_unexpected_alarm_fails_the_test() {
        ExpectedPeer::default().check(LOG);
    }
}
