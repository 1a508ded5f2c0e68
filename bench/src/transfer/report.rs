//! What is said of a run: a file, a table and a plot.

use serde::{Deserialize, Serialize};

use crate::error::{BenchError, Result, read_text, write_text};
use crate::machine::{Machine, commit};
use crate::report::plot::{Axis, Curve, Plot, Scale, Style, escape};
use crate::report::table::Table;
use crate::transfer::case::{Blocks, Case, Digests, Layers};
use crate::transfer::measure::Measured;

const STYLE: &str = include_str!("../report/style.css");

/// All cases of one run, and where it was.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub struct TransferReport {
    pub command: String,
    pub commit: Option<String>,
    pub machine: Machine,
    pub measured: Vec<Measured>,
}

impl TransferReport {
    pub fn new(command: String, measured: Vec<Measured>) -> Self {
        Self { command, commit: commit(), machine: Machine::here(), measured }
    }

    pub fn read(path: &std::path::Path) -> Result<Self> {
        serde_json::from_str(&read_text(path)?).map_err(|error| BenchError::parse(path, error))
    }

    pub fn write(&self, path: &std::path::Path) -> Result<()> {
        let text = serde_json::to_string_pretty(self).expect("numbers and names can be written");
        write_text(path, &(text + "\n"))
    }

    pub fn provenance(&self) -> String {
        let Machine { cpu, n_cores, memory_gib, kernel, .. } = &self.machine;
        let commit = self.commit.as_deref().unwrap_or("unknown");
        format!(
            "`{}`, commit {commit}, {cpu}, {n_cores} cores, {memory_gib} GiB, Linux {kernel}",
            self.command
        )
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
        Table { header, rows: self.measured.iter().map(row).collect() }
    }

    /// Rates over sizes, one plot for each way in which blocks lie.
    pub fn page(&self) -> String {
        let plots: String = [Blocks::Contiguous, Blocks::Scattered]
            .into_iter()
            .map(|blocks| self.plot(blocks))
            .filter(|plot| !plot.curves.is_empty())
            .map(|plot| plot.to_svg())
            .collect();
        format!(
            "<!doctype html>\n<html lang=\"en\"><head><meta charset=\"utf-8\"><title>KV transfer</title>\n\
             <style>{STYLE}</style></head><body>\n<h1>KV transfer</h1><p>{}</p>\n<div class=\"plots\">{plots}</div>\n{}</body></html>\n",
            escape(&self.provenance()),
            self.table().to_html()
        )
    }

    fn plot(&self, blocks: Blocks) -> Plot {
        let mut curves: Vec<Curve> = Vec::new();
        for measured in self.measured.iter().filter(|measured| measured.case.blocks == blocks) {
            let case = &measured.case;
            if case.layers == Layers::Streamed && self.has_at_once(case) {
                continue;
            }
            let name = format!("{}, digests {}", case.connector, word(&case.digests));
            add(&mut curves, name, Style::Dots, (case.bytes as f64, measured.rate / 1e9));
            if case.digests == Digests::On {
                let plain = format!("plain ({})", case.connector);
                add(&mut curves, plain, Style::Dashed, (case.bytes as f64, measured.plain_rate / 1e9));
            }
        }
        Plot {
            title: format!("{} blocks", word(&blocks)),
            x: Axis::new("bytes", Scale::Log),
            y: Axis::new("GB/s", Scale::Linear).including(&[0.0]),
            curves,
            marks: Vec::new(),
            shaded: None,
        }
    }

    fn has_at_once(&self, case: &Case) -> bool {
        let other = Case { layers: Layers::AtOnce, ..case.clone() };
        self.measured.iter().any(|measured| measured.case == other)
    }
}

fn add(curves: &mut Vec<Curve>, name: String, style: Style, point: (f64, f64)) {
    match curves.iter_mut().find(|curve| curve.name == name) {
        Some(curve) => curve.points.push(point),
        None => curves.push(Curve { name, colour: curves.len(), points: vec![point], style }),
    }
}

fn row(measured: &Measured) -> Vec<String> {
    let case = &measured.case;
    vec![
        case.connector.clone(),
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

    fn measured(bytes: u64, digests: Digests) -> Measured {
        let (connector, blocks, layers) = ("shm".to_owned(), Blocks::Contiguous, Layers::AtOnce);
        Measured {
            case: Case {
                connector,
                bytes,
                blocks,
                layers,
                digests,
                streams: 2,
                memory: crate::transfer::case::Memory::Host,
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

    #[test]
    fn a_report_is_read_as_it_was_written() {
        let cases = vec![
            measured(1 << 20, Digests::On),
            measured(1 << 20, Digests::Off),
            measured(1 << 30, Digests::On),
        ];
        let report = TransferReport::new("baton bench transfer".to_owned(), cases);
        let file = tempfile::NamedTempFile::new().expect("a file");
        report.write(file.path()).expect("written");
        let read = TransferReport::read(file.path()).expect("read");
        assert_eq!(read.table(), report.table());
        let plot = read.plot(Blocks::Contiguous);
        let names: Vec<_> =
            plot.curves.iter().map(|curve| (curve.name.as_str(), curve.points.len())).collect();
        assert_eq!(names, [("shm, digests on", 2), ("plain (shm)", 2), ("shm, digests off", 1)]);
        assert!(read.page().contains("contiguous blocks"));
    }
}
