//! Checks products whose sums are spread over ranks and are added up by the kernels that multiply. The result
//! must equal the sum of all parts in f32 on the CPU, bit by bit; for FP8, which has no such parts, it must
//! be as near as bf16 allows. Then thousands of such products run in turn with products whose sums a separate
//! kernel adds. Times are measured too.

use std::time::Duration;

use baton_kernels::cuda::{
    AddedRows, ComputeCard, Ending, Fp8Scales, FusedKernel, FusedProduct, Peers, SumRows, WeightMatrix,
};
use device::cuda::{Bf16, Buffer, CudaError, Graph};
use serde_json::{Value, json};

use super::check_endings::{FORMATS, forms};
use super::check_ranks::{
    EPSILON, GRAPHS, N_INPUTS, N_TIMED, PATIENCE, ROUNDS_OF_GRAPH, Side, added, middle, peers, rank_of,
};
use super::check_rows::POISON;
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::fp8::Matrix;
use super::measure::BEYOND_CACHES;
use super::verdict::{BF16_ERROR, Verdicts};

/// The inputs of one rank's product. They differ from rank to rank.
struct Inputs {
    matrix: Matrices,
    k: usize,
    x: Buffer<Bf16>,
}

enum Matrices {
    /// A matrix of `len` numbers, in one or several copies.
    Bf16 {
        numbers: Buffer<Bf16>,
        len: usize,
    },
    Fp8(Matrix),
}

/// The buffers of the residual and the sums.
struct Stream {
    width: usize,
    part: Buffer<Bf16>,
    residual: Buffer<Bf16>,
    out: Buffer<Bf16>,
    norm: Buffer<Bf16>,
    squares: Buffer<f32>,
}

/// The method for sums over ranks: a separate kernel, or the kernel that multiplies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Way {
    InTwo,
    Joined,
}

/// The part of the matrix on one GPU: the numbers of rows and columns, and the format.
type Shape = (usize, usize, Option<Fp8Scales>);

/// The numbers of rows of a matrix, and their widths. The last one has as many blocks of threads as a GPU
/// runs at once.
pub(crate) const SHAPES: &[(usize, usize)] = &[(200, 264), (8, 40), (4096, 1024)];

pub(crate) fn all(
    sides: &[Side],
    shapes: &[(usize, usize)],
    extent: Extent,
    verdicts: &mut Verdicts,
) -> Result<(), CudaError> {
    for (width, k) in extent.of(shapes, 2) {
        for fp8 in FORMATS {
            for n_rows in extent.of(&[3, 128, 1, 8, 17, 64], 2) {
                all_ranks_agree(sides, verdicts, (*width, *k, fp8), *n_rows)?;
            }
        }
    }
    Ok(())
}

pub(crate) fn many_rounds(sides: &[Side], verdicts: &mut Verdicts) -> Result<(), CudaError> {
    [1, 8, 40].into_iter().try_for_each(|n_rows| rounds(sides, verdicts, n_rows))
}

impl Inputs {
    fn new(
        card: &ComputeCard,
        (width, k, fp8): Shape,
        n_rows: usize,
        (nth, n_copies): (usize, usize),
    ) -> Result<Self, CudaError> {
        let mut draw = Draw::new((7 * width * k + nth) as u64);
        let len = width * k;
        let matrix = if let Some(scaling) = fp8 {
            Matrices::Fp8(Matrix::drawn(card, &mut draw, scaling, (width, k))?)
        } else {
            let numbers = draw.many(n_copies * len, 1.0 / (k as f32).sqrt());
            Matrices::Bf16 { numbers: card.upload(&numbers)?, len }
        };
        Ok(Self { matrix, k, x: card.upload(&draw.narrow(n_rows * k, 1.0))? })
    }

    fn product(&self, n_rows: usize, nth: usize) -> FusedProduct<'_> {
        let w = match &self.matrix {
            Matrices::Bf16 { numbers, len } => {
                let first = nth % (numbers.len() / len) * len;
                WeightMatrix::Bf16(numbers.slice(first..first + len))
            }
            Matrices::Fp8(matrix) => matrix.weights(),
        };
        FusedProduct::plain(w, self.x.slice(0..n_rows * self.k), self.k)
    }
}

