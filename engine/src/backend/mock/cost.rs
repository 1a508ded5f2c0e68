//! The mock's settings: its shape, the cost of its steps, and the KV that it verifies.
//!
//! TOML, every key optional:
//!
//! ```toml
//! context_tokens = 32768     # longest sequence, prompt and output together
//! name = "mock"              # what requests call the model
//! weights = 0                # another number is another model of the same name: other tokens, another fingerprint
//! eos_one_in = 200           # one drawn token in about this number ends the sequence; 0: none does
//! verify = "all"             # "all": every position's KV at every read; "last_block": its last block only
//!
//! [cost]
//! step_ms = 0.0              # every step, whatever is in it
//! decode_row_ms = 0.0        # every row of one token
//! prefill_token_ms = 0.0     # every token of a longer row
//! rows_together = 1          # rows up to the next multiple cost as prompt tokens, in steps with prompts
//! sent_byte_ns = 0.0         # every byte of KV sent; spent by the sender's connectors
//!
//! [[answers]]                # texts instead of drawn tokens, the first one whose `after` is in the prompt
//! after = "weather"
//! text = "It rains."
//!
//! [layout]
//! block_tokens = 16
//! n_layers = 4
//! n_kv_heads = 2
//! head_dim = 8               # head_dim times the dtype's bytes: 16 bytes at least, so that a checksum fits
//! dtype = "f32"              # f32, f16, bf16, fp8_e4m3
//! ```

use std::num::NonZero;
use std::path::Path;
use std::time::Duration;

use serde::Deserialize;
use types::{KvDtype, KvLayout, TokenId};

use super::kv;
use crate::error::OpenError;

/// The costs in the executable, by their name in `mock:NAME`.
const NAMED: &[(&str, &str)] =
    &[("llama-8b", include_str!("costs/llama-8b.toml")), ("slow", include_str!("costs/slow.toml"))];

#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct MockSettings {
    pub name: String,
    pub weights: u64,
    pub context_tokens: u32,
    pub eos_one_in: u64,
    pub verify: Verify,
    pub cost: Costs,
    pub answers: Vec<MockAnswer>,
    pub layout: LayoutSettings,
}

/// The answer to all prompts that contain a text.
#[derive(Clone, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct MockAnswer {
    pub after: String,
    pub text: String,
}

/// How much of the KV that a row reads is verified.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Verify {
    /// All KV back to the first token is verified. The time of a step grows with the context.
    All,
    /// Only the block that the row continues is verified; the KV before it is trusted. For load tests with
    /// long contexts.
    LastBlock,
}

