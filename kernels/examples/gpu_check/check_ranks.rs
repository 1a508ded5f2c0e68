//! Checks collective operations: every number, then thousands of rounds in graphs whose inputs always differ
//! from the previous rounds'. Also measures the time of a round. Two ranks have one GPU each. Four ranks
//! share two GPUs, which checks results but not times, and needs `CUDA_MODULE_LOADING=EAGER`.

use std::path::Path;
use std::time::Duration;

use baton_kernels::cuda::{CommonParams, ComputeCard, Peers, RankMemory, SumRows};
use device::cuda::{Bf16, Buffer, Cache, Card, CudaError, Graph, PinnedRows, RowShare};
use serde_json::{Value, json};

use super::check_joined;
use super::check_rows::POISON;
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::verdict::{BF16_ERROR, Verdicts};

pub(crate) const EPSILON: f32 = 1e-5;
pub(crate) const PATIENCE: Duration = Duration::from_secs(20);
const FEW_ROWS: usize = 256;
/// The number of different inputs that rounds use in turn, so that an inbox's content of one or two rounds
/// ago is never the expected one.
pub(crate) const N_INPUTS: usize = 3;
pub(crate) const ROUNDS_OF_GRAPH: usize = 96;
pub(crate) const GRAPHS: usize = 40;

/// One GPU, with the memory that other GPUs access.
pub(crate) struct Side {
    pub(crate) card: ComputeCard,
    part: Buffer<Bf16>,
    out: Buffer<Bf16>,
    whole: Buffer<f32>,
}

impl Side {
    fn open(ordinal: usize, nvrtc: Option<&Path>, cache: &Cache, n: usize) -> Result<Self, CudaError> {
        let card = ComputeCard::open(ordinal, nvrtc, cache)?;
        let (part, out, whole) = (card.buffer(n)?, card.buffer(n)?, card.buffer(n)?);
        Ok(Self { card, part, out, whole })
    }

    fn shown(&self) -> RankMemory<'_> {
        RankMemory { part: self.part.view(), out: self.out.view(), whole: self.whole.view() }
    }
}

pub(crate) fn all(
    nvrtc: Option<&Path>,
    cache: &Cache,
    (measures, extent): (bool, Extent),
    verdicts: &mut Verdicts,
) -> Result<Value, CudaError> {
    if Card::count()? < 2 {
        eprintln!("ranks: there is one GPU, and two are needed: left out");
        return Ok(json!(null));
    }
    let open = |ordinals: &[usize], n: usize| -> Result<Vec<Side>, CudaError> {
        ordinals.iter().map(|ordinal| Side::open(*ordinal, nvrtc, cache, n)).collect()
    };
    let mut sides = open(&[0, 1], 8192 * 4096)?;
    sums_and_gathers(&mut sides, (&[40, 4096, 8, 5120, 16_384], &[3, 17, 1, FEW_ROWS]), extent, verdicts)?;
    check_joined::all(&sides, check_joined::SHAPES, extent, verdicts)?;
    if extent == Extent::Small {
        return Ok(json!(null));
    }
    check_joined::many_rounds(&sides, verdicts)?;
    for (rows, is_many) in [
        ((1, 4096), false),
        ((5, 4096), false),
        ((FEW_ROWS, 256), false),
        ((5, 4096), true),
        ((301, 256), true),
    ] {
        rounds(&mut sides, verdicts, rows, is_many)?;
    }
    // Ranks can share a GPU only with EAGER loading: lazy code loading waits for the GPU's kernels, and so
    // for the other rank.
    if std::env::var("CUDA_MODULE_LOADING").is_ok_and(|how| how == "EAGER") {
        // Few blocks of threads are used, because those of both ranks on a GPU must run at the same time,
        // each with its next kernel.
        let mut four = open(&[0, 1, 0, 1], 1032 * 16_384)?;
        sums_and_gathers(&mut four, (&[40, 4096, 16_384], &[3, 17, 1]), extent, verdicts)?;
        check_joined::all(&four, &check_joined::SHAPES[..2], extent, verdicts)?;
    } else {
        eprintln!("four ranks on two GPUs: CUDA_MODULE_LOADING is not EAGER: left out");
    }
    let times = if measures { times(&mut sides)? } else { json!(null) };
    lost(&mut sides, verdicts)?;
    Ok(times)
}

