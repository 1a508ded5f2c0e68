//! Reads human conversations in ShareGPT's JSON format.

use std::path::Path;
use std::time::Duration;

use serde::Deserialize;

use crate::error::{BenchError, Result, read_text};
use crate::random::Random;
use crate::workload::prompt::Recipe;
use crate::workload::session::{Session, Sessions, Turn};

/// The guessed number of bytes per token, for English. Without a tokenizer an answer's length is not known.
const BYTES_PER_TOKEN: usize = 4;

#[derive(Debug, Deserialize)]
struct Conversation {
    #[serde(default, alias = "conversation")]
    conversations: Vec<Message>,
}

#[derive(Debug, Deserialize)]
struct Message {
    #[serde(alias = "role")]
    from: String,
    #[serde(alias = "content")]
    value: String,
}

/// Which part of the file is used.
#[derive(Clone, Copy, Debug)]
pub struct ShareGptOptions {
    /// The largest number of questions per conversation.
    pub n_turns_max: u32,
    pub think: Duration,
    pub seed: u64,
}

/// Reads the conversations of a file. They come in an order drawn from the seed, and are repeated.
pub fn read_sharegpt(path: &Path, options: ShareGptOptions) -> Result<Sessions> {
    let text = read_text(path)?;
    let conversations: Vec<Conversation> =
        serde_json::from_str(&text).map_err(|error| BenchError::parse(path, error))?;
    let mut sessions: Vec<_> = conversations.iter().filter_map(|talk| session(talk, options)).collect();
    if sessions.is_empty() {
        return Err(BenchError::parse(path, "no conversation begins with a question and its answer"));
    }
    shuffle(&mut sessions, &mut Random::stream(options.seed, 0x5a9e));
    Ok(Box::new(sessions.into_iter().cycle()))
}

fn session(talk: &Conversation, options: ShareGptOptions) -> Option<Session> {
    let pairs =
        talk.conversations.chunks_exact(2).take_while(|pair| is_question(&pair[0]) && !is_question(&pair[1]));
    let turns: Vec<_> =
        pairs.take(options.n_turns_max as usize).map(|pair| turn(pair, options.think)).collect();
    (!turns.is_empty()).then_some(Session { starts: None, turns })
}

fn turn(pair: &[Message], think: Duration) -> Turn {
    let output_tokens = pair[1].value.len().div_ceil(BYTES_PER_TOKEN).max(1) as u32;
    Turn { recipe: Recipe::Text(pair[0].value.as_str().into()), output_tokens, think, cancel_after: None }
}

fn is_question(message: &Message) -> bool {
    matches!(message.from.as_str(), "human" | "user")
}

/// Shuffles the items, by Fisher and Yates.
fn shuffle<T>(items: &mut [T], random: &mut Random) {
    for last in (1..items.len()).rev() {
        items.swap(last, random.below(last as u64 + 1) as usize);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const FILE: &str = r#"[
        {"id": "a", "conversations": [{"from": "human", "value": "What is prefill?"},
            {"from": "gpt", "value": "The first pass over a prompt."}, {"from": "human", "value": "And decode?"},
            {"from": "gpt", "value": "All the others."}, {"from": "human", "value": "Thanks"}]},
        {"id": "b", "conversations": [{"from": "gpt", "value": "Hello"}]},
        {"id": "c", "conversations": []}
    ]"#;

    fn read(n_turns_max: u32, text: &str) -> Result<Vec<Session>> {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("sharegpt.json");
        std::fs::write(&path, text).expect("written");
        let options = ShareGptOptions { n_turns_max, think: Duration::ZERO, seed: 1 };
        read_sharegpt(&path, options).map(|sessions| sessions.take(2).collect())
    }

    #[test]
    fn questions_with_answers_become_turns_and_the_file_repeats() {
        let sessions = read(8, FILE).expect("sound");
        assert_eq!(sessions[0], sessions[1]);
        let turns: Vec<_> =
            sessions[0].turns.iter().map(|turn| (turn.recipe.clone(), turn.output_tokens)).collect();
        let expected = [("What is prefill?", 8), ("And decode?", 4)];
        assert_eq!(turns, expected.map(|(text, n)| (Recipe::Text(text.into()), n)));
        assert_eq!(read(1, FILE).expect("sound")[0].turns.len(), 1);
    }

    #[test]
    fn a_file_without_conversations_is_refused() {
        assert!(read(1, "[]").is_err());
        assert!(read(1, "{").is_err());
    }
}
