//! Tests that need a whole process: signals, exit codes, stderr.
//!
//! Each test starts this executable again as a child that runs only [`child`].

use std::io::{BufRead, BufReader, Read};
use std::process::{Child as Process, ChildStderr, Command, Stdio};
use std::sync::mpsc;
use std::thread::JoinHandle;
use std::time::Duration;

use baton_chassis::Shutdown;
use baton_chassis::shutdown::EXIT_FORCED;
use baton_chassis::telemetry::{self, LogFormat, LogSettings};

const CHILD: &str = "CHASSIS_TEST_CHILD";
const WITHIN: Duration = Duration::from_secs(20);

/// Does nothing in the parent. In a child it runs a process that waits for its shutdown.
#[test]
fn child() {
    let Ok(task) = std::env::var(CHILD) else { return };
    let settings = LogSettings { format: LogFormat::Json, ..LogSettings::default() };
    let _telemetry = telemetry::init("child", &settings).expect("the first of this process");
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build().expect("a runtime");
    runtime.block_on(async {
        let shutdown = Shutdown::from_signals_and_stdin().expect("handlers");
        tracing::info!("up");
        shutdown.wait().await;
        match task.as_str() {
            "hang" => std::future::pending().await,
            "panic" => panic!("on purpose"),
            _ => tracing::info!("down"),
        }
    });
}

/// A running child. If it does not end in time, it is killed and has no exit code.
struct Running {
    process: Process,
    stderr: BufReader<ChildStderr>,
    /// The sender is dropped when the child has ended, which stops the watchdog.
    ended: mpsc::Sender<()>,
    watchdog: JoinHandle<()>,
}

impl Running {
    /// Starts a child and waits until its signal handlers are installed.
    fn start(task: &str) -> Self {
        let mut process = Command::new(std::env::current_exe().expect("this executable"))
            .args(["child", "--exact", "--nocapture"])
            .env(CHILD, task)
            .env_remove("BATON_LOG")
            .stdin(Stdio::piped())
            .stdout(Stdio::null())
            .stderr(Stdio::piped())
            .spawn()
            .expect("started");
        let stderr = BufReader::new(process.stderr.take().expect("piped"));
        let (ended, end) = mpsc::channel();
        let id = process.id();
        let watchdog = std::thread::spawn(move || {
            if end.recv_timeout(WITHIN) == Err(mpsc::RecvTimeoutError::Timeout) {
                kill(id, "-KILL");
            }
        });
        let mut running = Self { process, stderr, ended, watchdog };
        running.wait_for(r#""message":"up""#);
        running
    }

    /// Reads stderr until a line contains `text`. Fails if the child ends first.
    fn wait_for(&mut self, text: &str) {
        let found = (&mut self.stderr).lines().map_while(Result::ok).any(|line| line.contains(text));
        assert!(found, "the child never said {text}");
    }

    fn signal(&self, name: &str) {
        kill(self.process.id(), name);
    }

    /// Waits for the child's end. Returns the exit code and the rest of stderr.
    fn end(mut self) -> (Option<i32>, String) {
        let mut rest = String::new();
        self.stderr.read_to_string(&mut rest).expect("text");
        let code = self.process.wait().expect("waited").code();
        drop(self.ended);
        self.watchdog.join().expect("the watchdog ends");
        (code, rest)
    }
}

fn kill(id: u32, signal: &str) {
    let sent = Command::new("kill").args([signal, &id.to_string()]).status().expect("kill is there");
    assert!(sent.success());
}

#[test]
fn either_signal_ends_it_in_order() {
    for name in ["-TERM", "-INT"] {
        let running = Running::start("end");
        running.signal(name);
        let (code, rest) = running.end();
        assert_eq!(code, Some(0), "{rest}");
        assert!(rest.contains(r#""message":"down""#), "{rest}");
    }
}

#[test]
fn a_second_signal_ends_it_at_once() {
    let mut running = Running::start("hang");
    running.signal("-TERM");
    running.wait_for("shutdown requested by a signal");
    running.signal("-TERM");
    let (code, rest) = running.end();
    assert_eq!(code, Some(EXIT_FORCED), "{rest}");
}

#[test]
fn it_ends_with_its_parent() {
    let mut running = Running::start("end");
    drop(running.process.stdin.take());
    let (code, rest) = running.end();
    assert_eq!(code, Some(0), "{rest}");
    assert!(rest.contains("parent process has ended"), "{rest}");
}

#[test]
fn a_panic_is_a_log_line() {
    let running = Running::start("panic");
    running.signal("-TERM");
    let (code, rest) = running.end();
    assert_ne!(code, Some(0));
    let line = rest.lines().find(|line| line.contains(r#""message":"thread panicked""#)).expect(&rest);
    assert!(line.contains(r#""level":"ERROR""#) && line.contains("on purpose"), "{line}");
}
