//! Checks layers of experts against sums in f64: the choice of experts, the products in both forms and in all formats,
//! and that a row alone has the bits of a row among others.

use std::num::NonZero;

use baton_kernels::cpu::{Arithmetic, Processor};
use baton_kernels::cuda::{
    ComputeCard, ExpertActivations, ExpertChoice, ExpertInput, ExpertLayer, ExpertSizes, ExpertSpace,
    ExpertSums, ExpertsForm, Fp8Rows, Fp8Scales, HeldExperts, NormedRows, WeightMatrix,
};
use device::cuda::{Bf16, Buffer, CudaError};
use serde_json::{Value, json};

use super::check_products::product;
use super::choices::{Rule, RuleCase};
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::fp8::{Matrix, SCALES, name};
use super::measure::seconds;
use super::verdict::{BF16_ERROR, Verdicts};

/// Hidden size, width, experts, experts of a row.
const SHAPES: &[(usize, usize, usize, usize)] =
    &[(32, 24, 5, 2), (264, 136, 8, 3), (72, 40, 1, 1), (328, 200, 128, 8)];
/// The same for experts in FP8: the last two have more columns than warps load at once.
const SHAPES_FP8: &[(usize, usize, usize, usize)] = &[
    (64, 64, 5, 2),
    (264, 192, 8, 3),
    (320, 192, 8, 3),
    (72, 64, 1, 1),
    (192, 128, 128, 8),
    (2368, 64, 3, 1),
    (64, 1088, 2, 1),
];
const ROWS: &[usize] = &[3, 141, 1, 8, 9, 33, 600];
/// Three numbers of a row are rounded to bf16, one after the other.
const ERROR: f64 = 2.0 * BF16_ERROR;
/// A rounding to FP8 of a number near the middle between two FP8 numbers goes the other way. Without the rounding the
/// error is above 2.6e-2.
const ROUNDED_ERROR: f64 = 1.8e-2;
/// The rows that enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    Drawn,
    /// All rows are equal, so all have the same experts.
    Equal,
}

/// The format of the experts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum ExpertFormat {
    Bf16,
    Fp8(Fp8Scales, ExpertActivations),
}

impl ExpertFormat {
    fn all() -> impl Iterator<Item = Self> {
        let activations = [ExpertActivations::Full, ExpertActivations::Rounded];
        let fp8 = SCALES.into_iter().flat_map(move |scaling| activations.map(|one| Self::Fp8(scaling, one)));
        [Self::Bf16].into_iter().chain(fp8)
    }

    fn shapes(self) -> &'static [(usize, usize, usize, usize)] {
        if self == Self::Bf16 { SHAPES } else { SHAPES_FP8 }
    }

    /// Returns whether blocks of one expert end where the next expert begins.
    fn takes(self, hidden: usize) -> bool {
        !matches!(self, Self::Fp8(Fp8Scales::OfBlocks, _)) || hidden.is_multiple_of(Fp8Scales::BLOCK_ROWS)
    }

    fn activations(self) -> ExpertActivations {
        match self {
            Self::Bf16 => ExpertActivations::Full,
            Self::Fp8(_, activations) => activations,
        }
    }

    fn name(self) -> String {
        match self {
            Self::Bf16 => "bf16".to_owned(),
            Self::Fp8(scaling, activations) => format!("{}, {activations:?}", name(scaling)),
        }
    }

    fn error(self) -> f64 {
        if self.activations() == ExpertActivations::Rounded { ROUNDED_ERROR } else { ERROR }
    }
}

/// The matrices of all experts on the GPU.
enum OnCard {
    Bf16(Buffer<Bf16>),
    Fp8(Matrix),
    Measured { numbers: Buffer<u8>, scales: Buffer<f32>, scaling: Fp8Scales },
}

impl OnCard {
    fn view(&self) -> WeightMatrix<'_> {
        match self {
            Self::Bf16(numbers) => WeightMatrix::Bf16(numbers.view()),
            Self::Fp8(matrix) => matrix.weights(),
            Self::Measured { numbers, scales, scaling } => WeightMatrix::Fp8(Fp8Rows {
                numbers: numbers.view(),
                scales: scales.view(),
                scaling: *scaling,
            }),
        }
    }
}

