//! Checks layers of experts against sums in f64: the choice of experts, the products in both forms, and that
//! a row alone has the bits of a row among others.

use baton_kernels::cuda::{ComputeCard, ExpertLayer, ExpertSizes, ExpertSpace, ExpertsForm};
use device::cuda::{Bf16, Buffer, CudaError};
use serde_json::{Value, json};

use super::check_products::product;
use super::draw::{Draw, wide};
use super::extent::Extent;
use super::measure::seconds;
use super::verdict::{BF16_ERROR, Verdicts};

/// Hidden size, width, experts, experts of a row.
const SHAPES: &[(usize, usize, usize, usize)] =
    &[(32, 24, 5, 2), (264, 136, 8, 3), (72, 40, 1, 1), (328, 200, 128, 8)];
const ROWS: &[usize] = &[3, 141, 1, 8, 9, 33, 600];
/// Three numbers of a row are rounded to bf16, one after the other.
const ERROR: f64 = 2.0 * BF16_ERROR;
/// Scores that are closer than this may be in another order than in f64.
const NEAR: f64 = 1e-5;

/// The rows that enter.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Rows {
    Drawn,
    /// All rows are equal, so all have the same experts.
    Equal,
}

/// Weights and rows on both sides.
struct Case {
    sizes: ExpertSizes,
    router: Vec<Bf16>,
    gate_up: Vec<Bf16>,
    down: Vec<Bf16>,
    x: Vec<Bf16>,
    on_card: [Buffer<Bf16>; 3],
}

pub(crate) fn check(card: &ComputeCard, verdicts: &mut Verdicts, extent: Extent) -> Result<(), CudaError> {
    for (hidden, width, n_experts, per_row) in extent.of(SHAPES, 2).iter().copied() {
        for n_rows in extent.of(ROWS, 2).iter().copied() {
            for rows in [Rows::Drawn, Rows::Equal] {
                let is_normalized = n_rows % 2 == 1;
                let sizes = ExpertSizes { hidden, width, n_experts, per_row, is_normalized };
                let case = Case::draw(card, sizes, n_rows, rows)?;
                case.check(card, verdicts, &format!("experts {sizes:?}, {n_rows} rows, {rows:?}"))?;
            }
        }
    }
    Ok(())
}

impl Case {
    fn draw(card: &ComputeCard, sizes: ExpertSizes, n_rows: usize, rows: Rows) -> Result<Self, CudaError> {
        let ExpertSizes { hidden, width, n_experts, .. } = sizes;
        let mut draw = Draw::new((hidden * n_experts + n_rows) as u64);
        let mut router = draw.narrow(n_experts * hidden, 3.0 / (hidden as f32).sqrt());
        // The last expert has the scores of the first, so that there are ties.
        router.copy_within(0..hidden, (n_experts - 1) * hidden);
        let gate_up = draw.narrow(n_experts * 2 * width * hidden, 2.0 / (hidden as f32).sqrt());
        let down = draw.narrow(n_experts * hidden * width, 2.0 / (width as f32).sqrt());
        let x = match rows {
            Rows::Drawn => draw.narrow(n_rows * hidden, 1.0),
            Rows::Equal => draw.narrow(hidden, 1.0).repeat(n_rows),
        };
        let on_card = [card.upload(&router)?, card.upload(&gate_up)?, card.upload(&down)?];
        Ok(Self { sizes, router, gate_up, down, x, on_card })
    }

