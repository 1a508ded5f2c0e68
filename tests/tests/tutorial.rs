//! Runs the commands of `docs/deploy.md` for one machine, and checks their results.
//!
//! The commands run on a separate host, where the ports of the page are free.

use std::fs;
use std::os::unix::process::CommandExt as _;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};

use baton_tests::hosts::{self, Hosts};
use baton_tests::{eventually, executable};
use rustix::process::{Pid, Signal, kill_process_group};
use tempfile::TempDir;

/// A fenced block of the page: its language, and its lines.
struct Block {
    language: String,
    text: String,
}

/// Returns the fenced blocks of one section of the page.
fn blocks(section: &str) -> Vec<Block> {
    let page =
        fs::read_to_string(concat!(env!("CARGO_MANIFEST_DIR"), "/../docs/deploy.md")).expect("the page");
    let (_, after) = page.split_once(section).unwrap_or_else(|| panic!("no section {section}"));
    let section = after.split("\n## ").next().expect("a section has a text");
    let mut parts = section.split("\n```");
    let mut found = Vec::new();
    while let (Some(_), Some(block)) = (parts.next(), parts.next()) {
        let (language, text) = block.split_once('\n').expect("a block has lines");
        found.push(Block { language: language.to_owned(), text: text.to_owned() });
    }
    found
}

/// A new user's machine: a host, a folder, and `baton` in the path.
struct Laptop {
    hosts: Hosts,
    folder: TempDir,
    running: Vec<Child>,
}

impl Laptop {
    fn new() -> Self {
        let folder = tempfile::tempdir().expect("a folder");
        std::os::unix::fs::symlink(executable::baton(), folder.path().join("baton")).expect("linked");
        Self { hosts: Hosts::new(&["laptop"]), folder, running: Vec::new() }
    }

    fn shell(&self, script: &str) -> Command {
        let path = std::env::var("PATH").unwrap_or_default();
        let mut shell = Command::new("ip");
        shell.args(["netns", "exec", &self.hosts.namespace_of("laptop"), "sh", "-euc", script]);
        shell.current_dir(&self.folder).env("PATH", format!("{}:{path}", self.folder.path().display()));
        shell.env("XDG_CACHE_HOME", self.folder.path().join("cache")).process_group(0);
        shell
    }

    /// Runs `script` and returns its output. Background processes continue, and log to standard error.
    fn run(&mut self, script: &str) -> Output {
        let (output, errors) = (self.file("output"), self.file("errors"));
        let create = |path: &Path| fs::File::create(path).expect("a file");
        let mut shell = self.shell(script);
        shell.stdin(Stdio::null()).stdout(create(&output)).stderr(create(&errors));
        let mut child = shell.spawn().expect("a shell");
        let status = child.wait().expect("it ends");
        self.running.push(child);
        let read = |path: PathBuf| fs::read(path).expect("it was written");
        Output { status, stdout: read(output), stderr: read(errors) }
    }

    /// Runs `script` in the background.
    fn leave_running(&mut self, script: &str) {
        let child = self.shell(script).stdout(Stdio::null()).stderr(Stdio::null()).spawn().expect("a shell");
        self.running.push(child);
    }

    fn write(&self, block: &Block) {
        let name = block.text.lines().next().and_then(|line| line.strip_prefix("# ")).expect("a file's name");
        fs::write(self.file(name), &block.text).expect("written");
    }

    fn file(&self, name: &str) -> PathBuf {
        Path::new(self.folder.path()).join(name)
    }
}

impl Drop for Laptop {
    fn drop(&mut self) {
        for child in &mut self.running {
            if let Some(group) = Pid::from_raw(child.id().cast_signed()) {
                let _ = kill_process_group(group, Signal::KILL);
            }
            let _ = child.wait();
        }
    }
}

/// Returns the whole output: standard output, then standard error.
fn text(output: &Output) -> String {
    let [printed, errors] = [&output.stdout, &output.stderr].map(|text| String::from_utf8_lossy(text));
    format!("{printed}{errors}")
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn one_command_is_a_cluster() {
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; nothing was tested");
        return;
    }
    let blocks = blocks("## 1. One command");
    let (build, rest) = blocks[0].text.split_once("\nalias ").expect("it is built, and given a name");
    assert_eq!(build, "cargo build --release");
    let up = rest.lines().nth(1).expect("and started");
    let mut laptop = Laptop::new();
    laptop.leave_running(up);
    let ready = "baton health http://127.0.0.1:8000/ready";
    eventually("the cluster", async || laptop.run(ready).status.success().then_some(())).await;
    let output = laptop.run(&blocks[1].text.replace("curl", "curl -sS --fail-with-body"));
    assert!(output.status.success() && text(&output).contains("Prefill"), "{}", text(&output));
    assert!(text(&output).contains("decode-1"), "{}", text(&output));
}

#[tokio::test(flavor = "multi_thread", worker_threads = 2)]
async fn processes_are_started_by_hand() {
    if !hosts::possible() {
        eprintln!("hosts need root and iproute2; nothing was tested");
        return;
    }
    let mut laptop = Laptop::new();
    let blocks = blocks("## 2. Processes");
    blocks.iter().filter(|block| block.language == "toml").for_each(|block| laptop.write(block));
    let commands = blocks.iter().find(|block| block.language == "sh").expect("commands");
    let output = laptop.run(&commands.text);
    assert!(output.status.success(), "{}", text(&output));
    assert!(
        text(&output).contains("valid router") && text(&output).contains("no problems found"),
        "{}",
        text(&output)
    );
    assert!(text(&output).contains("Prefill"), "{}", text(&output));
}
