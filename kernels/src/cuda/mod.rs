//! Kernels for NVIDIA GPUs: compiled for the installed GPU and launched with checked arguments.
//!
//! Suggested reading order: the programs ([`source`]), the GPU that runs them ([`compute_card`]), the
//! computation ([`masks`] of grammars, `ops`, over the kernels in `kernels/cu`, and [`matmul`]), and ranks that add their sums
//! ([`peers`]).

pub mod source;
pub mod compute_card;
pub mod peers;
mod tensor_map;
pub mod masks;
pub mod ops;
pub mod matmul;

pub use compute_card::ComputeCard;
pub use masks::{StepMasks, TokenMasks};
pub use matmul::{Epilogue, Factors, OutputRows, ProductOutput, ProductShape, Products};
pub use ops::{
    AddedRows, CountBetter, DecodeAttention, DrawRow, DummyRows, EDIT_WORDS, Ending, ExpandedAttention,
    ExpertActivations, ExpertChoice, ExpertInput, ExpertLayer, ExpertSizes, ExpertSpace, ExpertSums,
    ExpertsForm, FeedTokens, FewRowsForm, Fp8Rows, Fp8RowsMut, Fp8Scales, FusedKernel, FusedProduct,
    HeadsRows, HeldExperts, KvNumber, KvPages, LATE, LatentAttention, LatentQueries, LatentRows, LogitEdit,
    MANY_FP8_FORMS, ManyFp8Form, ManyRows, NOWHERE, NormedLatents, NormedRows, Outcome, PendingNorm,
    PrefillAttention, PrefillSequence, QuantizedRows, RopeWriteKv, SKINNY_FORMS, SampleTokens, SkinnyForm,
    Standing, SumRows, TOP_MAX, TurnedHeads, WeightMatrix, WidenedPages, WidenedSize, WriteLatents,
};
pub use peers::{CommonParams, LostFlag, PEERS_MAX, Peers, RankMemory};
