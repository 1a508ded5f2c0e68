//! Bootstrap intervals: resampling shows whether a difference between two runs is more than noise.
//!
//! The resampled units are independent: a request when two runs are compared, a pair of slices when two
//! targets were measured interleaved. The gaps of one request stay together, because they depend on each
//! other.

use serde::{Deserialize, Serialize};

use crate::metrics::distribution::{mean, open_number, percentile};
use crate::random::Random;

const N_RESAMPLES: usize = 1000;
/// The percentage of resamples outside the interval on each side, which makes it a 95 % interval.
const TAIL_PERCENT: f64 = 2.5;

/// The ratio of a bin's upper to its lower bound. Half a percent is far finer than any interval that matters.
const BIN_RATIO: f64 = 1.005;
const BIN_LOW_MS: f64 = 1e-3;
const N_BINS: usize = 4800;
const INFINITE_BIN: usize = N_BINS - 1;

/// The statistic of two sets of samples that is compared.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Statistic {
    Mean,
    Percentile(f64),
}

/// The samples of one side, grouped by unit.
pub type Units = Vec<Vec<f64>>;

/// One statistic of two sides, A and B, with the interval of its ratio.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Contrast {
    pub name: String,
    #[serde(with = "open_number")]
    pub a: f64,
    #[serde(with = "open_number")]
    pub b: f64,
    /// The ratio `b` ÷ `a`.
    #[serde(with = "open_number")]
    pub ratio: f64,
    #[serde(with = "open_number")]
    pub low: f64,
    #[serde(with = "open_number")]
    pub high: f64,
}

impl Contrast {
    /// Returns whether the interval of the ratio excludes 1, so that the difference is more than noise.
    pub fn is_more_than_noise(&self) -> bool {
        self.low > 1.0 || self.high < 1.0
    }

    pub fn verdict(&self) -> String {
        let percent = (self.ratio - 1.0) * 100.0;
        match () {
            () if !self.ratio.is_finite() || !self.low.is_finite() => "cannot be told".to_owned(),
            () if !self.is_more_than_noise() => "within noise".to_owned(),
            () => format!("B is {percent:+.1} %"),
        }
    }
}

/// How the units of two sides are resampled.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Resampling {
    /// The units of each side are resampled by themselves.
    Independent,
    /// Unit `n` of both sides is resampled together, because the same disturbance may affect both.
    Paired,
}

/// Compares one metric of two sides by several statistics. `name` is the metric's name.
pub fn contrasts(
    name: &str,
    a: &Units,
    b: &Units,
    statistics: &[Statistic],
    resampling: Resampling,
) -> Vec<Contrast> {
    let (bins_a, bins_b) = (Bins::of(a), Bins::of(b));
    let mut random = Random::stream(0xb007, 0);
    let mut ratios = vec![Vec::with_capacity(N_RESAMPLES); statistics.len()];
    for _ in 0..N_RESAMPLES {
        let chosen_a = draw(a.len(), &mut random);
        let chosen_b =
            if resampling == Resampling::Paired { chosen_a.clone() } else { draw(b.len(), &mut random) };
        let (pool_a, pool_b) = (bins_a.pool(&chosen_a), bins_b.pool(&chosen_b));
        for (statistic, ratios) in statistics.iter().zip(&mut ratios) {
            ratios.push(pool_b.statistic(*statistic) / pool_a.statistic(*statistic));
        }
    }
    let (flat_a, flat_b) = (flat(a), flat(b));
    let contrast =
        |(statistic, ratios): (&Statistic, Vec<f64>)| contrast(name, *statistic, &flat_a, &flat_b, ratios);
    statistics.iter().zip(ratios).map(contrast).collect()
}

fn contrast(name: &str, statistic: Statistic, a: &[f64], b: &[f64], mut ratios: Vec<f64>) -> Contrast {
    ratios.retain(|ratio| !ratio.is_nan());
    ratios.sort_unstable_by(f64::total_cmp);
    let (a, b) = (statistic.of(a), statistic.of(b));
    Contrast {
        name: format!("{name} {}", statistic.name()),
        a,
        b,
        ratio: b / a,
        low: percentile(&ratios, TAIL_PERCENT),
        high: percentile(&ratios, 100.0 - TAIL_PERCENT),
    }
}

fn draw(n: usize, random: &mut Random) -> Vec<usize> {
    (0..n).map(|_| random.below(n as u64) as usize).collect()
}

fn flat(units: &Units) -> Vec<f64> {
    let mut all = units.concat();
    all.sort_unstable_by(f64::total_cmp);
    all
}

impl Statistic {
    pub fn name(self) -> String {
        match self {
            Statistic::Mean => "mean".to_owned(),
            Statistic::Percentile(percent) => format!("p{percent}"),
        }
    }

    fn of(self, sorted: &[f64]) -> f64 {
        match self {
            Statistic::Mean => mean(sorted),
            Statistic::Percentile(percent) => percentile(sorted, percent),
        }
    }
}

/// The samples of each unit as (bin, count), with their sum, so that adding up units is quick.
struct Bins(Vec<UnitBins>);

struct UnitBins {
    bins: Vec<(u16, u32)>,
    sum: f64,
}

