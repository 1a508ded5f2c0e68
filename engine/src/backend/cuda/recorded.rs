//! Decode steps recorded as graphs, one for each size in `graph_sizes`.

use std::collections::{BTreeMap, BTreeSet};

use device::cuda::{CudaError, Graph};
use tracing::warn;

use super::graph_sizes::{GraphSize, GraphSizes};
use super::plan::Dims;
use super::tools::Tools;

/// Limit of recorded graphs.
const GRAPHS_MAX: usize = 2048;

/// The recorded graphs, by size. Sizes up to a length are recorded at the start, longer ones at their first
/// use.
#[derive(Debug)]
pub(super) struct RecordedGraphs {
    graph_sizes: Option<GraphSizes>,
    n_groups: usize,
    /// Limit of the words of a recorded step. A step with more words is not recorded.
    n_words_max: usize,
    graphs: BTreeMap<GraphSize, Graph>,
    /// The sizes for which the GPU had not enough memory.
    unrecorded: BTreeSet<GraphSize>,
    n_at_start: usize,
}

impl RecordedGraphs {
    /// Starts without graphs. If `graph_sizes` is `None`, nothing is ever recorded.
    pub(super) fn new(graph_sizes: Option<GraphSizes>, n_groups: usize, n_words_max: usize) -> Self {
        let (graphs, unrecorded) = (BTreeMap::new(), BTreeSet::new());
        Self { graph_sizes, n_groups, n_words_max, graphs, unrecorded, n_at_start: 0 }
    }

    /// Returns the numbers of graphs recorded at the start and later.
    pub(super) fn counts(&self) -> (usize, usize) {
        (self.n_at_start, self.graphs.len() - self.n_at_start)
    }

    /// Returns the size that a step of rows with one token uses; `None` if it is not recorded.
    pub(super) fn graph_size(&self, rows: usize, length: usize) -> Option<GraphSize> {
        self.graph_sizes.as_ref()?.graph_size(rows, length).filter(|graph_size| self.has_room(*graph_size))
    }

    fn has_room(&self, graph_size: GraphSize) -> bool {
        self.dims(graph_size).n_words() <= self.n_words_max
    }

    pub(super) fn dims(&self, graph_size: GraphSize) -> Dims {
        Dims::of_decodes(self.n_groups, graph_size.rows, graph_size.length)
    }

    /// Runs the prepared step of this size. If the GPU has no memory for another graph, the step's kernels
    /// are launched one by one, which takes longer.
    pub(super) fn launch(&mut self, graph_size: GraphSize, tools: &mut Tools) -> Result<(), CudaError> {
        if !self.graphs.contains_key(&graph_size) && !self.unrecorded.contains(&graph_size) {
            match self.record(graph_size, tools) {
                Err(error) if error.is_out_of_memory() => {
                    let (rows, length) = (graph_size.rows, graph_size.length);
                    warn!(
                        rows,
                        length,
                        "GPU has too little free memory for the CUDA graph of a decode step: steps of this size take longer"
                    );
                    self.unrecorded.insert(graph_size);
                }
                recorded => recorded?,
            }
        }
        match self.graphs.get_mut(&graph_size) {
            Some(graph) => graph.launch(),
            None => tools.forward(self.dims(graph_size), &[], |_, _| Ok(())),
        }
    }

    /// Records all sizes for sequences of up to `length` tokens. Calls `told` with the number of recorded
    /// sizes and the total.
    pub(super) fn record_up_to(
        &mut self,
        length: usize,
        tools: &mut Tools,
        mut told: impl FnMut(usize, usize),
    ) -> Result<(), CudaError> {
        let sizes: Vec<GraphSize> = self.graph_sizes.iter().flat_map(GraphSizes::sizes).collect();
        let sizes: Vec<GraphSize> = sizes
            .into_iter()
            .filter(|graph_size| graph_size.length <= length && self.has_room(*graph_size))
            .collect();
        for (nth, graph_size) in sizes.iter().enumerate() {
            self.record(*graph_size, tools)?;
            told(nth + 1, sizes.len());
        }
        self.n_at_start = self.graphs.len();
        Ok(())
    }

    fn record(&mut self, graph_size: GraphSize, tools: &mut Tools) -> Result<(), CudaError> {
        if self.graphs.len() >= GRAPHS_MAX {
            // The largest size is dropped, because long sequences in the largest batches are the rarest.
            self.graphs.pop_last();
        }
        let dims = self.dims(graph_size);
        let graph = tools.pass(dims, &[], |decoder, pass| {
            let card = pass.card;
            card.record(|| decoder.forward(pass, |_| Ok(())))
        })?;
        self.graphs.insert(graph_size, graph);
        Ok(())
    }
}
