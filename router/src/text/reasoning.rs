//! Divides a model's reasoning from its answer.

use super::tags::TagFinder;

/// The tags around a model's reasoning.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReasoningTags {
    open: &'static str,
    close: &'static str,
}

/// The known tags. A chat template that contains the closing tag is a reasoning model's.
const KNOWN: &[ReasoningTags] = &[
    ReasoningTags { open: "<think>", close: "</think>" },
    ReasoningTags { open: "[THINK]", close: "[/THINK]" },
];

impl ReasoningTags {
    /// Finds the tags of a model in its chat template.
    pub fn of_template(source: &str) -> Option<Self> {
        KNOWN.iter().find(|tags| source.contains(tags.close)).copied()
    }

    pub(super) fn both(self) -> [&'static str; 2] {
        [self.open, self.close]
    }

    /// Returns whether the answer to this rendered chat begins inside the reasoning, because the template has
    /// written the opening tag.
    pub fn opened_by(self, prompt: &str) -> bool {
        prompt.trim_end().ends_with(self.open)
    }
}

/// How a request's reasoning is divided.
#[derive(Clone, Copy, Debug)]
pub struct ReasoningRules {
    pub tags: ReasoningTags,
    /// Whether the prompt ends with the opening tag, so that answers begin inside the reasoning.
    pub opened: bool,
    /// Whether the client wants the reasoning. Otherwise it is left out of the answer.
    pub included: bool,
}

/// Divides one answer, as its text arrives.
#[derive(Debug)]
pub(super) struct ReasoningParser {
    rules: ReasoningRules,
    state: State,
    finder: TagFinder,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Before the first text.
    Start,
    /// After the opening tag, before the first text of the reasoning.
    Opened,
    Reasoning,
    /// After the closing tag, before the first text of the answer.
    Closed,
    Answer,
}

impl ReasoningParser {
    pub(super) fn new(rules: ReasoningRules) -> Self {
        Self { rules, state: State::Start, finder: TagFinder::dropping_spaces() }
    }

    /// Appends a piece's reasoning, and its other text.
    pub(super) fn push(&mut self, piece: &str, reasoning: &mut String, text: &mut String) {
        let mut characters = piece.chars();
        while self.state != State::Answer {
            let Some(c) = characters.next() else { return };
            self.read(c, reasoning, text);
        }
        text.push_str(characters.as_str());
    }

    /// Appends the text that is held back, at the end of the answer.
    pub(super) fn finish(&mut self, reasoning: &mut String, text: &mut String) {
        let held = self.finder.take_held();
        match self.state {
            State::Opened | State::Reasoning => reasoning.push_str(held.trim_end()),
            State::Start if self.rules.opened => reasoning.push_str(held.trim()),
            State::Start | State::Closed | State::Answer => text.push_str(&held),
        }
    }

    fn read(&mut self, c: char, reasoning: &mut String, text: &mut String) {
        match self.state {
            State::Start => self.read_first(c, reasoning, text),
            State::Opened | State::Closed if c.is_whitespace() => {}
            State::Opened | State::Reasoning => {
                self.state = State::Reasoning;
                if self.finder.push(c, &[self.rules.tags.close], reasoning).is_some() {
                    self.finder.take_spaces();
                    self.state = State::Closed;
                }
            }
            State::Closed | State::Answer => {
                self.state = State::Answer;
                text.push(c);
            }
        }
    }

    /// Reads a character before it is known whether the answer begins with the opening tag.
    fn read_first(&mut self, c: char, reasoning: &mut String, text: &mut String) {
        let mut first = String::new();
        if self.finder.push(c, &[self.rules.tags.open], &mut first).is_some() {
            self.finder.take_spaces();
            self.state = State::Opened;
        } else if !first.is_empty() {
            first.push_str(&self.finder.take_held());
            self.state = if self.rules.opened { State::Opened } else { State::Answer };
            self.push(&first, reasoning, text);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn divided(opened: bool, pieces: &[&str]) -> (String, String) {
        let tags = ReasoningTags::of_template("{{ content.split('</think>') }}").expect("its tags");
        let mut parser = ReasoningParser::new(ReasoningRules { tags, opened, included: true });
        let (mut reasoning, mut text) = (String::new(), String::new());
        pieces.iter().for_each(|piece| parser.push(piece, &mut reasoning, &mut text));
        parser.finish(&mut reasoning, &mut text);
        (reasoning, text)
    }

    #[test]
    fn reasoning_is_divided_from_the_answer_wherever_the_text_is_cut() {
        for (opened, answer, reasoning, text) in [
            (false, "<think>\nTwo and two.\n</think>\n\nIt is 4.\n", "Two and two.", "It is 4.\n"),
            (false, "<think>\n\n</think>\n\nIt is 4.", "", "It is 4."),
            (false, " It is <think>4</think>.", "", " It is <think>4</think>."),
            (false, "<thin air>", "", "<thin air>"),
            (false, "<think> a < b, </ b\n", "a < b, </ b", ""),
            (false, "<th", "", "<th"),
            (true, "Two.\n\nAnd </two>.\n</think>\n4", "Two.\n\nAnd </two>.", "4"),
            (true, "<think>\nTwo.</think>4", "Two.", "4"),
            (true, "\n</think>4", "", "4"),
            (true, "Two", "Two", ""),
            (true, "<th", "<th", ""),
        ] {
            let expected = (reasoning.to_owned(), text.to_owned());
            assert_eq!(divided(opened, &[answer]), expected, "{answer:?}");
            for (at, _) in answer.char_indices() {
                let (a, b) = answer.split_at(at);
                assert_eq!(divided(opened, &[a, b]), expected, "{a:?} {b:?}");
            }
        }
    }

    #[test]
    fn the_template_has_the_tags() {
        let tags = ReasoningTags::of_template("[THINK]{{ x }}[/THINK]").expect("its tags");
        assert!(tags.opened_by("<s>[THINK]\n") && !tags.opened_by("<s>[THINK]x"));
        assert_eq!(ReasoningTags::of_template("{{ messages }}"), None);
    }
}