/// Compares every number, for rows of these widths and for these numbers of pushed rows.
fn sums_and_gathers(
    sides: &mut [Side],
    (widths, few): (&[usize], &[usize]),
    extent: Extent,
    verdicts: &mut Verdicts,
) -> Result<(), CudaError> {
    for width in extent.of(widths, 2) {
        let width = *width;
        let mut peers = peers(sides, width, PATIENCE)?;
        for n_rows in extent.of(few, 2) {
            sums(sides, &mut peers, verdicts, (*n_rows, width), false)?;
        }
        for n_rows in extent.of(&[5, 1, 2, 300, 1031], 2) {
            sums(sides, &mut peers, verdicts, (*n_rows, width), true)?;
        }
        for n_rows in extent.of(&[7, 1, 33], 1) {
            gathered(sides, &mut peers, verdicts, (*n_rows, width, 0))?;
            gathered(sides, &mut peers, verdicts, (*n_rows, width, 4))?;
        }
    }
    Ok(())
}

pub(crate) fn peers(sides: &[Side], width: usize, patience: Duration) -> Result<Vec<Peers>, CudaError> {
    let together = CommonParams { few_rows: FEW_ROWS, width, patience };
    let cards: Vec<&ComputeCard> = sides.iter().map(|side| &side.card).collect();
    let shown: Vec<RankMemory<'_>> = sides.iter().map(Side::shown).collect();
    Peers::all(&cards, &shown, together)
}

/// Returns the name of a rank for messages.
pub(crate) fn rank_of(nth: usize, sides: &[Side]) -> String {
    format!("rank {nth} of {}", sides.len())
}

fn sum(
    side: &mut Side,
    peers: &mut Peers,
    (residual, weight): (&mut Buffer<Bf16>, &Buffer<Bf16>),
    n: usize,
    is_many: bool,
) -> Result<(), CudaError> {
    let sum = SumRows {
        out: side.out.view_mut().slice(0..n),
        residual: residual.view_mut().slice(0..n),
        part: side.part.slice(0..n),
        weight: weight.view(),
        epsilon: EPSILON,
    };
    if is_many { side.card.sum_many_rows(peers, sum) } else { side.card.sum_few_rows(peers, sum) }
}

/// Computes the reference sum, in the order of the GPUs, with only the bits of a part that are pushed.
pub(crate) fn added(old: Bf16, parts: impl IntoIterator<Item = f32>) -> Bf16 {
    let thrown = parts.into_iter().map(|part| f32::from_bits(part.to_bits() & 0xffff_ff00));
    Bf16::from(thrown.fold(0.0, |sum, part| sum + part) + f32::from(old))
}

fn normed(rows: &[Bf16], weight: &[Bf16]) -> Vec<f64> {
    let weight = wide(weight);
    let of_row = |row: &[f64]| -> Vec<f64> {
        let squares: f64 = row.iter().map(|x| x * x).sum::<f64>() / row.len() as f64;
        let scale = 1.0 / (squares + f64::from(EPSILON)).sqrt();
        row.iter().zip(&weight).map(|(x, w)| x * scale * w).collect()
    };
    wide(rows).chunks(weight.len()).flat_map(of_row).collect()
}

/// Checks one sum, and that everything outside of the summed rows stays poisoned.
fn sums(
    sides: &mut [Side],
    peers: &mut [Peers],
    verdicts: &mut Verdicts,
    (n_rows, width): (usize, usize),
    is_many: bool,
) -> Result<(), CudaError> {
    let mut draw = Draw::new((n_rows * width) as u64);
    let (n, more) = (n_rows * width, (n_rows + 1) * width);
    let (residual, weight) = (draw.narrow(n, 2.0), draw.narrow(width, 1.5));
    let parts: Vec<Vec<Bf16>> =
        (0..sides.len()).map(|nth| draw.narrow(n, if nth == 0 { 3.0 } else { 1.0 })).collect();
    let (mut residuals, mut weights) = (Vec::new(), Vec::new());
    for (side, part) in sides.iter_mut().zip(&parts) {
        side.card.fill(side.out.view_mut().slice(0..more), POISON)?;
        side.card.write(side.part.view_mut().slice(0..n), part)?;
        residuals.push(side.card.upload(&residual)?);
        weights.push(side.card.upload(&weight)?);
        side.card.synchronize()?;
    }
    for (nth, side) in sides.iter_mut().enumerate() {
        sum(side, &mut peers[nth], (&mut residuals[nth], &weights[nth]), n, is_many)?;
    }
    let of_ranks = |i: usize| parts.iter().map(move |part| f32::from(part[i]));
    let expected: Vec<Bf16> = (0..n).map(|i| added(residual[i], of_ranks(i))).collect();
    let what = if is_many { "sum_many_rows" } else { "sum_few_rows" };
    let on_host = copied_together(sides, &residuals, width)?;
    verdicts.holds(format!("{what} {n_rows}x{width}: rows on the host"), on_host == expected);
    for (nth, side) in sides.iter().enumerate() {
        let name = format!("{what} {n_rows}x{width}, {}", rank_of(nth, sides));
        let found = side.card.download(residuals[nth].view())?;
        let is_own = |row: usize| !is_many || row % sides.len() == nth;
        let is_right = (0..n).all(|i| found[i] == if is_own(i / width) { expected[i] } else { residual[i] });
        verdicts.holds(format!("{name}: residual"), is_right);
        let out = side.card.download(side.out.slice(0..more))?;
        verdicts.compare(name.clone(), &wide(&out[..n]), &normed(&expected, &weight), BF16_ERROR);
        verdicts.holds(format!("{name}: nothing else"), wide(&out[n..]).iter().all(|x| x.is_nan()));
        verdicts.holds(format!("{name}: no rank is lost"), !peers[nth].lost_flag().is_raised());
    }
    Ok(())
}

