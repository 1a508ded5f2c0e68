//! Programs for GPUs: their text, which the executable contains, and the names of their kernels.

/// One `.cu` file, compiled as one program.
#[derive(Debug)]
pub struct Source {
    /// The file's name, which the compiler's messages contain.
    pub name: &'static str,
    /// The whole program: the included headers, then the file.
    pub text: &'static str,
    /// The kernels that can be launched.
    pub kernels: &'static [&'static str],
    /// The one architecture that the program is for; `None` means all.
    pub only_on: Option<&'static str>,
}

/// The programs of another crate, which a GPU loads beside [`WIRE`].
#[derive(Clone, Copy, Debug)]
pub struct Programs {
    pub sources: &'static [Source],
    /// Returns the dynamic shared memory of a kernel, if it exceeds the default limit.
    pub shared_bytes: fn(&str) -> Option<u32>,
}

/// The kernels that move and digest pages.
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
    /// Restricts the program to Hopper, because it uses Hopper's own instructions.
    pub const fn on_hopper(self) -> Self {
        Self { only_on: Some("sm_90a"), ..self }
    }

    /// Returns whether it can be compiled for this architecture.
    pub fn is_for(&self, arch: &str) -> bool {
        self.only_on.is_none_or(|only| only == arch)
    }
}

impl Programs {
    /// No further programs: only [`WIRE`] is compiled.
    pub const NONE: Self = Self { sources: &[], shared_bytes: |_| None };
}
