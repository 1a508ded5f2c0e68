//! The id of a model and its revision: `org/name@revision`.

use std::fmt;

/// The longest part of an id, as on the hub.
const PART_BYTES_MAX: usize = 96;
const REVISION_BYTES_MAX: usize = 256;

/// The revision that is used if none is given.
pub const MAIN: &str = "main";

/// The id of a model on a hub, with a revision.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ModelId {
    organization: String,
    name: String,
    /// The revision: a branch, a tag, or a commit.
    revision: String,
}

impl ModelId {
    /// Parses `org/name` or `org/name@revision`. Returns `None` for any other text, such as a path.
    pub fn parse(text: &str) -> Option<Self> {
        let (repository, revision) = text.split_once('@').unwrap_or((text, MAIN));
        let (organization, name) = repository.split_once('/')?;
        let sane = is_part(organization) && is_part(name) && is_revision(revision);
        sane.then(|| Self {
            organization: organization.to_owned(),
            name: name.to_owned(),
            revision: revision.to_owned(),
        })
    }

    /// Returns `org/name`.
    pub fn repository(&self) -> String {
        format!("{}/{}", self.organization, self.name)
    }

    pub fn revision(&self) -> &str {
        &self.revision
    }

    /// Returns the name of the model's folder in a cache.
    pub(crate) fn folder(&self) -> String {
        format!("models--{}--{}", self.organization, self.name)
    }
}

impl fmt::Display for ModelId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.revision.as_str() {
            MAIN => write!(f, "{}/{}", self.organization, self.name),
            revision => write!(f, "{}/{}@{revision}", self.organization, self.name),
        }
    }
}

fn is_part(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_.".contains(&byte);
    let edge = |byte: Option<&u8>| byte.is_some_and(|byte| !b"-.".contains(byte));
    let bytes = text.as_bytes();
    // Two dashes are refused because they separate the parts of a folder's name, and two dots because they
    // would lead out of it.
    let ambiguous = text.contains("--") || text.contains("..");
    bytes.len() <= PART_BYTES_MAX
        && bytes.iter().copied().all(plain)
        && edge(bytes.first())
        && edge(bytes.last())
        && !ambiguous
}

/// Returns whether the text can be a revision, by a part of git's rules: a revision is a path below `refs/`.
fn is_revision(text: &str) -> bool {
    let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"-_./+".contains(&byte);
    let sane_step = |step: &str| !step.is_empty() && !step.starts_with('.');
    (1..=REVISION_BYTES_MAX).contains(&text.len())
        && text.bytes().all(plain)
        && text.split('/').all(sane_step)
}

/// Returns whether a revision is a full commit id. The content of a commit never changes.
pub(crate) fn is_commit(revision: &str) -> bool {
    revision.len() == 40
        && revision.bytes().all(|byte| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ids_are_told_from_paths() {
        for (text, expected) in [
            ("Qwen/Qwen3-0.6B", Some(("Qwen/Qwen3-0.6B", "main"))),
            ("Qwen/Qwen3-0.6B@v1.0", Some(("Qwen/Qwen3-0.6B", "v1.0"))),
            ("org/name@refs/pr/3", Some(("org/name", "refs/pr/3"))),
            ("name", None),
            ("./name", None),
            ("../name", None),
            ("/org/name", None),
            ("org/name/more", None),
            ("org/na--me", None),
            ("org/name@", None),
            ("org/name@../../x", None),
            ("org/name@/x", None),
            ("or g/name", None),
            ("~/name", None),
            ("org/", None),
        ] {
            let id = ModelId::parse(text);
            let found = id.as_ref().map(|id| (id.repository(), id.revision().to_owned()));
            assert_eq!(
                found,
                expected.map(|(repository, revision)| (repository.to_owned(), revision.to_owned())),
                "{text}"
            );
        }
    }

    #[test]
    fn an_id_is_shown_as_it_is_typed() {
        for text in ["org/name", "org/name@v1"] {
            assert_eq!(ModelId::parse(text).expect("an id").to_string(), text);
        }
        assert_eq!(ModelId::parse("org/name@v1").expect("an id").folder(), "models--org--name");
    }

    #[test]
    fn a_commit_has_forty_digits() {
        assert!(is_commit(&"0a".repeat(20)));
        assert!(!is_commit("main") && !is_commit(&"0A".repeat(20)) && !is_commit(&"a".repeat(41)));
    }
}
