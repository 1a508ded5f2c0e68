//! Programs for cards: their text, carried in the executable, and the names of their kernels.

/// One `.cu` file, compiled as one program.
#[derive(Debug)]
pub struct Source {
    /// The file's name, as compilers' messages have it.
    pub name: &'static str,
    /// The whole program: what it begins with, then the file.
    pub text: &'static str,
    /// What can be launched from it.
    pub kernels: &'static [&'static str],
    /// The one kind of card that it is for; all kinds where none is named.
    pub only_on: Option<&'static str>,
}

/// The programs of another crate, which a card loads beside [`WIRE`].
#[derive(Clone, Copy, Debug)]
pub struct Programs {
    pub sources: &'static [Source],
    /// The shared memory that a kernel asks for beyond what a card gives to every kernel.
    pub shared_bytes: fn(&str) -> Option<u32>,
}

/// The kernels that move pages between cards and digest them.
pub const WIRE: Source = Source {
    name: "wire.cu",
    text: concat!(
        include_str!("../../cu/prelude.cuh"),
        "#line 1 \"wire.cu\"\n",
        include_str!("../../cu/wire.cu"),
    ),
    kernels: &["wire_pull", "wire_digest", "wire_copy"],
    only_on: None,
};

impl Source {
    /// For Hopper, whose own instructions no other card has.
    pub const fn on_hopper(self) -> Self {
        Self { only_on: Some("sm_90a"), ..self }
    }

    /// Whether it can be compiled for this kind of card.
    pub fn is_for(&self, arch: &str) -> bool {
        self.only_on.is_none_or(|only| only == arch)
    }
}

impl Programs {
    /// No programs but [`WIRE`].
    pub const NONE: Self = Self { sources: &[], shared_bytes: |_| None };
}
