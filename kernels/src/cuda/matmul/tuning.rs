//! Measurements of products, and the file that keeps them.

use std::collections::BTreeMap;
use std::fmt::Write as _;
use std::io;
use std::path::Path;

use device::cuda::CudaError;

use super::super::ComputeCard;
use super::super::ops::{FEW_ROWS_SHARES, FewRowsForm, Fp8Scales, FusedKernel, MANY_FP8_FORMS, SKINNY_FORMS};
use super::cublaslt::Algorithm;
use super::{Choice, ProductShape};

/// The numbers of rows that are measured. Other numbers use the method of the next larger one.
pub const TUNED_ROWS: &[usize] = &[
    1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 160, 192, 224, 256, 384, 512, 768, 1024, 1536, 2048, 3072, 4096,
    6144, 8192,
];
/// The number of timed runs over the matrices. The fastest one counts, because other work on the GPU can only
/// slow a run down.
const N_TIMES: usize = 3;
/// The numbers of products in one timed run, and in one that is recorded as a graph.
const N_LAUNCHES: usize = 4;
const N_LAUNCHES_RECORDED: usize = 32;
/// The largest number of rows for which runs are recorded: decode steps have no more rows.
const ROWS_RECORDED_MAX: usize = 256;

/// Returns the entry of [`TUNED_ROWS`] that is used for `n_rows` rows.
pub fn tuned_rows(n_rows: usize) -> usize {
    TUNED_ROWS.iter().copied().find(|rows| *rows >= n_rows).unwrap_or(TUNED_ROWS[TUNED_ROWS.len() - 1])
}

/// The fastest method for each measured shape.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Choices(BTreeMap<ProductShape, Choice>);

impl Choices {
    pub fn get(&self, shape: ProductShape) -> Option<Choice> {
        self.0.get(&ProductShape { n_rows: tuned_rows(shape.n_rows), ..shape }).copied()
    }

    pub fn keep(&mut self, shape: ProductShape, choice: Choice) {
        self.0.insert(shape, choice);
    }

    pub fn len(&self) -> usize {
        self.0.len()
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Reads the file, if it exists and is for this GPU and these libraries. Shapes of unreadable lines are
    /// measured again.
    pub fn read(file: &Path, about: &str) -> Self {
        let text = std::fs::read_to_string(file).unwrap_or_default();
        let mut lines = text.lines();
        if lines.next() != Some(about) {
            return Self::default();
        }
        Self(lines.filter_map(parsed).collect())
    }

    /// Adds the choices to the file, in which other processes keep theirs. Writes a temporary file and renames it, so that
    /// another process sees the whole file or none.
    pub fn write(&self, file: &Path, about: &str) -> io::Result<()> {
        let mut all = Self::read(file, about).0;
        all.extend(&self.0);
        let mut text = format!("{about}\n");
        for (shape, choice) in &all {
            text.push_str(&line(*shape, *choice));
        }
        if let Some(folder) = file.parent() {
            std::fs::create_dir_all(folder)?;
        }
        let beside = file.with_extension(format!("{}.part", std::process::id()));
        std::fs::write(&beside, text)?;
        std::fs::rename(&beside, file)
    }
}

/// Measures some runs and returns the fastest, in milliseconds of GPU time. Products with few rows are recorded
/// in a graph, like decode steps, because single launches would measure the host's launch time.
pub(super) fn time(
    card: &ComputeCard,
    n_matrices: usize,
    n_rows: usize,
    mut product: impl FnMut(usize) -> Result<(), CudaError>,
) -> Result<f32, CudaError> {
    let mut nth = 0;
    let mut next = || {
        nth += 1;
        product(nth % n_matrices.max(1))
    };
    // The first run loads code, which cannot be recorded, so it is not timed.
    next()?;
    if n_rows > ROWS_RECORDED_MAX {
        return least(card, || (0..N_LAUNCHES).try_for_each(|_| next()));
    }
    let mut graph = card.record(|| (0..N_LAUNCHES_RECORDED).try_for_each(|_| next()))?;
    least(card, || graph.launch())
}

fn least(card: &ComputeCard, mut run: impl FnMut() -> Result<(), CudaError>) -> Result<f32, CudaError> {
    let mut least = f32::INFINITY;
    for _ in 0..=N_TIMES {
        let start = card.mark()?;
        run()?;
        let end = card.mark()?;
        least = least.min(start.ms_until(&end)?);
    }
    Ok(least)
}

/// Formats one line of the file: `n k rows narrow|wide|fp8|fp8blocks skinny NAME`, `… few SHARES`, `… many`, `… many FORM`, or
/// `… lt` and the algorithm's words.
fn line(shape: ProductShape, choice: Choice) -> String {
    let ProductShape { n, k, n_rows, is_wide, fp8 } = shape;
    let kind = match (fp8, is_wide) {
        (Some(Fp8Scales::OfRows), _) => "fp8",
        (Some(Fp8Scales::OfBlocks), _) => "fp8blocks",
        (None, true) => "wide",
        (None, false) => "narrow",
    };
    let mut line = format!("{n} {k} {n_rows} {kind}");
    let written = match choice {
        Choice::Own(FusedKernel::Skinny(form)) => write!(line, " skinny {}", form.name),
        Choice::Own(FusedKernel::Few(FewRowsForm::Clusters { shares })) => write!(line, " few {shares}"),
        Choice::Own(FusedKernel::Few(FewRowsForm::Even)) => write!(line, " few even"),
        Choice::Many => write!(line, " many"),
        Choice::ManyFp8(form) => write!(line, " many {}", form.name()),
        Choice::Lt(algorithm) => {
            line.push_str(" lt");
            algorithm.words().iter().try_for_each(|word| write!(line, " {word:x}"))
        }
    };
    written.expect("a string has room");
    line.push('\n');
    line
}

fn parsed(line: &str) -> Option<(ProductShape, Choice)> {
    let words: Vec<&str> = line.split(' ').collect();
    let [n, k, n_rows, answer, kind, rest @ ..] = words.as_slice() else { return None };
    let (is_wide, fp8) = match *answer {
        "wide" => (true, None),
        "narrow" => (false, None),
        "fp8" => (false, Some(Fp8Scales::OfRows)),
        "fp8blocks" => (false, Some(Fp8Scales::OfBlocks)),
        _ => return None,
    };
    let (n, k, n_rows) = (n.parse().ok()?, k.parse().ok()?, n_rows.parse().ok()?);
    let shape = ProductShape { n, k, n_rows, is_wide, fp8 };
    let choice = match (*kind, rest) {
        ("skinny", [name]) => {
            let form = SKINNY_FORMS.iter().find(|form| form.name == *name).copied()?;
            Choice::Own(FusedKernel::Skinny(form))
        }
        ("few", ["even"]) if FewRowsForm::Even.serves(n_rows) && fp8.is_none() => {
            Choice::Own(FusedKernel::Few(FewRowsForm::Even))
        }
        ("few", [shares]) => {
            let shares = shares.parse().ok().filter(|shares| FEW_ROWS_SHARES.contains(shares))?;
            Choice::Own(FusedKernel::Few(FewRowsForm::Clusters { shares }))
        }
        ("many", []) => Choice::Many,
        ("many", [name]) if fp8.is_some() => {
            Choice::ManyFp8(MANY_FP8_FORMS.iter().find(|form| form.name() == *name).copied()?)
        }
        ("lt", words) => {
            let words: Option<Vec<u64>> =
                words.iter().map(|word| u64::from_str_radix(word, 16).ok()).collect();
            Choice::Lt(Algorithm::of(words?.try_into().ok()?))
        }
        _ => return None,
    };
    Some((shape, choice))
}

#[cfg(test)]
mod tests {
    use super::super::ManyFp8Form;
    use super::*;

