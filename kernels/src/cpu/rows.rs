//! Hot path.
//! Operations on single rows of activations: norms, rotary positions, the gate of a feed-forward layer.

use super::exp::exp;
use super::processor::Processor;
use super::simd::{Kernel, LANES, Simd};
use super::tile::{self, F32Row, Row};

/// The number of activations in one part of such work: enough to justify a claim.
const PART_NUMBERS: usize = 16 << 10;

impl Processor {
    /// Computes the root-mean-square norm of every row of `x`, scaled by `weight`, which has a row's length.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], epsilon: f32, out: &mut [f32]) {
        assert_eq!(x.len(), out.len());
        self.by_rows(out, weight.len(), |first, out| {
            let x = &x[first..first + out.len()];
            self.isa().run(RmsNorm { x, weight, epsilon, out });
        });
    }

    /// Computes [`Processor::rms_norm`] in place.
    pub fn rms_norm_in_place(&self, x: &mut [f32], weight: &[f32], epsilon: f32) {
        self.by_rows(x, weight.len(), |_, x| self.isa().run(RmsNormInPlace { x, weight, epsilon }));
    }

    /// Computes `x += y`.
    pub fn add(&self, x: &mut [f32], y: &[f32]) {
        assert_eq!(x.len(), y.len());
        self.by_rows(x, 1, |first, x| self.isa().run(Add { y: &y[first..first + x.len()], x }));
    }

    /// Computes `gate = silu(gate) * up`, with `silu(x) = x / (1 + e^-x)`.
    pub fn silu_mul(&self, gate: &mut [f32], up: &[f32]) {
        assert_eq!(gate.len(), up.len());
        self.by_rows(gate, 1, |first, gate| {
            self.isa().run(SiluMul { up: &up[first..first + gate.len()], gate })
        });
    }

    /// Computes `x = e^((x - greatest) * scale)`: the numerators of softmax.
    pub fn exponentials(&self, x: &mut [f32], greatest: f32, scale: f32) {
        self.by_rows(x, LANES, |_, x| self.isa().run(Exponentials { x, greatest, scale }));
    }

    /// Rotates the two halves of every head of a row by that row's angles. The angles are cosines and sines
    /// for half a head. `x` has rows of `n_heads` heads.
    pub fn rotate(&self, x: &mut [f32], n_heads: usize, angles: &RopeAngles) {
        let head_dim = 2 * angles.half;
        let width = n_heads * head_dim;
        assert_eq!(x.len(), angles.n_rows() * width);
        self.by_rows(x, width, |first, x| {
            for (nth, row) in x.chunks_exact_mut(width).enumerate() {
                let (cos, sin) = angles.row(first / width + nth);
                self.isa().run(Rotate { row, head_dim, cos, sin });
            }
        });
    }

    /// Calls `work` with some whole rows at a time and the index of their first number.
    pub(super) fn by_rows(&self, x: &mut [f32], row: usize, work: impl Fn(usize, &mut [f32]) + Sync) {
        let part = PART_NUMBERS.next_multiple_of(row.max(1));
        if x.len() <= part {
            return work(0, x);
        }
        self.pool().run_on(x, part, |nth, x| work(nth * part, x));
    }
}

/// How far each position turns the pairs of a head.
#[derive(Clone, Copy, Debug)]
pub struct Rotation<'a> {
    /// Radians for each position, for each pair.
    pub frequencies: &'a [f32],
    /// The factor of every cosine and sine.
    pub factor: f32,
}

impl Rotation<'_> {
    /// Returns the cosine and sine for each pair at a position, times the factor. The angle is one f32 product, as in
    /// `transformers`.
    pub fn turns(&self, position: usize) -> impl Iterator<Item = [f32; 2]> {
        self.frequencies.iter().map(move |frequency| {
            let (sin, cos) = (position as f32 * frequency).sin_cos();
            [cos * self.factor, sin * self.factor]
        })
    }
}

/// Rotary angles of some rows: cosine and sine for every pair of a head.
#[derive(Clone, Debug, Default)]
pub struct RopeAngles {
    half: usize,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

impl RopeAngles {
    /// Computes the angles of these positions.
    pub fn new(rotation: Rotation<'_>, positions: impl Iterator<Item = usize>) -> Self {
        let mut angles = Self { half: rotation.frequencies.len(), ..Self::default() };
        for [cos, sin] in positions.flat_map(|position| rotation.turns(position)) {
            angles.cos.push(cos);
            angles.sin.push(sin);
        }
        angles
    }

