//! Finds tags in a text that arrives in pieces, and holds back a possible beginning of one.

/// Searches for tags, one character at a time, so that the result does not depend on how the text is cut.
#[derive(Debug, Default)]
pub(super) struct TagFinder {
    /// The white space directly before `held`. It is held back too, and not part of the text if a tag follows.
    spaces: String,
    /// The end of the text so far that may be the beginning of a tag.
    held: String,
    /// Whether white space before a tag is held back.
    drops_spaces: bool,
}

impl TagFinder {
    /// Makes a finder that leaves out white space before a tag.
    pub(super) fn dropping_spaces() -> Self {
        Self { drops_spaces: true, ..Self::default() }
    }

    /// Reads a character. Appends the text that cannot be part of a tag, or returns the tag that is complete.
    pub(super) fn push(&mut self, c: char, tags: &[&'static str], text: &mut String) -> Option<&'static str> {
        if self.drops_spaces && self.held.is_empty() && c.is_whitespace() {
            self.spaces.push(c);
            return None;
        }
        self.held.push(c);
        if let Some(tag) = tags.iter().find(|tag| **tag == self.held) {
            self.held.clear();
            return Some(tag);
        }
        if !tags.iter().any(|tag| tag.starts_with(&self.held)) {
            self.release(tags, text);
        }
        None
    }

    /// Returns the white space before the tag that was just found.
    pub(super) fn take_spaces(&mut self) -> String {
        std::mem::take(&mut self.spaces)
    }

    /// Returns the text that is held back, at the end of the text.
    pub(super) fn take_held(&mut self) -> String {
        let mut held = self.take_spaces();
        held.push_str(&std::mem::take(&mut self.held));
        held
    }

    /// Appends the text that is held, except its longest end that may begin a tag.
    fn release(&mut self, tags: &[&'static str], text: &mut String) {
        text.push_str(&self.spaces);
        self.spaces.clear();
        let (held, drops_spaces) = (&self.held, self.drops_spaces);
        let is_space = |rest: &str| drops_spaces && rest.chars().all(char::is_whitespace);
        let stays = |at: &usize| {
            let rest = &held[*at..];
            is_space(rest) || tags.iter().any(|tag| tag.starts_with(rest))
        };
        let mut starts = held.char_indices().map(|(at, _)| at).skip(1);
        let start = starts.find(stays).unwrap_or(held.len());
        text.push_str(&held[..start]);
        let rest = self.held.split_off(start);
        if is_space(&rest) {
            self.spaces = rest;
            self.held.clear();
        } else {
            self.held = rest;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn found(mut finder: TagFinder, text: &str) -> (String, Option<&'static str>, String) {
        let (mut out, mut tag) = (String::new(), None);
        for c in text.chars() {
            tag = tag.or(finder.push(c, &["<tag>", "<tab>"], &mut out));
        }
        let held = finder.take_held();
        (out, tag, held)
    }

    #[test]
    fn a_tag_is_found_after_beginnings_that_are_none() {
        let check = |text, out: &str, tag, held: &str| {
            let expected = (out.to_owned(), tag, held.to_owned());
            assert_eq!(found(TagFinder::dropping_spaces(), text), expected, "{text:?}");
        };
        check("a <tag>", "a", Some("<tag>"), " ");
        check("a <ta b", "a <ta b", None, "");
        check("<t<tab>", "<t", Some("<tab>"), "");
        check("<<ta", "<", None, "<ta");
        check("x< \n", "x<", None, " \n");
        let (out, tag, held) = found(TagFinder::default(), "a <tag>");
        assert_eq!((out.as_str(), tag, held.as_str()), ("a ", Some("<tag>"), ""));
    }
}
