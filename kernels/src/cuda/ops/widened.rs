//! A layer's KV in bf16, made from pages in FP8.

use super::latent::latent_pages;
use super::{BLOCK_TOKENS, Bf16, ComputeCard, CudaError, KvNumber, KvPages, View, ensure, launch, number};
use device::cuda::Buffer;
use device::cuda::card::grid;

const THREADS: u32 = 256;

/// The tokens for which there is memory in bf16, and their heads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct WidenedSize {
    pub n_tokens: usize,
    pub n_kv_heads: usize,
    pub head_dim: usize,
}

/// Memory for the pages of some sequences in bf16. One layer uses it after the other.
#[derive(Debug)]
pub struct WidenedPages {
    pages: Buffer<Bf16>,
    kv: KvPages,
    /// The numbers of all pages in ascending order. Page `i` of sequence `s` is page `s * stride + i`, so the first part of
    /// this is the tables of any number of sequences.
    tables: Buffer<u32>,
}

/// Pages in FP8, and the tables of the sequences whose pages are widened.
#[derive(Clone, Copy, Debug)]
pub(super) struct NarrowPages<'a> {
    pub(super) pages: View<'a, Bf16>,
    pub(super) kv: KvPages,
    pub(super) tables: View<'a, u32>,
    pub(super) on_card: View<'a, [u32; 3]>,
    pub(super) window: usize,
}

impl WidenedSize {
    /// Returns the size for the latents of tokens.
    pub fn of_latents(n_tokens: usize) -> Self {
        let KvPages { n_kv_heads, head_dim, .. } = latent_pages(0, KvNumber::Bf16);
        Self { n_tokens, n_kv_heads, head_dim }
    }

    pub fn bytes(self) -> usize {
        let kv = self.kv();
        kv.halves() * size_of::<Bf16>() + kv.n_blocks * size_of::<u32>()
    }

    fn kv(self) -> KvPages {
        let Self { n_tokens, n_kv_heads, head_dim } = self;
        let n_blocks = n_tokens.div_ceil(BLOCK_TOKENS).max(1);
        KvPages { n_kv_heads, head_dim, n_blocks, number: KvNumber::Bf16 }
    }
}

impl WidenedPages {
    pub fn new(card: &ComputeCard, size: WidenedSize) -> Result<Self, CudaError> {
        let kv = size.kv();
        let numbers: Vec<u32> = (0..number("widen_pages", kv.n_blocks)?).collect();
        Ok(Self { pages: card.buffer(kv.halves())?, kv, tables: card.upload(&numbers)? })
    }

    /// Returns the number of sequences with tables of `stride` pages for which there is room.
    pub fn n_sequences(&self, stride: usize) -> usize {
        self.kv.n_blocks / stride.max(1)
    }

    pub(super) fn pages(&self) -> (View<'_, Bf16>, KvPages) {
        (self.pages.view(), self.kv)
    }

    /// Returns the tables of the first sequences, `len` numbers.
    pub(super) fn tables(&self, len: usize) -> View<'_, u32> {
        self.tables.slice(0..len)
    }
}

impl ComputeCard {
    /// Converts the pages that queries of the sequences see.
    pub(super) fn widen_pages(
        &self,
        widened: &mut WidenedPages,
        narrow: NarrowPages<'_>,
    ) -> Result<(), CudaError> {
        let kernel = "widen_pages";
        let NarrowPages { pages, kv, tables, on_card, window } = narrow;
        let stride = tables.len() / on_card.len().max(1);
        ensure(kernel, tables.len() <= widened.kv.n_blocks, "more pages than there is room for")?;
        ensure(kernel, kv.page_numbers() == widened.kv.page_numbers(), "room for other heads")?;
        let config = grid(stride, on_card.len(), THREADS);
        let (table_stride, page_numbers) = (number(kernel, stride)?, number(kernel, kv.page_numbers())?);
        let n_blocks = number(kernel, kv.n_blocks)?;
        let window = u32::try_from(window).unwrap_or(u32::MAX);
        launch!(
            self,
            kernel,
            config,
            &widened.pages.view_mut().address(),
            &pages.address(),
            &tables.address(),
            &on_card.address(),
            &table_stride,
            &page_numbers,
            &n_blocks,
            &window
        )
    }
}
