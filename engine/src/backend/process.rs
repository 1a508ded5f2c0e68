//! One of several processes of a node, on any device: the stage, or the ranks of one, that it computes.

use std::path::Path;
use std::sync::Arc;

use bytes::Bytes;
use types::{Fingerprint, ProcessShare, StageLayers};

use super::remote::{RemoteProcess, StageProcess, StageRanks};
use super::{Backend, Device, EngineSettings, cpu, cuda};
use crate::error::OpenError;

/// A process's share of a model whose config is read, and whose weights are not loaded.
#[derive(Debug)]
pub enum PreparedStage {
    Cpu(Box<cpu::process::PreparedStage>),
    Cuda(Box<cuda::process::PreparedStage>),
}

impl PreparedStage {
    /// Reads the config of a model for one of its processes. The settings say how many stages and ranks there are.
    pub fn prepare(engine: &EngineSettings, share: ProcessShare) -> Result<Self, OpenError> {
        let folder = Path::new(&engine.model);
        Ok(match engine.device {
            Device::Cpu => {
                engine.experts.ensure_cut("a processor")?;
                let prepared =
                    cpu::process::PreparedStage::prepare(folder, engine.kv, &engine.on_cpu(), share);
                Self::Cpu(Box::new(prepared?))
            }
            Device::Cuda(_) | Device::Auto => {
                let prepared =
                    cuda::process::PreparedStage::prepare(folder, engine.kv, &engine.cuda(), share);
                Self::Cuda(Box::new(prepared?))
            }
        })
    }

    /// Names the device that computes the stage. It must be equal in all processes of a node.
    pub fn hardware(&self) -> String {
        match self {
            Self::Cpu(_) => "processor".to_owned(),
            Self::Cuda(prepared) => prepared.hardware(),
        }
    }

    /// Returns the fingerprint of the model, as far as all processes of a node share it. Reads samples of the weights.
    pub fn fingerprint(&self) -> Result<Fingerprint, OpenError> {
        match self {
            Self::Cpu(prepared) => prepared.fingerprint(),
            Self::Cuda(prepared) => prepared.fingerprint(),
        }
    }

    /// Returns the number of blocks for which this process has room.
    pub fn n_blocks(&self) -> u32 {
        match self {
            Self::Cpu(prepared) => prepared.n_blocks(),
            Self::Cuda(prepared) => prepared.n_blocks(),
        }
    }

    /// Returns the layers of each stage of the model.
    pub fn layers_of_stages(&self) -> &StageLayers {
        match self {
            Self::Cpu(prepared) => prepared.layers_of_stages(),
            Self::Cuda(prepared) => prepared.layers_of_stages(),
        }
    }

    /// Makes an id for [`StageRanks::sums_id`]. Empty if the ranks need none. They connect to this process.
    pub fn sums_id(&self) -> Result<Bytes, OpenError> {
        match self {
            Self::Cpu(_) => Ok(Bytes::new()),
            Self::Cuda(prepared) => prepared.sums_id(),
        }
    }

    /// Loads the stage's weights, and takes memory for `n_blocks` blocks. `ranks` joins the stage's ranks, if some are in
    /// other processes.
    pub fn open(self, n_blocks: u32, ranks: Option<StageRanks>) -> Result<Arc<dyn StageProcess>, OpenError> {
        Ok(match self {
            Self::Cpu(prepared) => Arc::new(prepared.open(n_blocks, ranks.map(|ranks| ranks.mates))?),
            Self::Cuda(prepared) => Arc::new(prepared.open(n_blocks, ranks)?),
        })
    }

    /// Loads the weights of the last stage, and makes the backend of the whole model. `remote` are the other processes, and
    /// `ranks` joins those of the last stage.
    pub fn open_head(
        self,
        n_blocks: u32,
        remote: &[RemoteProcess],
        ranks: Option<StageRanks>,
    ) -> Result<Box<dyn Backend>, OpenError> {
        Ok(match self {
            Self::Cpu(prepared) => {
                Box::new(prepared.open_head(n_blocks, remote, ranks.map(|ranks| ranks.mates))?)
            }
            Self::Cuda(prepared) => Box::new(prepared.open_head(n_blocks, remote, ranks)?),
        })
    }
}
