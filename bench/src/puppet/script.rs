//! The script of a puppet's answer to one request.

use std::time::Duration;

use clap::ValueEnum;
use serde_json::{Value, json};

/// The script of an answer, from the complete request to the end of the answer.
#[derive(Clone, Debug, PartialEq)]
pub struct Script {
    /// The status line. Any status but 200 ends the answer with a small body.
    pub status: u16,
    pub steps: Vec<Step>,
    pub ending: Ending,
    pub counting: Counting,
}

/// One write of the stream, and its delay after the write before.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Step {
    pub after: Duration,
    pub act: ScriptAction,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ScriptAction {
    /// One chunk with this number of tokens and their text.
    Tokens(u32),
    /// One chunk with this number of tokens and no text, as for half a character.
    Unseen(u32),
    /// A chunk with an empty choice, as servers send before the first token.
    Empty,
    /// A comment line, as proxies send to keep a connection.
    Comment,
    /// An error event inside the stream.
    Error,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// The finish reason, the usage and `[DONE]` are sent.
    Done,
    /// The connection is closed in the middle of the stream.
    Cut,
    /// Nothing more is sent, and the connection stays open.
    Silence,
}

/// How the puppet reports the number of its tokens.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, ValueEnum)]
pub enum Counting {
    #[default]
    Ids,
    Usage,
    Nothing,
}

/// One write: its bytes, their number of tokens, and the time after the request was received.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ScriptedWrite {
    pub at: Duration,
    pub bytes: Vec<u8>,
    pub tokens: u32,
}

impl Script {
    /// Makes a script with the first token after `ttft`, and then one token each `gap`.
    pub fn even(n_tokens: u32, ttft: Duration, gap: Duration) -> Self {
        let after = |nth| if nth == 0 { ttft } else { gap };
        let steps =
            (0..n_tokens).map(|nth| Step { after: after(nth), act: ScriptAction::Tokens(1) }).collect();
        Self { status: 200, steps, ending: Ending::Done, counting: Counting::Ids }
    }

    /// Returns the script as writes. The head goes out with the first step, as from servers that wait for a
    /// token.
    pub fn writes(&self) -> Vec<ScriptedWrite> {
        if self.status != 200 {
            return vec![self.refusal()];
        }
        let mut writes = Vec::with_capacity(self.steps.len() + 1);
        let (mut at, mut total) = (Duration::ZERO, 0);
        for step in &self.steps {
            at += step.after;
            let tokens = step.act.n_tokens();
            total += tokens;
            writes.push(ScriptedWrite { at, bytes: framed(&self.event(step.act, total)), tokens });
        }
        if self.ending == Ending::Done {
            writes.push(ScriptedWrite { at, bytes: self.finish(total), tokens: 0 });
        }
        if let Some(first) = writes.first_mut() {
            first.bytes.splice(0..0, HEAD.bytes());
        }
        writes
    }

    fn refusal(&self) -> ScriptedWrite {
        let body = json!({"error": {"message": "the script refuses", "code": "puppet"}}).to_string();
        let (status, length) = (self.status, body.len());
        let bytes = format!(
            "HTTP/1.1 {status} No\r\ncontent-type: application/json\r\ncontent-length: {length}\r\n\r\n{body}"
        );
        let at = self.steps.first().map_or(Duration::ZERO, |step| step.after);
        ScriptedWrite { at, bytes: bytes.into_bytes(), tokens: 0 }
    }

    fn event(&self, act: ScriptAction, total: u32) -> String {
        match act {
            ScriptAction::Comment => ": still here\n\n".to_owned(),
            ScriptAction::Error => data(&json!({"error": {"message": "the script fails", "code": "puppet"}})),
            ScriptAction::Empty => self.chunk("", &[], total),
            ScriptAction::Unseen(n) => self.chunk("", &vec![7; n as usize], total),
            ScriptAction::Tokens(n) => self.chunk(&" a".repeat(n as usize), &vec![7; n as usize], total),
        }
    }

    fn chunk(&self, text: &str, ids: &[u32], total: u32) -> String {
        let mut event = json!({
            "id": "puppet", "object": "text_completion", "model": "puppet",
            "choices": [{"index": 0, "text": text, "logprobs": null, "finish_reason": null}],
        });
        match self.counting {
            Counting::Ids => event["choices"][0]["token_ids"] = json!(ids),
            Counting::Usage => event["usage"] = usage(total),
            Counting::Nothing => {}
        }
        data(&event)
    }

    /// Returns the finish reason and `[DONE]` in one write, with the end of the framing.
    fn finish(&self, total: u32) -> Vec<u8> {
        let last = json!({"choices": [{"index": 0, "text": "", "finish_reason": "length"}], "usage": null});
        let counts = json!({"choices": [], "usage": usage(total)});
        let events = data(&last) + &data(&counts) + "data: [DONE]\n\n";
        [framed(&events), b"0\r\n\r\n".to_vec()].concat()
    }
}

const HEAD: &str = "HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n";

impl ScriptAction {
    pub fn n_tokens(self) -> u32 {
        match self {
            ScriptAction::Tokens(n) | ScriptAction::Unseen(n) => n,
            ScriptAction::Empty | ScriptAction::Comment | ScriptAction::Error => 0,
        }
    }
}

fn usage(total: u32) -> Value {
    json!({"prompt_tokens": 5, "completion_tokens": total, "total_tokens": total + 5})
}

fn data(event: &Value) -> String {
    format!("data: {event}\n\n")
}

fn framed(body: &str) -> Vec<u8> {
    format!("{:x}\r\n{body}\r\n", body.len()).into_bytes()
}
