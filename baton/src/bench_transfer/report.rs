//! The reports of a run: a file, a table and plots.

use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::bench_transfer::case::{Blocks, Case, Digests, Layers};
use crate::bench_transfer::measure::CaseResult;
use crate::exit::CommandError;
use bench::error::{BenchError, read_text, write_text};
use bench::machine::{Machine, commit};
use bench::report::html::STYLE;
use bench::report::picture::picture;
use bench::report::plot::{Axis, Curve, Plot, Scale, Style, escape};
use bench::report::table::Table;

/// The results of one run, with a description of the machine.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TransferReport {
    pub command: String,
    pub commit: Option<String>,
    pub machine: Machine,
    pub measured: Vec<CaseResult>,
}

/// Runs on one machine that are reported together, because a long list of cases is measured a few at a time.
#[derive(Clone, Debug)]
pub struct TransferReports(Vec<TransferReport>);

/// The content of a result file: one run, or several.
#[derive(Serialize, Deserialize)]
#[serde(untagged)]
enum ResultFile {
    One(TransferReport),
    Several(Vec<TransferReport>),
}

impl TransferReport {
    pub fn new(command: String, measured: Vec<CaseResult>) -> Self {
        Self { command, commit: commit(), machine: Machine::here(), measured }
    }

    fn provenance(&self) -> String {
        let Machine { cpu, n_cores, memory_gib, kernel, .. } = &self.machine;
        let commit = self.commit.as_deref().unwrap_or("unknown");
        format!(
            "`{}`, commit {commit}, {cpu}, {n_cores} cores, {memory_gib} GiB, Linux {kernel}",
            self.command
        )
    }
}

impl From<TransferReport> for TransferReports {
    fn from(run: TransferReport) -> Self {
        Self(vec![run])
    }
}

impl TransferReports {
    /// Reads the runs in these files, in their order.
    pub fn read(paths: &[PathBuf]) -> Result<Self, CommandError> {
        let mut runs = Vec::new();
        for path in paths {
            match serde_json::from_str(&read_text(path).map_err(CommandError::work)?)
                .map_err(|error| CommandError::work(BenchError::parse(path, error)))?
            {
                ResultFile::One(run) => runs.push(run),
                ResultFile::Several(some) => runs.extend(some),
            }
        }
        Self(runs).checked()
    }

    fn checked(self) -> Result<Self, CommandError> {
        let machines = self.0.windows(2).map(|runs| (&runs[0].machine, &runs[1].machine));
        let place = |machine: &Machine| (machine.cpu.clone(), machine.n_cores, machine.gpus.clone());
        if machines.into_iter().any(|(one, other)| place(one) != place(other)) {
            return Err(CommandError::usage("these files are from different machines"));
        }
        let cases: Vec<&Case> = self.measured().map(|measured| &measured.case).collect();
        match cases.iter().enumerate().find(|(nth, case)| cases[..*nth].contains(case)) {
            Some((_, case)) => Err(CommandError::usage(format!("this was measured twice: {case:?}"))),
            None => Ok(self),
        }
    }

    pub fn write(&self, path: &Path) -> Result<(), CommandError> {
        let written = match &self.0[..] {
            [run] => ResultFile::One(run.clone()),
            runs => ResultFile::Several(runs.to_vec()),
        };
        let text = serde_json::to_string_pretty(&written).expect("numbers and names can be written");
        write_text(path, &(text + "\n")).map_err(CommandError::work)
    }

    /// Returns one sentence about machine and command for each run.
    pub fn provenance(&self) -> Vec<String> {
        self.0.iter().map(TransferReport::provenance).collect()
    }

    pub fn table(&self) -> Table {
        let names = [
            "connector",
            "size",
            "blocks",
            "layers",
            "digests",
            "GB/s",
            "plain GB/s",
            "ratio (quartiles)",
            "latency p50, p90",
            "processor time, plain",
        ];
        let header = names.iter().map(|name| (*name).to_owned()).collect();
        Table { header, rows: self.measured().map(row).collect() }
    }

    /// Returns the HTML page with the table and the plots.
    pub fn page(&self) -> String {
        let plots: String = self.plots().iter().map(Plot::to_svg).collect();
        let provenance: String =
            self.provenance().iter().map(|run| format!("<p>{}</p>\n", escape(run))).collect();
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>KV transfer</title>\n\
             <style>{STYLE}</style></head><body>\n<h1>KV transfer</h1>{provenance}<div class=\"plots\">{plots}</div>\n{}</body></html>\n",
            self.table().to_html()
        )
    }

    /// Returns the plots as one SVG.
    pub fn picture(&self) -> String {
        picture(&self.plots())
    }

    /// Returns the plots of rate over size, one for each placement of blocks.
    fn plots(&self) -> Vec<Plot> {
        let plots = [Blocks::Contiguous, Blocks::Scattered].map(|blocks| self.plot(blocks));
        plots.into_iter().filter(|plot| !plot.curves.is_empty()).collect()
    }

    fn plot(&self, blocks: Blocks) -> Plot {
        let mut curves: Vec<Curve> = Vec::new();
        for measured in self.measured().filter(|measured| measured.case.blocks == blocks) {
            let case = &measured.case;
            if case.layers == Layers::Streamed && self.has_at_once(case) {
                continue;
            }
            let mib = case.bytes as f64 / f64::from(1 << 20);
            let name = format!("{}, digests {}", case.wire(), word(&case.digests));
            add(&mut curves, name, Style::Dots, mib, measured.rate / 1e9);
            if case.digests == Digests::On && !case.tls {
                let plain = format!("plain ({})", case.connector);
                add(&mut curves, plain, Style::Dashed, mib, measured.plain_rate / 1e9);
            }
        }
        for curve in &mut curves {
            curve.points.sort_by(|(one, _), (other, _)| one.total_cmp(other));
        }
        Plot {
            title: format!("{} blocks: GB/s by MiB", word(&blocks)),
            x: Axis::new("MiB", Scale::Log),
            y: Axis::new("GB/s", Scale::Linear).including(&[0.0]),
            curves,
            marks: Vec::new(),
            shaded: None,
        }
    }

    fn has_at_once(&self, case: &Case) -> bool {
        let other = Case { layers: Layers::AtOnce, ..case.clone() };
        self.measured().any(|measured| measured.case == other)
    }

    fn measured(&self) -> impl Iterator<Item = &CaseResult> {
        self.0.iter().flat_map(|run| &run.measured)
    }
}