/// The samples of several units together.
struct ResampledUnits {
    counts: Vec<u32>,
    n: u64,
    sum: f64,
}

impl Bins {
    fn of(units: &Units) -> Self {
        Self(units.iter().map(|samples| UnitBins::of(samples)).collect())
    }

    fn pool(&self, chosen: &[usize]) -> ResampledUnits {
        let mut pool = ResampledUnits { counts: vec![0; N_BINS], n: 0, sum: 0.0 };
        for unit in chosen.iter().map(|nth| &self.0[*nth]) {
            pool.sum += unit.sum;
            for (bin, count) in &unit.bins {
                pool.counts[usize::from(*bin)] += count;
                pool.n += u64::from(*count);
            }
        }
        pool
    }
}

impl UnitBins {
    fn of(samples: &[f64]) -> Self {
        let mut sorted: Vec<_> = samples.iter().map(|sample| bin(*sample)).collect();
        sorted.sort_unstable();
        let bins = sorted.chunk_by(|one, other| one == other).map(|run| (run[0], run.len() as u32)).collect();
        Self { bins, sum: samples.iter().sum() }
    }
}

impl ResampledUnits {
    fn statistic(&self, statistic: Statistic) -> f64 {
        match statistic {
            Statistic::Mean => self.sum / self.n as f64,
            Statistic::Percentile(percent) => self.percentile(percent),
        }
    }

    fn percentile(&self, percent: f64) -> f64 {
        let rank = (percent / 100.0 * self.n.saturating_sub(1) as f64).round() as u64;
        let mut seen = 0;
        let found = self.counts.iter().position(|count| {
            seen += u64::from(*count);
            seen > rank
        });
        found.map_or(f64::NAN, bin_value)
    }
}

fn bin(sample: f64) -> u16 {
    match sample {
        sample if sample.is_infinite() => INFINITE_BIN as u16,
        sample if sample <= BIN_LOW_MS => 0,
        sample => 1 + ((sample / BIN_LOW_MS).ln() / BIN_RATIO.ln()).min((INFINITE_BIN - 2) as f64) as u16,
    }
}

fn bin_value(bin: usize) -> f64 {
    match bin {
        0 => BIN_LOW_MS / 2.0,
        INFINITE_BIN => f64::INFINITY,
        bin => BIN_LOW_MS * BIN_RATIO.powf(bin as f64 - 0.5),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const BOTH: [Statistic; 2] = [Statistic::Percentile(50.0), Statistic::Mean];

    fn lognormal(n: usize, median: f64, seed: u64) -> Units {
        let mut random = Random::stream(seed, 1);
        (0..n).map(|_| vec![median * (0.3 * random.normal()).exp()]).collect()
    }

    #[test]
    fn a_bin_holds_its_value() {
        for value in [0.002, 0.5, 1.0, 37.0, 12_345.0] {
            assert!((bin_value(usize::from(bin(value))) / value - 1.0).abs() < 0.003, "{value}");
        }
        assert_eq!(bin_value(usize::from(bin(f64::INFINITY))), f64::INFINITY);
    }

    #[test]
    fn a_real_difference_is_seen_and_its_size_is_within_the_interval() {
        let found = contrasts(
            "x",
            &lognormal(400, 10.0, 1),
            &lognormal(400, 12.0, 2),
            &BOTH,
            Resampling::Independent,
        );
        for contrast in found {
            assert!(
                contrast.is_more_than_noise() && contrast.low < 1.2 && 1.2 < contrast.high,
                "{contrast:?}"
            );
        }
    }

    /// Compares noise with noise fifty times. Two or three comparisons may find a difference.
    #[test]
    fn noise_is_called_noise() {
        let wrong = (0..50).filter(|seed| {
            let (a, b) = (lognormal(100, 10.0, seed * 2), lognormal(100, 10.0, seed * 2 + 1));
            contrasts("x", &a, &b, &BOTH[..1], Resampling::Independent)[0].is_more_than_noise()
        });
        assert!(wrong.count() <= 7);
    }

    #[test]
    fn pairs_see_through_what_disturbs_both() {
        let mut random = Random::stream(5, 5);
        let weather: Vec<f64> = (0..30).map(|_| (random.normal()).exp() * 10.0).collect();
        let a: Units = weather.iter().map(|w| vec![*w]).collect();
        let b: Units = weather.iter().map(|w| vec![w * 1.1]).collect();
        let mean = [Statistic::Mean];
        assert!(contrasts("x", &a, &b, &mean, Resampling::Paired)[0].is_more_than_noise());
        assert!(!contrasts("x", &a, &b, &mean, Resampling::Independent)[0].is_more_than_noise());
    }

    #[test]
    fn failures_make_a_tail_infinite_and_say_so() {
        let (a, mut b) = (lognormal(100, 10.0, 1), lognormal(100, 10.0, 2));
        b.iter_mut().take(10).for_each(|unit| unit[0] = f64::INFINITY);
        let contrast = &contrasts("x", &a, &b, &[Statistic::Percentile(99.0)], Resampling::Independent)[0];
        assert_eq!((contrast.b, contrast.verdict().as_str()), (f64::INFINITY, "cannot be told"));
    }
}
