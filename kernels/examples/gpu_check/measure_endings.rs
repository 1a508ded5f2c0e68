//! Measures products with the work after them: each product alone, and several in sequence.

use baton_kernels::cuda::ops::FEW_ROWS_SHARES;
use baton_kernels::cuda::{
    AddedRows, ComputeCard, Ending, FewRowsForm, FusedKernel, FusedProduct, PendingNorm, SKINNY_FORMS,
    WeightMatrix,
};
use device::cuda::{Bf16, Buffer, CudaError, View};
use serde_json::Value;

use super::draw::Draw;
use super::measure::{BEYOND_CACHES, Limits, N_LAUNCHES, line, seconds};

/// The widths of an 8B model: of its residual, and of its feed-forward layer.
const HIDDEN: usize = 4096;
const WIDTH: usize = 14_336;

/// The inputs and outputs of products with one number of rows.
struct Bench {
    n_rows: usize,
    /// The matrices. Each has enough copies to exceed the caches.
    gate_up: Buffer<Bf16>,
    o: Buffer<Bf16>,
    down: Buffer<Bf16>,
    x: Buffer<Bf16>,
    stream: Stream,
    y: Buffer<Bf16>,
}

/// The residual that layers add to.
struct Stream {
    residual: Buffer<Bf16>,
    out: Buffer<Bf16>,
    norm: Buffer<Bf16>,
    squares: Buffer<f32>,
}

pub(crate) fn all(card: &ComputeCard, limits: &Limits) -> Result<Vec<Value>, CudaError> {
    let mut lines = vec![];
    for n_rows in [1, 8] {
        let mut bench = Bench::new(card, n_rows)?;
        bench.chains(card, limits, &mut lines)?;
        let skinny = SKINNY_FORMS.iter().copied().map(FusedKernel::Skinny);
        let shares = FEW_ROWS_SHARES.iter().filter(|shares| card.has_few_rows() && **shares <= 4);
        let few = shares.map(|shares| FusedKernel::Few(FewRowsForm::Clusters { shares: *shares }));
        for form in skinny.chain(few) {
            bench.gates(card, limits, form, &mut lines)?;
            bench.added(card, limits, form, &mut lines)?;
        }
    }
    Ok(lines)
}

impl Bench {
    fn new(card: &ComputeCard, n_rows: usize) -> Result<Self, CudaError> {
        let weights = |n: usize| {
            let n_copies = BEYOND_CACHES / (2 * n) + 1;
            card.upload(&Draw::new(27).many(n_copies * n, 0.02))
        };
        Ok(Self {
            n_rows,
            gate_up: weights(2 * WIDTH * HIDDEN)?,
            o: weights(HIDDEN * HIDDEN)?,
            down: weights(HIDDEN * WIDTH)?,
            x: card.upload(&Draw::new(28).many(n_rows * HIDDEN, 1.0))?,
            stream: Stream {
                residual: card.upload(&Draw::new(29).many(n_rows * HIDDEN, 1.0))?,
                out: card.buffer(n_rows * HIDDEN)?,
                norm: card.upload(&Draw::new(30).many(HIDDEN, 1.0))?,
                squares: card.upload(&vec![1.0_f32; n_rows * HIDDEN / 16])?,
            },
            y: card.buffer(n_rows * 2 * WIDTH)?,
        })
    }

    fn gates(
        &mut self,
        card: &ComputeCard,
        limits: &Limits,
        form: FusedKernel,
        lines: &mut Vec<Value>,
    ) -> Result<(), CudaError> {
        let (n, n_rows) = (2 * WIDTH * HIDDEN, self.n_rows);
        for (name, is_gated, n_parts) in [
            ("sums", false, 0),
            ("gated", true, 0),
            ("gated, pending 32", true, 32),
            ("gated, pending 256", true, 256),
        ] {
            let Self { gate_up, x, stream, y, .. } = &mut *self;
            let time = seconds(card, N_LAUNCHES, |nth| {
                let squares = stream.squares.slice(0..n_rows * n_parts);
                let pending_norm = (n_parts > 0).then_some(PendingNorm { squares, epsilon: 1e-5 });
                let w = WeightMatrix::Bf16(copy(gate_up, nth, n));
                let product = FusedProduct { w, x: x.view(), k: HIDDEN, pending_norm };
                let ending = if is_gated {
                    Ending::Gated(y.view_mut().slice(0..n_rows * WIDTH))
                } else {
                    Ending::Sums(y.view_mut())
                };
                card.multiply_own(form, product, ending)
            })?;
            lines.push(line(
                &format!("gate_up {n_rows} rows, {name}, {form:?}"),
                time,
                (2 * n) as f64,
                limits.read,
            ));
        }
        Ok(())
    }

