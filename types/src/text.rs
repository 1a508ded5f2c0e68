//! The text of an error with its causes.

use std::error::Error;

/// Returns the message of an error followed by those of its causes, outermost first.
pub fn in_full(error: &dyn Error) -> String {
    let mut text = error.to_string();
    let mut source = error.source();
    while let Some(cause) = source {
        text.push_str(": ");
        text.push_str(&cause.to_string());
        source = cause.source();
    }
    text
}

#[cfg(test)]
mod tests {
    use std::fmt;

    use super::*;

    #[derive(Debug)]
    struct Told(&'static str, Option<Box<Told>>);

    impl fmt::Display for Told {
        fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
            f.write_str(self.0)
        }
    }

    impl Error for Told {
        fn source(&self) -> Option<&(dyn Error + 'static)> {
            self.1.as_deref().map(|cause| cause as _)
        }
    }

    #[test]
    fn every_cause_is_told_once() {
        let told = |text, cause: Option<Told>| Told(text, cause.map(Box::new));
        let deep = told("no node", Some(told("no link", Some(told("connection refused", None)))));
        assert_eq!(in_full(&deep), "no node: no link: connection refused");
        assert_eq!(in_full(&told("no node", None)), "no node");
    }
}
