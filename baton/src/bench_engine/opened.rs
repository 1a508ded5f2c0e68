//! A backend that is open for measurements, with the functions that only a GPU has.

use engine::backend::cuda::{CudaLimits, DecodeProfile, LoadReport};
use engine::{Backend, CpuBackend, CudaBackend, Device};

use super::args::EngineArgs;
use crate::exit::CommandError;

#[derive(Debug)]
pub(super) enum AnyBackend {
    Cpu(Box<CpuBackend>),
    Cuda(Box<CudaBackend>),
}

impl AnyBackend {
    pub(super) fn open(args: &EngineArgs) -> Result<Self, CommandError> {
        let kv_bytes = usize::try_from(args.kv_memory.0).map_err(CommandError::usage)?;
        let cpu = || {
            args.experts().ensure_cut("a processor")?;
            CpuBackend::open(args.model(), kv_bytes, &args.cpu()).map(|backend| Self::Cpu(Box::new(backend)))
        };
        let opened = match args.device {
            Device::Cpu => cpu(),
            Device::Cuda(_) => Self::on_gpu(args, kv_bytes),
            Device::Auto => match Self::on_gpu(args, kv_bytes) {
                Err(error) if error.is_no_gpu() => {
                    super::report::tell(&format!("warning: {error}; the CPU computes"));
                    cpu()
                }
                opened => opened,
            },
        };
        opened.map_err(CommandError::start)
    }

    fn on_gpu(args: &EngineArgs, kv_bytes: usize) -> Result<Self, engine::OpenError> {
        args.opened(args.model(), kv_bytes, &args.cuda()).map(|backend| Self::Cuda(Box::new(backend)))
    }

    pub(super) fn backend(&mut self) -> &mut dyn Backend {
        match self {
            Self::Cpu(backend) => backend.as_mut(),
            Self::Cuda(backend) => backend.as_mut(),
        }
    }

    pub(super) fn into_backend(self) -> Box<dyn Backend> {
        match self {
            Self::Cpu(backend) => backend,
            Self::Cuda(backend) => backend,
        }
    }

    pub(super) fn device(&self) -> String {
        match self {
            Self::Cpu(_) => "cpu".to_owned(),
            Self::Cuda(backend) => {
                let (card, n_ranks, n_stages) = (backend.card(), backend.n_ranks(), backend.n_stages());
                let times = if n_ranks > 1 { format!("{n_ranks} × ") } else { String::new() };
                let stages = if n_stages > 1 { format!("{n_stages} stages × ") } else { String::new() };
                format!("{stages}{times}{} ({})", card.name(), card.arch())
            }
        }
    }

    pub(super) fn loaded(&self) -> Option<LoadReport> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(backend) => Some(backend.loaded()),
        }
    }

    pub(super) fn limits(&mut self) -> Result<Option<CudaLimits>, CommandError> {
        match self {
            Self::Cpu(_) => Ok(None),
            Self::Cuda(backend) => backend.limits().map(Some).map_err(CommandError::work),
        }
    }

    pub(super) fn profiles(
        &mut self,
        batches: &[usize],
        context: usize,
    ) -> Result<Vec<DecodeProfile>, CommandError> {
        match self {
            Self::Cpu(_) => Ok(Vec::new()),
            Self::Cuda(backend) => {
                let profile =
                    |rows: &usize| backend.profile_decode(*rows, context).map_err(CommandError::work);
                batches.iter().map(profile).collect()
            }
        }
    }

    pub(super) fn recorded(&self) -> Option<(usize, usize)> {
        match self {
            Self::Cpu(_) => None,
            Self::Cuda(backend) => Some(backend.n_recorded()),
        }
    }
}
