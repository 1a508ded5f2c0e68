//! A server's explanation of the time of one request, with `--explain`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};
use serde_json::Value;

/// Milliseconds by part of a request's time.
pub type Parts = BTreeMap<String, f64>;

/// The explanation of one request. `docs/api.md` describes the fields.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Explanation {
    pub total_ms: f64,
    pub first_token_ms: Option<f64>,
    pub before_first_token_ms: Parts,
    pub after_first_token_ms: Parts,
    pub worst_gap: Option<GapExplanation>,
}

/// The explanation of the longest time between two tokens.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct GapExplanation {
    pub token: u32,
    pub ms: f64,
    pub parts_ms: Parts,
    /// The node's work in the gap, as the server writes it.
    #[serde(default)]
    pub step: Value,
}

/// The explanation of the request with this index in the run.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct RequestExplanation {
    pub index: u32,
    #[serde(flatten)]
    pub explained: Explanation,
}

impl Explanation {
    /// Reads the explanation in the last chunk of a stream; `None` if there is none.
    pub fn in_event(event: &[u8]) -> Option<Self> {
        memchr::memmem::find(event, b"\"explanations\":")?;
        let event: Value = serde_json::from_slice(event).ok()?;
        Self::deserialize(event["explanations"].get(0)?).ok()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_explanation_of_a_last_chunk_is_read() {
        let event = br#"{"choices":[{"text":"\"explanations\":"}],"explanations":[{"index":0,"total_ms":5.5,
            "first_token_ms":2,"before_first_token_ms":{"reserve":2},"after_first_token_ms":{"decode":3.5},
            "worst_gap":null,"largest":"decode"}]}"#;
        let explained = Explanation::in_event(event).expect("it has one");
        assert_eq!((explained.total_ms, explained.after_first_token_ms["decode"]), (5.5, 3.5));
        assert_eq!(Explanation::in_event(br#"{"choices":[{"text":"\"explanations\":"}]}"#), None);
    }
}
