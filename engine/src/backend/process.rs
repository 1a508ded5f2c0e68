//! One of several processes of a node, on any device: the stage, or the ranks of one, that it computes.

use std::path::Path;
use std::sync::Arc;

use types::{Fingerprint, ProcessShare, StageLayers};

use super::remote::{RemoteProcess, StageMates, StageProcess};
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

    /// Names what computes the stage. It must be equal in all processes of a node.
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

    /// Loads the stage's weights, and takes memory for `n_blocks` blocks. `mates` has the stage's other ranks.
    pub fn open(
        self,
        n_blocks: u32,
        mates: Option<Arc<dyn StageMates>>,
    ) -> Result<Arc<dyn StageProcess>, OpenError> {
        Ok(match self {
            Self::Cpu(prepared) => Arc::new(prepared.open(n_blocks, mates)?),
            Self::Cuda(prepared) => Arc::new(prepared.open(n_blocks)?),
        })
    }

    /// Loads the weights of the last stage, and makes the backend of the whole model. `remote` are the other processes, and
    /// `mates` those with ranks of the last stage.
    pub fn open_head(
        self,
        n_blocks: u32,
        remote: &[RemoteProcess],
        mates: Option<Arc<dyn StageMates>>,
    ) -> Result<Box<dyn Backend>, OpenError> {
        Ok(match self {
            Self::Cpu(prepared) => Box::new(prepared.open_head(n_blocks, remote, mates)?),
            Self::Cuda(prepared) => Box::new(prepared.open_head(n_blocks, remote)?),
        })
    }
}