/// The costs that add up to the time of a step on the simulated device: of the step itself, of each row, of each prompt
/// token, and of each byte sent.
#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Costs {
    pub step_ms: f64,
    pub decode_row_ms: f64,
    pub prefill_token_ms: f64,
    pub rows_together: NonZero<usize>,
    pub sent_byte_ns: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct LayoutSettings {
    pub block_tokens: u16,
    pub n_layers: u16,
    pub n_kv_heads: u16,
    pub head_dim: u16,
    pub dtype: DtypeName,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DtypeName {
    F32,
    F16,
    Bf16,
    Fp8E4m3,
}

impl Default for MockSettings {
    fn default() -> Self {
        Self {
            name: "mock".to_owned(),
            weights: 0,
            context_tokens: 32768,
            eos_one_in: 200,
            verify: Verify::All,
            cost: Costs::default(),
            answers: Vec::new(),
            layout: LayoutSettings::default(),
        }
    }
}

impl Default for Costs {
    fn default() -> Self {
        let rows_together = NonZero::<usize>::MIN;
        Self { step_ms: 0.0, decode_row_ms: 0.0, prefill_token_ms: 0.0, rows_together, sent_byte_ns: 0.0 }
    }
}

impl Default for LayoutSettings {
    fn default() -> Self {
        Self { block_tokens: 16, n_layers: 4, n_kv_heads: 2, head_dim: 8, dtype: DtypeName::F32 }
    }
}

// === impl MockSettings ===

impl MockSettings {
    /// Returns the settings of `mock:NAME`: built-in ones, or those of the file NAME.
    pub fn named(name: Option<&str>) -> Result<Self, OpenError> {
        let Some(name) = name else { return Ok(Self::default()) };
        if Path::new(name).extension().is_some_and(|extension| extension == "toml") {
            return Self::read(Path::new(name));
        }
        let Some((_, text)) = NAMED.iter().find(|(known, _)| *known == name) else {
            let known: Vec<&str> = NAMED.iter().map(|(known, _)| *known).collect();
            let known = format!("mock, mock:FILE.toml, mock:{}", known.join(", mock:"));
            return Err(OpenError::UnknownModel { name: format!("mock:{name}"), known });
        };
        Self::parse(name, text)
    }

    fn read(path: &Path) -> Result<Self, OpenError> {
        let text = std::fs::read_to_string(path)
            .map_err(|source| OpenError::ReadCosts { path: path.to_owned(), source })?;
        Self::parse(&path.display().to_string(), &text)
    }

    /// Reads and checks settings. `name` is for errors.
    pub fn parse(name: &str, text: &str) -> Result<Self, OpenError> {
        let settings: Self = toml::from_str(text)
            .map_err(|source| OpenError::ParseCosts { name: name.to_owned(), source: Box::new(source) })?;
        settings.check()?;
        Ok(settings)
    }

    /// Returns the text that is the answer to this prompt, if there is one.
    pub(super) fn answer(&self, prompt: &[TokenId]) -> Option<&str> {
        if self.answers.is_empty() {
            return None;
        }
        // Special tokens are no bytes. 0xff is in no UTF-8 text.
        let bytes: Vec<u8> = prompt.iter().map(|token| u8::try_from(token.0).unwrap_or(0xff)).collect();
        let has = |after: &str| bytes.windows(after.len().max(1)).any(|window| window == after.as_bytes());
        self.answers.iter().find(|answer| has(&answer.after)).map(|answer| answer.text.as_str())
    }

    fn check(&self) -> Result<(), OpenError> {
        self.cost.check()?;
        self.layout.check()
    }
}

impl Costs {
    fn check(&self) -> Result<(), OpenError> {
        let all = [
            ("cost.step_ms", self.step_ms),
            ("cost.decode_row_ms", self.decode_row_ms),
            ("cost.prefill_token_ms", self.prefill_token_ms),
            ("cost.sent_byte_ns", self.sent_byte_ns),
        ];
        match all.iter().find(|(_, cost)| !(cost.is_finite() && *cost >= 0.0)) {
            Some((key, cost)) => Err(OpenError::MockSettings(format!("{key} = {cost} is not a duration"))),
            None => Ok(()),
        }
    }

    /// Returns the time of a step with rows of these lengths.
    pub fn of_step(&self, rows: impl Iterator<Item = usize>) -> Duration {
        let (mut n_running, mut n_prompt) = (0, 0);
        for n_tokens in rows {
            let to = if n_tokens == 1 { &mut n_running } else { &mut n_prompt };
            *to += n_tokens;
        }
        let (n_rows, together) = (n_running + n_prompt, self.rows_together.get());
        if n_prompt > 0 {
            n_prompt += n_rows.next_multiple_of(together) - n_rows;
        }
        let of_rows = self.decode_row_ms * n_running as f64 + self.prefill_token_ms * n_prompt as f64;
        Duration::from_secs_f64((self.step_ms + of_rows) / 1e3)
    }

    /// Returns the time that the simulated wire needs to send `bytes` bytes.
    pub fn of_sending(&self, bytes: u64) -> Duration {
        Duration::from_secs_f64(self.sent_byte_ns * bytes as f64 / 1e9)
    }
}

/// Returns the cost of sending on the simulated wire of `model`; `None` if the wire is not simulated.
pub fn wire_costs(model: &str) -> Result<Option<Costs>, OpenError> {
    let name = match model.split_once(':') {
        None if model == "mock" => None,
        Some(("mock", name)) => Some(name),
        _ => return Ok(None),
    };
    let costs = MockSettings::named(name)?.cost;
    Ok((costs.sent_byte_ns > 0.0).then_some(costs))
}

impl LayoutSettings {
    fn check(&self) -> Result<(), OpenError> {
        let cell_bytes = usize::from(self.head_dim) * KvDtype::from(self.dtype).bytes();
        if cell_bytes < kv::CELL_BYTES_MIN {
            return Err(OpenError::MockSettings(format!(
                "layout.head_dim: {cell_bytes} bytes hold no checksum, {} do",
                kv::CELL_BYTES_MIN
            )));
        }
        let counts = [
            ("layout.block_tokens", self.block_tokens),
            ("layout.n_layers", self.n_layers),
            ("layout.n_kv_heads", self.n_kv_heads),
        ];
        match counts.iter().find(|(_, count)| *count == 0) {
            Some((key, _)) => Err(OpenError::MockSettings(format!("{key} is zero"))),
            None => Ok(()),
        }
    }

    pub fn layout(&self) -> KvLayout {
        KvLayout::uniform(self.block_tokens, self.dtype.into(), self.n_layers, self.n_kv_heads, self.head_dim)
    }
}

impl From<DtypeName> for KvDtype {
    fn from(name: DtypeName) -> Self {
        match name {
            DtypeName::F32 => Self::F32,
            DtypeName::F16 => Self::F16,
            DtypeName::Bf16 => Self::Bf16,
            DtypeName::Fp8E4m3 => Self::Fp8E4m3,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_comes_with_the_program_is_right() {
        for (name, _) in NAMED {
            MockSettings::named(Some(name)).expect("named costs parse");
        }
        let llama = MockSettings::named(Some("llama-8b")).expect("named costs parse");
        assert_eq!(llama.layout.layout().block_bytes(types::GroupIdx(0)), 2 << 20);
    }

    #[test]
    fn every_key_is_optional_and_none_is_unknown() {
        assert_eq!(MockSettings::parse("t", "").expect("empty"), MockSettings::default());
        let error = MockSettings::parse("t", "contxt_tokens = 3").expect_err("misspelt");
        assert!(matches!(error, OpenError::ParseCosts { .. }));
        let error = MockSettings::named(Some("nonsense")).expect_err("no such name");
        assert_eq!(
            error.to_string(),
            "no model \"mock:nonsense\": known are mock, mock:FILE.toml, mock:llama-8b, mock:slow"
        );
    }

    #[test]
    fn a_set_answer_follows_its_prompt() {
        let text = "[[answers]]\nafter = \"rain\"\ntext = \"Yes\"\n[[answers]]\nafter = \"a\"\ntext = \"\"";
        let settings = MockSettings::parse("t", text).expect("two answers");
        let prompt = |text: &str| -> Vec<TokenId> { text.bytes().map(|byte| TokenId(byte.into())).collect() };
        assert_eq!(settings.answer(&prompt("Does it rain?")), Some("Yes"));
        assert_eq!(settings.answer(&prompt("a")), Some(""), "the second one");
        assert_eq!(settings.answer(&prompt("no")), None);
        assert_eq!(MockSettings::default().answer(&prompt("rain")), None);
    }

    #[test]
    fn what_cannot_be_is_refused() {
        for (text, expected) in [
            ("[layout]\nhead_dim = 2", "mock settings: layout.head_dim: 8 bytes hold no checksum, 16 do"),
            ("[layout]\nn_layers = 0", "mock settings: layout.n_layers is zero"),
            ("[cost]\nstep_ms = -1.0", "mock settings: cost.step_ms = -1 is not a duration"),
            ("[cost]\nstep_ms = nan", "mock settings: cost.step_ms = NaN is not a duration"),
        ] {
            assert_eq!(MockSettings::parse("t", text).expect_err(text).to_string(), expected);
        }
    }

    #[test]
    fn a_step_costs_the_sum_of_its_rows() {
        let mut costs =
            Costs { step_ms: 2.0, decode_row_ms: 0.5, prefill_token_ms: 0.25, ..Costs::default() };
        costs.sent_byte_ns = 2.0;
        for (rows, expected_us) in
            [(vec![], 2000), (vec![1], 2500), (vec![1, 1, 100], 28000), (vec![4], 3000)]
        {
            assert_eq!(costs.of_step(rows.iter().copied()), Duration::from_micros(expected_us), "{rows:?}");
        }
        assert_eq!(costs.of_sending(1_000_000), Duration::from_millis(2));
        costs.rows_together = NonZero::new(16).expect("not zero");
        for (rows, expected_us) in
            [(vec![15], 6000), (vec![17], 10000), (vec![1, 31], 10250), (vec![1, 32], 14250)]
        {
            assert_eq!(costs.of_step(rows.iter().copied()), Duration::from_micros(expected_us), "{rows:?}");
        }
    }

    #[test]
    fn only_a_mock_with_a_cost_paces_its_wire() {
        for (model, paced) in
            [("mock", false), ("mock:slow", false), ("mock:llama-8b", true), ("/a/folder", false)]
        {
            assert_eq!(wire_costs(model).expect("known").is_some(), paced, "{model}");
        }
        wire_costs("mock:nonsense").expect_err("no such costs");
    }
}
