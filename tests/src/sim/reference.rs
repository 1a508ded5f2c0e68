//! The answer of the model alone to a prompt: no scheduler, no wire, one step at a time.

use engine::{Backend, Mock, MockSettings, Pace, Row, RowInput, SampleSpec, SlotId, StepBatch};
use types::{BlockIdx, FinishReason, Prompt, TokenId};

/// The whole answer that a prompt must get, whatever the faults.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Reference {
    pub tokens: Vec<TokenId>,
    pub finish: FinishReason,
}

/// A mock that serves no other client.
#[derive(Debug)]
pub struct Alone {
    mock: Mock,
    table: Vec<BlockIdx>,
    n_prompts: u64,
}

impl Alone {
    /// Makes a mock. `n_blocks` blocks must hold the longest sequence.
    pub fn new(name: &str, settings: MockSettings, n_blocks: u32) -> Self {
        let mock = Mock::new(name, settings, n_blocks, Pace::Modelled).expect("memory for a few blocks");
        Self { mock, table: (0..n_blocks).map(BlockIdx).collect(), n_prompts: 0 }
    }

    pub fn answer(&mut self, prompt: &Prompt) -> Reference {
        self.n_prompts += 1;
        let mut history = prompt.tokens.to_vec();
        let mut start = 0;
        loop {
            let index = (history.len() - prompt.tokens.len()) as u32;
            let token = self.next(prompt, &history, start, index);
            start = history.len();
            history.push(token);
            if let Some(finish) = finish(prompt, token, index, &self.mock.model().eos_tokens) {
                return Reference { tokens: history.split_off(prompt.tokens.len()), finish };
            }
        }
    }

    fn next(&mut self, prompt: &Prompt, history: &[TokenId], start: usize, index: u32) -> TokenId {
        let n_prompt = prompt.tokens.len();
        let (sampling, stop) = (&prompt.sampling, &prompt.stop);
        let sample = SampleSpec { sampling, stop, history, n_prompt, index, constraint: None };
        let row = Row {
            slot: SlotId(self.n_prompts),
            input: RowInput::Tokens(&history[start..]),
            start,
            tables: &[&self.table],
            prompt_logprobs: None,
            sample: Some(sample),
        };
        let launched = self.mock.launch(StepBatch { rows: &[row] }).expect("nothing is in flight");
        let mut output = self.mock.collect(launched).expect("a mock does not fail");
        let sampled = output.rows.remove(0).expect("its own kv is right");
        sampled.expect("a token was asked for").token
    }
}

fn finish(prompt: &Prompt, token: TokenId, index: u32, eos: &[TokenId]) -> Option<FinishReason> {
    if eos.contains(&token) && !prompt.stop.ignore_eos {
        return Some(FinishReason::Stop);
    }
    (index + 1 == prompt.stop.max_tokens).then_some(FinishReason::Length)
}