/// Memory for matrices in bf16, if tiles need them.
struct Widening(Option<Buffer<Bf16>>);

impl Widening {
    fn new(
        card: &ComputeCard,
        format: ExpertFormat,
        form: ExpertsForm,
        sizes: ExpertSizes,
    ) -> Result<Self, CudaError> {
        let is_needed =
            form == ExpertsForm::Tiles && matches!(format, ExpertFormat::Fp8(_, ExpertActivations::Full));
        let ExpertSizes { hidden, width, .. } = sizes;
        let room = is_needed.then(|| card.buffer(sizes.n_all() * 2 * width * hidden)).transpose()?;
        Ok(Self(room))
    }

    /// Widens the matrix if needed.
    fn prepared<'a>(
        &'a mut self,
        card: &ComputeCard,
        w: WeightMatrix<'a>,
        k: usize,
    ) -> Result<WeightMatrix<'a>, CudaError> {
        match (&mut self.0, w) {
            (Some(room), WeightMatrix::Fp8(rows)) => {
                let n_numbers = w.n_rows(k) * k;
                card.widen_fp8(room.view_mut().slice(0..n_numbers), rows, k)?;
                Ok(WeightMatrix::Widened(room.slice(0..n_numbers)))
            }
            _ => Ok(w),
        }
    }

    /// Computes a whole layer.
    fn compute(
        &mut self,
        card: &ComputeCard,
        form: ExpertsForm,
        layer: ExpertLayer<'_>,
        input: ExpertInput<'_>,
        to: ExpertSums<'_>,
        space: &mut ExpertSpace,
    ) -> Result<(), CudaError> {
        let gate_up = self.prepared(card, layer.gate_up, layer.sizes.hidden)?;
        card.gate_experts(form, ExpertLayer { gate_up, ..layer }, input, space)?;
        let down = self.prepared(card, layer.down, layer.sizes.width)?;
        card.sum_experts(form, ExpertLayer { down, ..layer }, to, space)
    }
}

/// Weights and rows on both sides.
struct Case {
    sizes: ExpertSizes,
    format: ExpertFormat,
    rule: Rule,
    router: Vec<Bf16>,
    gate_up: Vec<f64>,
    down: Vec<f64>,
    x: Vec<Bf16>,
    router_there: Buffer<Bf16>,
    gate_up_there: OnCard,
    down_there: OnCard,
}

pub(crate) fn check(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    for format in ExpertFormat::all() {
        for (hidden, width, n_experts, per_row) in extent.of(format.shapes(), 2).iter().copied() {
            let all_rows = extent.of(ROWS, 2).iter().copied().enumerate();
            for (nth, n_rows) in all_rows.filter(|_| format.takes(hidden)) {
                for rows in [Rows::Drawn, Rows::Equal] {
                    let (n_shared, is_normalized) = ((nth + 1) % 3, n_rows % 2 == 1);
                    let held = HeldExperts::ALL;
                    let sizes =
                        ExpertSizes { hidden, width, n_experts, held, per_row, n_shared, is_normalized };
                    let rules = match format {
                        ExpertFormat::Bf16 => RuleCase::all(n_experts, per_row),
                        ExpertFormat::Fp8(..) => vec![RuleCase::PLAIN],
                    };
                    let of_all = rules.into_iter().map(|rule| (sizes, rule));
                    // One of the ranks that the experts are spread over. It may have no choice.
                    let spread = (rows == Rows::Drawn).then_some([2, 4][nth % 2]);
                    let spread = spread.filter(|every| n_experts.is_multiple_of(*every)).map(|every| {
                        let held = HeldExperts { first: nth / 2 % every, every };
                        (ExpertSizes { held, ..sizes }, RuleCase::PLAIN)
                    });
                    for (sizes, rule) in of_all.chain(spread) {
                        let case = Case::draw(card, (sizes, rule), format, n_rows, rows)?;
                        let name =
                            format!("experts {} {sizes:?}, {rule:?}, {n_rows} rows, {rows:?}", format.name());
                        case.check(card, verdicts, &name)?;
                    }
                }
            }
        }
    }
    Ok(())
}

