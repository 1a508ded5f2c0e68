//! Writes the results of `baton bench engine` as text.

use std::io::Write as _;

use engine::backend::cuda::{CudaLimits, DecodeProfile, LoadReport};
use engine::measure::Measurements;

use super::Report;

/// Writes results to standard output. A reader that has closed the pipe is no error.
pub(super) fn say(report: &Report) {
    let mut text = String::new();
    if let Some(LoadReport { bytes, seconds }) = report.loaded {
        let gb = bytes as f64 / 1e9;
        text.push_str(&format!("weights of {gb:.2} GB loaded in {seconds:.2} s: {:.2} GB/s\n", gb / seconds));
    }
    if let Some(limits) = &report.limits {
        text.push_str(&of_limits(limits));
    }
    if let Some(measured) = &report.measured {
        text.push_str(&of_measured(measured));
    }
    report.profiles.iter().for_each(|profile| text.push_str(&of_profile(profile)));
    let _ = write!(std::io::stdout().lock(), "{text}");
}

/// Writes a message about the run, such as its progress, to standard error.
pub(super) fn tell(line: &str) {
    let _ = writeln!(std::io::stderr().lock(), "{line}");
}

fn of_limits(limits: &CudaLimits) -> String {
    let mut text = format!(
        "{}: weights of {:.2} GB read at {:.2} TB/s\n",
        limits.gpu,
        limits.weight_bytes as f64 / 1e9,
        limits.read_bytes_per_s / 1e12
    );
    for rate in &limits.products {
        text.push_str(&format!(
            "products of all layers, {:>5} rows: {:>8.3} ms, {:>6.1} TFLOP/s, {:>5.2} TB/s of weights\n",
            rate.rows,
            rate.ms,
            rate.flop_per_s / 1e12,
            rate.weight_bytes_per_s / 1e12
        ));
    }
    text
}

fn of_measured(measured: &Measurements) -> String {
    let mut text = String::new();
    for times in &measured.decode {
        text.push_str(&format!(
            "decode step, {:>4} rows of {} tokens, {}: {:>9.3} ms (p99 {:.3})\n",
            times.rows, times.context_tokens, times.drawn_by, times.step_ms.median, times.step_ms.p99
        ));
    }
    for times in &measured.prompts {
        text.push_str(&format!(
            "first token of a prompt of {:>6}: {:>9.2} ms\n",
            times.prompt_tokens, times.ttft_ms.median
        ));
    }
    if let Some(offline) = &measured.offline {
        text.push_str(&format!(
            "{} requests of {} in, {} out, at once: {:.2} requests/s\n",
            offline.of.n_requests, offline.of.prompt_tokens, offline.of.output_tokens, offline.requests_per_s
        ));
    }
    text
}

fn of_profile(profile: &DecodeProfile) -> String {
    let parts: Vec<String> = profile.parts.iter().map(|(name, ms)| format!("{name} {ms:.3}")).collect();
    format!("{} rows of {}, {:.3} ms: {}\n", profile.rows, profile.length, profile.step_ms, parts.join(", "))
}
