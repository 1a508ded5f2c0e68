//! Hot path.
//! The operations of one step on all of its rows. The decoder calls them layer by layer.

use std::cell::RefCell;
use std::ops::Range;

use device::PageBusy;
use kernels::cpu::{Attention, Format, KvShape, Matrix, Processor, Product, RopeAngles, Rotation, Stretch};
use kv_cache::{KvMemory, PageMut, PageRef, RankMemory};
use types::layout::{Attention as Sight, LayerShape};
use types::{BlockIdx, GroupIdx, KvDtype, KvLayout, TokenId};

use super::nn::{Embedding, Linear, RmsNorm};
use super::quantization::ActivationFormat;
use super::ranks::{RankFence, RankHandle};
use super::tensor::{Scratch, Tensor};
use crate::error::RowError;

/// Neighbouring tokens of one sequence, one row of a step.
#[derive(Debug)]
pub struct PassRow<'a> {
    pub tokens: &'a [TokenId],
    /// The position of the first token.
    pub start: usize,
    /// The sequence's blocks, one table per layer group.
    pub tables: &'a [Vec<BlockIdx>],
    /// Whether the logits after the last token are needed.
    pub is_wanted: bool,
    /// The row's error, if any. After an error, the row's results are undefined and not read.
    pub outcome: Result<(), RowError>,
}

/// All rows of a step. Each token is a row of every tensor, in the order of the rows.
///
/// Each rank has its own pass. A linear layer computes the rank's share of its outputs from all of its
/// inputs. If the rank has only a share of an input, the input is gathered first.
#[derive(Debug)]
pub struct Pass<'a> {
    processor: &'a Processor,
    scratch: &'a Scratch,
    layout: &'a KvLayout,
    memory: RankMemory<'a>,
    written: &'a RankFence,
    rank: &'a RankHandle,
    rows: Vec<PassRow<'a>>,
    n_tokens: usize,
    angles: RopeAngles,
    activations: ActivationFormat,
    /// See [`StepOutput::routing_leads`](crate::step::StepOutput::routing_leads).
    routing_leads: RefCell<Vec<f32>>,
}

/// A row of a tensor, and the factor with which it is added to a sum.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct ScaledRow {
    pub nth: usize,
    pub weight: f32,
}

/// A product of each head's numbers with rows of its own.
#[derive(Clone, Debug)]
pub struct HeadProduct<'a> {
    /// The same number of rows for each head of the model, in the order of heads.
    pub matrix: &'a Matrix,
    pub n_heads: usize,
    /// The rows that multiply, of those of a head.
    pub rows: Range<usize>,
}

/// The input of one layer's attention.
#[derive(Clone, Copy, Debug)]
pub struct AttentionInput<'a> {
    pub layer: usize,
    /// The factor for scores.
    pub scale: f32,
    pub q: &'a Tensor,
    pub k: &'a Tensor,
    /// `None`: the rows of `k` are latent vectors, which are also the values.
    pub v: Option<&'a Tensor>,
}

/// The resources of a pass.
#[derive(Clone, Copy, Debug)]
pub struct PassParts<'a> {
    pub processor: &'a Processor,
    pub scratch: &'a Scratch,
    pub memory: &'a KvMemory,
    pub written: &'a RankFence,
    pub rank: &'a RankHandle,
    pub rotation: Rotation<'a>,
    /// The format of the input of products with FP8 matrices.
    pub activations: ActivationFormat,
}

impl<'a> Pass<'a> {
    pub fn new(parts: PassParts<'a>, rows: Vec<PassRow<'a>>) -> Self {
        let PassParts { processor, scratch, memory, written, rank, rotation, activations } = parts;
        let positions = rows.iter().flat_map(|row| row.start..row.start + row.tokens.len());
        let angles = RopeAngles::new(rotation, positions);
        let n_tokens = rows.iter().map(|row| row.tokens.len()).sum();
        let (layout, memory) = (memory.layout(), memory.rank(rank.nth()));
        Self {
            processor,
            scratch,
            layout,
            memory,
            written,
            rank,
            rows,
            n_tokens,
            angles,
            activations,
            routing_leads: RefCell::default(),
        }
    }

