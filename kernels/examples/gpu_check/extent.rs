//! How much is checked.

/// All of it, or what a tool that slows every access down a hundredfold gets through in a minute.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Extent {
    Whole,
    Small,
}

impl Extent {
    /// All cases, or the first few: lists begin with the small ones.
    pub(crate) fn of<T>(self, cases: &[T], n_small: usize) -> &[T] {
        match self {
            Self::Whole => cases,
            Self::Small => &cases[..n_small.min(cases.len())],
        }
    }
}
