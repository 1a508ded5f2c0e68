//! Writes an HTML page about runs as one file, without scripts, fonts or network requests.

use std::fmt::Write as _;

use crate::error::Result;
use crate::metrics::Metric;
use crate::record::RequestRecord;
use crate::report::plot::{Axis, Curve, Plot, Scale, Style, escape};
use crate::report::{RunReport, markdown};

/// The number of points in the curve of a distribution.
const N_POINTS: usize = 300;
const N_BUCKETS: u64 = 200;
/// The smallest number of runs for which the trade-off is drawn.
const N_TRADE_OFF_MIN: usize = 3;
/// The style sheet of every page.
pub const STYLE: &str = include_str!("style.css");

/// The metrics whose distributions are drawn, each with the shape of its curve.
const DRAWN: [(Metric, Shape); 6] = [
    (Metric::Ttft, Shape::Cumulative),
    (Metric::SecondToken, Shape::Cumulative),
    (Metric::Handover, Shape::Cumulative),
    (Metric::Tbt, Shape::Tail),
    (Metric::WorstGap, Shape::Cumulative),
    (Metric::E2el, Shape::Cumulative),
];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Shape {
    /// The share of samples up to x.
    Cumulative,
    /// The share of samples above x, on a log scale, so that one stall in a thousand is visible.
    Tail,
}

/// Returns the HTML page, with its title.
pub fn page(title: &str, runs: &[RunReport]) -> Result<String> {
    let records: Vec<_> = runs.iter().map(RunReport::records).collect::<Result<_>>()?;
    let mut page = format!(
        "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\">\
         <meta name=\"viewport\" content=\"width=device-width\"><title>{}</title>\n<style>{STYLE}</style></head><body>\n",
        escape(title)
    );
    let _ = writeln!(page, "<h1>{}</h1>", escape(title));
    verdict(&mut page, runs);
    table(&mut page, runs);
    section(&mut page, "Latency", distributions(runs, &records));
    section(&mut page, "Throughput against latency", trade_offs(runs));
    section(&mut page, "Timeline", timelines(runs, &records));
    provenance(&mut page, runs);
    page.push_str("</body></html>\n");
    Ok(page)
}

fn verdict(page: &mut String, runs: &[RunReport]) {
    for run in runs.iter().filter(|run| !run.valid) {
        let reasons = escape(&run.lag.invalid_because.join("; "));
        let _ = writeln!(page, "<p class=\"invalid\">{} is not valid: {reasons}</p>", escape(&run.label));
    }
}

fn table(page: &mut String, runs: &[RunReport]) {
    page.push_str(&markdown::table(runs).to_html());
    let remarks = markdown::remarks(runs);
    if !remarks.is_empty() {
        let items: String = remarks.iter().map(|remark| format!("<li>{}</li>", escape(remark))).collect();
        let _ = writeln!(page, "<ul>{items}</ul>");
    }
}

fn section(page: &mut String, title: &str, plots: Vec<Plot>) {
    if !plots.is_empty() {
        let drawn: String = plots.iter().map(Plot::to_svg).collect();
        let _ = writeln!(page, "<h2>{title}</h2><div class=\"plots\">{drawn}</div>");
    }
}

fn distributions(runs: &[RunReport], records: &[Vec<RequestRecord>]) -> Vec<Plot> {
    DRAWN.iter().map(|(metric, shape)| distribution(*metric, *shape, runs, records)).collect()
}