    /// Notes the routing leads of all tokens in one layer.
    pub fn note_routing_leads(&self, of_layer: &[f32]) {
        let mut leads = self.routing_leads.borrow_mut();
        leads.resize(self.n_tokens, f32::INFINITY);
        leads.iter_mut().zip(of_layer).for_each(|(lead, of_layer)| *lead = lead.min(*of_layer));
    }

    /// Returns the smallest routing lead of each token over all layers; empty if no layer has experts.
    pub fn take_routing_leads(&self) -> Vec<f32> {
        self.routing_leads.take()
    }

    /// Returns the outcome of each row, in their order.
    pub fn into_outcomes(self) -> impl Iterator<Item = Result<(), RowError>> + use<'a> {
        self.rows.into_iter().map(|row| row.outcome)
    }

    /// Looks up the embedding of each token: (tokens, hidden).
    pub fn embed(&self, table: &Embedding) -> Tensor {
        let mut out = self.scratch.tensor(self.n_tokens, table.0.cols());
        let tokens = self.rows.iter().flat_map(|row| row.tokens);
        for (nth, token) in tokens.enumerate() {
            table.0.read_row(token.0 as usize, out.row_mut(nth));
        }
        out
    }

    /// Returns the rows that the stage before computed: (tokens, hidden).
    pub fn received(&self, rows: &[f32], hidden: usize) -> Tensor {
        let mut out = self.scratch.tensor(self.n_tokens, hidden);
        out.copy_from_slice(rows);
        out
    }

    pub fn norm(&self, x: &Tensor, norm: &RmsNorm) -> Tensor {
        let mut out = self.scratch.tensor(x.n_rows(), x.width());
        self.processor.rms_norm(x, &norm.weight, norm.epsilon, &mut out);
        out
    }

    /// Applies the norm to every head separately.
    pub fn norm_heads(&self, x: &mut Tensor, norm: &RmsNorm) {
        self.processor.rms_norm_in_place(x, &norm.weight, norm.epsilon);
    }

    pub fn linear(&self, x: &Tensor, linear: &Linear) -> Tensor {
        let [out] = self.linears(x, [linear]);
        out
    }

    /// Computes several layers with the same input. Threads share their work.
    pub fn linears<const N: usize>(&self, x: &Tensor, linears: [&Linear; N]) -> [Tensor; N] {
        self.multiply(x, linears, |n_outputs| self.rank.share(n_outputs))
    }

    /// Like [`linears`](Self::linears), for outputs that are heads: a head is never divided between ranks.
    pub fn heads<const N: usize>(&self, x: &Tensor, linears: [&Linear; N], head_dim: usize) -> [Tensor; N] {
        self.multiply(x, linears, |n_outputs| self.rank.share_of_heads(n_outputs / head_dim, head_dim))
    }

    fn multiply<const N: usize>(
        &self,
        x: &Tensor,
        linears: [&Linear; N],
        share: impl Fn(usize) -> Range<usize>,
    ) -> [Tensor; N] {
        let gathered = linears.first().and_then(|linear| self.gathered(x, linear.weight.cols()));
        let x = gathered.as_ref().unwrap_or(x);
        let are_fp8 = linears.iter().all(|linear| linear.weight.format().is_fp8());
        let rounded = (are_fp8 && self.activations == ActivationFormat::Fp8).then(|| {
            let mut rounded = self.neighbours(x, 0..x.n_rows());
            self.processor.round_rows(&mut rounded, x.width());
            rounded
        });
        let x = rounded.as_ref().unwrap_or(x);
        let columns = linears.map(|linear| share(linear.weight.rows()));
        let mut outs = columns.each_ref().map(|columns| self.scratch.tensor(x.n_rows(), columns.len()));
        let mut products = Vec::with_capacity(N);
        for ((out, linear), columns) in outs.iter_mut().zip(linears).zip(columns) {
            products.push(Product { matrix: &linear.weight, bias: linear.bias.as_deref(), columns, out });
        }
        self.processor.multiply(x, x.n_rows(), &mut products);
        outs
    }

    /// Multiplies the numbers of each of this rank's heads by rows of that head: (tokens, heads * rows).
    pub fn multiply_heads(&self, x: &Tensor, product: &HeadProduct<'_>) -> Tensor {
        let HeadProduct { matrix, n_heads, rows } = product;
        let heads = self.rank.share(*n_heads);
        let rows_of_head = matrix.rows() / n_heads;
        let mut out = self.scratch.tensor(x.n_rows(), heads.len() * rows.len());
        let mut of_head = self.scratch.tensor(x.n_rows(), rows.len());
        for (nth, head) in heads.enumerate() {
            let x = x.parts(1, nth * matrix.cols()..(nth + 1) * matrix.cols());
            let first = head * rows_of_head;
            let columns = first + rows.start..first + rows.end;
            let product = Product { matrix, bias: None, columns, out: &mut of_head };
            self.processor.multiply(&x, x.n_rows(), &mut [product]);
            for row in 0..x.n_rows() {
                out.row_mut(row)[nth * rows.len()..(nth + 1) * rows.len()].copy_from_slice(of_head.row(row));
            }
        }
        out
    }

    /// Computes `x += y`.
    pub fn add(&self, x: &mut Tensor, y: &Tensor) {
        let gathered = self.gathered(y, x.width());
        self.processor.add(x, gathered.as_ref().unwrap_or(y));
    }

    /// Returns all columns of `x`: gathered from all ranks, or `x` itself if it has all columns.
    pub fn whole(&self, x: Tensor, width: usize) -> Tensor {
        self.gathered(&x, width).unwrap_or(x)
    }

    /// Gathers all columns, if this rank has only a share of them.
    fn gathered(&self, x: &Tensor, width: usize) -> Option<Tensor> {
        (x.width() < width).then(|| {
            let mut all = self.scratch.tensor(x.n_rows(), width);
            self.rank.gather(x, &mut all);
            all
        })
    }

    /// Returns zeroes for this rank's share of `n_outputs` columns.
    pub fn zeroes(&self, n_rows: usize, n_outputs: usize) -> Tensor {
        let mut out = self.scratch.tensor(n_rows, self.rank.share(n_outputs).len());
        out.fill(0.0);
        out
    }

    /// Returns a copy of some rows.
    pub fn rows(&self, x: &Tensor, rows: &[ScaledRow]) -> Tensor {
        let mut out = self.scratch.tensor(rows.len(), x.width());
        for (to, row) in rows.iter().enumerate() {
            out.row_mut(to).copy_from_slice(x.row(row.nth));
        }
        out
    }

    /// Returns a copy of neighbouring rows.
    pub fn neighbours(&self, x: &Tensor, rows: Range<usize>) -> Tensor {
        let mut out = self.scratch.tensor(rows.len(), x.width());
        out.copy_from_slice(&x[rows.start * x.width()..rows.end * x.width()]);
        out
    }

    /// Adds each row of `y` to the row of `x` that `rows` names, multiplied by its weight.
    pub fn add_to_rows(&self, x: &mut Tensor, y: &Tensor, rows: &[ScaledRow]) {
        for (from, row) in rows.iter().enumerate() {
            for (sum, number) in x.row_mut(row.nth).iter_mut().zip(y.row(from)) {
                *sum += number * row.weight;
            }
        }
    }

    /// Computes `silu(gate) * up`.
    pub fn gated(&self, mut gate: Tensor, up: &Tensor) -> Tensor {
        self.processor.silu_mul(&mut gate, up);
        gate
    }

    /// Rotates every head by its token's position.
    pub fn rotate(&self, x: &mut Tensor, head_dim: usize) {
        let n_heads = x.width() / head_dim;
        self.processor.rotate(x, n_heads, &self.angles);
    }

    /// Writes a layer's keys and values, opens the layer's fence, and computes attention: (tokens, heads *
    /// head_dim) of this rank's heads.
    pub fn attend(&mut self, input: AttentionInput<'_>) -> Tensor {
        let AttentionInput { layer, scale, q, k, v } = input;
        let place = LayerKv::of(self.layout, layer);
        let kv = place.shape(self.layout);
        self.write_kv(&place, &kv, k, v);
        self.written.layers_done(self.rank, layer as u16 + 1);
        let attention =
            Attention { kv, n_heads: q.width() / kv.head_dim, scale, window: place.sight.window() };
        let mut out = self.scratch.tensor(q.n_rows(), q.width());
        let runs = self.visible_pages(&place, &attention);
        self.processor.attend(&attention, q, &stretches(&runs, kv.page_bytes()), &mut out);
        out
    }

    /// Returns the last row of each sequence whose logits are needed: (wanted, width). Failed rows are
    /// included.
    pub fn wanted(&self, x: &Tensor) -> Tensor {
        let n_wanted = self.rows.iter().filter(|row| row.is_wanted).count();
        let mut out = self.scratch.tensor(n_wanted, x.width());
        let mut end = 0;
        let mut nth = 0;
        for row in &self.rows {
            end += row.tokens.len();
            if row.is_wanted {
                out.row_mut(nth).copy_from_slice(x.row(end - 1));
                nth += 1;
            }
        }
        out
    }

    fn write_kv(&mut self, place: &LayerKv, kv: &KvShape, k: &Tensor, v: Option<&Tensor>) {
        let mut slices = Vec::with_capacity(self.rows.len());
        let mut first = 0;
        for row in &mut self.rows {
            let (keys, values) = (&k[first * k.width()..], v.map(|v| &v[first * v.width()..]));
            first += row.tokens.len();
            if row.outcome.is_ok() {
                match KvSlice::all_of(row, self.memory, place, kv, KvRows { keys, values }) {
                    Ok(of_row) => slices.extend(of_row),
                    Err(error) => row.outcome = Err(error),
                }
            }
        }
        let processor = self.processor;
        processor.pool().run_on(&mut slices, 1, |_, slice| {
            let KvSlice { page, slot, keys, values } = &mut slice[0];
            processor.write_kv(kv, page, *slot, keys, values);
        });
    }

    /// Borrows the pages that each row reads, except those of failed rows. They are borrowed until the result
    /// is dropped.
    fn visible_pages(&mut self, place: &LayerKv, attention: &Attention) -> Vec<VisiblePages<'a>> {
        let mut runs = Vec::with_capacity(self.rows.len());
        let mut first = 0;
        for row in &mut self.rows {
            let rows = first..first + row.tokens.len();
            first = rows.end;
            if row.outcome.is_err() {
                continue;
            }
            match VisiblePages::read(self.memory, place, attention, row, rows) {
                Ok(pages) => runs.push(pages),
                Err(error) => row.outcome = Err(error),
            }
        }
        runs
    }
}