    pub fn n_rows(&self) -> usize {
        self.cos.len() / self.half.max(1)
    }

    fn row(&self, nth: usize) -> (&[f32], &[f32]) {
        let range = nth * self.half..(nth + 1) * self.half;
        (&self.cos[range.clone()], &self.sin[range])
    }
}

// === kernels ===

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    epsilon: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let row = self.weight.len();
        for (x, out) in self.x.chunks_exact(row).zip(self.out.chunks_exact_mut(row)) {
            let scale = norm_scale(simd, x, self.epsilon);
            for ((out, x), weight) in out.iter_mut().zip(x).zip(self.weight) {
                *out = weight * (x * scale);
            }
        }
    }
}

struct RmsNormInPlace<'a> {
    x: &'a mut [f32],
    weight: &'a [f32],
    epsilon: f32,
}

impl Kernel for RmsNormInPlace<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        for x in self.x.chunks_exact_mut(self.weight.len()) {
            let scale = norm_scale(simd, x, self.epsilon);
            for (x, weight) in x.iter_mut().zip(self.weight) {
                *x = weight * (*x * scale);
            }
        }
    }
}

/// Returns the reciprocal of the root mean square. The squares are summed like any dot product.
#[inline(always)]
fn norm_scale<S: Simd>(simd: S, x: &[f32], epsilon: f32) -> f32 {
    let row = F32Row::new(x);
    let mut sums = [0.0; LANES];
    let mut running = simd.zero();
    for nth in 0..Row::<S>::n_steps(row) {
        let step = row.step(simd, nth);
        running = simd.mul_add(step, step, running);
    }
    simd.store(running, &mut sums);
    tile::add_tail(simd, row, row, &mut sums);
    1.0 / (simd.sum(simd.load(&sums)) / x.len() as f32 + epsilon).sqrt()
}

struct Add<'a> {
    x: &'a mut [f32],
    y: &'a [f32],
}

impl Kernel for Add<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        for (x, y) in self.x.iter_mut().zip(self.y) {
            *x += y;
        }
    }
}

struct SiluMul<'a> {
    gate: &'a mut [f32],
    up: &'a [f32],
}

impl Kernel for SiluMul<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (gates, last_gates) = self.gate.as_chunks_mut::<LANES>();
        let (ups, last_ups) = self.up.as_chunks::<LANES>();
        for (gate, up) in gates.iter_mut().zip(ups) {
            silu_mul(simd, gate, up);
        }
        let (mut gate, mut up) = ([0.0; LANES], [0.0; LANES]);
        gate[..last_gates.len()].copy_from_slice(last_gates);
        up[..last_ups.len()].copy_from_slice(last_ups);
        silu_mul(simd, &mut gate, &up);
        last_gates.copy_from_slice(&gate[..last_gates.len()]);
    }
}

#[inline(always)]
fn silu_mul<S: Simd>(simd: S, gate: &mut [f32; LANES], up: &[f32; LANES]) {
    let x = simd.load(gate);
    let one = simd.splat(1.0);
    let silu = simd.div(x, simd.add(one, exp(simd, simd.sub(simd.zero(), x))));
    simd.store(simd.mul(silu, simd.load(up)), gate);
}

struct Exponentials<'a> {
    x: &'a mut [f32],
    greatest: f32,
    scale: f32,
}

impl Kernel for Exponentials<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, simd: S) {
        let (steps, tail) = self.x.as_chunks_mut::<LANES>();
        for step in steps {
            exponentials(simd, step, self.greatest, self.scale);
        }
        let mut last = [0.0; LANES];
        last[..tail.len()].copy_from_slice(tail);
        exponentials(simd, &mut last, self.greatest, self.scale);
        tail.copy_from_slice(&last[..tail.len()]);
    }
}

#[inline(always)]
fn exponentials<S: Simd>(simd: S, x: &mut [f32; LANES], greatest: f32, scale: f32) {
    let relative = simd.sub(simd.load(x), simd.splat(greatest));
    simd.store(exp(simd, simd.mul(relative, simd.splat(scale))), x);
}

struct Rotate<'a> {
    row: &'a mut [f32],
    head_dim: usize,
    cos: &'a [f32],
    sin: &'a [f32],
}