fn distribution(metric: Metric, shape: Shape, runs: &[RunReport], records: &[Vec<RequestRecord>]) -> Plot {
    let curve = |(nth, (run, records)): (usize, (&RunReport, &Vec<RequestRecord>))| {
        let mut samples = metric.samples(run.window.of(records).into_iter());
        samples.sort_unstable_by(f64::total_cmp);
        Curve { name: run.label.clone(), colour: nth, points: shape.points(&samples), style: Style::Line }
    };
    let y = match shape {
        Shape::Cumulative => Axis::new("share of requests within", Scale::Linear).including(&[0.0, 1.0]),
        Shape::Tail => Axis::new("share of gaps longer", Scale::Log).including(&[1.0]),
    };
    Plot {
        title: metric.title().to_owned(),
        x: Axis::new("milliseconds", Scale::Log),
        y,
        curves: runs.iter().zip(records).enumerate().map(curve).collect(),
        marks: Vec::new(),
        shaded: None,
    }
}

impl Shape {
    /// Returns the points of the curve over sorted samples. Failures are beyond every x: their curve stays
    /// below 1, or above 0.
    fn points(self, sorted: &[f64]) -> Vec<(f64, f64)> {
        let n = sorted.len();
        let ranks: Vec<usize> = match self {
            Shape::Cumulative => {
                (0..N_POINTS.min(n)).map(|nth| nth * (n - 1) / (N_POINTS.min(n) - 1).max(1)).collect()
            }
            Shape::Tail => tail_ranks(n),
        };
        let share = |rank: usize| match self {
            Shape::Cumulative => (rank + 1) as f64 / n as f64,
            Shape::Tail => (n - rank) as f64 / n as f64,
        };
        ranks.into_iter().map(|rank| (sorted[rank], share(rank))).filter(|(x, _)| *x > 0.0).collect()
    }
}

/// Returns ranks at even distances on a log scale of the share above them.
fn tail_ranks(n: usize) -> Vec<usize> {
    let step = (n as f64).ln() / N_POINTS as f64;
    let mut ranks: Vec<usize> = (0..=N_POINTS)
        .map(|nth| n - ((step * nth as f64).exp() as usize).clamp(1, n.max(1)).min(n))
        .collect();
    ranks.retain(|rank| *rank < n);
    ranks.reverse();
    ranks.dedup();
    ranks
}

/// Returns the plots of latency over throughput. Each sweep has one curve, with a point for each of its runs
/// in the order of throughput.
fn trade_offs(runs: &[RunReport]) -> Vec<Plot> {
    if runs.len() < N_TRADE_OFF_MIN {
        return Vec::new();
    }
    [Metric::Ttft, Metric::SecondToken, Metric::Tbt, Metric::WorstGap]
        .map(|metric| trade_off(metric, runs))
        .to_vec()
}

fn trade_off(metric: Metric, runs: &[RunReport]) -> Plot {
    let mut sweeps: Vec<&str> = runs.iter().map(|run| sweep_of(&run.label)).collect();
    sweeps.dedup();
    let mut curves = Vec::new();
    for sweep in sweeps {
        let members: Vec<_> = runs.iter().filter(|run| sweep_of(&run.label) == sweep).collect();
        for (name, percent) in [("p50", 50), ("p99", 99)] {
            let name = format!("{sweep} {name}").trim().to_owned();
            curves.push(Curve {
                name,
                colour: curves.len(),
                points: knee(&members, metric, percent),
                style: Style::Dots,
            });
        }
    }
    Plot {
        title: metric.title().to_owned(),
        x: Axis::new("output tokens/s", Scale::Linear).including(&[0.0]),
        y: Axis::new("milliseconds", Scale::Log),
        curves,
        marks: Vec::new(),
        shaded: None,
    }
}

/// Returns the name of the sweep in a run's label: `remote rate=4` is a point of the sweep `remote`.
fn sweep_of(label: &str) -> &str {
    match label.rsplit_once(' ') {
        Some((sweep, point)) if point.contains('=') => sweep,
        None if label.contains('=') => "",
        _ => label,
    }
}

fn knee(runs: &[&RunReport], metric: Metric, percent: u32) -> Vec<(f64, f64)> {
    let of = |run: &RunReport| if percent == 50 { run.latency(metric).p50 } else { run.latency(metric).p99 };
    let mut points: Vec<_> = runs.iter().map(|run| (run.rates.output_tokens_per_s, of(run))).collect();
    points.sort_by(|one, other| one.0.total_cmp(&other.0));
    points
}

