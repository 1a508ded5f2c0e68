//! `baton bench puppet`: runs a server with known delays, to measure the harness.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use clap::Args;
use serde_json::Value;

use crate::command::{CommandOutcome, say};
use crate::error::{BenchError, Result};
use crate::puppet::script::{Counting, Script, ScriptAction, Step};
use crate::puppet::server::{PreparedScript, ScriptedServer};
use crate::span::parse_span;

/// The largest number of answers of different lengths that are kept in rendered form.
const N_PARTS_MAX: usize = 4096;
const N_TOKENS_DEFAULT: u64 = 16;

#[derive(Clone, Debug, Args)]
pub struct ScriptedServerArgs {
    /// The address to listen on
    #[arg(long, default_value = "127.0.0.1:8100")]
    pub listen: String,
    /// Time from a request to its first token
    #[arg(long, default_value = "50ms", value_parser = parse_span, value_name = "SPAN")]
    pub ttft: Duration,
    /// Time from the first token to the second; by default the gap
    #[arg(long, value_parser = parse_span, value_name = "SPAN")]
    pub handover: Option<Duration>,
    /// Time from chunk to chunk
    #[arg(long, default_value = "20ms", value_parser = parse_span, value_name = "SPAN")]
    pub gap: Duration,
    /// Number of tokens in a chunk, from the second chunk on
    #[arg(long, default_value_t = 1, value_name = "N")]
    pub coalesce: u32,
    /// Send an empty chunk before the first token
    #[arg(long)]
    pub empty_first: bool,
    /// Wait longer once, before chunk N: N:SPAN
    #[arg(long, value_parser = parse_stall, value_name = "N:SPAN")]
    pub stall: Option<(usize, Duration)>,
    /// How the client can count tokens
    #[arg(long, value_enum, default_value_t)]
    pub counting: Counting,
    /// Time between two accepted connections
    #[arg(long, default_value = "0s", value_parser = parse_span, value_name = "SPAN")]
    pub accept_delay: Duration,
}

fn parse_stall(text: &str) -> std::result::Result<(usize, Duration), String> {
    let (nth, span) = text.split_once(':').ok_or_else(|| format!("`{text}` is not N:SPAN"))?;
    Ok((nth.parse().map_err(|_| format!("`{nth}` is not a number"))?, parse_span(span)?))
}

impl ScriptedServerArgs {
    /// Makes the script of an answer of `n_tokens`.
    pub fn script(&self, n_tokens: u32) -> Script {
        let mut steps = Vec::new();
        if self.empty_first {
            steps.push(Step { after: Duration::ZERO, act: ScriptAction::Empty });
        }
        steps.push(Step { after: self.ttft, act: ScriptAction::Tokens(1) });
        let mut left = n_tokens.saturating_sub(1);
        while left > 0 {
            let n = left.min(self.coalesce.max(1));
            let is_second = left + 1 == n_tokens;
            let after = self.handover.filter(|_| is_second).unwrap_or(self.gap);
            steps.push(Step { after, act: ScriptAction::Tokens(n) });
            left -= n;
        }
        if let Some((nth, span)) = self.stall
            && let Some(step) = steps.get_mut(nth)
        {
            step.after += span;
        }
        Script { steps, counting: self.counting, ..Script::even(0, Duration::ZERO, Duration::ZERO) }
    }
}

/// Runs the server until it is interrupted.
pub async fn run(args: ScriptedServerArgs) -> Result<CommandOutcome> {
    let (listen, accept_delay) = (args.listen.clone(), args.accept_delay);
    let parts: Mutex<HashMap<u32, PreparedScript>> = Mutex::default();
    let casting = move |_: usize, body: &Value| {
        let n_tokens = body["max_tokens"].as_u64().unwrap_or(N_TOKENS_DEFAULT) as u32;
        let mut parts = parts.lock().unwrap_or_else(PoisonError::into_inner);
        if parts.len() >= N_PARTS_MAX {
            parts.clear();
        }
        parts.entry(n_tokens).or_insert_with(|| PreparedScript::from(&args.script(n_tokens))).clone()
    };
    let puppet =
        ScriptedServer::start(&listen, accept_delay, Arc::new(casting)).await.map_err(BenchError::Prepare)?;
    say(&format!("ready http={}", puppet.url()));
    tokio::signal::ctrl_c().await.map_err(BenchError::Prepare)?;
    Ok(CommandOutcome::Well)
}