impl Stream {
    fn new(card: &ComputeCard, width: usize, n_rows: usize) -> Result<Self, CudaError> {
        let n = n_rows * width;
        let mut draw = Draw::new(n as u64);
        let mut stream = Self {
            width,
            part: card.buffer(n)?,
            residual: card.upload(&draw.narrow(n, 2.0))?,
            out: card.buffer(n)?,
            norm: card.upload(&draw.narrow(width, 1.5))?,
            // The buffer has room for the parts of all forms, for rows that may end within a part.
            squares: card.buffer(n_rows * width.div_ceil(16))?,
        };
        card.fill(stream.part.view_mut(), POISON)?;
        card.fill(stream.out.view_mut(), POISON)?;
        card.fill(stream.squares.view_mut(), POISON)?;
        Ok(stream)
    }

    fn multiply(
        &mut self,
        card: &ComputeCard,
        form: FusedKernel,
        product: FusedProduct<'_>,
    ) -> Result<(), CudaError> {
        let n = product.x.len() / product.k * self.width;
        card.multiply_own(form, product, Ending::Sums(self.part.view_mut().slice(0..n)))
    }

    /// Computes one GPU's partial sums. They are in bf16 if a separate kernel pushes them or if there is
    /// nothing finer, otherwise in f32.
    fn parts(
        &mut self,
        card: &ComputeCard,
        (form, way): (FusedKernel, Way),
        product: FusedProduct<'_>,
    ) -> Result<Vec<f32>, CudaError> {
        let n = product.x.len() / product.k * self.width;
        if way == Way::InTwo || matches!(product.w, WeightMatrix::Fp8(_)) {
            self.multiply(card, form, product)?;
            return Ok(card.download(self.part.slice(0..n))?.into_iter().map(f32::from).collect());
        }
        let form = match form {
            FusedKernel::Few(form) => FusedKernel::Few(form.joined(self.width, product.k)),
            FusedKernel::Skinny(_) => form,
        };
        let mut parts = card.buffer::<f32>(n)?;
        card.multiply_own(form, product, Ending::Wide(parts.view_mut()))?;
        card.download(parts.view())
    }

    fn give(
        &mut self,
        card: &ComputeCard,
        peers: &mut Peers,
        (form, way): (FusedKernel, Way),
        product: FusedProduct<'_>,
    ) -> Result<(), CudaError> {
        let n_rows = product.x.len() / product.k;
        let n = n_rows * self.width;
        match way {
            Way::InTwo => {
                self.multiply(card, form, product)?;
                let Self { part, residual, out, norm, .. } = self;
                let sum = SumRows {
                    out: out.view_mut().slice(0..n),
                    residual: residual.view_mut().slice(0..n),
                    part: part.slice(0..n),
                    weight: norm.view(),
                    epsilon: EPSILON,
                };
                card.sum_few_rows(peers, sum)
            }
            Way::Joined => {
                let n_parts = form.parts(self.width);
                let Self { residual, out, norm, squares, .. } = self;
                let added = AddedRows {
                    residual: residual.view_mut().slice(0..n),
                    out: out.view_mut().slice(0..n),
                    weight: norm.view(),
                    squares: squares.view_mut().slice(0..n_rows * n_parts),
                };
                card.multiply_own(form, product, Ending::Joined(added, peers))
            }
        }
    }
}

fn streams(sides: &[Side], width: usize, n_rows: usize) -> Result<Vec<Stream>, CudaError> {
    sides.iter().map(|side| Stream::new(&side.card, width, n_rows)).collect()
}

