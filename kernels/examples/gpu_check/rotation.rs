//! Heads that are rotated and written into pages, with or without norms: random inputs, and the expected
//! output.

use baton_kernels::cuda::ops::BLOCK_TOKENS;
use baton_kernels::cuda::{ComputeCard, KvPages, RopeWriteKv};
use device::cuda::{Bf16, Buffer, CudaError, ViewMut};

use super::check_rows::{EPSILON, normed};
use super::draw::{Draw, wide};
use super::pages::numbers_of;
use super::verdict::{BF16_ERROR, Verdicts, error_of};

const N_POSITIONS: usize = 50;

/// The numbers of heads, the layout of k and v, and whether q and k are normed.
#[derive(Clone, Copy)]
struct Heads {
    n_q: usize,
    kv: KvPages,
    has_norms: bool,
}

/// The positions, slots and norms of rows of heads.
pub(crate) struct Rotation {
    heads: Heads,
    turns: Vec<[f32; 2]>,
    positions: Vec<u32>,
    /// The slot of each row. One slot is invalid, so its k and v are not written.
    slots: Vec<u32>,
    norms: [Vec<Bf16>; 2],
}

/// A [`Rotation`] in GPU memory.
pub(crate) struct RotationThere {
    heads: Heads,
    turns: Buffer<[f32; 2]>,
    positions: Buffer<u32>,
    slots: Buffer<u32>,
    norms: [Buffer<Bf16>; 2],
}

impl Rotation {
    pub(crate) fn drawn(
        draw: &mut Draw,
        (n_rows, n_q): (usize, usize),
        kv: KvPages,
        has_norms: bool,
    ) -> Self {
        let head_dim = kv.head_dim;
        let turns = (0..N_POSITIONS * head_dim / 2).map(|_| draw.number() * 3.0);
        let turns = turns.map(|angle| [angle.cos(), angle.sin()]).collect();
        let positions = (0..n_rows).map(|_| draw.below(N_POSITIONS) as u32).collect();
        let mut slots = draw.order(kv.n_blocks * BLOCK_TOKENS)[..n_rows].to_vec();
        slots[n_rows / 2] = u32::MAX;
        let norms = [draw.narrow(head_dim, 1.5), draw.narrow(head_dim, 1.5)];
        Self { heads: Heads { n_q, kv, has_norms }, turns, positions, slots, norms }
    }

    pub(crate) fn upload(&self, card: &ComputeCard) -> Result<RotationThere, CudaError> {
        let Self { heads, turns, positions, slots, norms } = self;
        Ok(RotationThere {
            heads: *heads,
            turns: card.upload(turns)?,
            positions: card.upload(positions)?,
            slots: card.upload(slots)?,
            norms: [card.upload(&norms[0])?, card.upload(&norms[1])?],
        })
    }

    /// Compares, after the kernel, q and the pages with the expected ones, computed from the rows before the
    /// kernel. The pages were poisoned before.
    pub(crate) fn compare<'a>(
        &self,
        verdicts: &mut Verdicts,
        name: &str,
        before: impl Iterator<Item = &'a [f64]>,
        (q, pages): (Vec<Bf16>, Vec<Bf16>),
    ) {
        let Heads { n_q, kv: KvPages { n_kv_heads, head_dim, number, .. }, .. } = self.heads;
        let (q, pages) = (wide(&q), numbers_of(&pages, number));
        let (mut of_q, mut q_reference, mut of_kv, mut kv_reference) = (vec![], vec![], vec![], vec![]);
        for (row, numbers) in before.enumerate() {
            for (nth, head) in numbers.chunks(head_dim).enumerate() {
                let expected = self.expected(row, nth, head);
                if nth < n_q {
                    of_q.extend_from_slice(&q[row * numbers.len() + nth * head_dim..][..head_dim]);
                    q_reference.extend(expected);
                } else if self.slots[row] != u32::MAX {
                    let slot = self.slots[row] as usize;
                    let page = slot / BLOCK_TOKENS * 2 * n_kv_heads + nth - n_q;
                    let from = (page * BLOCK_TOKENS + slot % BLOCK_TOKENS) * head_dim;
                    of_kv.extend_from_slice(&pages[from..from + head_dim]);
                    kv_reference.extend(expected);
                }
            }
        }
        verdicts.compare(format!("{name}, q"), &of_q, &q_reference, BF16_ERROR);
        verdicts.compare(format!("{name}, k and v"), &of_kv, &kv_reference, error_of(number));
        let n_poisoned = pages.iter().filter(|number| number.is_nan()).count();
        verdicts.holds(format!("{name}, nothing else written"), n_poisoned == pages.len() - of_kv.len());
    }

    fn expected(&self, row: usize, nth: usize, head: &[f64]) -> Vec<f64> {
        let Heads { n_q, kv, has_norms } = self.heads;
        let is_q = nth < n_q;
        if !is_q && nth >= n_q + kv.n_kv_heads {
            return head.to_vec();
        }
        let half = kv.head_dim / 2;
        let turns = &self.turns[self.positions[row] as usize * half..][..half];
        match has_norms {
            true => turned(&normed(head, &wide(&self.norms[usize::from(!is_q)])), turns),
            false => turned(head, turns),
        }
    }
}

impl RotationThere {
    pub(crate) fn rope<'a>(&'a self, qkv: ViewMut<'a, Bf16>, pages: ViewMut<'a, Bf16>) -> RopeWriteKv<'a> {
        let Heads { n_q, kv, has_norms } = self.heads;
        RopeWriteKv {
            qkv,
            n_q_heads: n_q,
            pages,
            kv,
            positions: self.positions.view(),
            slots: self.slots.view(),
            turns: self.turns.view(),
            norms: has_norms.then(|| [self.norms[0].view(), self.norms[1].view()]),
            epsilon: EPSILON,
        }
    }
}

fn turned(head: &[f64], turns: &[[f32; 2]]) -> Vec<f64> {
    let half = head.len() / 2;
    let turn = |i: usize| {
        let [cos, sin] = turns[i % half].map(f64::from);
        if i < half { head[i] * cos - head[i + half] * sin } else { head[i] * cos + head[i - half] * sin }
    };
    (0..head.len()).map(turn).collect()
}
