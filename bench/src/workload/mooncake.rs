//! Reads traces in Mooncake's format: real arrival times and lengths, and the prefixes that prompts share.

use std::io::{BufRead, BufReader};
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use crate::error::{BenchError, Result};
use crate::workload::prompt::{Recipe, Segment};
use crate::workload::session::{Session, Sessions};

/// The number of tokens that one hash id stands for.
const BLOCK_TOKENS: u32 = 512;

#[derive(Debug, Deserialize)]
struct Line {
    /// The arrival time in milliseconds.
    timestamp: f64,
    input_length: u32,
    output_length: u32,
    #[serde(default)]
    hash_ids: Vec<u64>,
}

/// How a trace is scaled to a machine. Every result contains these numbers.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct TraceOptions {
    /// A factor for times: 2 halves the rate.
    pub slowdown: f64,
    /// A factor for prompts and their shared blocks: 0.1 leaves a tenth.
    pub length_scale: f64,
    /// The longest prompt after scaling, in tokens. Longer ones are cut.
    pub input_max: u32,
    pub output_max: u32,
}

/// Reads a whole trace. Its sessions contain their own start times.
pub fn read_trace(path: &Path, options: TraceOptions) -> Result<Sessions> {
    let open = |source| BenchError::Read { path: path.to_owned(), source };
    let file = BufReader::new(std::fs::File::open(path).map_err(open)?);
    let mut sessions = Vec::new();
    for (nth, line) in file.lines().enumerate() {
        let line = line.map_err(open)?;
        if !line.trim().is_empty() {
            let parsed: Line = serde_json::from_str(&line)
                .map_err(|error| BenchError::parse(path, format!("line {}: {error}", nth + 1)))?;
            sessions.push(options.session(&parsed));
        }
    }
    sessions.sort_by_key(|session| session.starts);
    Ok(Box::new(sessions.into_iter()))
}

impl TraceOptions {
    fn session(&self, line: &Line) -> Session {
        let n_input = self.scaled(line.input_length).min(self.input_max);
        let recipe = Recipe::Drawn(self.segments(&line.hash_ids, n_input));
        let n_output = line.output_length.clamp(1, self.output_max);
        let starts = Duration::from_secs_f64((line.timestamp * self.slowdown / 1e3).max(0.0));
        Session { starts: Some(starts), ..Session::single(recipe, n_output) }
    }

    fn scaled(&self, n_tokens: u32) -> u32 {
        (f64::from(n_tokens) * self.length_scale).round().max(1.0) as u32
    }

    /// Returns the segments of a prompt, one for each hash id. Tokens beyond the ids belong to this prompt
    /// alone.
    ///
    /// | tokens                              | segment                      |
    /// |-------------------------------------|------------------------------|
    /// | `i·block .. (i+1)·block`            | seed `hash_ids[i]`, whole    |
    /// | the last, up to `n_input`           | the same seed, cut           |
    fn segments(&self, hash_ids: &[u64], n_input: u32) -> Vec<Segment> {
        let block = self.scaled(BLOCK_TOKENS);
        let mut left = n_input;
        let mut segments = Vec::with_capacity(hash_ids.len() + 1);
        for &seed in hash_ids {
            let n_tokens = left.min(block);
            left -= n_tokens;
            if n_tokens > 0 {
                segments.push(Segment { seed, n_tokens });
            }
        }
        if left > 0 {
            let last = hash_ids.last().copied().unwrap_or(0);
            segments.push(Segment { seed: last ^ u64::MAX, n_tokens: left });
        }
        segments
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const TRACE: &str = r#"{"timestamp": 0, "input_length": 1100, "output_length": 50, "hash_ids": [0, 1, 2]}
{"timestamp": 3000, "input_length": 700, "output_length": 9, "hash_ids": [0, 9]}
"#;

    fn read(options: TraceOptions, text: &str) -> Result<Vec<Session>> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("trace.jsonl");
        std::fs::write(&path, text).expect("written");
        read_trace(&path, options).map(Iterator::collect)
    }

    fn options() -> TraceOptions {
        TraceOptions { slowdown: 1.0, length_scale: 1.0, input_max: u32::MAX, output_max: u32::MAX }
    }

    fn shape(session: &Session) -> (u64, Vec<(u64, u32)>, u32) {
        let Recipe::Drawn(segments) = &session.turns[0].recipe else { panic!("traces have no text") };
        let segments = segments.iter().map(|segment| (segment.seed, segment.n_tokens)).collect();
        (
            session.starts.map_or(0, |starts| starts.as_millis() as u64),
            segments,
            session.turns[0].output_tokens,
        )
    }

    #[test]
    fn equal_hash_ids_are_equal_segments() {
        let sessions = read(options(), TRACE).expect("sound");
        assert_eq!(shape(&sessions[0]), (0, vec![(0, 512), (1, 512), (2, 76)], 50));
        assert_eq!(shape(&sessions[1]), (3000, vec![(0, 512), (9, 188)], 9));
    }

    #[test]
    fn a_trace_is_slowed_shortened_and_cut() {
        let fitted = TraceOptions { slowdown: 2.0, length_scale: 0.125, input_max: 100, output_max: 20 };
        let sessions = read(fitted, TRACE).expect("sound");
        assert_eq!(shape(&sessions[0]), (0, vec![(0, 64), (1, 36)], 20));
        assert_eq!(shape(&sessions[1]), (6000, vec![(0, 64), (9, 24)], 9));
    }

    #[test]
    fn a_bad_line_is_named() {
        let error = read(options(), "{\"timestamp\": 0}\n").expect_err("fields are missing");
        assert!(error.in_full().contains("line 1"), "{}", error.in_full());
    }

    #[test]
    fn a_prompt_longer_than_its_ids_keeps_its_length() {
        let line = r#"{"timestamp": 0, "input_length": 600, "output_length": 1, "hash_ids": [4]}"#;
        let (_, segments, _) = shape(&read(options(), line).expect("sound")[0]);
        assert_eq!(segments.iter().map(|(_, n)| n).sum::<u32>(), 600);
    }
}