impl Case {
    fn draw(
        card: &ComputeCard,
        (sizes, rule): (ExpertSizes, RuleCase),
        format: ExpertFormat,
        n_rows: usize,
        rows: Rows,
    ) -> Result<Self, CudaError> {
        let ExpertSizes { hidden, width, n_experts, .. } = sizes;
        let mut draw = Draw::new((hidden * n_experts + n_rows) as u64);
        let mut router = draw.narrow(n_experts * hidden, 3.0 / (hidden as f32).sqrt());
        // The last expert has the scores of the first, so that there are ties.
        router.copy_within(0..hidden, (n_experts - 1) * hidden);
        let n_all = sizes.n_all();
        let mut matrices = |n: usize, k: usize| -> Result<(Vec<f64>, OnCard), CudaError> {
            match format {
                ExpertFormat::Bf16 => {
                    let numbers = draw.narrow(n_all * n * k, 2.0 / (k as f32).sqrt());
                    Ok((wide(&numbers), OnCard::Bf16(card.upload(&numbers)?)))
                }
                ExpertFormat::Fp8(scaling, _) => {
                    let matrix = Matrix::drawn(card, &mut draw, scaling, (n_all * n, k))?;
                    let numbers = matrix.wide().into_iter().map(f64::from).collect();
                    Ok((numbers, OnCard::Fp8(matrix)))
                }
            }
        };
        let (gate_up, gate_up_there) = matrices(2 * width, hidden)?;
        let (down, down_there) = matrices(hidden, width)?;
        // Numbers of FP8 matrices have a size of about 1.
        let size = if format == ExpertFormat::Bf16 { 1.0 } else { 2.0 / (hidden as f32).sqrt() };
        let x = match rows {
            Rows::Drawn => draw.narrow(n_rows * hidden, size),
            Rows::Equal => draw.narrow(hidden, size).repeat(n_rows),
        };
        let router_there = card.upload(&router)?;
        let rule = Rule::draw(card, rule, n_experts)?;
        Ok(Self { sizes, format, rule, router, gate_up, down, x, router_there, gate_up_there, down_there })
    }

    fn run(&self, card: &ComputeCard, form: ExpertsForm, x: &[Bf16]) -> Result<Vec<Bf16>, CudaError> {
        let poison = vec![Bf16(0x7fc0); x.len()];
        let (x, mut out) = (card.upload(x)?, card.upload(&poison)?);
        self.compute(card, form, ExpertInput::Normed(x.view()), ExpertSums::Written(out.view_mut()))?;
        card.download(out.view())
    }

    /// Adds the rows to others, norms the sums and computes the layer: first with separate kernels, then with the one that
    /// also chooses experts. Returns the output, the residual and the normed rows of both.
    fn run_given(&self, card: &ComputeCard) -> Result<[[Vec<Bf16>; 3]; 2], CudaError> {
        let (given, weight) = (card.upload(&self.x)?, card.upload(&self.x[..self.sizes.hidden])?);
        let (given, weight, epsilon) = (given.view(), weight.view(), EPSILON);
        let outcome = |is_joined: bool| {
            let (mut residual, mut normed) = (card.upload(&self.x)?, card.upload(&self.x)?);
            let mut sums = card.upload(&vec![Bf16(0x7fc0); self.x.len()])?;
            let to = ExpertSums::Written(sums.view_mut());
            let (out, residual_to) = (normed.view_mut(), residual.view_mut());
            if is_joined {
                let rows = NormedRows { out, residual: residual_to, weight, epsilon };
                self.compute(card, ExpertsForm::Units, ExpertInput::Given { given, rows }, to)?;
            } else {
                card.add_rms_norm(out, residual_to, given, weight, epsilon)?;
                self.compute(card, ExpertsForm::Units, ExpertInput::Normed(normed.view()), to)?;
            }
            Ok([card.download(sums.view())?, card.download(residual.view())?, card.download(normed.view())?])
        };
        Ok([outcome(false)?, outcome(true)?])
    }

