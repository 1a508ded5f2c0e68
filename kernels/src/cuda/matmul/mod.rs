//! Products of rows with large matrices, each by the method that was fastest for its shape on this GPU.
//!
//! Products of few rows are bound by reading the matrix; our kernels read faster than cuBLASLt. Products of
//! many rows are bound by arithmetic. cuBLASLt computes them by one of its many algorithms, or on Hopper our
//! kernel computes them together with the work after the product. The methods are measured once for each
//! shape ([`tuning`]).
//!
//! The fastest method for few rows sums in another order than the fastest one for many. If a row's result
//! must not depend on the other rows, every product of a matrix uses one method, with a fixed number of rows
//! at a time ([`Products::open_deterministic`]).
//!
//! For few rows a kernel reads an FP8 matrix directly; for many rows the matrix is widened to bf16 first. The
//! limit between the two is measured too. If activations are rounded ([`Products::round_activations`]), Hopper
//! multiplies many rows in FP8, and the other methods multiply the rounded rows in bf16.

pub mod cublaslt;
mod experts;
mod factors;
mod output;
pub mod tuning;

use std::collections::HashMap;

use device::cuda::error::ensure;
use device::cuda::{Bf16, CudaError, View, ViewMut};

use super::ComputeCard;
use super::ops::{
    Ending, FEW_ROWS_FORMS, FEW_ROWS_MAX, FewRowsForm, Fp8Rows, Fp8Scales, FusedKernel, FusedProduct,
    MANY_FP8_FORMS, ManyFp8Form, ManyRows, SKINNY_FORMS, SKINNY_ROWS_MAX, WeightMatrix,
};
use cublaslt::{Algorithm, Lt, Plan};
use factors::{Prepared, Room, RoundedRoom};
pub use output::{Epilogue, OutputRows, ProductOutput};
pub use tuning::{Choices, TUNED_ROWS, tuned_rows};

/// The shape of a product: rows of `k` numbers with a matrix of `n` rows of `k`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ProductShape {
    pub n: usize,
    pub k: usize,
    pub n_rows: usize,
    /// Whether the output is in f32.
    pub is_wide: bool,
    /// Which weights share a scale, if the matrix is in FP8. Then the output is not in f32.
    pub fp8: Option<Fp8Scales>,
}

impl ProductShape {
    fn is_fp8(self) -> bool {
        self.fp8.is_some()
    }
}

/// The method that computes a matrix product.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Choice {
    /// The product is computed by [`ComputeCard::multiply_own`]: up to 8 rows, or up to 128 on Hopper. With
    /// an FP8 matrix, more rows take several passes.
    Own(FusedKernel),
    /// The product is computed by [`ComputeCard::multiply_many`]: on Hopper, for more rows. An FP8 matrix is
    /// widened to bf16 first.
    Many,
    /// The product is computed by [`ComputeCard::multiply_many_fp8`]: on Hopper, an FP8 matrix and rounded rows.
    ManyFp8(ManyFp8Form),
    Lt(Algorithm),
}

/// The result of [`Products::tune`] for one shape.
#[derive(Debug)]
pub struct TuningResult {
    /// The fastest methods and their times, the fastest first.
    pub best: Vec<(Choice, f32)>,
    /// The methods that failed on this GPU.
    pub refused: Vec<(Choice, CudaError)>,
}

/// The two sides of a product: a matrix and the rows that it multiplies, both with rows of `k` numbers.
#[derive(Clone, Copy, Debug)]
pub struct Factors<'a> {
    pub w: WeightMatrix<'a>,
    pub x: View<'a, Bf16>,
    pub k: usize,
}

/// The libraries, memory and measurements that products need.
#[derive(Debug)]
pub struct Products {
    lt: Lt,
    choices: Choices,
    /// Whether a row's result must not depend on the other rows.
    are_alike: bool,
    /// The prepared method for each exact shape, made at the first use of the shape.
    ways: HashMap<ProductShape, Method>,
    room: Room,
}

