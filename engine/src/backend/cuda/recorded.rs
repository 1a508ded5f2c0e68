//! Decode steps recorded as graphs, one for each size of the ladder.

use std::collections::{BTreeMap, BTreeSet};

use kernels::cuda::{CudaError, Graph};
use tracing::warn;

use super::ladder::{Ladder, Rung};
use super::plan::Dims;
use super::rank::Tools;

/// The most graphs that are kept.
const GRAPHS_MAX: usize = 2048;

/// Graphs by size. Sizes up to a length are recorded at the start, longer ones when they are first met.
#[derive(Debug)]
pub(super) struct Recorded {
    ladder: Option<Ladder>,
    n_groups: usize,
    /// Room for a step's words; what needs more is not recorded.
    n_words_max: usize,
    graphs: BTreeMap<Rung, Graph>,
    /// For which there was no memory.
    unrecorded: BTreeSet<Rung>,
    n_at_start: usize,
}

impl Recorded {
    /// Without a ladder nothing is recorded.
    pub(super) fn new(ladder: Option<Ladder>, n_groups: usize, n_words_max: usize) -> Self {
        let (graphs, unrecorded) = (BTreeMap::new(), BTreeSet::new());
        Self { ladder, n_groups, n_words_max, graphs, unrecorded, n_at_start: 0 }
    }

    /// Those recorded at the start, and those after it.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.n_at_start, self.graphs.len() - self.n_at_start)
    }

    /// The size that a step of rows of one token takes.
    pub(super) fn rung(&self, rows: usize, length: usize) -> Option<Rung> {
        self.ladder.as_ref()?.rung(rows, length).filter(|rung| self.has_room(*rung))
    }

    fn has_room(&self, rung: Rung) -> bool {
        self.dims(rung).n_words() <= self.n_words_max
    }

    pub(super) fn dims(&self, rung: Rung) -> Dims {
        Dims::of_decodes(self.n_groups, rung.rows, rung.length)
    }

    /// Runs the step that lies ready, whose size this is. Where the card has no memory for one more graph, its kernels are
    /// launched one by one, which takes longer.
    pub(super) fn launch(&mut self, rung: Rung, tools: &mut Tools) -> Result<(), CudaError> {
        if !self.graphs.contains_key(&rung) && !self.unrecorded.contains(&rung) {
            match self.record(rung, tools) {
                Err(error) if error.is_out_of_memory() => {
                    let (rows, length) = (rung.rows, rung.length);
                    warn!(rows, length, "no memory for the graph of a decode step: such steps take longer");
                    self.unrecorded.insert(rung);
                }
                recorded => recorded?,
            }
        }
        match self.graphs.get_mut(&rung) {
            Some(graph) => graph.launch(),
            None => tools.forward(self.dims(rung), &[], |_, _| Ok(())),
        }
    }

    /// Records all sizes for sequences of up to `length` tokens. `told` hears how many of how many are done.
    pub(super) fn record_up_to(
        &mut self,
        length: usize,
        tools: &mut Tools,
        mut told: impl FnMut(usize, usize),
    ) -> Result<(), CudaError> {
        let rungs: Vec<Rung> = self.ladder.iter().flat_map(Ladder::rungs).collect();
        let rungs: Vec<Rung> =
            rungs.into_iter().filter(|rung| rung.length <= length && self.has_room(*rung)).collect();
        for (nth, rung) in rungs.iter().enumerate() {
            self.record(*rung, tools)?;
            told(nth + 1, rungs.len());
        }
        self.n_at_start = self.graphs.len();
        Ok(())
    }

    fn record(&mut self, rung: Rung, tools: &mut Tools) -> Result<(), CudaError> {
        if self.graphs.len() >= GRAPHS_MAX {
            // The longest of the fewest rows are met least.
            self.graphs.pop_last();
        }
        let dims = self.dims(rung);
        let graph = tools.pass(dims, &[], |decoder, pass| {
            let card = pass.card;
            card.record(|| decoder.forward(pass, |_| Ok(())))
        })?;
        self.graphs.insert(rung, graph);
        Ok(())
    }
}