    /// Adds the sums of the rows' experts to the rows, and norms the results.
    fn run_normed(&self, card: &ComputeCard) -> Result<[Vec<Bf16>; 2], CudaError> {
        let (x, mut residual) = (card.upload(&self.x)?, card.upload(&self.x)?);
        let (mut out, weight) = (card.upload(&self.x)?, card.upload(&self.x[..self.sizes.hidden])?);
        let (to, residual_to, weight) = (out.view_mut(), residual.view_mut(), weight.view());
        let normed = NormedRows { out: to, residual: residual_to, weight, epsilon: EPSILON };
        self.compute(card, ExpertsForm::Units, ExpertInput::Normed(x.view()), ExpertSums::Normed(normed))?;
        Ok([card.download(out.view())?, card.download(residual.view())?])
    }

    /// The same with the sums of [`run`](Self::run), in two steps.
    fn norm_apart(&self, card: &ComputeCard, sums: &[Bf16]) -> Result<[Vec<Bf16>; 2], CudaError> {
        let (sums, mut residual) = (card.upload(sums)?, card.upload(&self.x)?);
        let (mut out, weight) = (card.upload(&self.x)?, card.upload(&self.x[..self.sizes.hidden])?);
        card.add_rms_norm(out.view_mut(), residual.view_mut(), sums.view(), weight.view(), EPSILON)?;
        Ok([card.download(out.view())?, card.download(residual.view())?])
    }

    fn compute(
        &self,
        card: &ComputeCard,
        form: ExpertsForm,
        input: ExpertInput<'_>,
        to: ExpertSums<'_>,
    ) -> Result<(), CudaError> {
        let mut space = self.space(card, input.n_numbers() / self.sizes.hidden)?;
        let mut room = Widening::new(card, self.format, form, self.sizes)?;
        room.compute(card, form, self.layer(), input, to, &mut space)
    }

    fn space(&self, card: &ComputeCard, n_rows: usize) -> Result<ExpertSpace, CudaError> {
        ExpertSpace::new(card, self.sizes, n_rows + 5, self.format.activations())
    }