    fn shape(n_rows: usize) -> ProductShape {
        ProductShape { n: 6144, k: 4096, n_rows, is_wide: false, fp8: None }
    }

    #[test]
    fn rows_between_tuned_numbers_use_the_next_one() {
        for (n_rows, expected) in [(1, 1), (3, 4), (9, 16), (257, 384), (8192, 8192), (20_000, 8192)] {
            assert_eq!(tuned_rows(n_rows), expected, "{n_rows}");
        }
    }

    #[test]
    fn what_was_measured_is_remembered_for_the_same_card_and_libraries() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("below/choices.txt");
        let mut choices = Choices::default();
        choices.keep(shape(8), Choice::Own(FusedKernel::Skinny(SKINNY_FORMS[1])));
        let lt = Choice::Lt(Algorithm::of([1, 2, 0xffff_ffff_ffff_ffff, 0, 5, 6, 7, 8]));
        choices.keep(shape(64), lt);
        choices.keep(shape(32), Choice::Own(FusedKernel::Few(FewRowsForm::Clusters { shares: 4 })));
        choices.keep(shape(16), Choice::Own(FusedKernel::Few(FewRowsForm::Even)));
        choices.keep(ProductShape { is_wide: true, ..shape(64) }, lt);
        choices.keep(shape(512), Choice::Many);
        choices.keep(
            ProductShape { fp8: Some(Fp8Scales::OfRows), ..shape(64) },
            Choice::Own(FusedKernel::Few(FewRowsForm::Clusters { shares: 2 })),
        );
        let rounded = ProductShape { fp8: Some(Fp8Scales::OfBlocks), ..shape(256) };
        choices.keep(rounded, Choice::ManyFp8(ManyFp8Form::Split));
        choices.write(&file, "a card, 13.1").unwrap();
        let read = Choices::read(&file, "a card, 13.1");
        assert_eq!(read, choices);
        assert_eq!(read.get(shape(50)), Some(lt), "rows below the tuned number");
        assert_eq!(read.get(shape(5)), Some(Choice::Own(FusedKernel::Skinny(SKINNY_FORMS[1]))));
        assert_eq!(read.get(shape(400)), Some(Choice::Many));
        assert_eq!(read.get(rounded), Some(Choice::ManyFp8(ManyFp8Form::Split)));
        assert_eq!(read.get(shape(65)), None);
        let mut of_other = Choices::default();
        of_other.keep(shape(128), lt);
        of_other.keep(shape(64), Choice::Many);
        of_other.write(&file, "a card, 13.1").unwrap();
        let both = Choices::read(&file, "a card, 13.1");
        assert_eq!(both.len(), choices.len() + 1, "the choices of another process stay");
        assert_eq!((both.get(shape(512)), both.get(shape(64))), (Some(Choice::Many), Some(Choice::Many)));
        assert!(Choices::read(&file, "another card").is_empty());
        assert!(Choices::read(&folder.path().join("none"), "a card, 13.1").is_empty());
    }

    #[test]
    fn lines_that_make_no_sense_are_left_out() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("choices.txt");
        let text = "about\n6144 4096 8 narrow skinny none\n6144 4096 8 narrow few 3 12\n6144 4096 128 narrow few even\n6144 4096 512 narrow many split\n6144 4096 512 fp8 many broad\n1 2\n6144 4096 8 narrow lt 1 2\n6144 4096 8 broad lt 1\n";
        std::fs::write(&file, text).unwrap();
        assert!(Choices::read(&file, "about").is_empty());
    }
}