/// Checks for every kernel that all ranks get the same sums.
fn all_ranks_agree(
    sides: &[Side],
    verdicts: &mut Verdicts,
    shape: Shape,
    n_rows: usize,
) -> Result<(), CudaError> {
    let (width, k, fp8) = shape;
    let mut peers = peers(sides, width, PATIENCE)?;
    let inputs = |(nth, side): (usize, &Side)| Inputs::new(&side.card, shape, n_rows, (nth, 1));
    let inputs = sides.iter().enumerate().map(inputs).collect::<Result<Vec<_>, _>>()?;
    for form in forms(&sides[0].card, fp8, n_rows) {
        let how = (form, Way::Joined);
        let mut streams = streams(sides, width, n_rows)?;
        let mut parts = vec![];
        for ((side, stream), inputs) in sides.iter().zip(&mut streams).zip(&inputs) {
            parts.push(stream.parts(&side.card, how, inputs.product(n_rows, 0))?);
        }
        let old = sides[0].card.download(streams[0].residual.view())?;
        let of_ranks = |i: usize| parts.iter().map(move |part: &Vec<f32>| part[i]);
        let expected: Vec<Bf16> = old.iter().enumerate().map(|(i, old)| added(*old, of_ranks(i))).collect();
        for (nth, stream) in streams.iter_mut().enumerate() {
            stream.give(&sides[nth].card, &mut peers[nth], how, inputs[nth].product(n_rows, 0))?;
        }
        let mut residuals = vec![];
        for (nth, stream) in streams.iter().enumerate() {
            let name = format!("joined {n_rows}x{width}x{k}, {fp8:?}, {form:?}, {}", rank_of(nth, sides));
            let card = &sides[nth].card;
            let residual = card.download(stream.residual.view())?;
            match fp8.is_some() {
                true => verdicts.compare(
                    format!("{name}, residual"),
                    &wide(&residual),
                    &wide(&expected),
                    BF16_ERROR,
                ),
                false => verdicts.holds(format!("{name}, residual"), residual == expected),
            }
            verdicts.holds(format!("{name}, no rank is lost"), !peers[nth].lost_flag().is_raised());
            let (found, norm) = (wide(&residual), wide(&card.download(stream.norm.view())?));
            let times: Vec<f64> = found.iter().zip(norm.iter().cycle()).map(|(x, by)| x * by).collect();
            let out = wide(&card.download(stream.out.view())?);
            verdicts.compare(format!("{name}, out"), &out, &times, BF16_ERROR);
            let of_part = if form.norms_heads() { 128 } else { 16 };
            let parts = found.chunks(width).flat_map(|row| row.chunks(of_part));
            let parts: Vec<f64> = parts.map(|part| part.iter().map(|x| x * x).sum()).collect();
            let squares = card.download(stream.squares.slice(0..parts.len()))?;
            let squares: Vec<f64> = squares.into_iter().map(f64::from).collect();
            verdicts.compare(format!("{name}, squares"), &squares, &parts, 1e-5);
            residuals.push(residual);
        }
        let name = format!("joined {n_rows}x{width}x{k}, {fp8:?}, {form:?}, all {} ranks agree", sides.len());
        verdicts.holds(name, residuals.iter().all(|residual| *residual == residuals[0]));
    }
    Ok(())
}

/// Checks thousands of accumulated sums: by every form, with both methods, of all rows and of one row.
fn rounds(sides: &[Side], verdicts: &mut Verdicts, n_rows: usize) -> Result<(), CudaError> {
    let shape @ (width, ..) = (256, 512, None);
    let forms = forms(&sides[0].card, None, n_rows);
    let form = |round: usize| round % forms.len();
    let input = |round: usize| round % N_INPUTS;
    let rows = |round: usize| if round % 4 == 3 { 1 } else { n_rows };
    let way = |round: usize| if round % 5 == 4 { Way::InTwo } else { Way::Joined };
    let mut peers = peers(sides, width, PATIENCE)?;
    let (mut streams, mut inputs, mut parts, mut graphs) = (vec![], vec![], vec![], vec![]);
    for (nth, Side { card, .. }) in sides.iter().enumerate() {
        let drawn = |of: usize| Inputs::new(card, shape, n_rows, (N_INPUTS * nth + of, 1));
        let of_side = (0..N_INPUTS).map(drawn).collect::<Result<Vec<_>, _>>()?;
        let mut stream = Stream::new(card, width, n_rows)?;
        // The results of each form for each input. Each method then adds them up.
        let mut of_forms = vec![];
        for form in &forms {
            for input in &of_side {
                let mut of_way = |way| stream.parts(card, (*form, way), input.product(n_rows, 0));
                of_forms.push([of_way(Way::InTwo)?, of_way(Way::Joined)?]);
            }
        }
        streams.push(stream);
        inputs.push(of_side);
        parts.push(of_forms);
    }
    // The first launches load code, which cannot be recorded, so they run before the graph.
    for form in &forms {
        for way in [Way::InTwo, Way::Joined] {
            for (nth, Side { card, .. }) in sides.iter().enumerate() {
                let product = inputs[nth][0].product(n_rows, 0);
                streams[nth].give(card, &mut peers[nth], (*form, way), product)?;
            }
        }
    }
    for (nth, (Side { card, .. }, stream)) in sides.iter().zip(&mut streams).enumerate() {
        card.fill(stream.residual.view_mut(), 0)?;
        let peers = &mut peers[nth];
        graphs.push(card.record(|| {
            (0..ROUNDS_OF_GRAPH).try_for_each(|round| {
                let product = inputs[nth][input(round)].product(rows(round), 0);
                stream.give(card, peers, (forms[form(round)], way(round)), product)
            })
        })?);
        card.synchronize()?;
    }
    for _ in 0..GRAPHS {
        graphs.iter_mut().try_for_each(Graph::launch)?;
    }
    let mut expected = vec![Bf16::default(); n_rows * width];
    for round in (0..GRAPHS).flat_map(|_| 0..ROUNDS_OF_GRAPH) {
        let of = form(round) * N_INPUTS + input(round);
        for (i, sum) in expected.iter_mut().take(rows(round) * width).enumerate() {
            *sum = added(*sum, parts.iter().map(|of_forms| of_forms[of][way(round) as usize][i]));
        }
    }
    for (nth, Side { card, .. }) in sides.iter().enumerate() {
        let is_right = card.download(streams[nth].residual.view())? == expected;
        let n_rounds = GRAPHS * ROUNDS_OF_GRAPH;
        let name = format!("{n_rounds} rounds, joined and in two, {n_rows} rows, {}", rank_of(nth, sides));
        verdicts.holds(name, is_right && !peers[nth].lost_flag().is_raised());
    }
    drop(graphs);
    Ok(())
}