/// A method for one exact shape, ready to run.
#[derive(Debug)]
enum Method {
    Own(FusedKernel),
    Many,
    ManyFp8(ManyFp8Form),
    Lt(Plan),
}

/// The number of methods of each kind that [`Products::tune`] returns.
const BEST_OF_KIND: usize = 2;

/// Limit of entries in the table of shapes. When it is reached, all entries are dropped and made again.
const WAYS_MAX: usize = 4096;

/// The largest number of rows for which reading an FP8 matrix again for every 128 rows may be faster than
/// widening it.
const PASSES_ROWS_MAX: usize = 512;

/// The smallest number of rows for which multiplying in FP8 may be faster than reading the matrix in FP8 and
/// multiplying in bf16.
const MANY_FP8_ROWS_MIN: usize = 64;

impl Products {
    /// Loads cuBLASLt, from `folder` if one is named. There are no measurements yet.
    pub fn open(card: &ComputeCard, folder: Option<&std::path::Path>) -> Result<Self, CudaError> {
        let lt = Lt::open(card, folder)?;
        let (choices, ways, room) = (Choices::default(), HashMap::new(), Room::default());
        Ok(Self { lt, choices, are_alike: false, ways, room })
    }

    /// Allocates memory for widening matrices in FP8 of up to `n_numbers` numbers.
    pub fn make_room(&mut self, card: &ComputeCard, n_numbers: usize) -> Result<(), CudaError> {
        self.room.widened = Some(card.buffer(n_numbers)?);
        Ok(())
    }

    /// Rounds the rows of all products with an FP8 matrix to FP8. Allocates memory for `n_rows` rows of `k`
    /// numbers.
    pub fn round_activations(
        &mut self,
        card: &ComputeCard,
        n_rows: usize,
        k: usize,
    ) -> Result<(), CudaError> {
        self.room.rounded = Some(RoundedRoom::new(card, n_rows, k)?);
        Ok(())
    }

    /// Returns the bytes that [`round_activations`](Self::round_activations) allocates.
    pub fn rounded_bytes(n_rows: usize, k: usize) -> usize {
        RoundedRoom::n_bytes(n_rows, k)
    }

    /// Returns whether the rows of products with an FP8 matrix are rounded to FP8.
    pub fn rounds_activations(&self) -> bool {
        self.room.rounded.is_some()
    }

    /// Computes a product of few rows and the work after it, in a form that [`own_form`](Self::own_form) returned.
    pub fn multiply_own(
        &mut self,
        card: &ComputeCard,
        form: FusedKernel,
        product: FusedProduct<'_>,
        ending: Ending<'_>,
    ) -> Result<(), CudaError> {
        let FusedProduct { w, x, k, pending_norm } = product;
        let x = match (&mut self.room.rounded, w) {
            (Some(room), WeightMatrix::Fp8(_)) => room.in_bf16(card, x, k)?,
            _ => x,
        };
        card.multiply_own(form, FusedProduct { w, x, k, pending_norm }, ending)
    }

    /// Like [`open`](Self::open), for products whose rows do not depend on the other rows. Nothing is
    /// measured, and cuBLASLt computes none of them. For more rows than our kernel takes, it runs several
    /// times and reads the matrix each time.
    pub fn open_deterministic(
        card: &ComputeCard,
        folder: Option<&std::path::Path>,
    ) -> Result<Self, CudaError> {
        Ok(Self { are_alike: true, ..Self::open(card, folder)? })
    }

    /// Returns the library's version number.
    pub fn library_version(&self) -> usize {
        self.lt.version()
    }

    /// Uses earlier measurements.
    pub fn adopt(&mut self, choices: Choices) {
        self.choices = choices;
        self.ways.clear();
    }

    pub fn choices(&self) -> &Choices {
        &self.choices
    }