    fn layer(&self) -> ExpertLayer<'_> {
        ExpertLayer {
            router: self.router_there.view(),
            choice: self.rule.choice(),
            gate_up: self.gate_up_there.view(),
            down: self.down_there.view(),
            sizes: self.sizes,
        }
    }

    fn check(&self, card: &ComputeCard, verdicts: &mut Verdicts, name: &str) -> Result<(), CudaError> {
        let (hidden, error) = (self.sizes.hidden, self.format.error());
        let (reference, are_certain) = self.reference();
        let certain = |numbers: &[f64]| -> Vec<f64> {
            let rows = numbers.chunks(hidden).zip(&are_certain).filter(|(_, is_certain)| **is_certain);
            rows.flat_map(|(row, _)| row.to_vec()).collect()
        };
        let units = self.run(card, ExpertsForm::Units, &self.x)?;
        verdicts.compare(format!("{name}, units"), &certain(&wide(&units)), &certain(&reference), error);
        let of_both = [self.run_normed(card)?, self.norm_apart(card, &units)?];
        let [joined, apart] =
            of_both.map(|both| both.concat().into_iter().map(|number| number.0).collect::<Vec<_>>());
        verdicts.holds(format!("{name}, added and normed"), joined == apart);
        if card.has_many_rows() {
            let tiles = self.run(card, ExpertsForm::Tiles, &self.x)?;
            verdicts.compare(format!("{name}, tiles"), &certain(&wide(&tiles)), &certain(&reference), error);
        }
        let n_rows = self.x.len() / hidden;
        if card.norms_with_choice(ExpertsForm::Units, self.layer(), &self.space(card, n_rows)?, n_rows) {
            let [apart, joined] = self.run_given(card)?.map(|all| all.concat());
            let is_alike = apart.iter().zip(&joined).all(|(one, other)| one.0 == other.0);
            verdicts.holds(format!("{name}, given rows"), is_alike);
        }
        let last = self.x.len() - hidden..self.x.len();
        let alone = self.run(card, ExpertsForm::Units, &self.x[last.clone()])?;
        let is_alike = alone.iter().zip(&units[last]).all(|(one, other)| one.0 == other.0);
        verdicts.holds(format!("{name}, the last row alone"), is_alike);
        if self.x.len() > hidden {
            let mut x = self.x.clone();
            x[0] = Bf16(0x7fc0);
            let found = self.run(card, ExpertsForm::Units, &x)?;
            let is_nan = found[..hidden].iter().all(|number| f32::from(*number).is_nan());
            let is_alike = found.iter().zip(&units).skip(hidden).all(|(one, other)| one.0 == other.0);
            verdicts.holds(format!("{name}, a row without numbers"), is_nan && is_alike);
        }
        Ok(())
    }

    /// Computes all rows in f64, and whether the choice of each row's experts is certain.
    fn reference(&self) -> (Vec<f64>, Vec<bool>) {
        let ExpertSizes { hidden, width, n_experts, .. } = self.sizes;
        let scores = product(&self.router, &self.x, hidden);
        let rounded = self.rounded(wide(&self.x), hidden);
        let (mut all, mut are_certain) = (Vec::new(), Vec::new());
        for (nth, (x, scores)) in rounded.chunks(hidden).zip(scores.chunks(n_experts)).enumerate() {
            if nth > 0 && *x == rounded[..hidden] {
                all.extend_from_within(..hidden);
                are_certain.push(are_certain[0]);
                continue;
            }
            let (experts, is_certain) = self.rule.chosen(scores, self.sizes);
            are_certain.push(is_certain);
            let mut sum = vec![0.0; hidden];
            for (expert, weight) in self.held(experts) {
                let gate_up = &self.gate_up[expert * 2 * width * hidden..(expert + 1) * 2 * width * hidden];
                let dot = |row: &[f64], of: &[f64]| -> f64 { row.iter().zip(of).map(|(a, b)| a * b).sum() };
                let both: Vec<f64> = gate_up.chunks(hidden).map(|row| dot(row, x)).collect();
                let inner: Vec<f64> =
                    (0..width).map(|at| both[at] / (1.0 + (-both[at]).exp()) * both[width + at]).collect();
                let inner = self.rounded(inner, width);
                let down = &self.down[expert * hidden * width..(expert + 1) * hidden * width];
                for (sum, row) in sum.iter_mut().zip(down.chunks(width)) {
                    *sum += dot(row, &inner) * weight;
                }
            }
            all.extend(sum);
        }
        (all, are_certain)
    }

    /// Returns the choices that the rank computes, by the numbers of its own experts, with those of the shared experts. A
    /// shared expert goes to the rank with the fewest of the row's choices, counted from the row's first expert.
    fn held(&self, experts: Vec<(usize, f64)>) -> Vec<(usize, f64)> {
        let HeldExperts { first, every } = self.sizes.held;
        let lowest = experts.iter().map(|(expert, _)| *expert).min().unwrap_or(0);
        let mut n_choices = vec![0; every];
        experts.iter().for_each(|(expert, _)| n_choices[expert % every] += 1);
        let here = experts.iter().filter(|(expert, _)| expert % every == first);
        let mut here: Vec<(usize, f64)> = here.map(|(expert, weight)| (expert / every, *weight)).collect();
        for nth in 0..self.sizes.n_shared {
            let fewest = (0..every).min_by_key(|rank| (n_choices[*rank], (rank + lowest) % every));
            let fewest = fewest.expect("a rank");
            n_choices[fewest] += 1;
            if fewest == first {
                here.push((self.sizes.n_held() + nth, 1.0));
            }
        }
        here
    }

    /// Rounds rows to FP8 as the CPU does, if the format has rounded activations.
    fn rounded(&self, x: Vec<f64>, k: usize) -> Vec<f64> {
        if self.format.activations() == ExpertActivations::Full {
            return x;
        }
        let mut narrow: Vec<f32> = x.iter().map(|number| f32::from(Bf16::from(*number as f32))).collect();
        let cpu = Processor::new(Arithmetic::F32, NonZero::<usize>::MIN).expect("a thread starts");
        cpu.round_rows(&mut narrow, k);
        narrow.into_iter().map(f64::from).collect()
    }
}

