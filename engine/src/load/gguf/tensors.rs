//! The tensors of a GGUF file, under the names that they have in a hub's folder.

use std::ops::Range;

use kernels::cpu::SharedBytes;

use super::blocks::{BlocksError, StoredAs};
use super::header::{Header, TensorInfo};
use super::model::{Experts, Model, RowOrder};

/// The divisors of rotary frequencies, which become a setting in `config.json`.
pub(super) const ROPE_FREQUENCIES: &str = "rope_freqs.weight";

/// Tensors outside of layers, by their names in both formats.
pub(super) const OUTSIDE: &[(&str, &str)] = &[
    ("token_embd.weight", "model.embed_tokens.weight"),
    ("output_norm.weight", "model.norm.weight"),
    ("output.weight", "lm_head.weight"),
];
/// Tensors of a layer, without the end `.weight` or `.bias`.
pub(super) const IN_LAYERS: &[(&str, &str)] = &[
    ("attn_norm", "input_layernorm"),
    ("ffn_norm", "post_attention_layernorm"),
    ("attn_q", "self_attn.q_proj"),
    ("attn_k", "self_attn.k_proj"),
    ("attn_v", "self_attn.v_proj"),
    ("attn_output", "self_attn.o_proj"),
    ("attn_q_norm", "self_attn.q_norm"),
    ("attn_k_norm", "self_attn.k_norm"),
    ("ffn_gate", "mlp.gate_proj"),
    ("ffn_up", "mlp.up_proj"),
    ("ffn_down", "mlp.down_proj"),
];
pub(super) const ROUTER: &str = "ffn_gate_inp";
/// Tensors with the matrices of all experts of a layer: gate, up and down.
pub(super) const OF_EXPERTS: [&str; 3] = ["ffn_gate_exps", "ffn_up_exps", "ffn_down_exps"];

/// One tensor, or the matrix of one expert.
#[derive(Clone, Debug)]
pub(in crate::load) struct Tensor {
    pub(in crate::load) shape: Vec<usize>,
    /// The place of its bytes in the file's data.
    pub(in crate::load) bytes: Range<usize>,
    pub(in crate::load) stored_as: StoredAs,
    /// The number of rows of a head whose rows are in the order of [`RowOrder::Pairs`].
    paired: Option<usize>,
}

impl Tensor {
    /// Reads the tensor's numbers out of the file's data.
    pub(in crate::load) fn read(&self, data: &SharedBytes) -> Result<SharedBytes, BlocksError> {
        let bytes = data.slice(self.bytes.clone());
        // A bias has one number for each row of its matrix, so it is ordered as a matrix of one column.
        let cols = if let [_, cols] = *self.shape {
            cols
        } else if self.paired.is_some() {
            1
        } else {
            self.shape.iter().product()
        };
        match self.paired {
            Some(head) => self.stored_as.read(&bytes, cols, Some(&|row| paired_row(row, head))),
            None => self.stored_as.read(&bytes, cols, None),
        }
    }
}

/// Returns where a row of q or k is, if the two rows that are turned together are neighbours.
fn paired_row(row: usize, head: usize) -> usize {
    let (nth, row) = (row / head, row % head);
    let half = head / 2;
    nth * head + 2 * (row % half) + row / half
}

/// Returns all tensors. One without a counterpart in a hub's folder keeps its name, and the check for unread tensors
/// finds it.
pub(super) fn tensors(header: &Header<'_>, model: &Model) -> Result<Vec<(String, Tensor)>, String> {
    let mut all = Vec::new();
    for info in header.tensors.iter().filter(|info| info.name != ROPE_FREQUENCIES) {
        let Some((layer, part, end)) = in_layer(info.name) else {
            let outside = OUTSIDE.iter().find(|(name, _)| *name == info.name);
            all.push((outside.map_or(info.name, |(_, name)| name).to_owned(), whole(info, None)));
            continue;
        };
        let experts = model.architecture.experts;
        if let (Some(nth), "weight") = (OF_EXPERTS.iter().position(|name| *name == part), end) {
            let of_layer = |expert: usize| {
                let Experts { part, matrices } = experts;
                format!("model.layers.{layer}.{part}.experts.{expert}.{}.weight", matrices[nth])
            };
            all.extend(of_experts(info, model)?.enumerate().map(|(nth, tensor)| (of_layer(nth), tensor)));
            continue;
        }
        let router = format!("{}.gate", experts.part);
        let known = IN_LAYERS.iter().find(|(name, _)| *name == part).map(|(_, name)| *name);
        let name = match known.or((part == ROUTER).then_some(router.as_str())) {
            Some(name) => format!("model.layers.{layer}.{name}.{end}"),
            None => info.name.to_owned(),
        };
        all.push((name, whole(info, paired(part, model))));
    }
    Ok(all)
}

/// Divides the name of a layer's tensor into the layer, the part, and the end.
fn in_layer(name: &str) -> Option<(u64, &str, &str)> {
    let (layer, rest) = name.strip_prefix("blk.")?.split_once('.')?;
    let (part, end) = rest.rsplit_once('.')?;
    Some((layer.parse().ok()?, part, end)).filter(|(.., end)| ["weight", "bias"].contains(end))
}

fn paired(part: &str, model: &Model) -> Option<usize> {
    let is_turned = ["attn_q", "attn_k"].contains(&part);
    let head = usize::try_from(model.head_dim).ok().filter(|head| *head > 0 && head.is_multiple_of(2));
    head.filter(|_| is_turned && model.architecture.rows == RowOrder::Pairs)
}

fn whole(info: &TensorInfo<'_>, paired: Option<usize>) -> Tensor {
    let paired = paired.filter(|head| info.shape[0].is_multiple_of(*head));
    Tensor { shape: info.shape.clone(), bytes: info.bytes.clone(), stored_as: info.stored_as, paired }
}

/// Divides a tensor with the matrices of all experts.
fn of_experts<'a>(
    info: &'a TensorInfo<'_>,
    model: &Model,
) -> Result<impl Iterator<Item = Tensor> + use<'a>, String> {
    let [n_experts, rows, cols] = *info.shape else {
        return Err(format!("tensor {} has shape {:?}, not three dimensions", info.name, info.shape));
    };
    if n_experts as u64 != model.n_experts {
        return Err(format!("tensor {} has {n_experts} experts, not {}", info.name, model.n_experts));
    }
    let n_bytes = info.bytes.len() / n_experts;
    Ok((0..n_experts).map(move |expert| {
        let start = info.bytes.start + expert * n_bytes;
        Tensor {
            shape: vec![rows, cols],
            bytes: start..start + n_bytes,
            stored_as: info.stored_as,
            paired: None,
        }
    }))
}