    /// Computes `y = x * transpose(w)`. `x` and `w` have rows of `k` numbers; `y` has one row for each row of
    /// `x`, with one number for each row of `w`.
    pub fn multiply(
        &mut self,
        card: &ComputeCard,
        y: OutputRows<'_>,
        factors: Factors<'_>,
    ) -> Result<(), CudaError> {
        let shape = checked(&y, factors)?;
        if shape.n_rows == 0 || shape.n == 0 {
            return Ok(());
        }
        if self.are_alike {
            return self.multiply_alike(card, shape, y, factors);
        }
        self.find_way(card, shape)?;
        let Self { lt, ways, room, .. } = self;
        let way = &ways[&shape];
        lt.run_way(card, way, y, room.prepare(card, way, factors)?)
    }

    /// Computes a product and the work after it. `room` holds the product, unless one kernel does both.
    pub fn multiply_then(
        &mut self,
        card: &ComputeCard,
        next: Epilogue<'_>,
        mut room: ViewMut<'_, Bf16>,
        factors: Factors<'_>,
    ) -> Result<(), CudaError> {
        let shape = checked(&OutputRows::Narrow(room.reborrow()), factors)?;
        if self.are_alike || shape.n_rows == 0 || shape.n == 0 {
            self.multiply(card, OutputRows::Narrow(room.reborrow()), factors)?;
            return next.follow(card, room.view(), shape.n);
        }
        self.find_way(card, shape)?;
        let way = &self.ways[&shape];
        self.lt.run_then(card, way, next, room, self.room.prepare(card, way, factors)?)
    }

    /// Prepares the method for this shape, if it is not prepared.
    fn find_way(&mut self, card: &ComputeCard, shape: ProductShape) -> Result<(), CudaError> {
        if !self.ways.contains_key(&shape) {
            let way = self.way(card, shape)?;
            if self.ways.len() >= WAYS_MAX {
                self.ways.clear();
            }
            self.ways.insert(shape, way);
        }
        Ok(())
    }

    /// Multiplies by the matrix's fixed method, in passes of its maximum number of rows.
    fn multiply_alike(
        &mut self,
        card: &ComputeCard,
        shape: ProductShape,
        mut y: OutputRows<'_>,
        factors: Factors<'_>,
    ) -> Result<(), CudaError> {
        let ProductShape { n, k, n_rows, .. } = shape;
        let Self { lt, room, .. } = self;
        let (way, rows_max) = if card.has_few_rows() {
            (FusedKernel::Few(FewRowsForm::of(n, k)), FEW_ROWS_MAX)
        } else {
            (FusedKernel::Skinny(SKINNY_FORMS[0]), SKINNY_ROWS_MAX)
        };
        let way = Method::Own(way);
        let Prepared::Plain(factors) = room.prepare(card, &way, factors)? else {
            return ensure("product", false, "a method that depends on the number of rows");
        };
        for first in (0..n_rows).step_by(rows_max) {
            let end = (first + rows_max).min(n_rows);
            let some = Factors { x: factors.x.slice(first * k..end * k), ..factors };
            lt.run_way(card, &way, y.slice(first * n..end * n), Prepared::Plain(some))?;
        }
        Ok(())
    }

    /// Returns the form of our kernel that computes products of this shape and the work after them, if one is
    /// chosen. `None` if results must not depend on other rows, because larger numbers of rows use other
    /// kernels for that work.
    pub fn own_form(&self, card: &ComputeCard, shape: ProductShape) -> Option<FusedKernel> {
        // Most steps with prompts return here, before the lookup.
        if self.are_alike || shape.n_rows > FEW_ROWS_MAX {
            return None;
        }
        match self.choices.get(shape) {
            Some(Choice::Own(form)) => Some(form).filter(|form| is_by_itself(*form, shape)),
            Some(Choice::Many | Choice::ManyFp8(_) | Choice::Lt(_)) => None,
            None => guess(card, shape),
        }
    }

