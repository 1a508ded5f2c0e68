//! What processes log, read by the tests: a warning or an error that a test does not expect fails it.
//!
//! A test names what it is about to cause: `up.expect_log(&["status stream broke"])`. Everything else that is logged at
//! `WARN` or `ERROR` fails the test.

use std::sync::{Mutex, PoisonError};

/// What is said of a machine that tests run on.
const OF_THIS_MACHINE: &[&str] = &["no GPU is used: the CPU computes"];
/// What a process may say that is stopped in the middle of something, as every test does at its end.
const WHEN_STOPPED: &[&str] = &[
    "a port was closed with connections open",
    "connection closed with requests under way",
    "router tasks still run",
];
/// What others say of a node that is killed, and `baton up` of its child.
///
/// A request that was routed just before may find the wires within the machine gone already, and take another.
pub const A_NODE_DIES: &[&str] = &[
    "node ended",
    "status stream broke",
    "members were silent for a whole lease",
    "connector cannot be used, falling back",
];
/// What a router says of a pool node that does not do its part, and that node of a link that was being made just then.
pub const THE_POOL_FAILS: &[&str] = &["the pool failed", "refused kv stream"];
/// What is said where a process is stopped with its connections open, by it and of it.
pub const A_NODE_STANDS_STILL: &[&str] = &[
    "status stream broke",
    "members were silent for a whole lease",
    "the registry is away",
    "the registry cannot be watched",
    "members are missed",
    "announcement failed, trying again",
    "stream failed",
    "the node makes no progress",
    "no request makes progress",
];
/// What everybody says while there is no registry.
pub const THE_REGISTRY_IS_AWAY: &[&str] = &[
    "the registry is away",
    "the registry cannot be watched",
    "members are missed",
    "announcement failed, trying again",
    "not withdrawn, the lease will lapse",
];

/// What a router says of a model folder without a tokenizer.
pub const NO_TOKENIZER: &[&str] = &["no tokenizer.json"];

/// What one test expects to be warned of: parts of lines. Nothing, at first.
#[derive(Debug, Default)]
pub struct Expected {
    parts: Mutex<Vec<&'static str>>,
}

impl Expected {
    pub fn add(&self, parts: &[&'static str]) {
        self.parts.lock().unwrap_or_else(PoisonError::into_inner).extend(parts);
    }

    /// Fails the test, unless it fails already, if `log` has an unexpected alarm.
    ///
    /// # Panics
    /// With the lines.
    pub fn check(&self, log: &str) {
        if std::thread::panicking() {
            return;
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

/// Whether a line, in either format, is a warning or an error.
fn is_alarm(line: &str) -> bool {
    // `process time LEVEL target: message`
    let level = line.split_whitespace().nth(2);
    let in_text = matches!(level, Some("WARN" | "ERROR"));
    in_text || line.contains("\"level\":\"WARN\"") || line.contains("\"level\":\"ERROR\"")
}

#[cfg(test)]
mod tests {
    use super::*;

    const LOG: &str = "\
        router  2026-11-20T17:46:03Z  INFO baton_router::server: router is up\n\
        router  2026-11-20T17:46:04Z  WARN baton_router::cluster: status stream broke node=d\n\
        {\"level\":\"ERROR\",\"message\":\"panicked\"}\n\
        ready http=http://127.0.0.1:1 grpc=http://127.0.0.1:2";

    #[test]
    fn alarms_are_found_in_both_formats() {
        let expected = Expected::default();
        assert_eq!(expected.unexpected(LOG).len(), 2);
        expected.add(&["status stream broke"]);
        assert_eq!(expected.unexpected(LOG), ["{\"level\":\"ERROR\",\"message\":\"panicked\"}"]);
        expected.add(&["panicked"]);
        assert!(expected.unexpected(LOG).is_empty());
    }

    #[test]
    #[should_panic(expected = "unexpected lines in the log")]
    fn an_unexpected_alarm_fails_the_test() {
        Expected::default().check(LOG);
    }
}
