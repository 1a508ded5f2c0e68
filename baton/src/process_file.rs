//! Any process's TOML file, without being told whose it is: `[router]` makes it a router's, `[pool]` a pool node's,
//! anything else a node's.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use chassis::identity::settings::ClusterSection;
use chassis::{Gate, World};
use node::{NodeConfig, RawNodeConfig};
use pool_node::{PoolConfig, RawPoolConfig};
use registry::RegistryParts;
use router::{RawRouterConfig, RouterConfig};

use crate::exit::Failed;
use crate::output;

/// What the file means, once everything in it has been found to mean something.
#[derive(Debug)]
pub(crate) enum ProcessFile {
    Router(Box<RouterConfig>),
    Node(Box<NodeConfig>),
    Pool(Box<PoolConfig>),
}

/// `baton --check-config FILE…`: every file is looked at, so that one run names all the wrong ones.
pub(crate) fn check(files: &[PathBuf]) -> Result<ExitCode, Failed> {
    let mut wrong = None;
    for file in files {
        match ProcessFile::read(file, std::iter::empty()) {
            Ok(process) => {
                output::tell(&format!("{}: a valid {} configuration", file.display(), process.kind()))
            }
            Err(failed) => wrong = Some(failed.report()),
        }
    }
    Ok(wrong.unwrap_or(ExitCode::SUCCESS))
}

impl ProcessFile {
    /// Reads `file`, overridden by `env` as the process itself would have it.
    pub(crate) fn read(file: &Path, env: impl Iterator<Item = (String, String)>) -> Result<Self, Failed> {
        let read = match () {
            () if has(file, "router") => Self::router(file, env),
            () if has(file, "pool") => Self::pool(file, env),
            () => Self::node(file, env),
        }?;
        read.names_connectors().map_err(|why| in_file(file, &why))?;
        read.names_a_registry()?;
        Ok(read)
    }

    /// The answer to `--check`: every word is known, that of a connector and that of a registry, too.
    pub(crate) fn is_valid(&self) -> Result<ExitCode, Failed> {
        self.names_connectors().map_err(Failed::usage)?;
        self.names_a_registry()?;
        output::tell("the configuration is valid");
        Ok(ExitCode::SUCCESS)
    }

    /// What a process without a file is: the router of `baton up`.
    pub(crate) fn default_router() -> Result<Self, Failed> {
        let config = RouterConfig::resolve(RawRouterConfig::default()).map_err(Failed::usage)?;
        Ok(Self::Router(Box::new(config)))
    }

    fn router(file: &Path, env: impl Iterator<Item = (String, String)>) -> Result<Self, Failed> {
        let raw: RawRouterConfig = chassis::config::load(Some(file), env).map_err(Failed::usage)?;
        let config = RouterConfig::resolve(raw).map_err(|error| in_file(file, &error))?;
        Ok(Self::Router(Box::new(config)))
    }

    fn node(file: &Path, env: impl Iterator<Item = (String, String)>) -> Result<Self, Failed> {
        let raw: RawNodeConfig = chassis::config::load(Some(file), env).map_err(Failed::usage)?;
        let config = NodeConfig::resolve(raw).map_err(|error| in_file(file, &error))?;
        Ok(Self::Node(Box::new(config)))
    }

    fn pool(file: &Path, env: impl Iterator<Item = (String, String)>) -> Result<Self, Failed> {
        let raw: RawPoolConfig = chassis::config::load(Some(file), env).map_err(Failed::usage)?;
        let config = PoolConfig::resolve(raw).map_err(|error| in_file(file, &error))?;
        Ok(Self::Pool(Box::new(config)))
    }

    pub(crate) fn kind(&self) -> &'static str {
        match self {
            Self::Router(_) => "router",
            Self::Node(_) => "node",
            Self::Pool(_) => "pool",
        }
    }

    pub(crate) fn cluster(&self) -> &ClusterSection {
        match self {
            Self::Router(config) => &config.cluster,
            Self::Node(config) => &config.cluster,
            Self::Pool(config) => &config.cluster,
        }
    }

    /// `None`: the process is the registry.
    pub(crate) fn registry_url(&self) -> Option<&str> {
        match self {
            Self::Router(config) => config.registry_url.as_deref(),
            Self::Node(config) => Some(&config.registry_url),
            Self::Pool(config) => Some(&config.registry_url),
        }
    }

    fn names_connectors(&self) -> Result<(), String> {
        let names = match self {
            Self::Router(_) => return Ok(()),
            Self::Node(config) => &config.connectors,
            Self::Pool(config) => &config.connectors,
        };
        let known = kv_transfer::connectors::names();
        let unknown = |name: &&String| *name != "auto" && !known.contains(&name.as_str());
        let Some(name) = names.iter().find(unknown) else { return Ok(()) };
        Err(format!("`transfer.connectors`: {name:?} is not one of auto, {}", known.join(", ")))
    }

    /// Opening a registry sends nothing, but wants a runtime; it refuses an address that means none.
    fn names_a_registry(&self) -> Result<(), Failed> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(Failed::start)?;
        let _inside = runtime.enter();
        let parts = RegistryParts { world: World::real(), gate: Gate::new("check") };
        let opened = self.registry_url().map_or(Ok(()), |url| registry::open(url, parts).map(drop));
        opened.map_err(Failed::usage)
    }
}

/// A file that is not TOML belongs to no role; the process that reads it says why.
fn has(file: &Path, section: &str) -> bool {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.parse::<toml::Table>().is_ok_and(|table| table.contains_key(section))
}

fn in_file(file: &Path, error: &dyn std::fmt::Display) -> Failed {
    Failed::usage(format!("{}: {error}", file.display()))
}