impl Kernel for Rotate<'_> {
    type Output = ();

    #[inline(always)]
    fn run<S: Simd>(self, _simd: S) {
        for head in self.row.chunks_exact_mut(self.head_dim) {
            let (first, second) = head.split_at_mut(self.head_dim / 2);
            for (((a, b), cos), sin) in first.iter_mut().zip(second).zip(self.cos).zip(self.sin) {
                (*a, *b) = (*a * cos - *b * sin, *b * cos + *a * sin);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::num::NonZero;

    use super::*;
    use crate::cpu::{Arithmetic, Isa};

    fn cpus() -> Vec<Processor> {
        let threads = NonZero::new(2).unwrap();
        Isa::all()
            .into_iter()
            .map(|isa| Processor::with_isa(isa, Arithmetic::F32, threads).unwrap())
            .collect()
    }

    fn numbers(n: usize, seed: f32) -> Vec<f32> {
        (0..n).map(|i| (i as f32 * 0.71 + seed).sin() * 3.0).collect()
    }

    /// Runs `f` on `n` numbers with every instruction set. Checks that all give the same result, and returns
    /// it.
    fn all_agree(n: usize, f: impl Fn(&Processor, &mut Vec<f32>)) -> Vec<f32> {
        let mut results = cpus().into_iter().map(|cpu| {
            let mut x = numbers(n, 0.3);
            f(&cpu, &mut x);
            x
        });
        let first = results.next().unwrap();
        assert!(results.all(|result| result == first), "processors differ");
        first
    }

    #[test]
    fn a_norm_is_what_its_name_says() {
        let weight = numbers(37, 2.0);
        let x = numbers(37 * 3, 0.3);
        let out = all_agree(37 * 3, |cpu, x| cpu.rms_norm_in_place(x, &weight, 1e-5));
        let mut apart = vec![0.0; out.len()];
        cpus()[0].rms_norm(&x, &weight, 1e-5, &mut apart);
        assert_eq!(out, apart);
        for row in 0..3 {
            let row = row * 37..(row + 1) * 37;
            let mean = x[row.clone()].iter().map(|x| f64::from(*x).powi(2)).sum::<f64>() / 37.0;
            for ((x, weight), out) in x[row.clone()].iter().zip(&weight).zip(&out[row]) {
                let truth = f64::from(*x) / (mean + 1e-5).sqrt() * f64::from(*weight);
                assert!((f64::from(*out) - truth).abs() < 1e-5);
            }
        }
    }

    #[test]
    fn a_row_does_not_know_its_neighbours() {
        let weight = numbers(100, 1.0);
        let many = all_agree(100 * 400, |cpu, x| cpu.rms_norm_in_place(x, &weight, 1e-6));
        let mut one = numbers(100 * 400, 0.3)[39_900..].to_vec();
        cpus()[0].rms_norm_in_place(&mut one, &weight, 1e-6);
        assert_eq!(many[39_900..], one);
    }

    #[test]
    fn a_gate_is_silu_times_up() {
        let up = numbers(1003, 5.0);
        let out = all_agree(1003, |cpu, x| cpu.silu_mul(x, &up));
        for ((x, up), out) in numbers(1003, 0.3).iter().zip(&up).zip(out) {
            let truth = f64::from(*x) / (1.0 + (-f64::from(*x)).exp()) * f64::from(*up);
            assert!((f64::from(out) - truth).abs() < 1e-5);
        }
    }

    #[test]
    fn exponentials_are_relative_to_the_greatest() {
        let out = all_agree(1003, |processor, x| processor.exponentials(x, 3.0, 0.5));
        for (x, out) in numbers(1003, 0.3).iter().zip(out) {
            let truth = ((f64::from(*x) - 3.0) * 0.5).exp();
            assert!((f64::from(out) - truth).abs() < 1e-6);
        }
    }

    #[test]
    fn rotation_keeps_lengths_and_turns_by_position() {
        let angles = RopeAngles::new(Rotation { frequencies: &[1.0, 0.1], factor: 1.0 }, [0, 3].into_iter());
        let x = numbers(2 * 2 * 4, 0.3);
        let out = all_agree(2 * 2 * 4, |cpu, x| cpu.rotate(x, 2, &angles));
        assert_eq!(x[..8], out[..8], "position 0 turns by nothing");
        let (a, b) = (x[8], x[10]);
        assert!((out[8] - (a * 3f32.cos() - b * 3f32.sin())).abs() < 1e-6);
        assert!((out[10] - (b * 3f32.cos() + a * 3f32.sin())).abs() < 1e-6);
    }

    #[test]
    fn sums_are_sums() {
        let y = numbers(40_000, 9.0);
        let out = all_agree(40_000, |cpu, x| cpu.add(x, &y));
        assert_eq!(out[39_999], numbers(40_000, 0.3)[39_999] + y[39_999]);
    }
}
