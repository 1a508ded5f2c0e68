//! The model that a GGUF file describes.

use super::header::Header;

/// The architectures that are read, by llama.cpp's names.
const ARCHITECTURES: &[Architecture] = &[
    Architecture { name: "llama", class: "LlamaForCausalLM", experts: Experts::USUAL, rows: RowOrder::Pairs },
    Architecture {
        name: "qwen2",
        class: "Qwen2ForCausalLM",
        experts: Experts::USUAL,
        rows: RowOrder::Halves,
    },
    Architecture {
        name: "qwen3",
        class: "Qwen3ForCausalLM",
        experts: Experts::USUAL,
        rows: RowOrder::Halves,
    },
    Architecture {
        name: "qwen3moe",
        class: "Qwen3MoeForCausalLM",
        experts: Experts::USUAL,
        rows: RowOrder::Halves,
    },
];
/// A file of `llama` with experts. llama.cpp has no name of its own for it.
const MIXTRAL: Architecture = Architecture {
    name: "llama",
    class: "MixtralForCausalLM",
    experts: Experts { part: "block_sparse_moe", matrices: ["w1", "w3", "w2"] },
    rows: RowOrder::Pairs,
};

/// The most layers, heads, numbers of a head, and experts.
const COUNT_MAX: u64 = u16::MAX as u64;

/// An architecture, with the names of its tensors in a hub's folder.
#[derive(Clone, Copy, Debug)]
pub(super) struct Architecture {
    pub(super) name: &'static str,
    /// The class in `transformers`.
    pub(super) class: &'static str,
    pub(super) experts: Experts,
    pub(super) rows: RowOrder,
}

#[derive(Clone, Copy, Debug)]
pub(super) struct Experts {
    /// The part of a layer that has the experts and their router.
    pub(super) part: &'static str,
    /// The names of an expert's matrices for gate, up and down.
    pub(super) matrices: [&'static str; 3],
}

impl Experts {
    const USUAL: Self = Self { part: "mlp", matrices: ["gate_proj", "up_proj", "down_proj"] };
}

/// The order of the rows of q and k within a head. Rotary embedding turns two of them together.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum RowOrder {
    /// The two are in the two halves of the head, as in safetensors.
    Halves,
    /// The two are neighbours.
    Pairs,
}

/// The sizes on which names and places of tensors depend.
#[derive(Clone, Copy, Debug)]
pub(super) struct Model {
    pub(super) architecture: Architecture,
    pub(super) n_experts: u64,
    pub(super) n_layers: u64,
    pub(super) hidden: u64,
    pub(super) n_heads: u64,
    pub(super) n_kv_heads: u64,
    pub(super) head_dim: u64,
    pub(super) vocab: u64,
}

impl Model {
    pub(super) fn of(header: &Header<'_>) -> Result<Self, String> {
        if let Some(n_parts) = header.count("split.count")?.filter(|n_parts| *n_parts > 1) {
            return Err(format!(
                "it is one of {n_parts} parts, which is not implemented: join them with llama-gguf-split --merge"
            ));
        }
        let name = header.text("general.architecture")?.ok_or("there is no key general.architecture")?;
        let known = ARCHITECTURES.iter().find(|known| known.name == name).copied();
        let mut architecture = known.ok_or_else(|| {
            let known: Vec<&str> = ARCHITECTURES.iter().map(|known| known.name).collect();
            format!("general.architecture {name:?} is not implemented: {} are", known.join(", "))
        })?;
        let key = |key: &str| format!("{name}.{key}");
        // No model has larger counts, and memory is allocated for each layer and expert.
        let within = |key: String, count: u64| match count <= COUNT_MAX {
            true => Ok(count),
            false => Err(format!("key {key} is {count}")),
        };
        let count_or = |name: &str, default| within(key(name), header.count_or(&key(name), default)?);
        let needed = |name: &str| within(key(name), header.needed_count(&key(name))?);
        let n_experts = count_or("expert_count", 0)?;
        if n_experts > 0 && architecture.name == MIXTRAL.name {
            architecture = MIXTRAL;
        }
        let hidden = header.needed_count(&key("embedding_length"))?;
        let n_heads = needed("attention.head_count")?;
        let head_dim = count_or("attention.key_length", hidden / n_heads.max(1))?;
        let embedding = header.tensors.iter().find(|tensor| tensor.name == "token_embd.weight");
        let vocab = embedding
            .and_then(|tensor| tensor.shape.first())
            .ok_or("there is no tensor token_embd.weight")?;
        Ok(Self {
            architecture,
            n_experts,
            n_layers: needed("block_count")?,
            hidden,
            n_heads,
            n_kv_heads: count_or("attention.head_count_kv", n_heads)?,
            head_dim,
            vocab: *vocab as u64,
        })
    }

    /// Returns the name of a key of this architecture.
    pub(super) fn key(&self, key: &str) -> String {
        format!("{}.{key}", self.architecture.name)
    }
}