    /// Measures product o, without and with the work after it.
    fn added(
        &mut self,
        card: &ComputeCard,
        limits: &Limits,
        form: FusedKernel,
        lines: &mut Vec<Value>,
    ) -> Result<(), CudaError> {
        let (n, n_rows) = (HIDDEN * HIDDEN, self.n_rows);
        for name in ["sums", "added"] {
            let Self { o, x, stream, y, .. } = &mut *self;
            let time = seconds(card, N_LAUNCHES, |nth| {
                let product = FusedProduct::plain(WeightMatrix::Bf16(copy(o, nth, n)), x.view(), HIDDEN);
                match name {
                    "sums" => {
                        let sums = y.view_mut().slice(0..n_rows * HIDDEN);
                        card.multiply_own(form, product, Ending::Sums(sums))
                    }
                    _ => stream.give(card, form, product, n_rows),
                }
            })?;
            let what = format!("o {n_rows} rows, {name}, {form:?}");
            lines.push(line(&what, time, (2 * n) as f64, limits.read));
        }
        Ok(())
    }

    /// Measures the work after attention in a layer, in sequence: the first two products, the last two, and
    /// all.
    fn chains(
        &mut self,
        card: &ComputeCard,
        limits: &Limits,
        lines: &mut Vec<Value>,
    ) -> Result<(), CudaError> {
        let n_rows = self.n_rows;
        let own =
            [FusedKernel::Few(FewRowsForm::Clusters { shares: 4 }), FusedKernel::Skinny(SKINNY_FORMS[0])];
        let own_gate =
            [FusedKernel::Few(FewRowsForm::Clusters { shares: 1 }), FusedKernel::Skinny(SKINNY_FORMS[2])];
        let sizes = [HIDDEN * HIDDEN, 2 * WIDTH * HIDDEN, WIDTH * HIDDEN];
        for nth_case in 0..24 {
            let forms = [own[nth_case % 2], own_gate[nth_case / 2 % 2], own[nth_case / 4 % 2]];
            let kinds = [[true, true, false], [false, true, true], [true, true, true]][nth_case / 8];
            if !card.has_few_rows() && forms.iter().any(|form| matches!(form, FusedKernel::Few(_))) {
                continue;
            }
            let Self { gate_up, o, down, x, stream, y, .. } = &mut *self;
            let time = seconds(card, N_LAUNCHES, |nth| {
                if kinds[0] {
                    let w = WeightMatrix::Bf16(copy(o, nth, sizes[0]));
                    stream.give(card, forms[0], FusedProduct::plain(w, x.view(), HIDDEN), n_rows)?;
                }
                if kinds[1] {
                    let squares = stream.squares.slice(0..n_rows * forms[0].parts(HIDDEN));
                    let pending_norm = Some(PendingNorm { squares, epsilon: 1e-5 });
                    let w = WeightMatrix::Bf16(copy(gate_up, nth, sizes[1]));
                    let product = FusedProduct { w, x: stream.out.view(), k: HIDDEN, pending_norm };
                    let gated = y.view_mut().slice(0..n_rows * WIDTH);
                    card.multiply_own(forms[1], product, Ending::Gated(gated))?;
                }
                if kinds[2] {
                    let w = WeightMatrix::Bf16(copy(down, nth, sizes[2]));
                    let product = FusedProduct::plain(w, y.slice(0..n_rows * WIDTH), WIDTH);
                    stream.give(card, forms[2], product, n_rows)?;
                }
                Ok(())
            })?;
            let bytes: usize = (0..3).filter(|of| kinds[*of]).map(|of| 2 * sizes[of]).sum();
            let what = format!("chain {n_rows} rows, {kinds:?}, {forms:?}");
            lines.push(line(&what, time, bytes as f64, limits.read));
        }
        Ok(())
    }
}

impl Stream {
    fn give(
        &mut self,
        card: &ComputeCard,
        form: FusedKernel,
        product: FusedProduct<'_>,
        n_rows: usize,
    ) -> Result<(), CudaError> {
        let Self { residual, out, norm, squares } = self;
        let added = AddedRows {
            residual: residual.view_mut(),
            out: out.view_mut(),
            weight: norm.view(),
            squares: squares.view_mut().slice(0..n_rows * form.parts(HIDDEN)),
        };
        card.multiply_own(form, product, Ending::Added(added))
    }
}

/// Returns the next copy of a matrix, which no cache holds.
fn copy(of: &Buffer<Bf16>, nth: usize, n: usize) -> View<'_, Bf16> {
    let from = nth % (of.len() / n) * n;
    of.slice(from..from + n)
}
