//! `baton rank`: a further process of a node with several processes.

use std::process::ExitCode;
use std::time::Duration;

use chassis::admin::Readiness;
use chassis::metrics::Metrics;
use chassis::{Gate, Shutdown};
use kv_transfer::TransferMetrics;
use node::group::{FollowerParts, GroupError, follow};
use node::{NodeConfig, NodeError, Ports};
use tracing::{info, warn};

use crate::cli::RankArgs;
use crate::config_file::ConfigFile;
use crate::exit::CommandError;
use crate::identity;
use crate::node::{Settings, bind};

/// The name of this kind of process in logs and metrics.
const NAME: &str = "rank";
/// The longest time that its tasks and threads may take to end.
const END_WITHIN: Duration = Duration::from_secs(10);

pub(crate) fn run(args: &RankArgs) -> Result<ExitCode, CommandError> {
    let settings = Settings::read(&args.process)?;
    if args.process.check {
        return ConfigFile::Node(Box::new(settings.config)).is_valid();
    }
    let refused = |why| Err(CommandError::usage(NodeError::Config(why)));
    match settings.config.group.grid.n_processes() {
        1 => {
            return refused("expert.model.processes is 1: a node of one process has no others".to_owned());
        }
        n_processes if usize::from(args.place) >= n_processes - 1 => {
            let last = n_processes - 2;
            return refused(format!(
                "place {}: with {n_processes} processes it is at most {last}",
                args.place
            ));
        }
        _ => {}
    }
    settings.run(NAME, &args.process, async |config, shutdown| serve(&config, args, shutdown).await)
}

async fn serve(config: &NodeConfig, args: &RankArgs, shutdown: Shutdown) -> Result<ExitCode, CommandError> {
    let world = identity::of_rank(&config.cluster, &config.tls, config.id.as_ref())?;
    let _certificates = identity::follow_certificates(&world);
    let metrics = Metrics::of_node(NAME);
    let readiness = Readiness::unready("waiting for the head");
    let pages = chassis::admin::router(readiness.clone(), metrics.clone());
    let ports = Ports::admin(bind(&world, &config.admin).await?, pages, config.connections);
    let gate = Gate::new("follower");
    let parts = FollowerParts {
        world,
        gate: gate.clone(),
        config,
        head: args.of.clone(),
        place: args.place,
        metrics: TransferMetrics::new(&metrics),
        readiness,
    };
    let ended = follow(parts, shutdown).await;
    if let Err(late) = gate.close(END_WITHIN).await {
        warn!(%late, "tasks and threads are still running at process exit");
    }
    ports.close().await;
    info!("process has stopped");
    ended.map(|()| ExitCode::SUCCESS).map_err(|error| match error {
        // The process has computed nothing yet.
        GroupError::NoHead { .. }
        | GroupError::NotAdmitted { .. }
        | GroupError::Refused { .. }
        | GroupError::Executable(_)
        | GroupError::Open(_) => CommandError::start(NodeError::Group(error)),
        error => CommandError::work(NodeError::Group(error)),
    })
}
