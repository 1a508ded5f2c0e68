//! Bodies before they are due. A prompt of 100,000 tokens takes milliseconds to write down, and those would be the
//! load loop's own lag: another thread does it, a bounded number of requests ahead.

use std::io;
use std::sync::Arc;

use tokio::sync::mpsc;

use crate::client::recorder::Answer;
use crate::client::request::{Endpoint, Prompt, RequestShape};
use crate::random::mix;
use crate::workload::{Recipe, Segment, Session, Turn, Vocabulary};

/// How many sessions may be ready before they are due.
const N_AHEAD: usize = 64;

/// Turns recipes into requests.
#[derive(Clone, Debug)]
pub struct Composer {
    pub shape: RequestShape,
    pub salt: u64,
    pub vocabulary: Vocabulary,
}

/// A session whose first request is written down.
#[derive(Debug)]
pub struct Prepared {
    pub session: Session,
    pub talk: Talk,
    pub first: Wire,
}

/// One request, ready to go.
#[derive(Clone, Debug)]
pub struct Wire {
    pub bytes: Vec<u8>,
    pub prompt_tokens: u32,
}

/// What has been said in a session, in the form in which the endpoint wants it.
#[derive(Debug)]
pub struct Talk {
    /// Names the session's requests and the answers that we have to make up.
    pub ordinal: u32,
    ids: Vec<u32>,
    messages: Vec<(&'static str, String)>,
    n_turns: u32,
}

impl Composer {
    /// Starts the thread. It ends when the sessions do, or when the receiver is dropped.
    pub fn start(
        self: Arc<Self>,
        sessions: Box<dyn Iterator<Item = Session> + Send>,
    ) -> io::Result<mpsc::Receiver<Prepared>> {
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

    fn prepare(&self, ordinal: u32, session: Session) -> Prepared {
        let mut talk = Talk { ordinal, ids: Vec::new(), messages: Vec::new(), n_turns: 0 };
        let first = self.compose(&mut talk, &session.turns[0]);
        Prepared { session, talk, first }
    }

    /// Adds a turn to the talk and writes the request that carries the whole of it.
    pub fn compose(&self, talk: &mut Talk, turn: &Turn) -> Wire {
        let id = format!("bench-{:x}-{}-{}", self.salt, talk.ordinal, talk.n_turns);
        talk.n_turns += 1;
        let (prompt, prompt_tokens) = self.say(talk, &turn.recipe);
        Wire { bytes: self.shape.compose(&prompt, turn.output_tokens, &id), prompt_tokens }
    }

    fn say(&self, talk: &mut Talk, recipe: &Recipe) -> (Prompt, u32) {
        match (self.shape.endpoint(), recipe) {
            (Endpoint::Completions, Recipe::Drawn(_)) => {
                recipe.draw(self.salt, &self.vocabulary, &mut talk.ids);
                (Prompt::TokenIds(talk.ids.clone()), talk.ids.len() as u32)
            }
            (Endpoint::Completions, Recipe::Text(text)) => {
                talk.messages.push(("user", text.to_string()));
                let said: Vec<_> = talk.messages.iter().map(|(_, content)| content.as_str()).collect();
                (Prompt::Text(said.join("\n")), talk.words_guess())
            }
            (Endpoint::Chat, _) => {
                talk.messages.push(("user", recipe.words(self.salt)));
                (Prompt::Messages(talk.messages.clone()), talk.words_guess())
            }
        }
    }

    /// Takes the answer into the talk. Where the server does not tell its token ids, as many are made up: the next
    /// prompt has the right length, and a cache can keep what we said and not what it said.
    pub fn hear(&self, talk: &mut Talk, answer: Answer, n_tokens: u32) {
        if !talk.messages.is_empty() {
            talk.messages.push(("assistant", answer.text));
        } else if answer.token_ids.len() == n_tokens as usize {
            talk.ids.extend(answer.token_ids);
        } else {
            let seed = mix(u64::from(talk.ordinal), u64::from(talk.n_turns));
            Recipe::Drawn(vec![Segment { seed, n_tokens }]).draw(self.salt, &self.vocabulary, &mut talk.ids);
        }
    }
}

impl Talk {
    /// Until the server has counted: a word is a token.
    fn words_guess(&self) -> u32 {
        self.messages.iter().map(|(_, content)| content.split_whitespace().count() as u32).sum()
    }
}