/// Returns all rows of the residual. Each rank copies its own rows to the host.
fn copied_together(sides: &[Side], residuals: &[Buffer<Bf16>], width: usize) -> Result<Vec<Bf16>, CudaError> {
    let rows = PinnedRows::over(sides[0].card.pinned(residuals[0].len())?);
    for (first, (side, residual)) in sides.iter().zip(residuals).enumerate() {
        let share = RowShare { width, first, every: sides.len() };
        side.card.receive_rows(&[residual.view()], share, &rows)?;
    }
    Ok(rows.into_numbers()?.numbers()?.to_vec())
}

/// Checks a gather of columns of all ranks. The last rank has `n_left_out` padding columns.
fn gathered(
    sides: &mut [Side],
    peers: &mut [Peers],
    verdicts: &mut Verdicts,
    (n_rows, part_width, n_left_out): (usize, usize, usize),
) -> Result<(), CudaError> {
    let width = sides.len() * part_width - n_left_out;
    let (n, n_part) = (n_rows * width, n_rows * part_width);
    let number = |nth: usize, i: usize| (nth * n_part + i) as f32;
    let mut parts = Vec::new();
    for (nth, side) in sides.iter_mut().enumerate() {
        side.card.fill(side.whole.view_mut().slice(0..n + 4), POISON)?;
        parts.push(side.card.upload(&(0..n_part).map(|i| number(nth, i)).collect::<Vec<_>>())?);
        side.card.synchronize()?;
    }
    for (nth, side) in sides.iter_mut().enumerate() {
        let whole = side.whole.view_mut().slice(0..n);
        side.card.gather_columns(&mut peers[nth], whole, parts[nth].view(), n_rows)?;
    }
    for (nth, side) in sides.iter().enumerate() {
        let whole = side.card.download(side.whole.slice(0..n + 4))?;
        let expected = |i: usize| {
            let (row, column) = (i / width, i % width);
            number(column / part_width, row * part_width + column % part_width)
        };
        let is_right = (0..n).all(|i| whole[i] == expected(i)) && whole[n..].iter().all(|x| x.is_nan());
        verdicts.holds(
            format!("gather_columns {n_rows}x{part_width}, {n_left_out} left out, {}", rank_of(nth, sides)),
            is_right,
        );
    }
    Ok(())
}

