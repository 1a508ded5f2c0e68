//! The supported architectures, and their tensors beside the matrices that all of them share.

use super::mixture::{MixtureStyle, Normalized, Scoring};

/// One supported architecture. One [`Decoder`](super::decoder::Decoder) computes all architectures on a CPU,
/// and one plan computes them on GPUs.
#[derive(Debug)]
pub struct Architecture {
    /// The architecture's name in `architectures` of a `config.json`.
    pub name: &'static str,
    /// The biases of the projections to q, k and v.
    pub qkv_bias: Bias,
    /// The bias of attention's output projection.
    pub o_bias: Bias,
    /// The biases of the three matrices of a feed-forward layer.
    pub mlp_bias: Bias,
    /// Whether each head of q and k has its own norm.
    pub head_norms: bool,
    pub windows: Windows,
    /// Whether all heads share one latent vector for each token.
    pub has_latents: bool,
    /// The mixtures of experts of the feed-forward layers; `None`: they are dense.
    pub mixture: Option<&'static MixtureStyle>,
    /// The keys of a `config.json` that this architecture reads and others may not.
    pub keys: &'static [&'static str],
    /// The defaults of the class in `transformers` for keys that a `config.json` lacks, as JSON.
    pub defaults: &'static str,
}

/// When matrices have biases.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Bias {
    Never,
    Always,
    /// Matrices have biases if `attention_bias` or, for a feed-forward layer, `mlp_bias` is set.
    AsConfigured,
}

/// The layers that see only the last `sliding_window` tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Windows {
    Never,
    AllLayers,
    /// The layers that `layer_types` lists, or without it those from `max_window_layers` on, if
    /// `use_sliding_window` is set.
    UpperLayers,
}

/// The optional tensors of a model.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct OptionalTensors {
    pub qkv_bias: bool,
    pub o_bias: bool,
    pub mlp_bias: bool,
    /// Whether each layer has `q_norm` and `k_norm`.
    pub head_norms: bool,
}

/// All supported architectures. A new one is one entry here, if the decoders support it.
pub const ARCHITECTURES: &[Architecture] =
    &[LLAMA, MISTRAL, MIXTRAL, QWEN2, QWEN3, QWEN3_MOE, DEEPSEEK_V2, DEEPSEEK_V3];

/// The architecture of Llama 2, 3, 3.1 and 3.2.
const LLAMA: Architecture = Architecture {
    name: "LlamaForCausalLM",
    qkv_bias: Bias::AsConfigured,
    o_bias: Bias::AsConfigured,
    mlp_bias: Bias::AsConfigured,
    head_norms: false,
    windows: Windows::Never,
    has_latents: false,
    mixture: None,
    keys: &["attention_bias", "mlp_bias"],
    defaults: r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "eos_token_id": 2}"#,
};

const MISTRAL: Architecture = Architecture {
    name: "MistralForCausalLM",
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    head_norms: false,
    windows: Windows::AllLayers,
    has_latents: false,
    mixture: None,
    keys: &["sliding_window"],
    defaults: r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "sliding_window": 4096,
        "eos_token_id": 2}"#,
};

const MIXTRAL: Architecture = Architecture {
    name: "MixtralForCausalLM",
    qkv_bias: Bias::Never,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    head_norms: false,
    windows: Windows::AllLayers,
    has_latents: false,
    mixture: Some(&MixtureStyle {
        part: "block_sparse_moe",
        matrices: ["w1", "w3", "w2"],
        normalized: Normalized::Always,
        n_experts: 8,
        scoring: Scoring::Softmax,
        topk_methods: &[],
    }),
    keys: &["num_experts_per_tok", "num_local_experts", "sliding_window"],
    defaults: r#"{"vocab_size": 32000, "hidden_size": 4096, "intermediate_size": 14336, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "max_position_embeddings": 131072, "rms_norm_eps": 1e-5,
        "rope_theta": 1e6, "num_experts_per_tok": 2, "eos_token_id": 2}"#,
};

/// The architecture of Qwen2 and Qwen2.5.
const QWEN2: Architecture = Architecture {
    name: "Qwen2ForCausalLM",
    qkv_bias: Bias::Always,
    o_bias: Bias::Never,
    mlp_bias: Bias::Never,
    head_norms: false,
    windows: Windows::UpperLayers,
    has_latents: false,
    mixture: None,
    keys: &["max_window_layers", "sliding_window", "use_sliding_window"],
    defaults: r#"{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "max_position_embeddings": 32768, "sliding_window": 4096,
        "max_window_layers": 28}"#,
};

const QWEN3: Architecture = Architecture {
    name: "Qwen3ForCausalLM",
    qkv_bias: Bias::AsConfigured,
    o_bias: Bias::AsConfigured,
    mlp_bias: Bias::Never,
    head_norms: true,
    windows: Windows::UpperLayers,
    has_latents: false,
    mixture: None,
    keys: &["attention_bias", "max_window_layers", "sliding_window", "use_sliding_window"],
    defaults: r#"{"vocab_size": 151936, "hidden_size": 4096, "intermediate_size": 22016, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 32, "head_dim": 128, "max_position_embeddings": 32768,
        "sliding_window": 4096, "max_window_layers": 28}"#,
};