    /// Returns the measured method for shapes like this one, else the default.
    fn way(&self, card: &ComputeCard, shape: ProductShape) -> Result<Method, CudaError> {
        match self.choices.get(shape) {
            Some(Choice::Own(form)) if shape.is_fp8() || shape.n_rows <= own_rows_max(form) => {
                Ok(Method::Own(form))
            }
            Some(Choice::Many) if shape.n_rows > FEW_ROWS_MAX => Ok(Method::Many),
            Some(Choice::ManyFp8(form)) if self.multiplies_fp8(card, shape) => Ok(Method::ManyFp8(form)),
            Some(Choice::Lt(algorithm)) => Ok(Method::Lt(self.lt.plan_with(shape, algorithm)?)),
            _ => match guess(card, shape) {
                Some(form) => Ok(Method::Own(form)),
                None if self.multiplies_fp8(card, shape) => Ok(Method::ManyFp8(ManyFp8Form::Wide)),
                None => Ok(Method::Lt(self.lt.plan(shape)?)),
            },
        }
    }

    /// Returns whether products of this shape have rounded rows and can be computed in FP8.
    fn multiplies_fp8(&self, card: &ComputeCard, shape: ProductShape) -> bool {
        self.room.rounded.is_some() && shape.is_fp8() && card.has_many_rows_fp8()
    }

    /// Measures every method for this shape and keeps the fastest. The matrices together are larger than the
    /// caches. Returns the fastest few; the caller measures them in whole steps and calls [`Self::prefer`].
    /// The work after the product is measured with it.
    pub fn tune(
        &mut self,
        card: &ComputeCard,
        shape: ProductShape,
        output: ProductOutput<'_>,
        matrices: &[WeightMatrix<'_>],
        x: View<'_, Bf16>,
    ) -> Result<TuningResult, CudaError> {
        let ProductOutput { mut y, mut next } = output;
        let mut timed: Vec<(f32, Choice)> = Vec::new();
        let mut refused = Vec::new();
        for choice in self.candidates(card, shape)? {
            let way = match choice {
                Choice::Own(form) => Method::Own(form),
                Choice::Many => Method::Many,
                Choice::ManyFp8(form) => Method::ManyFp8(form),
                Choice::Lt(algorithm) => Method::Lt(self.lt.plan_with(shape, algorithm)?),
            };
            let Self { lt, room: of_factors, .. } = self;
            let time = tuning::time(card, matrices.len(), shape.n_rows, |nth| {
                let factors = Factors { w: matrices[nth], x, k: shape.k };
                let factors = of_factors.prepare(card, &way, factors)?;
                match (y.reborrow(), &mut next) {
                    (OutputRows::Narrow(room), Some(next)) => {
                        lt.run_then(card, &way, next.reborrow(), room, factors)
                    }
                    (y, _) => lt.run_way(card, &way, y, factors),
                }
            });
            match time {
                Ok(time) => timed.push((time, choice)),
                // A method can fail: the library may suggest an algorithm that it cannot run, or a partial
                // GPU (MIG) cannot hold the clusters. The failure is noted.
                Err(error) => {
                    card.synchronize()?;
                    refused.push((choice, error));
                }
            }
        }
        if timed.is_empty()
            && let Some((_, error)) = refused.pop()
        {
            return Err(error);
        }
        timed.sort_by(|a, b| a.0.total_cmp(&b.0));
        // In whole steps our kernels also do the work after the product, so some methods of each kind are
        // returned.
        let mut kept = [0; 5];
        timed.retain(|(_, choice)| {
            let kept = match choice {
                Choice::Own(FusedKernel::Skinny(_)) => &mut kept[0],
                Choice::Own(FusedKernel::Few(_)) => &mut kept[1],
                Choice::Many => &mut kept[2],
                Choice::Lt(_) => &mut kept[3],
                Choice::ManyFp8(_) => &mut kept[4],
            };
            *kept += 1;
            *kept <= BEST_OF_KIND
        });
        if let Some((_, choice)) = timed.first() {
            self.prefer(shape, *choice);
        }
        Ok(TuningResult { best: timed.into_iter().map(|(time, choice)| (choice, time)).collect(), refused })
    }

    /// Uses this method for products of this shape from now on.
    pub fn prefer(&mut self, shape: ProductShape, choice: Choice) {
        self.choices.keep(shape, choice);
        self.ways.clear();
    }

    fn candidates(&self, card: &ComputeCard, shape: ProductShape) -> Result<Vec<Choice>, CudaError> {
        if self.multiplies_fp8(card, shape) && shape.n_rows > PASSES_ROWS_MAX {
            return Ok(vec![Choice::ManyFp8(ManyFp8Form::Wide)]);
        }
        let is_many_fp8 = self.multiplies_fp8(card, shape) && shape.n_rows >= MANY_FP8_ROWS_MIN;
        let many_fp8 = MANY_FP8_FORMS.iter().filter(|_| is_many_fp8).copied().map(Choice::ManyFp8);
        let algorithms = self.lt.algorithms(shape)?.into_iter().map(Choice::Lt);
        let is_skinny = shape.n_rows <= SKINNY_ROWS_MAX && !(shape.is_fp8() && card.has_few_rows());
        let skinny = SKINNY_FORMS.iter().filter(|_| is_skinny).copied().map(FusedKernel::Skinny);
        let few_max = if shape.is_fp8() { PASSES_ROWS_MAX } else { FEW_ROWS_MAX };
        let is_few = card.has_few_rows() && shape.n_rows <= few_max;
        let serves = |form: &&FewRowsForm| is_few && form.serves(shape.n_rows.min(FEW_ROWS_MAX));
        let takes = |form: &&FewRowsForm| form.takes_fp8() || !shape.is_fp8();
        let few = FEW_ROWS_FORMS.iter().filter(serves).filter(takes).copied();
        let is_many = card.has_many_rows() && shape.n_rows > FEW_ROWS_MAX && !shape.is_wide;
        let many = is_many.then_some(Choice::Many).into_iter().chain(many_fp8);
        Ok(skinny.chain(few.map(FusedKernel::Few)).map(Choice::Own).chain(many).chain(algorithms).collect())
    }
}

impl Lt {
    fn run_way(
        &self,
        card: &ComputeCard,
        way: &Method,
        y: OutputRows<'_>,
        factors: Prepared<'_>,
    ) -> Result<(), CudaError> {
        match (way, factors, y) {
            (Method::Many | Method::ManyFp8(_), factors, OutputRows::Narrow(y)) => {
                factors.multiply_many(card, ManyRows::Sums(y))
            }
            (
                Method::Own(form @ FusedKernel::Few(_)),
                Prepared::Plain(Factors { w: WeightMatrix::Fp8(w), x, k }),
                y,
            ) => in_passes(card, *form, y, w, x, k),
            (Method::Own(form), Prepared::Plain(Factors { w, x, k }), y) => {
                card.multiply_own(*form, FusedProduct::plain(w, x, k), y.into())
            }
            (Method::Lt(plan), Prepared::Plain(Factors { w, x, .. }), y) => match w.in_bf16() {
                Some(w) => self.run(card, plan, y, w, x),
                None => ensure("product", false, "a matrix in FP8 that was not widened"),
            },
            _ => ensure("product", false, "factors in a format that the method does not take"),
        }
    }