/// Checks that a GPU whose peer does not respond gives up within its time limit and reports it.
pub(crate) fn lost(sides: &[Side], verdicts: &mut Verdicts) -> Result<(), CudaError> {
    let (card, width, n_rows) = (&sides[0].card, 4096, 8);
    let inputs = Inputs::new(card, (width, 512, None), n_rows, (0, 1))?;
    for form in forms(card, None, n_rows) {
        let mut peers = peers(sides, width, Duration::from_millis(100))?;
        let mut stream = Stream::new(card, width, n_rows)?;
        let start = card.mark()?;
        stream.give(card, &mut peers[0], (form, Way::Joined), inputs.product(n_rows, 0))?;
        let ms = start.ms_until(&card.mark()?)?;
        verdicts.holds(format!("joined: a lost card is given up ({ms:.0} ms), {form:?}"), ms < 2000.0);
        verdicts.holds("joined: all cards are told of a lost one", peers[1].lost_flag().is_raised());
    }
    Ok(())
}

/// Measures both methods for every form, with two ranks' parts of an 8B model's matrices.
pub(crate) fn times(sides: &[Side], lines: &mut Vec<Value>) -> Result<(), CudaError> {
    let width = 4096;
    for (name, k) in [("o", 2048), ("down", 7168)] {
        let n_copies = BEYOND_CACHES / (2 * width * k) + 1;
        let inputs =
            |(nth, side): (usize, &Side)| Inputs::new(&side.card, (width, k, None), 64, (nth, n_copies));
        let inputs = sides.iter().enumerate().map(inputs).collect::<Result<Vec<_>, _>>()?;
        for n_rows in [1, 8, 64] {
            for form in forms(&sides[0].card, None, n_rows) {
                let mut line = json!({"matrix": name, "rows": n_rows, "form": format!("{form:?}")});
                for (of, way) in [("in_two_us", Way::InTwo), ("joined_us", Way::Joined)] {
                    line[of] = json!(time(sides, &inputs, n_rows, (form, way))?);
                }
                eprintln!("a product and its sum over two cards: {line}");
                lines.push(line);
            }
        }
    }
    Ok(())
}

fn time(sides: &[Side], inputs: &[Inputs], n_rows: usize, how: (FusedKernel, Way)) -> Result<f64, CudaError> {
    let width = 4096;
    let mut peers = peers(sides, width, PATIENCE)?;
    let mut streams = streams(sides, width, n_rows)?;
    for (nth, Side { card, .. }) in sides.iter().enumerate() {
        streams[nth].give(card, &mut peers[nth], how, inputs[nth].product(n_rows, 0))?;
    }
    let mut graphs = vec![];
    for ((nth, stream), peers) in streams.iter_mut().enumerate().zip(&mut peers) {
        let card = &sides[nth].card;
        graphs.push(card.record(|| {
            (0..N_TIMED).try_for_each(|at| stream.give(card, peers, how, inputs[nth].product(n_rows, at)))
        })?);
    }
    let time = middle(sides, &mut graphs)?;
    drop(graphs);
    Ok(time)
}