// === location of a layer's KV ===

/// The location of a layer's KV.
#[derive(Clone, Copy, Debug)]
struct LayerKv {
    group: GroupIdx,
    layer_pos: u16,
    shape: LayerShape,
    sight: Sight,
}

impl LayerKv {
    fn of(layout: &KvLayout, layer: usize) -> Self {
        let places = layout.group_indices().flat_map(|group| {
            let sight = layout.group(group).attention;
            let layers = layout.group(group).layers.iter().zip(0..);
            layers.map(move |(shape, layer_pos)| Self { group, layer_pos, shape: *shape, sight })
        });
        let mut at_layer = places.filter(|place| usize::from(place.shape.layer) == layer);
        at_layer.next().expect("the layout is made from the model")
    }

    fn shape(&self, layout: &KvLayout) -> KvShape {
        KvShape {
            n_parts: if self.sight == Sight::Latent { 1 } else { 2 },
            block_tokens: usize::from(layout.block_tokens),
            n_kv_heads: usize::from(layout.rank_heads(self.shape)),
            head_dim: usize::from(self.shape.head_dim),
            format: match layout.dtype {
                KvDtype::F32 => Format::F32,
                KvDtype::Bf16 => Format::Bf16,
                KvDtype::Fp8E4m3 => Format::Fp8,
                KvDtype::F16 => unreachable!("refused when the backend is opened"),
            },
        }
    }