    fn run_then(
        &self,
        card: &ComputeCard,
        way: &Method,
        next: Epilogue<'_>,
        mut room: ViewMut<'_, Bf16>,
        factors: Prepared<'_>,
    ) -> Result<(), CudaError> {
        let does_both = match way {
            Method::Many => true,
            Method::ManyFp8(form) => form.has_gate() || matches!(next, Epilogue::Norm(_)),
            Method::Own(_) | Method::Lt(_) => false,
        };
        if !does_both {
            let n = factors.n();
            self.run_way(card, way, OutputRows::Narrow(room.reborrow()), factors)?;
            return next.follow(card, room.view(), n);
        }
        match next {
            Epilogue::Gate(gated) => factors.multiply_many(card, ManyRows::Gated(gated)),
            Epilogue::Norm(mut rows) => {
                factors.multiply_many(card, ManyRows::Added(rows.residual.reborrow()))?;
                card.rms_norm(rows.out, rows.residual.view(), rows.weight, rows.epsilon)
            }
        }
    }
}

/// Returns the method to use without measurements. It is fast for most matrices.
fn guess(card: &ComputeCard, shape: ProductShape) -> Option<FusedKernel> {
    let ProductShape { n, k, n_rows, fp8, .. } = shape;
    if card.has_few_rows() && n_rows <= FEW_ROWS_MAX {
        return Some(FusedKernel::Few(FewRowsForm::of(n, k)));
    }
    (n_rows <= SKINNY_ROWS_MAX && fp8.is_none()).then_some(FusedKernel::Skinny(SKINNY_FORMS[0]))
}

/// Returns whether one kernel computes the product in one pass, without widening an FP8 matrix first.
fn is_by_itself(form: FusedKernel, shape: ProductShape) -> bool {
    let takes_fp8 = matches!(form, FusedKernel::Few(_));
    shape.n_rows <= own_rows_max(form) && (takes_fp8 || !shape.is_fp8())
}

fn own_rows_max(form: FusedKernel) -> usize {
    match form {
        FusedKernel::Skinny(_) => SKINNY_ROWS_MAX,
        FusedKernel::Few(_) => FEW_ROWS_MAX,
    }
}

/// Multiplies in several passes, each with the kernel's maximum number of rows.
fn in_passes(
    card: &ComputeCard,
    form: FusedKernel,
    y: OutputRows<'_>,
    w: Fp8Rows<'_>,
    x: View<'_, Bf16>,
    k: usize,
) -> Result<(), CudaError> {
    let OutputRows::Narrow(mut y) = y else {
        return ensure("product", false, "an f32 output with an FP8 matrix");
    };
    let (n, n_rows) = (w.n_rows(k), x.len() / k);
    for first in (0..n_rows).step_by(FEW_ROWS_MAX) {
        let end = (first + FEW_ROWS_MAX).min(n_rows);
        let some = FusedProduct::plain(WeightMatrix::Fp8(w), x.slice(first * k..end * k), k);
        card.multiply_own(form, some, Ending::Sums(y.reborrow().slice(first * n..end * n)))?;
    }
    Ok(())
}

fn checked(y: &OutputRows<'_>, factors: Factors<'_>) -> Result<ProductShape, CudaError> {
    let Factors { w, x, k } = factors;
    let kernel = "product";
    let fp8 = w.fp8_scales();
    let n = w.n_rows(k);
    let n_numbers = if fp8.is_some() { n * Fp8Rows::width(k) / 2 } else { n * k };
    let is_whole = k > 0 && k.is_multiple_of(8) && w.halves().len() == n_numbers && x.len().is_multiple_of(k);
    ensure(kernel, is_whole, "rows that are incomplete, or whose width is not a multiple of 8")?;
    let n_rows = x.len() / k;
    ensure(kernel, !(fp8.is_some() && y.is_wide()), "an f32 output with an FP8 matrix")?;
    ensure(kernel, y.len() == n * n_rows, "an output of the wrong size")?;
    ensure(kernel, n.is_multiple_of(8), "a matrix whose rows are not a multiple of 8")?;
    let are_vectors = w.halves().is_aligned() && x.is_aligned() && y.address().is_multiple_of(16);
    ensure(kernel, are_vectors, "numbers that are not aligned to 16 bytes")?;
    Ok(ProductShape { n, k, n_rows, is_wide: y.is_wide(), fp8 })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_widened_first_is_no_product_by_itself() {
        let of_rows = Some(Fp8Scales::OfRows);
        let shape = |n_rows, fp8| ProductShape { n: 64, k: 64, n_rows, is_wide: false, fp8 };
        let (skinny, few) = (FusedKernel::Skinny(SKINNY_FORMS[0]), FusedKernel::Few(FEW_ROWS_FORMS[0]));
        for (form, n_rows, fp8, expected) in [
            (skinny, 8, None, true),
            (skinny, 9, None, false),
            (skinny, 8, of_rows, false),
            (few, 128, of_rows, true),
            (few, 129, None, false),
        ] {
            let shape = shape(n_rows, fp8);
            assert_eq!(is_by_itself(form, shape), expected, "{form:?}, {shape:?}");
        }
    }
}