fn timelines(runs: &[RunReport], records: &[Vec<RequestRecord>]) -> Vec<Plot> {
    runs.iter()
        .zip(records)
        .flat_map(|(run, records)| [token_timeline(run, records), request_timeline(run, records)])
        .collect()
}

/// Values in even buckets over the whole run, for a timeline.
struct Buckets {
    width_us: u64,
    values: Vec<f64>,
}

impl Buckets {
    fn over(records: &[RequestRecord]) -> Self {
        let end_us = records.iter().map(RequestRecord::ended_at_us).max().unwrap_or(0);
        let width_us = (end_us / N_BUCKETS).max(100_000);
        Self { width_us, values: vec![0.0; (end_us / width_us + 1) as usize] }
    }

    fn add(&mut self, at_us: u64, value: f64) {
        let last = self.values.len() - 1;
        self.values[((at_us / self.width_us) as usize).min(last)] += value;
    }

    fn points(&self, scale: f64) -> Vec<(f64, f64)> {
        let at = |nth: usize| (nth as f64 + 0.5) * self.width_us as f64 / 1e6;
        self.values.iter().enumerate().map(|(nth, value)| (at(nth), value * scale)).collect()
    }
}

fn token_timeline(run: &RunReport, records: &[RequestRecord]) -> Plot {
    let mut tokens = Buckets::over(records);
    for record in records {
        for chunk in record.deliveries() {
            tokens.add(record.intended_us + u64::from(chunk.at_us), f64::from(chunk.tokens));
        }
    }
    let per_second = 1e6 / tokens.width_us as f64;
    let curve =
        Curve { name: String::new(), colour: 0, points: tokens.points(per_second), style: Style::Line };
    timeline(format!("{}: tokens delivered", run.label), "tokens/s", vec![curve], run)
}

fn request_timeline(run: &RunReport, records: &[RequestRecord]) -> Plot {
    let (mut under_way, mut failed) = (Buckets::over(records), Buckets::over(records));
    let width_us = under_way.width_us;
    for record in records {
        let (from, to) = (record.intended_us / width_us, record.ended_at_us() / width_us);
        (from..=to).for_each(|bucket| under_way.add(bucket * width_us, 1.0));
        failed.add(record.ended_at_us(), f64::from(u8::from(record.failure().is_some())));
    }
    let curve = |name: &str, colour, buckets: &Buckets| Curve {
        name: name.to_owned(),
        colour,
        points: buckets.points(1.0),
        style: Style::Line,
    };
    let mut curves = vec![curve("under way", 0, &under_way)];
    if records.iter().any(|record| record.failure().is_some()) {
        curves.push(curve("failed", 1, &failed));
    }
    timeline(format!("{}: requests", run.label), "requests", curves, run)
}

fn timeline(title: String, unit: &str, curves: Vec<Curve>, run: &RunReport) -> Plot {
    let window = run.window;
    Plot {
        title,
        x: Axis::new("seconds", Scale::Linear).including(&[0.0]),
        y: Axis::new(unit, Scale::Linear).including(&[0.0]),
        curves,
        marks: run.faults.iter().map(|fault| (fault.at_us as f64 / 1e6, fault.what.clone())).collect(),
        shaded: window.is_cut.then_some((window.start_us as f64 / 1e6, window.end_us as f64 / 1e6)),
    }
}

fn provenance(page: &mut String, runs: &[RunReport]) {
    page.push_str("<h2>How it was measured</h2>\n<ul>");
    for run in runs {
        let _ = writeln!(page, "<li>{}</li>", escape(&markdown::provenance(run)));
    }
    page.push_str("</ul>\n<p>Times count from the moment a request should have been sent. A failed request is infinitely late. \
                   Attainment is over requests sent.</p>\n");
}
