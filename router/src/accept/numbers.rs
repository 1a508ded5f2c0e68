//! The numbers of a request, each in its range.

use std::ops::{Bound, RangeBounds};

use crate::error::AcceptError;

/// The largest number of alternatives reported beside a token.
pub const LOGPROBS_MAX: u32 = 20;

/// Returns the requested number if it is in range, or the default. A default comes from the operator and is
/// not checked.
pub(super) fn number(
    param: &'static str,
    asked: Option<f32>,
    default: f32,
    range: impl RangeBounds<f32>,
) -> Result<f32, AcceptError> {
    match asked {
        None => Ok(default),
        Some(value) if range.contains(&value) => Ok(value),
        Some(value) => Err(AcceptError::invalid(param, format!("{}, not {value}", words(&range)))),
    }
}

pub(super) fn penalty(param: &'static str, asked: Option<f32>, default: f32) -> Result<f32, AcceptError> {
    number(param, asked, default, -2.0..=2.0)
}

/// Describes a range in words.
fn words(range: &impl RangeBounds<f32>) -> String {
    let start = match range.start_bound() {
        Bound::Included(start) => format!("from {start}"),
        Bound::Excluded(start) => format!("above {start}"),
        Bound::Unbounded => "any".to_owned(),
    };
    match (range.start_bound(), range.end_bound()) {
        (Bound::Included(_), Bound::Included(end)) => format!("{start} to {end}"),
        (_, Bound::Included(end)) => format!("{start} and at most {end}"),
        (_, Bound::Excluded(end)) => format!("{start} and below {end}"),
        (_, Bound::Unbounded) => start,
    }
}

pub(super) fn top_k(asked: Option<i64>, default: u32) -> Result<u32, AcceptError> {
    match asked {
        None => Ok(default),
        Some(-1) => Ok(0),
        Some(k) => u32::try_from(k)
            .map_err(|_| AcceptError::invalid("top_k", format!("a count, or -1 for all, not {k}"))),
    }
}

pub(crate) fn logprobs(param: &'static str, asked: u32) -> Result<u8, AcceptError> {
    match u8::try_from(asked) {
        Ok(n) if asked <= LOGPROBS_MAX => Ok(n),
        _ => Err(AcceptError::invalid(param, format!("from 0 to {LOGPROBS_MAX}, not {asked}"))),
    }
}