/// The layers whose speed is measured: that of Qwen3-30B-A3B, and in bf16 also that of DeepSeek-V2-Lite.
const QWEN: ExpertSizes = ExpertSizes {
    hidden: 2048,
    width: 768,
    n_experts: 128,
    held: HeldExperts::ALL,
    per_row: 8,
    n_shared: 0,
    is_normalized: true,
};
const DEEPSEEK: ExpertSizes =
    ExpertSizes { n_experts: 64, width: 1408, per_row: 6, n_shared: 2, is_normalized: false, ..QWEN };
const N_LAUNCHES: usize = 20;
/// The addend of norms.
const EPSILON: f32 = 1e-6;
/// The number of layers in turn, so that weights are in no cache.
const N_LAYERS: usize = 4;

pub(crate) fn measure(card: &ComputeCard) -> Result<Vec<Value>, CudaError> {
    let mut lines = measure_layer(card, ExpertFormat::Bf16, DEEPSEEK)?;
    for format in ExpertFormat::all() {
        lines.extend(measure_layer(card, format, QWEN)?);
    }
    Ok(lines)
}

/// Uploads the matrices of all experts of a measured layer, `n` rows of `k` numbers.
fn measured(card: &ComputeCard, format: ExpertFormat, n: usize, k: usize) -> Result<OnCard, CudaError> {
    match format {
        ExpertFormat::Bf16 => Ok(OnCard::Bf16(card.upload(&Draw::new(35).many(n * k, 0.02))?)),
        ExpertFormat::Fp8(scaling, _) => {
            let run = Draw::new(35).many(1 << 20, 1.0);
            let run: Vec<u8> = run.into_iter().map(|number| number.0 as u8 & 0xF7).collect();
            let numbers = card.upload(&run.repeat(n * k / run.len()))?;
            Ok(OnCard::Measured { numbers, scales: card.upload(&vec![0.001; scaling.count(n, k)])?, scaling })
        }
    }
}

fn measure_layer(
    card: &ComputeCard,
    format: ExpertFormat,
    sizes: ExpertSizes,
) -> Result<Vec<Value>, CudaError> {
    let ExpertSizes { hidden, width, n_experts, .. } = sizes;
    let router = card.upload(&Draw::new(34).narrow(n_experts * hidden, 0.05))?;
    let layer = |_| -> Result<[OnCard; 2], CudaError> {
        Ok([
            measured(card, format, sizes.n_all() * 2 * width, hidden)?,
            measured(card, format, sizes.n_all() * hidden, width)?,
        ])
    };
    let layers = (0..N_LAYERS).map(layer).collect::<Result<Vec<_>, _>>()?;
    let mut lines = vec![];
    for n_rows in [1, 8, 32, 64, 128, 256, 512, 1024, 2048, 8192] {
        let x = card.upload(&Draw::new(36).narrow(n_rows * hidden, 1.0))?;
        let (mut space, mut out) = (
            ExpertSpace::new(card, sizes, n_rows, format.activations())?,
            card.buffer::<Bf16>(n_rows * hidden)?,
        );
        for form in [ExpertsForm::Units, ExpertsForm::Tiles] {
            let is_far = (form == ExpertsForm::Tiles) != (n_rows > 512);
            if !card.has_many_rows() && form == ExpertsForm::Tiles || is_far && !(64..=2048).contains(&n_rows)
            {
                continue;
            }
            let mut room = Widening::new(card, format, form, sizes)?;
            let time = seconds(card, N_LAUNCHES, |nth| {
                let [gate_up, down] = layers[nth % N_LAYERS].each_ref().map(OnCard::view);
                let layer =
                    ExpertLayer { router: router.view(), choice: ExpertChoice::PLAIN, gate_up, down, sizes };
                let (input, to) = (ExpertInput::Normed(x.view()), ExpertSums::Written(out.view_mut()));
                room.compute(card, form, layer, input, to, &mut space)
            })?;
            let flop = (6 * n_rows * sizes.n_choices() * hidden * width) as f64;
            let what = format!("{n_experts} experts in {}, {n_rows} rows, {form:?}", format.name());
            eprintln!("{what}: {:.1} us, {:.1} TFLOP/s", time * 1e6, flop / time / 1e12);
            lines.push(json!({"what": what, "us": time * 1e6, "flop_per_s": flop / time}));
        }
    }
    Ok(lines)
}
