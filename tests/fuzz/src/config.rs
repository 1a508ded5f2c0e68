//! The configuration of a process: a file, and environment variables.

use chassis::config::parse;
use chassis::error::Origin;
use node::{NodeConfig, RawNodeConfig};
use router::{RawRouterConfig, RouterConfig};

/// Parses the configuration of a process. The first byte chooses the process. Lines with a `=` before the
/// first empty line are variables.
pub fn config(bytes: &[u8]) {
    let Some((whose, text)) = bytes.split_first() else { return };
    let Ok(text) = std::str::from_utf8(text) else { return };
    let (env, file) = text.split_once("\n\n").unwrap_or(("", text));
    let env: Vec<(String, String)> = env
        .lines()
        .filter_map(|line| line.split_once('='))
        .map(|(key, value)| (format!("BATON_{key}"), value.to_owned()))
        .collect();
    if whose % 2 == 0 {
        let raw = parse::<RawRouterConfig>(file, Origin::Defaults, env);
        drop(raw.map(|raw| RouterConfig::resolve(raw).map_err(|error| error.to_string())));
    } else {
        let raw = parse::<RawNodeConfig>(file, Origin::Defaults, env);
        drop(raw.map(|raw| NodeConfig::resolve(raw).map_err(|error| error.to_string())));
    }
}
