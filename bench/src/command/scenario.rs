//! `baton bench scenario`: runs a scenario of the suite. Each has one file and one command.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

use clap::{Args, Parser};
use serde::Deserialize;
use tokio::time::{Instant, sleep};

use crate::client::TargetServer;
use crate::command::{BenchArgs, BenchCommand, CommandOutcome, dispatch, tell};
use crate::error::{BenchError, Result, read_text};

const READY_WITHIN: Duration = Duration::from_secs(300);
const ASK_EVERY: Duration = Duration::from_millis(100);

#[derive(Clone, Debug, Args)]
pub struct ScenarioArgs {
    /// A file in bench/scenarios
    pub file: PathBuf,
    /// Measure this server instead of starting the scenario's own
    #[arg(long)]
    pub url: Option<String>,
    /// Turn off the scenario's feature
    #[arg(long)]
    pub ablate: bool,
    /// Replaces {data} in the scenario: a trace or a file of conversations that is not part of the project
    #[arg(long, value_name = "FILE")]
    pub data: Option<PathBuf>,
    /// Further arguments for the bench command
    #[arg(last = true)]
    pub more: Vec<String>,
}

/// A scenario of the suite, as its file describes it.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Scenario {
    /// The question that the scenario answers, in a sentence.
    pub question: String,
    /// The hardware that the scenario needs: `cpu`, or GPUs.
    pub hardware: String,
    /// The arguments of `baton bench`. `{data}` is the file given with --data, `{here}` the scenario's
    /// folder.
    pub bench: Vec<String>,
    /// The servers to start first. The arguments contain their addresses.
    #[serde(default)]
    pub server: Vec<ScenarioServer>,
    pub ablation: Ablation,
}

/// A server, such as a cluster, that the scenario starts.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct ScenarioServer {
    /// The arguments of `baton`.
    pub start: Vec<String>,
    pub url: String,
}

/// How to turn off one feature in the scenario, to measure the feature.
#[derive(Clone, Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Ablation {
    /// The feature that is turned off.
    pub off: String,
    /// Arguments that are appended to those of the bench.
    #[serde(default)]
    pub bench: Vec<String>,
    /// Arguments that are appended to those of the first server.
    #[serde(default)]
    pub server: Vec<String>,
}

/// The scenario's arguments in the form in which clap parses them, after a program name.
#[derive(Debug, Parser)]
#[command(no_binary_name = true, args_override_self = true)]
struct ScenarioCommand {
    #[command(flatten)]
    bench: BenchArgs,
}

impl Scenario {
    pub fn read(path: &Path) -> Result<Self> {
        toml::from_str(&read_text(path)?).map_err(|error| BenchError::parse(path, error))
    }

    /// Returns the bench command of this scenario.
    pub fn command(&self, args: &ScenarioArgs) -> Result<BenchCommand> {
        let mut words = self.bench.clone();
        words.extend(self.ablation.bench.iter().filter(|_| args.ablate).cloned());
        words.extend(args.url.iter().flat_map(|url| ["--url".to_owned(), url.clone()]));
        words.extend(args.more.iter().cloned());
        let data = args.data.as_ref().map(|path| path.display().to_string());
        if data.is_none() && words.iter().any(|word| word == "{data}") {
            return Err(BenchError::usage(
                "this scenario reads a file that is not part of the project: give --data",
            ));
        }
        let data = data.unwrap_or_default();
        let words =
            words.into_iter().map(|word| word.replace("{data}", &data).replace("{here}", &here(&args.file)));
        let typed =
            ScenarioCommand::try_parse_from(words).map_err(|error| BenchError::parse(&args.file, error))?;
        Ok(typed.bench.command)
    }

    /// Returns the arguments of `baton` for each server. If `is_ablated`, the first server's include those of
    /// the ablation.
    pub fn server_words(&self, args: &ScenarioArgs) -> Vec<Vec<String>> {
        let mut all: Vec<_> = self.server.iter().map(|server| server.start.clone()).collect();
        if let (true, Some(first)) = (args.ablate, all.first_mut()) {
            first.extend(self.ablation.server.iter().cloned());
        }
        let place =
            |words: Vec<String>| words.iter().map(|word| word.replace("{here}", &here(&args.file))).collect();
        all.into_iter().map(place).collect()
    }
}

/// Returns the folder of a scenario's file, the value of `{here}`.
fn here(file: &Path) -> String {
    file.parent().unwrap_or(Path::new(".")).display().to_string()
}

pub async fn run(args: ScenarioArgs) -> Result<CommandOutcome> {
    let scenario = Scenario::read(&args.file)?;
    let command = scenario.command(&args)?;
    tell(&format!("{} ({})", scenario.question, scenario.hardware));
    let _servers = if args.url.is_none() { start_all(&scenario, &args).await? } else { Vec::new() };
    Box::pin(dispatch(command)).await
}

/// A running server of the scenario. Dropping it ends the server.
struct Running(Child);

impl Running {
    fn has_ended(&mut self) -> bool {
        !matches!(self.0.try_wait(), Ok(None))
    }
}

impl Drop for Running {
    /// Ends the server by SIGTERM first, because a cluster must end its children.
    fn drop(&mut self) {
        if let Some(pid) = rustix::process::Pid::from_raw(self.0.id() as i32) {
            let _ = rustix::process::kill_process(pid, rustix::process::Signal::TERM);
        }
        for _ in 0..100 {
            if matches!(self.0.try_wait(), Ok(Some(_)) | Err(_)) {
                return;
            }
            std::thread::sleep(ASK_EVERY);
        }
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

async fn start_all(scenario: &Scenario, args: &ScenarioArgs) -> Result<Vec<Running>> {
    let baton = std::env::current_exe().map_err(BenchError::Prepare)?;
    let mut running = Vec::new();
    for (words, server) in scenario.server_words(args).iter().zip(&scenario.server) {
        let child = Command::new(&baton).args(words).stdin(Stdio::null()).stdout(Stdio::null()).spawn();
        let child = child.map_err(|source| BenchError::Start { program: words.join(" "), source })?;
        let mut child = Running(child);
        wait_ready(&mut child, &server.url).await?;
        running.push(child);
    }
    Ok(running)
}

/// Waits until the server answers. Fails if the server ends instead.
async fn wait_ready(server: &mut Running, url: &str) -> Result<()> {
    let deadline = Instant::now() + READY_WITHIN;
    loop {
        match models(url).await {
            Ok(200) => return Ok(()),
            _ if server.has_ended() => {
                return Err(BenchError::target(url, "the server ended before it was ready"));
            }
            Err(error) if Instant::now() > deadline => return Err(error),
            _ if Instant::now() > deadline => {
                return Err(BenchError::target(url, "not ready within five minutes"));
            }
            _ => sleep(ASK_EVERY).await,
        }
    }
}

async fn models(url: &str) -> Result<u16> {
    let target = TargetServer::resolve(url).await?;
    target.get("/v1/models").await.map(|(status, _)| status)
}
