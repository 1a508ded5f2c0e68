//! Collective operations of the GPUs of one model: sums of partial results, and gathering of columns. All
//! GPUs launch the same operations in the same order, each with its own arguments.

use super::{Bf16, ComputeCard, CudaError, View, ViewMut, ensure, launch, number, rows_of};
use crate::cuda::peers::Peers;
use device::cuda::card::grid;

/// The number of threads for a row that is pushed, as in `ranks.cu`.
const FEW_THREADS: u32 = 1024;
/// The number of threads for a row that is fetched, and for columns, as in `ranks.cu`.
const MANY_THREADS: u32 = 256;
/// The widest row that both kernels can keep in registers.
const WIDTH_MAX: usize = 16_384;
/// The maximum number of blocks of threads that gather columns: enough to fill the link.
const GATHER_BLOCKS_MAX: usize = 264;

/// The arguments of a sum over ranks: the sum of all ranks' parts is added to `residual`, then
/// `out = norm(residual) * weight`, row by row.
#[derive(Debug)]
pub struct SumRows<'a> {
    pub out: ViewMut<'a, Bf16>,
    pub residual: ViewMut<'a, Bf16>,
    pub part: View<'a, Bf16>,
    pub weight: View<'a, Bf16>,
    pub epsilon: f32,
}

impl SumRows<'_> {
    /// Checks the arguments. Returns the number of rows and their width.
    fn check(
        &self,
        card: &ComputeCard,
        kernel: &'static str,
        peers: &Peers,
    ) -> Result<(usize, usize), CudaError> {
        let Self { out, residual, part, weight, .. } = self;
        card.check_places(kernel, &[out, residual, part, weight], &[])?;
        peers.check_place(card, kernel)?;
        let width = weight.len();
        ensure(kernel, width.is_multiple_of(8), "rows whose width is not a multiple of 8")?;
        ensure(kernel, width <= WIDTH_MAX, "rows wider than 16,384")?;
        let are_alike = out.len() == part.len() && residual.len() == part.len();
        ensure(kernel, are_alike, "output, residual and part of different lengths")?;
        Ok((rows_of(kernel, part.len(), width)?, width))
    }
}

impl ComputeCard {
    /// Sums rows by the method with the shortest wait, for at most as many rows as fit into the inboxes.
    /// Every rank has the whole residual.
    pub fn sum_few_rows(&self, peers: &mut Peers, sum: SumRows<'_>) -> Result<(), CudaError> {
        let kernel = "sum_few_rows";
        let (n_rows, width) = sum.check(self, kernel, peers)?;
        peers.check_thrown(self, kernel, n_rows, width)?;
        if n_rows == 0 {
            return Ok(());
        }
        let config = grid(n_rows, 1, FEW_THREADS);
        let SumRows { out, residual, part, weight, epsilon } = sum;
        let inboxes = peers.inboxes(kernel)?;
        launch!(
            self,
            kernel,
            config,
            &out.address(),
            &residual.address(),
            &part.address(),
            &weight.address(),
            &epsilon,
            &inboxes
        )
    }

    /// Sums any number of rows by the method that sends the fewest bytes. Each rank has the residual of every
    /// n-th row only, so all sums over these rows must use this method.
    ///
    /// `out` and `part` start at the start of the buffers in [`RankMemory`](crate::cuda::RankMemory).
    pub fn sum_many_rows(&self, peers: &mut Peers, sum: SumRows<'_>) -> Result<(), CudaError> {
        let kernel = "sum_many_rows";
        let (n_rows, width) = sum.check(self, kernel, peers)?;
        let me = peers.me();
        let are_shown = sum.part.address() == peers.parts.at[me] && sum.out.address() == peers.outs.at[me];
        let fit = sum.part.len() <= peers.shown[0] && sum.out.len() <= peers.shown[1];
        ensure(kernel, are_shown && fit, "rows outside of the memory that the ranks share")?;
        if n_rows == 0 {
            return Ok(());
        }
        let config = grid(n_rows.div_ceil(peers.n_ranks()), 1, MANY_THREADS);
        let (n_rows, width) = (number(kernel, n_rows)?, number(kernel, width)?);
        let SumRows { residual, weight, epsilon, .. } = sum;
        let turn = peers.turn.view_mut().address();
        launch!(
            self,
            kernel,
            config,
            &peers.outs,
            &residual.address(),
            &peers.parts,
            &weight.address(),
            &n_rows,
            &width,
            &epsilon,
            &peers.flags,
            &turn,
            &peers.ranks
        )
    }

    /// Gives every rank all columns of some rows. Each rank has the same number of columns in `part`. `whole`
    /// starts at the start of the shared buffer. Columns beyond the rows' width are left out.
    pub fn gather_columns(
        &self,
        peers: &mut Peers,
        whole: ViewMut<'_, f32>,
        part: View<'_, f32>,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let kernel = "gather_columns";
        self.check_places(kernel, &[&whole, &part], &[])?;
        if n_rows == 0 {
            return ensure(kernel, whole.is_empty() && part.is_empty(), "columns without rows");
        }
        ensure(
            kernel,
            whole.len().is_multiple_of(n_rows) && part.len().is_multiple_of(n_rows),
            "uneven rows",
        )?;
        let (width, part_width) = (whole.len() / n_rows, part.len() / n_rows);
        let are_fours = width.is_multiple_of(4) && part_width.is_multiple_of(4);
        ensure(kernel, are_fours, "columns that are not a multiple of 4")?;
        ensure(kernel, part_width * peers.n_ranks() >= width, "fewer columns than the whole rows have")?;
        let is_shown = whole.address() == peers.wholes.at[peers.me()] && whole.len() <= peers.shown[2];
        ensure(kernel, is_shown, "rows outside of the memory that the ranks share")?;
        let n_blocks = (part.len() / 4).div_ceil(MANY_THREADS as usize).clamp(1, GATHER_BLOCKS_MAX);
        let config = grid(n_blocks, 1, MANY_THREADS);
        let (n_rows, width) = (number(kernel, n_rows)?, number(kernel, width)?);
        let part_width = number(kernel, part_width)?;
        let turn = peers.turn.view_mut().address();
        launch!(
            self,
            kernel,
            config,
            &peers.wholes,
            &part.address(),
            &n_rows,
            &part_width,
            &width,
            &peers.flags,
            &turn,
            &peers.ranks
        )
    }
}