    fn busy(&self, position: usize, busy: &PageBusy) -> RowError {
        RowError::Page { layer: self.shape.layer, position, reason: busy.to_string() }
    }
}

// === writing and reading pages ===

/// A row's keys and values within one block, and their page.
struct KvSlice<'a> {
    page: PageMut<'a>,
    slot: usize,
    keys: &'a [f32],
    values: &'a [f32],
}

/// Keys and values of tokens, one row for each; latent vectors have no values.
struct KvRows<'a> {
    keys: &'a [f32],
    values: Option<&'a [f32]>,
}

impl<'a> KvSlice<'a> {
    /// Yields a row's slices block by block. `kv_rows` start with those of the row's tokens.
    fn all_of(
        row: &PassRow<'_>,
        memory: RankMemory<'a>,
        place: &LayerKv,
        kv: &KvShape,
        kv_rows: KvRows<'a>,
    ) -> Result<Vec<Self>, RowError> {
        let (block_tokens, width) = (kv.block_tokens, kv.n_kv_heads * kv.head_dim);
        let table = &row.tables[usize::from(place.group.0)];
        let end = row.start + row.tokens.len();
        let mut slices = Vec::new();
        let mut position = row.start;
        while position < end {
            let slot = position % block_tokens;
            let next = (position - slot + block_tokens).min(end);
            let numbers = (position - row.start) * width..(next - row.start) * width;
            let block = table[position / block_tokens].0;
            let page = memory.write(place.group, place.layer_pos, block..block + 1);
            let page = page.map_err(|busy| place.busy(position, &busy))?;
            let keys = &kv_rows.keys[numbers.clone()];
            let values = kv_rows.values.map_or(&[][..], |values| &values[numbers]);
            slices.push(Self { page, slot, keys, values });
            position = next;
        }
        Ok(slices)
    }
}

