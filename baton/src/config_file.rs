//! The TOML file of any process. A section `[router]` makes it a router's file, `[pool]` a pool node's, and any other
//! file is a node's.

use std::path::{Path, PathBuf};
use std::process::ExitCode;

use chassis::identity::settings::{ClusterSection, TlsSection};
use chassis::{Gate, World};
use node::{NodeConfig, RawNodeConfig};
use pool_node::{PoolConfig, RawPoolConfig};
use registry::RegistryParts;
use router::{RawRouterConfig, RouterConfig};

use crate::exit::CommandError;
use crate::output;

/// A valid configuration file, by the kind of process that reads it.
#[derive(Debug)]
pub(crate) enum ConfigFile {
    Router(Box<RouterConfig>),
    Node(Box<NodeConfig>),
    Pool(Box<PoolConfig>),
}

/// Runs `baton --check-config FILE…`. Every file is checked, so that one run reports all invalid ones.
pub(crate) fn check(files: &[PathBuf]) -> Result<ExitCode, CommandError> {
    let mut wrong = None;
    for file in files {
        match ConfigFile::read(file, std::iter::empty()) {
            Ok(process) => {
                output::tell(&format!("{}: a valid {} configuration", file.display(), process.kind()))
            }
            Err(failed) => wrong = Some(failed.report()),
        }
    }
    Ok(wrong.unwrap_or(ExitCode::SUCCESS))
}

impl ConfigFile {
    /// Reads `file`, with the overrides in `env` that the process itself would apply.
    pub(crate) fn read(
        file: &Path,
        env: impl Iterator<Item = (String, String)>,
    ) -> Result<Self, CommandError> {
        let read = match () {
            () if has(file, "router") => Self::router(file, env),
            () if has(file, "pool") => Self::pool(file, env),
            () => Self::node(file, env),
        }?;
        read.names_connectors().map_err(|why| in_file(file, &why))?;
        read.names_a_registry()?;
        Ok(read)
    }

    /// Checks the names of connectors and of the registry, for `--check`. All other values are already valid.
    pub(crate) fn is_valid(&self) -> Result<ExitCode, CommandError> {
        self.names_connectors().map_err(CommandError::usage)?;
        self.names_a_registry()?;
        output::tell("the configuration is valid");
        Ok(ExitCode::SUCCESS)
    }

    /// Returns the default process, for a command without a file: the router of `baton up`.
    pub(crate) fn default_router() -> Result<Self, CommandError> {
        let config = RouterConfig::resolve(RawRouterConfig::default()).map_err(CommandError::usage)?;
        Ok(Self::Router(Box::new(config)))
    }

    fn router(file: &Path, env: impl Iterator<Item = (String, String)>) -> Result<Self, CommandError> {
        let raw: RawRouterConfig = chassis::config::load(Some(file), env).map_err(CommandError::usage)?;
        let config = RouterConfig::resolve(raw).map_err(|error| in_file(file, &error))?;
        Ok(Self::Router(Box::new(config)))
    }

    fn node(file: &Path, env: impl Iterator<Item = (String, String)>) -> Result<Self, CommandError> {
        let raw: RawNodeConfig = chassis::config::load(Some(file), env).map_err(CommandError::usage)?;
        let config = NodeConfig::resolve(raw).map_err(|error| in_file(file, &error))?;
        Ok(Self::Node(Box::new(config)))
    }

    fn pool(file: &Path, env: impl Iterator<Item = (String, String)>) -> Result<Self, CommandError> {
        let raw: RawPoolConfig = chassis::config::load(Some(file), env).map_err(CommandError::usage)?;
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

    pub(crate) fn tls(&self) -> &TlsSection {
        match self {
            Self::Router(config) => &config.tls,
            Self::Node(config) => &config.tls,
            Self::Pool(config) => &config.tls,
        }
    }

    /// Returns the addresses on which the process listens, each after its setting.
    pub(crate) fn listening(&self) -> Vec<(&'static str, &str)> {
        match self {
            Self::Router(config) => config.listening(),
            Self::Node(config) => config.listening(),
            Self::Pool(config) => config.listening(),
        }
    }

    /// Returns the address of the registry that the process connects to; `None` if the process serves the
    /// registry.
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

    /// Checks the registry's address by opening the registry, which sends nothing but needs a runtime.
    fn names_a_registry(&self) -> Result<(), CommandError> {
        let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
        let runtime = runtime.map_err(CommandError::start)?;
        let _inside = runtime.enter();
        let parts = RegistryParts { world: World::real(), gate: Gate::new("check") };
        let opened = self.registry_url().map_or(Ok(()), |url| registry::open(url, parts).map(drop));
        opened.map_err(CommandError::usage)
    }
}

/// Returns whether the file has this section. A file that is not TOML has none; the process that reads it
/// reports the error.
fn has(file: &Path, section: &str) -> bool {
    let text = std::fs::read_to_string(file).unwrap_or_default();
    text.parse::<toml::Table>().is_ok_and(|table| table.contains_key(section))
}

fn in_file(file: &Path, error: &dyn std::fmt::Display) -> CommandError {
    CommandError::usage(format!("{}: {error}", file.display()))
}
