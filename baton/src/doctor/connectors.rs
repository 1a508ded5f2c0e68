//! Checks which connectors work for the process on this machine, by building them with a little memory.

use chassis::{Gate, World};
use engine::Device;
use kv_cache::KvMemory;
use kv_transfer::{ConnectorParts, Faults, TransferMetrics, TransferSettings};
use node::Connectors;
use types::{Fingerprint, KvDtype, KvLayout, MissingWire, NodeId};

use crate::config_file::ConfigFile;

use super::finding::Finding;

const GROUP: &str = "connectors";
const N_BLOCKS: u32 = 4;

/// The kind of memory that will hold the process's KV.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum KvPlace {
    Host,
    PerhapsGpu,
}

pub(super) async fn look(process: &ConfigFile) -> Vec<Finding> {
    match process {
        ConfigFile::Router(_) => Vec::new(),
        ConfigFile::Node(config) => {
            let on_host = config.engine.device == Device::Cpu || config.engine.model.starts_with("mock");
            let place = if on_host { KvPlace::Host } else { KvPlace::PerhapsGpu };
            built(&config.connectors, &config.transfer, place).await
        }
        ConfigFile::Pool(config) => built(&config.connectors, &config.transfer, KvPlace::Host).await,
    }
}

async fn built(names: &[String], settings: &TransferSettings, place: KvPlace) -> Vec<Finding> {
    let parts = match parts(settings) {
        Ok(parts) => parts,
        Err(error) => {
            return vec![Finding::bad(
                GROUP,
                format!("no memory for the check of connectors: {error}"),
                "free some memory",
            )];
        }
    };
    match Connectors::build(names, &node::host::host_id(), &parts).await {
        Ok(connectors) => {
            let here = connectors.addresses().into_iter().map(|wire| works(wire.scheme.as_str()));
            here.chain(connectors.missing().iter().map(|missing| is_out(missing, place))).collect()
        }
        Err(error) => {
            let cause = std::error::Error::source(&error).map(|cause| format!(": {cause}"));
            let found = format!("{}: {error}{}", names.join(", "), cause.unwrap_or_default());
            let advice = "every connector in transfer.connectors must work; `auto` uses only those that do";
            vec![Finding::bad(GROUP, found, advice)]
        }
    }
}

/// Makes the parts for building connectors. They use free ports, because the process itself may be running.
fn parts(settings: &TransferSettings) -> Result<ConnectorParts, String> {
    let world = World::real();
    Ok(ConnectorParts {
        node: NodeId::new("doctor"),
        epoch: world.epoch(),
        memory: KvMemory::host(KvLayout::uniform(16, KvDtype::F32, 1, 1, 4), N_BLOCKS)
            .map_err(|error| error.to_string())?,
        fingerprint: Fingerprint::default(),
        world,
        gate: Gate::new("doctor"),
        settings: TransferSettings {
            listen: "127.0.0.1:0".to_owned(),
            advertise: String::new(),
            ..settings.clone()
        },
        metrics: TransferMetrics::default(),
        faults: Faults::none(),
        processes: None,
    })
}

fn works(scheme: &str) -> Finding {
    Finding::ok(GROUP, format!("{scheme}: can be used here; --peer tests it with another node"))
}

/// Reports a connector that is not available. Connectors between GPUs cannot be tested without GPU memory.
fn is_out(missing: &MissingWire, place: KvPlace) -> Finding {
    let MissingWire { scheme, why } = missing;
    if place == KvPlace::PerhapsGpu && ["cuda-ipc", "nccl"].contains(&scheme.as_str()) {
        let found = format!("{scheme}: not available, unless the node computes on a GPU");
        return Finding::note(
            GROUP,
            found,
            "see the findings for the GPU; the node's log and /debug/cluster show the result",
        );
    }
    Finding::note(
        GROUP,
        format!("{scheme}: not available: {why}"),
        "nothing to do if the others are enough; docs/connectors.md lists the requirements of each",
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::doctor::finding::Level;

    async fn found(names: &[&str]) -> Vec<Finding> {
        let names: Vec<String> = names.iter().map(|name| (*name).to_owned()).collect();
        built(&names, &TransferSettings::default(), KvPlace::Host).await
    }

    #[tokio::test]
    async fn what_is_out_is_said_with_its_reason() {
        let findings = found(&["auto"]).await;
        let says = |text: &str| findings.iter().any(|finding| finding.found.contains(text));
        assert!(
            says("tcp: can be used") && says("cuda-ipc: not available: its KV is not on a GPU"),
            "{findings:?}"
        );
        let narrow = found(&["tcp"]).await;
        let says = |text: &str| narrow.iter().any(|finding| finding.found.contains(text));
        assert!(says("shm: not available: transfer.connectors is tcp"), "{narrow:?}");
    }

    #[tokio::test]
    async fn what_was_named_and_does_not_work_is_in_the_way() {
        let findings = found(&["cuda-ipc"]).await;
        assert_eq!(findings[0].level, Level::Bad, "{findings:?}");
    }
}