/// The pages of a layer that one row sees, in runs of neighbours.
struct VisiblePages<'a> {
    rows: Range<usize>,
    start: usize,
    first_block: usize,
    runs: Vec<PageRef<'a>>,
}

impl<'a> VisiblePages<'a> {
    fn read(
        memory: RankMemory<'a>,
        place: &LayerKv,
        attention: &Attention,
        row: &PassRow<'_>,
        rows: Range<usize>,
    ) -> Result<Self, RowError> {
        let block_tokens = attention.kv.block_tokens;
        let first_block = attention.first_seen(row.start) / block_tokens;
        let end_block = (row.start + row.tokens.len()).div_ceil(block_tokens);
        let blocks = &row.tables[usize::from(place.group.0)][first_block..end_block];
        let mut pages = Self { rows, start: row.start, first_block, runs: Vec::new() };
        let mut n_read = 0;
        for run in blocks.chunk_by(|one, next| one.0 + 1 == next.0) {
            let range = run[0].0..run[0].0 + run.len() as u32;
            let read = memory.read(place.group, place.layer_pos, range);
            let position = (first_block + n_read) * block_tokens;
            pages.runs.push(read.map_err(|busy| place.busy(position, &busy))?);
            n_read += run.len();
        }
        Ok(pages)
    }
}

fn stretches<'a>(rows: &'a [VisiblePages<'_>], page_bytes: usize) -> Vec<Stretch<'a>> {
    let stretch = |row: &'a VisiblePages<'_>| Stretch {
        rows: row.rows.clone(),
        start: row.start,
        first_block: row.first_block,
        pages: row.runs.iter().flat_map(|run| run.chunks_exact(page_bytes)).collect(),
    };
    rows.iter().map(stretch).collect()
}