/// Checks thousands of accumulated sums. Each sum has other parts than the two before it.
fn rounds(
    sides: &mut [Side],
    verdicts: &mut Verdicts,
    (n_rows, width): (usize, usize),
    is_many: bool,
) -> Result<(), CudaError> {
    let n = n_rows * width;
    let mut peers = peers(sides, width, PATIENCE)?;
    let mut draw = Draw::new(77);
    let weight = draw.narrow(width, 1.5);
    let ones = vec![Bf16::from(1.0); width];
    let (mut graphs, mut residuals, mut parts, mut kept) = (vec![], vec![], vec![], vec![]);
    for (nth, side) in sides.iter_mut().enumerate() {
        let inputs: Vec<Vec<Bf16>> = (0..N_INPUTS).map(|_| draw.narrow(n, 1.0)).collect();
        let on_card = inputs.iter().map(|input| side.card.upload(input)).collect::<Result<Vec<_>, _>>()?;
        let (by, ones) = (side.card.upload(&weight)?, side.card.upload(&ones)?);
        let mut residual = side.card.upload(&vec![Bf16::default(); n])?;
        // The parts are the norms of the inputs, because the GPU then writes them in stream order.
        let mut of_side = Vec::new();
        for input in &on_card {
            side.card.rms_norm(side.part.view_mut().slice(0..n), input.view(), ones.view(), EPSILON)?;
            of_side.push(side.card.download(side.part.slice(0..n))?);
        }
        let peers = &mut peers[nth];
        let Side { card, part, out, .. } = side;
        graphs.push(card.record(|| {
            for round in 0..ROUNDS_OF_GRAPH {
                card.rms_norm(
                    part.view_mut().slice(0..n),
                    on_card[round % N_INPUTS].view(),
                    ones.view(),
                    EPSILON,
                )?;
                let sum = SumRows {
                    out: out.view_mut().slice(0..n),
                    residual: residual.view_mut(),
                    part: part.slice(0..n),
                    weight: by.view(),
                    epsilon: EPSILON,
                };
                if is_many { card.sum_many_rows(peers, sum)? } else { card.sum_few_rows(peers, sum)? }
            }
            Ok(())
        })?);
        card.synchronize()?;
        residuals.push(residual);
        parts.push(of_side);
        // The memory of the graphs is kept until they have run.
        kept.push((on_card, by, ones));
    }
    for _ in 0..GRAPHS {
        graphs.iter_mut().try_for_each(Graph::launch)?;
    }
    let mut expected = vec![Bf16::default(); n];
    for round in 0..GRAPHS * ROUNDS_OF_GRAPH {
        let input = round % ROUNDS_OF_GRAPH % N_INPUTS;
        for (i, sum) in expected.iter_mut().enumerate() {
            *sum = added(*sum, parts.iter().map(|of_side| of_side[input][i].into()));
        }
    }
    let what = if is_many { "sum_many_rows" } else { "sum_few_rows" };
    for (nth, side) in sides.iter().enumerate() {
        let n_rounds = GRAPHS * ROUNDS_OF_GRAPH;
        let name = format!("{n_rounds} rounds of {what} {n_rows}x{width}, {}", rank_of(nth, sides));
        let found = side.card.download(residuals[nth].view())?;
        let is_own = |row: usize| !is_many || row % sides.len() == nth;
        let is_right = (0..n).all(|i| !is_own(i / width) || found[i] == expected[i]);
        verdicts.holds(name.clone(), is_right && !peers[nth].lost_flag().is_raised());
        let out = side.card.download(side.out.slice(0..n))?;
        verdicts.compare(format!("{name}: norm"), &wide(&out), &normed(&expected, &weight), BF16_ERROR);
    }
    drop((graphs, kept));
    Ok(())
}

/// Checks that a GPU whose peer does not respond gives up within its time limit and reports it.
fn lost(sides: &mut [Side], verdicts: &mut Verdicts) -> Result<(), CudaError> {
    let mut peers = peers(sides, 4096, Duration::from_millis(100))?;
    let side = &mut sides[0];
    let (mut residual, weight) = (side.card.buffer(4096)?, side.card.buffer(4096)?);
    for is_many in [false, true] {
        let start = side.card.mark()?;
        sum(side, &mut peers[0], (&mut residual, &weight), 4096, is_many)?;
        let ms = start.ms_until(&side.card.mark()?)?;
        verdicts.holds(format!("a lost card is given up ({ms:.0} ms)"), ms < 2000.0);
        verdicts.holds("all cards are told of a lost one", peers[1].lost_flag().is_raised());
    }
    check_joined::lost(sides, verdicts)
}

fn times(sides: &mut [Side]) -> Result<Value, CudaError> {
    let width = 4096;
    let mut lines = Vec::new();
    for n_rows in [1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 2048, 8192] {
        let mut peers = peers(sides, width, PATIENCE)?;
        let mut line = json!({"rows": n_rows, "bytes": n_rows * width * 2});
        for (name, is_many) in [("few_us", false), ("many_us", true)] {
            if is_many || n_rows <= FEW_ROWS {
                let us = time(sides, &mut peers, n_rows * width, is_many)?;
                line[name] = json!(us);
            }
        }
        line["alone_us"] = json!(alone(&mut sides[0], n_rows * width)?);
        eprintln!("sum of {n_rows} rows over two cards, and their norm: {line}");
        lines.push(line);
    }
    let mut peers = peers(sides, width, PATIENCE)?;
    for n_rows in [1, 8, 64, 256] {
        let us = time_gather(sides, &mut peers, n_rows)?;
        eprintln!("gather_columns {n_rows} rows of 128256: {us:.1} us");
        lines.push(json!({"gather_rows": n_rows, "us": us}));
    }
    check_joined::times(sides, &mut lines)?;
    Ok(json!(lines))
}

