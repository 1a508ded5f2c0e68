//! The distance of a kernel's output from the reference, and its bound.

use std::fmt;

use baton_kernels::cuda::KvNumber;
use serde_json::{Value, json};

/// The bound of ‖output − reference‖ ÷ ‖reference‖ for rounding to bf16.
pub(crate) const BF16_ERROR: f64 = 6e-3;
/// The bound for rounding to 8 bits (e4m3), with 3 bits of mantissa.
const FP8_ERROR: f64 = 3.5e-2;

/// Returns the bound for numbers of KV.
pub(crate) fn error_of(number: KvNumber) -> f64 {
    match number {
        KvNumber::Bf16 => BF16_ERROR,
        KvNumber::Fp8 => FP8_ERROR,
    }
}

#[derive(Default)]
pub(crate) struct Verdicts(Vec<Verdict>);

struct Verdict {
    name: String,
    error: f64,
    bound: f64,
}

impl Verdicts {
    /// Compares all numbers. NaN is infinitely wrong unless the reference is NaN too.
    pub(crate) fn compare(&mut self, name: impl Into<String>, answer: &[f64], reference: &[f64], bound: f64) {
        let mut difference = 0.0;
        let mut size = 0.0;
        for (a, b) in answer.iter().zip(reference) {
            difference += (a - b) * (a - b);
            size += b * b;
        }
        let is_whole = answer.len() == reference.len() && f64::is_finite(difference);
        let error = if is_whole { (difference / size.max(1e-30)).sqrt() } else { f64::INFINITY };
        self.push(name.into(), error, bound);
    }

    /// Records whether a condition holds.
    pub(crate) fn holds(&mut self, name: impl Into<String>, holds: bool) {
        self.push(name.into(), if holds { 0.0 } else { f64::INFINITY }, 0.0);
    }

    /// Returns whether all checks passed. Without any check, the result is a failure.
    pub(crate) fn are_all_right(&self) -> bool {
        !self.0.is_empty() && self.0.iter().all(Verdict::is_right)
    }

    pub(crate) fn to_json(&self) -> Value {
        let checks = self.0.iter().map(|verdict| {
            json!({"name": verdict.name, "right": verdict.is_right(),
                   "relative_error": verdict.error.min(1e30), "bound": verdict.bound})
        });
        checks.collect()
    }

    fn push(&mut self, name: String, error: f64, bound: f64) {
        let verdict = Verdict { name, error, bound };
        if !verdict.is_right() {
            eprintln!("{verdict}");
        }
        self.0.push(verdict);
    }
}

impl Verdict {
    fn is_right(&self) -> bool {
        self.error <= self.bound
    }
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let word = if self.is_right() { "right" } else { "WRONG" };
        write!(f, "{word} {}: {:.2e} of at most {:.0e}", self.name, self.error, self.bound)
    }
}

impl fmt::Display for Verdicts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let n_wrong = self.0.iter().filter(|verdict| !verdict.is_right()).count();
        write!(f, "{} checks, {n_wrong} wrong", self.0.len())
    }
}