const QWEN3_MOE: Architecture = Architecture {
    name: "Qwen3MoeForCausalLM",
    qkv_bias: Bias::AsConfigured,
    o_bias: Bias::AsConfigured,
    mlp_bias: Bias::Never,
    head_norms: true,
    windows: Windows::Never,
    has_latents: false,
    mixture: Some(&MixtureStyle {
        part: "mlp",
        matrices: ["gate_proj", "up_proj", "down_proj"],
        normalized: Normalized::AsConfigured,
        n_experts: 128,
        scoring: Scoring::Softmax,
        topk_methods: &[],
    }),
    keys: &[
        "attention_bias",
        "decoder_sparse_step",
        "mlp_only_layers",
        "moe_intermediate_size",
        "norm_topk_prob",
        "num_experts",
        "num_experts_per_tok",
        "num_local_experts",
    ],
    defaults: r#"{"vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 24,
        "num_attention_heads": 32, "num_key_value_heads": 4, "max_position_embeddings": 32768,
        "moe_intermediate_size": 768, "num_experts_per_tok": 8, "use_sliding_window": false}"#,
};

/// The architecture of DeepSeek-V2, V2-Lite and V2.5. `rope_interleave` is no key of its configs.
const DEEPSEEK_V2: Architecture = Architecture {
    name: "DeepseekV2ForCausalLM",
    qkv_bias: Bias::AsConfigured,
    o_bias: Bias::AsConfigured,
    mlp_bias: Bias::Never,
    head_norms: false,
    windows: Windows::Never,
    has_latents: true,
    mixture: Some(&MixtureStyle {
        part: "mlp",
        matrices: ["gate_proj", "up_proj", "down_proj"],
        normalized: Normalized::Never,
        n_experts: 64,
        scoring: Scoring::Softmax,
        topk_methods: &["greedy", "group_limited_greedy"],
    }),
    keys: &[
        "attention_bias",
        "first_k_dense_replace",
        "kv_lora_rank",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "num_experts_per_tok",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "routed_scaling_factor",
        "scoring_func",
        "topk_group",
        "topk_method",
        "v_head_dim",
    ],
    defaults: r#"{"vocab_size": 102400, "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32,
        "num_attention_heads": 32, "max_position_embeddings": 2048, "eos_token_id": 2, "kv_lora_rank": 512,
        "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128, "rope_interleave": true,
        "n_shared_experts": 2, "moe_intermediate_size": 1407, "topk_method": "greedy"}"#,
};

/// The architecture of DeepSeek-V3 and R1.
const DEEPSEEK_V3: Architecture = Architecture {
    name: "DeepseekV3ForCausalLM",
    qkv_bias: Bias::AsConfigured,
    o_bias: Bias::AsConfigured,
    mlp_bias: Bias::Never,
    head_norms: false,
    windows: Windows::Never,
    has_latents: true,
    mixture: Some(&MixtureStyle {
        part: "mlp",
        matrices: ["gate_proj", "up_proj", "down_proj"],
        normalized: Normalized::AsConfigured,
        n_experts: 256,
        scoring: Scoring::Sigmoid,
        topk_methods: &["noaux_tc"],
    }),
    keys: &[
        "attention_bias",
        "first_k_dense_replace",
        "kv_lora_rank",
        "moe_intermediate_size",
        "moe_layer_freq",
        "n_group",
        "n_routed_experts",
        "n_shared_experts",
        "norm_topk_prob",
        "num_experts_per_tok",
        "num_nextn_predict_layers",
        "q_lora_rank",
        "qk_head_dim",
        "qk_nope_head_dim",
        "qk_rope_head_dim",
        "rope_interleave",
        "routed_scaling_factor",
        "scoring_func",
        "topk_group",
        "topk_method",
        "v_head_dim",
    ],
    defaults: r#"{"vocab_size": 129280, "hidden_size": 7168, "intermediate_size": 18432, "num_hidden_layers": 61,
        "num_attention_heads": 128, "num_key_value_heads": 128, "max_position_embeddings": 4096, "eos_token_id": 1,
        "kv_lora_rank": 512, "q_lora_rank": 1536, "qk_nope_head_dim": 128, "qk_rope_head_dim": 64, "v_head_dim": 128,
        "rope_interleave": true, "n_shared_experts": 1, "moe_intermediate_size": 2048, "num_experts_per_tok": 8,
        "first_k_dense_replace": 3, "topk_method": "noaux_tc", "n_group": 8, "topk_group": 4, "norm_topk_prob": true,
        "routed_scaling_factor": 2.5, "num_nextn_predict_layers": 1}"#,
};

/// The biases that a config asks for.
#[derive(Clone, Copy, Debug)]
pub(super) struct BiasSettings {
    pub(super) attention: bool,
    pub(super) mlp: bool,
}

impl Architecture {
    /// Returns the architecture with that name, or the names of the supported ones.
    pub fn named(name: &str) -> Result<&'static Self, String> {
        let found = ARCHITECTURES.iter().find(|architecture| architecture.name == name);
        found.ok_or_else(|| ARCHITECTURES.iter().map(|known| known.name).collect::<Vec<_>>().join(", "))
    }

    /// Returns the optional tensors of a model.
    pub(super) fn optional_tensors(&self, biases: BiasSettings) -> OptionalTensors {
        OptionalTensors {
            qkv_bias: self.qkv_bias.is_there(biases.attention),
            o_bias: self.o_bias.is_there(biases.attention),
            mlp_bias: self.mlp_bias.is_there(biases.mlp),
            head_norms: self.head_norms,
        }
    }
}

impl Bias {
    fn is_there(self, configured: bool) -> bool {
        match self {
            Self::Never => false,
            Self::Always => true,
            Self::AsConfigured => configured,
        }
    }
}