pub(crate) const N_TIMED: usize = 64;
const N_TIMES: usize = 11;

/// Returns the time of one launch in graphs of many, in microseconds: the median of some runs.
pub(crate) fn middle(sides: &[Side], graphs: &mut [Graph]) -> Result<f64, CudaError> {
    let mut times = Vec::new();
    for _ in 0..N_TIMES {
        let start = sides[0].card.mark()?;
        graphs.iter_mut().try_for_each(Graph::launch)?;
        times.push(f64::from(start.ms_until(&sides[0].card.mark()?)?) * 1e3 / N_TIMED as f64);
        sides[1..].iter().try_for_each(|side| side.card.synchronize())?;
    }
    times.sort_by(f64::total_cmp);
    Ok(times[N_TIMES / 2])
}

fn time(sides: &mut [Side], peers: &mut [Peers], n: usize, is_many: bool) -> Result<f64, CudaError> {
    let mut kept = Vec::new();
    for side in sides.iter() {
        kept.push((
            side.card.upload(&vec![Bf16::default(); n])?,
            side.card.upload(&vec![Bf16::from(1.0); 4096])?,
        ));
    }
    // The first launches load code, which cannot be recorded, so they run before the graph.
    for ((nth, side), (residual, weight)) in sides.iter_mut().enumerate().zip(&mut kept) {
        sum(side, &mut peers[nth], (residual, weight), n, is_many)?;
    }
    let mut graphs = Vec::new();
    for ((nth, side), (residual, weight)) in sides.iter_mut().enumerate().zip(&mut kept) {
        let (Side { card, part, out, .. }, peers) = (side, &mut peers[nth]);
        graphs.push(card.record(|| {
            for _ in 0..N_TIMED {
                let sum = SumRows {
                    out: out.view_mut().slice(0..n),
                    residual: residual.view_mut(),
                    part: part.slice(0..n),
                    weight: weight.view(),
                    epsilon: EPSILON,
                };
                if is_many { card.sum_many_rows(peers, sum)? } else { card.sum_few_rows(peers, sum)? }
            }
            Ok(())
        })?);
    }
    let time = middle(sides, &mut graphs)?;
    drop(graphs);
    Ok(time)
}

/// Measures the sum of rows with a single rank, in microseconds.
fn alone(side: &mut Side, n: usize) -> Result<f64, CudaError> {
    let Side { card, part, out, .. } = side;
    let mut residual = card.upload(&vec![Bf16::default(); n])?;
    let weight = card.upload(&vec![Bf16::from(1.0); 4096])?;
    let mut run = || {
        let (out, residual) = (out.view_mut().slice(0..n), residual.view_mut());
        card.add_rms_norm(out, residual, part.slice(0..n), weight.view(), EPSILON)
    };
    run()?;
    let mut graph = card.record(|| (0..N_TIMED).try_for_each(|_| run()))?;
    let mut least = f32::INFINITY;
    for _ in 0..N_TIMES {
        let start = card.mark()?;
        graph.launch()?;
        least = least.min(start.ms_until(&card.mark()?)?);
    }
    Ok(f64::from(least) * 1e3 / N_TIMED as f64)
}

fn time_gather(sides: &mut [Side], peers: &mut [Peers], n_rows: usize) -> Result<f64, CudaError> {
    let (n, n_part) = (n_rows * 128_256, n_rows * 64_128);
    let mut parts = Vec::new();
    for side in sides.iter() {
        parts.push(side.card.upload(&vec![0.5_f32; n_part])?);
    }
    for (nth, side) in sides.iter_mut().enumerate() {
        let whole = side.whole.view_mut().slice(0..n.min(8192 * 4096));
        side.card.gather_columns(&mut peers[nth], whole, parts[nth].view(), n_rows)?;
    }
    let mut graphs = Vec::new();
    for (nth, side) in sides.iter_mut().enumerate() {
        let (Side { card, whole, .. }, peers, part) = (side, &mut peers[nth], &parts[nth]);
        graphs.push(card.record(|| {
            (0..N_TIMED).try_for_each(|_| {
                card.gather_columns(peers, whole.view_mut().slice(0..n), part.view(), n_rows)
            })
        })?);
    }
    let time = middle(sides, &mut graphs)?;
    drop(graphs);
    Ok(time)
}
