//! Which cases are checked.

/// All checks, or those that take a minute under a tool that slows every access down a hundredfold.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Whole,
    Small,
}

impl Extent {
    /// Returns all cases, or the first few: lists start with the small ones.
    pub(crate) fn of<T>(self, cases: &[T], n_small: usize) -> &[T] {
        match self {
            Self::Whole => cases,
            Self::Small => &cases[..n_small.min(cases.len())],
        }
    }
}