    fn layer(&self) -> ExpertLayer<'_> {
        let [router, gate_up, down] = self.on_card.each_ref().map(Buffer::view);
        ExpertLayer { router, gate_up, down, sizes: self.sizes }
    }

    fn run(&self, card: &ComputeCard, form: ExpertsForm, x: &[Bf16]) -> Result<Vec<Bf16>, CudaError> {
        let mut space = ExpertSpace::new(card, self.sizes, x.len() / self.sizes.hidden + 5)?;
        let poison = vec![Bf16(0x7fc0); x.len()];
        let (x, mut out) = (card.upload(x)?, card.upload(&poison)?);
        card.gate_experts(form, self.layer(), x.view(), &mut space)?;
        card.sum_experts(form, self.layer(), out.view_mut(), &mut space)?;
        card.download(out.view())
    }

    fn check(&self, card: &ComputeCard, verdicts: &mut Verdicts, name: &str) -> Result<(), CudaError> {
        let hidden = self.sizes.hidden;
        let (reference, are_certain) = self.reference();
        let certain = |numbers: &[f64]| -> Vec<f64> {
            let rows = numbers.chunks(hidden).zip(&are_certain).filter(|(_, is_certain)| **is_certain);
            rows.flat_map(|(row, _)| row.to_vec()).collect()
        };
        let units = self.run(card, ExpertsForm::Units, &self.x)?;
        verdicts.compare(format!("{name}, units"), &certain(&wide(&units)), &certain(&reference), ERROR);
        if card.has_many_rows() {
            let tiles = self.run(card, ExpertsForm::Tiles, &self.x)?;
            verdicts.compare(format!("{name}, tiles"), &certain(&wide(&tiles)), &certain(&reference), ERROR);
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
        let ExpertSizes { hidden, width, n_experts, per_row, is_normalized } = self.sizes;
        let scores = product(&self.router, &self.x, hidden);
        let (mut all, mut are_certain) = (Vec::new(), Vec::new());
        for (nth, (x, scores)) in self.x.chunks(hidden).zip(scores.chunks(n_experts)).enumerate() {
            if nth > 0 && *x == self.x[..hidden] {
                all.extend_from_within(..hidden);
                are_certain.push(are_certain[0]);
                continue;
            }
            let greatest = scores.iter().copied().fold(f64::NEG_INFINITY, f64::max);
            let exponentials: Vec<f64> = scores.iter().map(|score| (score - greatest).exp()).collect();
            let mut order: Vec<usize> = (0..n_experts).collect();
            order.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]).then(a.cmp(b)));
            let is_near = |pair: &[usize]| {
                let lead = scores[pair[0]] - scores[pair[1]];
                lead > 0.0 && lead < NEAR
            };
            are_certain.push(!order.windows(2).take(per_row).any(is_near));
            order.truncate(per_row);
            let divisor: f64 = match is_normalized {
                true => order.iter().map(|expert| exponentials[*expert]).sum(),
                false => exponentials.iter().sum(),
            };
            let mut sum = vec![0.0; hidden];
            for expert in order {
                let gate_up = &self.gate_up[expert * 2 * width * hidden..(expert + 1) * 2 * width * hidden];
                let x = wide(x);
                let dot = |row: &[Bf16], of: &[f64]| -> f64 {
                    row.iter().zip(of).map(|(weight, number)| f64::from(f32::from(*weight)) * number).sum()
                };
                let both: Vec<f64> = gate_up.chunks(hidden).map(|row| dot(row, &x)).collect();
                let inner: Vec<f64> =
                    (0..width).map(|at| both[at] / (1.0 + (-both[at]).exp()) * both[width + at]).collect();
                let down = &self.down[expert * hidden * width..(expert + 1) * hidden * width];
                for (sum, row) in sum.iter_mut().zip(down.chunks(width)) {
                    *sum += dot(row, &inner) * exponentials[expert] / divisor;
                }
            }
            all.extend(sum);
        }
        (all, are_certain)
    }
}

/// The layer whose speed is measured: that of Qwen3-30B-A3B.
const MEASURED: ExpertSizes =
    ExpertSizes { hidden: 2048, width: 768, n_experts: 128, per_row: 8, is_normalized: true };
const N_LAUNCHES: usize = 20;
/// The number of layers in turn, so that weights are in no cache.
const N_LAYERS: usize = 4;

pub(crate) fn measure(card: &ComputeCard) -> Result<Vec<Value>, CudaError> {
    let ExpertSizes { hidden, width, n_experts, per_row, .. } = MEASURED;
    let mut draw = Draw::new(35);
    let mut layer = || -> Result<[Buffer<Bf16>; 3], CudaError> {
        Ok([
            card.upload(&draw.narrow(n_experts * hidden, 0.05))?,
            card.upload(&draw.many(n_experts * 2 * width * hidden, 0.02))?,
            card.upload(&draw.many(n_experts * hidden * width, 0.02))?,
        ])
    };
    let layers = (0..N_LAYERS).map(|_| layer()).collect::<Result<Vec<_>, _>>()?;
    let mut lines = vec![];
    for n_rows in [1, 8, 64, 256, 512, 1024, 8192] {
        let x = card.upload(&Draw::new(36).narrow(n_rows * hidden, 1.0))?;
        let (mut space, mut out) =
            (ExpertSpace::new(card, MEASURED, n_rows)?, card.buffer::<Bf16>(n_rows * hidden)?);
        for form in [ExpertsForm::Units, ExpertsForm::Tiles] {
            let is_far = (form == ExpertsForm::Tiles) != (n_rows > 512);
            if !card.has_many_rows() && form == ExpertsForm::Tiles || is_far && !(64..=1024).contains(&n_rows)
            {
                continue;
            }
            let time = seconds(card, N_LAUNCHES, |nth| {
                let [router, gate_up, down] = layers[nth % N_LAYERS].each_ref().map(Buffer::view);
                let layer = ExpertLayer { router, gate_up, down, sizes: MEASURED };
                card.gate_experts(form, layer, x.view(), &mut space)?;
                card.sum_experts(form, layer, out.view_mut(), &mut space)
            })?;
            let flop = (6 * n_rows * per_row * hidden * width) as f64;
            let what = format!("layer of experts, {n_rows} rows, {form:?}");
            eprintln!("{what}: {:.1} us, {:.1} TFLOP/s", time * 1e6, flop / time / 1e12);
            lines.push(json!({"what": what, "us": time * 1e6, "flop_per_s": flop / time}));
        }
    }
    Ok(lines)
}