fn add(curves: &mut Vec<Curve>, name: String, style: Style, x: f64, y: f64) {
    let point = (x, y);
    match curves.iter_mut().find(|curve| curve.name == name) {
        Some(curve) => curve.points.push(point),
        None => curves.push(Curve { name, colour: curves.len(), points: vec![point], style }),
    }
}

fn row(measured: &CaseResult) -> Vec<String> {
    let case = &measured.case;
    vec![
        case.wire(),
        size(case.bytes),
        word(&case.blocks),
        word(&case.layers),
        word(&case.digests),
        format!("{:.2}", measured.rate / 1e9),
        format!("{:.2}", measured.plain_rate / 1e9),
        format!("{:.2} ({:.2} – {:.2})", measured.ratio, measured.ratio_low, measured.ratio_high),
        format!("{}, {}", time(measured.latency_us_p50), time(measured.latency_us_p90)),
        format!("{}, {}", time(measured.processor_us_p50), time(measured.plain_processor_us_p50)),
    ]
}

fn word(value: &impl clap::ValueEnum) -> String {
    value.to_possible_value().map_or_else(String::new, |value| value.get_name().to_owned())
}

fn size(bytes: u64) -> String {
    match bytes {
        bytes if bytes >= 1 << 30 => format!("{} GiB", bytes >> 30),
        bytes if bytes >= 1 << 20 => format!("{} MiB", bytes >> 20),
        bytes => format!("{} KiB", bytes >> 10),
    }
}

fn time(us: f64) -> String {
    if us < 1e3 { format!("{us:.0} µs") } else { format!("{:.1} ms", us / 1e3) }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn measured(bytes: u64, digests: Digests) -> CaseResult {
        let (connector, blocks, layers) = ("shm".to_owned(), Blocks::Contiguous, Layers::AtOnce);
        CaseResult {
            case: Case {
                connector,
                bytes,
                blocks,
                layers,
                digests,
                streams: 2,
                memory: crate::bench_transfer::case::Memory::Host,
                tls: false,
            },
            n_pairs: 5,
            rate: 8e9,
            plain_rate: 1e10,
            ratio: 0.8,
            ratio_low: 0.79,
            ratio_high: 0.82,
            latency_us_p50: 134_000.0,
            latency_us_p90: 140_000.0,
            plain_us_p50: 107_000.0,
            processor_us_p50: 240_000.0,
            plain_processor_us_p50: 200_000.0,
        }
    }

    #[test]
    fn a_row_says_what_and_how_fast() {
        let expected = [
            "shm",
            "1 GiB",
            "contiguous",
            "at-once",
            "on",
            "8.00",
            "10.00",
            "0.80 (0.79 – 0.82)",
            "134.0 ms, 140.0 ms",
            "240.0 ms, 200.0 ms",
        ];
        assert_eq!(row(&measured(1 << 30, Digests::On)), expected);
    }

    fn run(measured: Vec<CaseResult>) -> TransferReport {
        TransferReport::new("baton bench transfer".to_owned(), measured)
    }

    fn written(runs: Vec<TransferReport>) -> tempfile::NamedTempFile {
        let file = tempfile::NamedTempFile::new().expect("a file");
        TransferReports(runs).write(file.path()).expect("written");
        file
    }

    #[test]
    fn reports_are_read_as_they_were_written_and_told_as_one() {
        let one = written(vec![run(vec![measured(1 << 30, Digests::On), measured(1 << 30, Digests::Off)])]);
        let two = written(vec![run(vec![measured(1 << 20, Digests::On)]), run(vec![])]);
        let all = [one.path().to_owned(), two.path().to_owned()];
        let read = TransferReports::read(&all).expect("read");
        assert_eq!((read.table().rows.len(), read.provenance().len()), (3, 3));
        let plot = read.plot(Blocks::Contiguous);
        let curve = |curve: &Curve| (curve.name.clone(), curve.points.clone());
        let expected = [
            ("shm, digests on".to_owned(), vec![(1.0, 8.0), (1024.0, 8.0)]),
            ("plain (shm)".to_owned(), vec![(1.0, 10.0), (1024.0, 10.0)]),
            ("shm, digests off".to_owned(), vec![(1024.0, 8.0)]),
        ];
        assert_eq!(plot.curves.iter().map(curve).collect::<Vec<_>>(), expected);
        assert!(read.page().contains("contiguous blocks") && read.picture().contains("contiguous blocks"));
    }

    #[test]
    fn what_does_not_belong_together_is_refused() {
        let one = || run(vec![measured(1 << 20, Digests::On)]);
        let mut elsewhere = run(vec![measured(1 << 30, Digests::On)]);
        elsewhere.machine.n_cores += 1;
        for (other, reason) in [(one(), "twice"), (elsewhere, "different machines")] {
            let files = [written(vec![one()]), written(vec![other])];
            let error = TransferReports::read(&files.each_ref().map(|file| file.path().to_owned()));
            let error = format!("{:?}", error.expect_err("refused"));
            assert!(error.contains(reason), "{error}");
        }
    }
}
