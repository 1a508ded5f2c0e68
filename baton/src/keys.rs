//! `baton keys new`: makes an API key, and its line for the router's tenants file.

use std::process::ExitCode;

use chassis::World;
use router::tenants::{ApiKey, is_tenant_name};

use crate::cli::{KeysArgs, KeysCommand};
use crate::exit::CommandError;
use crate::output;

/// Makes a key and prints it once. The key is not stored.
pub(crate) fn run(args: &KeysArgs) -> Result<ExitCode, CommandError> {
    let KeysCommand::New { tenant } = &args.command;
    if !is_tenant_name(tenant) {
        return Err(CommandError::usage(format!(
            "{tenant:?} is not a valid tenant name: use letters, digits, '-', '_', '.' or ':'"
        )));
    }
    let world = World::real();
    let key = ApiKey::random([world.grant(), world.grant()]);
    let (text, hash) = (key.as_str(), key.hash());
    output::print(&format!(
        "key (for the client): {text}\nline (under [keys]):  \"{hash}\" = \"{tenant}\"\n"
    ))?;
    Ok(ExitCode::SUCCESS)
}
