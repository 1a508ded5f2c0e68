//! Reads and shows durations as users write them: `25ms`, `2s`, `1m`.

use std::time::Duration;

const UNITS: [(&str, f64); 6] =
    [("us", 1e-6), ("µs", 1e-6), ("ms", 1e-3), ("s", 1.0), ("m", 60.0), ("h", 3600.0)];

/// The longest duration that is accepted. It keeps times since a request's start within 32 bits of
/// microseconds.
pub const SPAN_MAX: Duration = Duration::from_secs(3600);

/// Parses a duration such as `25ms`. A unit is required, because some tools read a bare number as seconds and
/// others as milliseconds.
pub fn parse_span(text: &str) -> Result<Duration, String> {
    let split = text.find(|c: char| !c.is_ascii_digit() && c != '.').unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let value: f64 = number.parse().map_err(|_| format!("`{text}` does not start with a number"))?;
    let (_, scale) = UNITS
        .iter()
        .find(|(name, _)| *name == unit)
        .ok_or_else(|| format!("`{text}` needs a unit: us, ms, s, m or h"))?;
    let span = Duration::try_from_secs_f64(value * scale).map_err(|error| error.to_string())?;
    if span > SPAN_MAX { Err(format!("`{text}` is longer than an hour")) } else { Ok(span) }
}

/// Shows milliseconds: `0.43 ms`, `25.1 ms`, `2.30 s`, or `never` for infinity.
pub fn show_ms(ms: f64) -> String {
    match ms {
        ms if ms.is_nan() => "-".to_owned(),
        ms if ms.is_infinite() => "never".to_owned(),
        ms if ms >= 10_000.0 => format!("{:.1} s", ms / 1e3),
        ms if ms >= 1_000.0 => format!("{:.2} s", ms / 1e3),
        ms if ms >= 100.0 => format!("{ms:.0} ms"),
        ms if ms >= 10.0 => format!("{ms:.1} ms"),
        ms if ms >= 0.1 || ms == 0.0 => format!("{ms:.2} ms"),
        ms => format!("{:.0} µs", ms * 1e3),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn spans_are_read() {
        let check = |text, ms| assert_eq!(parse_span(text), Ok(Duration::from_micros(ms)), "{text}");
        check("25ms", 25_000);
        check("2s", 2_000_000);
        check("1.5s", 1_500_000);
        check("1m", 60_000_000);
        check("250us", 250);
    }

    #[test]
    fn bad_spans_are_refused_with_the_reason() {
        let check = |text, reason: &str| {
            let error = parse_span(text).expect_err(text);
            assert!(error.contains(reason), "{error}");
        };
        check("25", "needs a unit");
        check("ms", "number");
        check("2h", "longer than an hour");
        check("1.2.3s", "number");
    }

    #[test]
    fn milliseconds_are_shown_with_three_digits() {
        let shown = [0.0, 0.001, 0.4321, 25.13, 431.0, 2300.4, 61_000.0, f64::INFINITY].map(show_ms);
        assert_eq!(shown, ["0.00 ms", "1 µs", "0.43 ms", "25.1 ms", "431 ms", "2.30 s", "61.0 s", "never"]);
    }
}
