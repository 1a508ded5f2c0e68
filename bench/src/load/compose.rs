//! Writes request bodies before they are due. Writing a prompt of 100,000 tokens takes milliseconds, which
//! would delay the load loop. So another thread writes them, a bounded number of requests ahead.

use std::io;
use std::sync::Arc;

use tokio::sync::mpsc;

use crate::client::recorder::Answer;
use crate::client::request::{Endpoint, Prompt, RequestShape};
use crate::random::mix;
use crate::workload::{Recipe, Segment, Session, Turn, Vocabulary};

/// The largest number of sessions that are written ahead.
const N_AHEAD: usize = 64;

/// Turns the recipes of prompts into requests.
#[derive(Clone, Debug)]
pub struct Composer {
    pub shape: RequestShape,
    pub salt: u64,
    pub vocabulary: Vocabulary,
}

/// A session whose first request is written.
#[derive(Debug)]
pub struct PreparedSession {
    pub session: Session,
    pub transcript: Transcript,
    pub first: ComposedRequest,
}

/// One request, ready to be sent.
#[derive(Clone, Debug)]
pub struct ComposedRequest {
    pub bytes: Vec<u8>,
    pub prompt_tokens: u32,
}

/// The turns of a session so far, as the endpoint needs them.
#[derive(Debug)]
pub struct Transcript {
    /// The number of the session, a seed for its requests and for invented answers.
    pub ordinal: u32,
    ids: Vec<u32>,
    messages: Vec<(&'static str, String)>,
    n_turns: u32,
}

impl Composer {
    /// Starts the thread that writes the sessions' first requests. It ends after the last session, or when
    /// the receiver is dropped.
    pub fn start(
        self: Arc<Self>,
        sessions: Box<dyn Iterator<Item = Session> + Send>,
    ) -> io::Result<mpsc::Receiver<PreparedSession>> {
        let (sender, receiver) = mpsc::channel(N_AHEAD);
        let prepare = move || {
            for (ordinal, session) in sessions.enumerate() {
                if sender.blocking_send(self.prepare(ordinal as u32, session)).is_err() {
                    return;
                }
            }
        };
        std::thread::Builder::new().name("compose".to_owned()).spawn(prepare)?;
        Ok(receiver)
    }

    fn prepare(&self, ordinal: u32, session: Session) -> PreparedSession {
        let mut transcript = Transcript { ordinal, ids: Vec::new(), messages: Vec::new(), n_turns: 0 };
        let first = self.compose(&mut transcript, &session.turns[0]);
        PreparedSession { session, transcript, first }
    }

    /// Adds a turn to the transcript, and writes the request with all turns.
    pub fn compose(&self, transcript: &mut Transcript, turn: &Turn) -> ComposedRequest {
        let id = format!("bench-{:x}-{}-{}", self.salt, transcript.ordinal, transcript.n_turns);
        transcript.n_turns += 1;
        let (prompt, prompt_tokens) = self.add_turn(transcript, &turn.recipe);
        ComposedRequest { bytes: self.shape.compose(&prompt, turn.output_tokens, &id), prompt_tokens }
    }

    fn add_turn(&self, transcript: &mut Transcript, recipe: &Recipe) -> (Prompt, u32) {
        match (self.shape.endpoint(), recipe) {
            (Endpoint::Completions, Recipe::Drawn(_)) => {
                recipe.draw(self.salt, &self.vocabulary, &mut transcript.ids);
                (Prompt::TokenIds(transcript.ids.clone()), transcript.ids.len() as u32)
            }
            (Endpoint::Completions, Recipe::Text(text)) => {
                transcript.messages.push(("user", text.to_string()));
                let said: Vec<_> = transcript.messages.iter().map(|(_, content)| content.as_str()).collect();
                (Prompt::Text(said.join("\n")), transcript.words_guess())
            }
            (Endpoint::Chat, _) => {
                transcript.messages.push(("user", recipe.words(self.salt)));
                (Prompt::Messages(transcript.messages.clone()), transcript.words_guess())
            }
        }
    }

    /// Adds the answer to the transcript. If the server sends no token ids, the same number of ids is
    /// invented. Then the next prompt has the right length, but a cache can reuse only the prompts in it, not
    /// the answers.
    pub fn add_answer(&self, transcript: &mut Transcript, answer: Answer, n_tokens: u32) {
        if !transcript.messages.is_empty() {
            transcript.messages.push(("assistant", answer.text));
        } else if answer.token_ids.len() == n_tokens as usize {
            transcript.ids.extend(answer.token_ids);
        } else {
            let seed = mix(u64::from(transcript.ordinal), u64::from(transcript.n_turns));
            Recipe::Drawn(vec![Segment { seed, n_tokens }]).draw(
                self.salt,
                &self.vocabulary,
                &mut transcript.ids,
            );
        }
    }
}

impl Transcript {
    /// Returns the number of words, as a guess of the number of tokens before the server has counted.
    fn words_guess(&self) -> u32 {
        self.messages.iter().map(|(_, content)| content.split_whitespace().count() as u32).sum()
    }
}
