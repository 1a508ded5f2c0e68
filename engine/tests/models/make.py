"""Makes the tiny random models beside this file, and writes down what `transformers` computes with them in float32.

    pip install torch==2.11.0 transformers
    python3 make.py [NAME…]

Each folder is a model as it is published: config.json, safetensors, generation_config.json. `golden.json` holds a
prompt, its greedy continuation, the logits of the prompt's last token and of the continuation's last step, and the
smallest lead that the best logit ever had over the second best.
"""

import json
import pathlib
import shutil
import sys
import tempfile

import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

HERE = pathlib.Path(__file__).parent
SHAPE = dict(vocab_size=96, hidden_size=32, intermediate_size=40, num_hidden_layers=2, num_attention_heads=4,
             max_position_embeddings=512, initializer_range=0.25, bos_token_id=0, eos_token_id=1, pad_token_id=None)
N_PROMPT, N_STEPS = 37, 20
# Long enough for a window to leave whole blocks behind many times over.
N_STEPS_WINDOWED = 160

MODELS = {
    # One KV head per head, a separate output layer, widths that are not a multiple of a vector, biases everywhere.
    "llama": (transformers.LlamaConfig(**SHAPE | dict(hidden_size=40, num_key_value_heads=4, attention_bias=True,
                                                      mlp_bias=True, rms_norm_eps=1e-5)), torch.float16, "1GB"),
    # Scaled positions, two files with an index, a config as older versions wrote it.
    "llama3": (transformers.LlamaConfig(**SHAPE, num_key_value_heads=1, tie_word_embeddings=True, head_dim=16,
                                        rope_parameters=dict(rope_type="llama3", rope_theta=500000.0, factor=8.0,
                                                             low_freq_factor=1.0, high_freq_factor=4.0,
                                                             original_max_position_embeddings=64)),
               torch.bfloat16, "20KB"),
    # A window that is shorter than the prompt and no whole number of blocks.
    "mistral": (transformers.MistralConfig(**SHAPE, num_key_value_heads=2, head_dim=12, sliding_window=21),
                torch.bfloat16, "1GB"),
    # Biases of q, k and v; tied.
    "qwen2": (transformers.Qwen2Config(**SHAPE, num_key_value_heads=2, tie_word_embeddings=True), torch.bfloat16, "1GB"),
    # Norms of q and k; heads wider than hidden size over heads; float32.
    "qwen3": (transformers.Qwen3Config(**SHAPE | dict(hidden_size=16), num_key_value_heads=2, head_dim=16,
                                       tie_word_embeddings=True), torch.float32, "1GB"),
    # Two groups of layers: one sees everything, the others a window.
    "qwen2-window": (transformers.Qwen2Config(**SHAPE | dict(num_hidden_layers=3), num_key_value_heads=2,
                                              use_sliding_window=True, sliding_window=21, max_window_layers=1),
                     torch.bfloat16, "1GB"),
    # Experts in every layer; the scores of the chosen ones add up to one.
    "mixtral": (transformers.MixtralConfig(**SHAPE, num_key_value_heads=2, num_local_experts=5, num_experts_per_tok=2,
                                           sliding_window=None), torch.bfloat16, "1GB"),
    # Dense layers among sparse ones; scores as they are.
    "qwen3-moe": (transformers.Qwen3MoeConfig(**SHAPE | dict(num_hidden_layers=4), num_key_value_heads=2, head_dim=8,
                                              num_experts=8, num_experts_per_tok=3, moe_intermediate_size=20,
                                              decoder_sparse_step=1, mlp_only_layers=[1], norm_topk_prob=False),
                  torch.float32, "1GB"),
    # Scores that add up to one; all experts of a layer in one tensor.
    "qwen3-moe-stacked": (transformers.Qwen3MoeConfig(**SHAPE, num_key_value_heads=1, head_dim=16, num_experts=6,
                                                      num_experts_per_tok=2, moe_intermediate_size=12,
                                                      decoder_sparse_step=2, norm_topk_prob=True),
                          torch.bfloat16, "1GB"),
    # Latent attention without a latent of q; experts of two of four groups; a dense layer first.
    "deepseek-v2": (transformers.DeepseekV2Config(**SHAPE | dict(num_hidden_layers=3), num_key_value_heads=4,
                                                  q_lora_rank=None, kv_lora_rank=16, qk_nope_head_dim=8,
                                                  qk_rope_head_dim=4, v_head_dim=6, n_routed_experts=8, n_group=4,
                                                  topk_group=2, topk_method="group_limited_greedy",
                                                  num_experts_per_tok=3, n_shared_experts=2, moe_intermediate_size=12,
                                                  first_k_dense_replace=1, routed_scaling_factor=1.5),
                    torch.bfloat16, "1GB"),
    # Latents of q and of k and v, biases, rotation in halves, YaRN with two mscales, sigmoid scores with a correction,
    # a dense layer first, a layer of multi-token prediction. The norms of latents have an epsilon of their own.
    "deepseek-v3": (transformers.DeepseekV3Config(**SHAPE | dict(num_hidden_layers=3), num_key_value_heads=4,
                                                  q_lora_rank=20, kv_lora_rank=12, qk_nope_head_dim=6,
                                                  qk_rope_head_dim=8, v_head_dim=10, attention_bias=True,
                                                  rms_norm_eps=1e-3, rope_interleave=False,
                                                  n_routed_experts=8, n_group=4, topk_group=2, num_experts_per_tok=3,
                                                  n_shared_experts=1, moe_intermediate_size=12,
                                                  first_k_dense_replace=1, norm_topk_prob=True,
                                                  routed_scaling_factor=2.5, num_mtp_layers=0,
                                                  rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0,
                                                                       original_max_position_embeddings=64,
                                                                       mscale=1.0, mscale_all_dim=0.5)),
                    torch.bfloat16, "1GB"),
    # YaRN in attention without latents.
    "llama-yarn": (transformers.LlamaConfig(**SHAPE | dict(num_hidden_layers=1), num_key_value_heads=2, head_dim=16,
                                            rope_parameters=dict(rope_type="yarn", rope_theta=10000.0, factor=8.0,
                                                                 original_max_position_embeddings=64)),
                   torch.bfloat16, "1GB"),
    # Weights in FP8 with a scale for each block, of a shape that GPUs take too. The last block of a row is narrow.
    "qwen3-fp8": (transformers.Qwen3Config(**SHAPE | dict(hidden_size=136, intermediate_size=256, num_attention_heads=2,
                                                          initializer_range=0.1), num_key_value_heads=1, head_dim=128,
                                           tie_word_embeddings=True), torch.bfloat16, "1GB"),
    # The same for latent attention and experts; no width is a whole number of blocks.
    "deepseek-v3-fp8": (transformers.DeepseekV3Config(**SHAPE | dict(hidden_size=136, num_attention_heads=2,
                                                                     initializer_range=0.1), num_key_value_heads=2,
                                                      q_lora_rank=132, kv_lora_rank=20, qk_nope_head_dim=70,
                                                      qk_rope_head_dim=8, v_head_dim=10, n_routed_experts=4, n_group=2,
                                                      topk_group=1, num_experts_per_tok=2, n_shared_experts=1,
                                                      moe_intermediate_size=132, first_k_dense_replace=1,
                                                      norm_topk_prob=True, routed_scaling_factor=2.5, num_mtp_layers=0),
                        torch.bfloat16, "1GB"),
}
# The rows and the columns that share a scale.
BLOCK = 128


def randomize(model, generator):
    """Norms and biases start as ones and zeroes, which would hide a mistake in them."""
    for name, parameter in model.named_parameters():
        if "norm" in name or name.endswith("bias"):
            parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    for name, buffer in model.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer += 0.3 * torch.randn(buffer.shape, generator=generator)


def greedy(model, prompt, n_steps):
    tokens, rows, lead = list(prompt), [], float("inf")
    for _ in range(n_steps):
        logits = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0, -1].double()
        best = logits.topk(2).values
        lead = min(lead, float(best[0] - best[1]))
        rows.append(logits)
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt):], rows, lead


def is_windowed(config):
    return "sliding_attention" in (getattr(config, "layer_types", None) or []) or config.model_type == "mistral"


def single_experts(tensors):
    """One tensor for each matrix of each expert, as checkpoints are published."""
    single = {}
    for name, tensor in tensors.items():
        layer, _, matrix = name.rpartition(".experts.")
        for expert in range(tensor.shape[0] if matrix in ("gate_up_proj", "down_proj") else 0):
            if matrix == "down_proj":
                single[f"{layer}.experts.{expert}.down_proj.weight"] = tensor[expert].clone()
            else:
                gate, up = tensor[expert].chunk(2)
                single[f"{layer}.experts.{expert}.gate_proj.weight"] = gate.clone()
                single[f"{layer}.experts.{expert}.up_proj.weight"] = up.clone()
        if matrix not in ("gate_up_proj", "down_proj"):
            single[name] = tensor
    return single


def stacked_experts(tensors):
    """One tensor for the matrices of all experts of a layer: gate, then up, and down."""
    stacked, layers = {}, {}
    for name, tensor in tensors.items():
        layer, _, matrix = name.rpartition(".experts.")
        if layer and matrix.endswith(".weight"):
            expert, matrix = matrix.removesuffix(".weight").split(".")
            layers.setdefault(layer, {})[int(expert), matrix] = tensor
        else:
            stacked[name] = tensor
    for layer, of in layers.items():
        experts = range(1 + max(expert for expert, _ in of))
        both = [torch.cat([of[expert, "gate_proj"], of[expert, "up_proj"]]) for expert in experts]
        stacked[f"{layer}.experts.gate_up_proj"] = torch.stack(both)
        stacked[f"{layer}.experts.down_proj"] = torch.stack([of[expert, "down_proj"] for expert in experts])
    return stacked


def write_experts(folder, form):
    """Writes the weights again, with experts in another form."""
    path = folder / "model.safetensors"
    save_file(form(load_file(path)), path, metadata={"format": "pt"})


def add_prediction_layer(folder):
    """Adds some tensors of a layer of multi-token prediction, which are left out."""
    path = folder / "config.json"
    config = json.loads(path.read_text())
    layer, hidden = f"model.layers.{config['num_hidden_layers']}", config["hidden_size"]
    path.write_text(json.dumps(config | {"num_nextn_predict_layers": 1}, indent=2) + "\n")
    tensors = {f"{layer}.enorm.weight": torch.ones(hidden, dtype=torch.bfloat16),
               f"{layer}.eh_proj.weight": torch.ones(hidden, 2 * hidden, dtype=torch.bfloat16)}
    write_experts(folder, lambda others: others | tensors)


def scaled_blocks(weight):
    """Rounds a matrix to FP8. Returns its numbers and a scale for each block; a weight is the product of both."""
    weight = weight.float()
    numbers = torch.empty(weight.shape, dtype=torch.float8_e4m3fn)
    scales = torch.empty([-(-size // BLOCK) for size in weight.shape])
    for row in range(scales.shape[0]):
        for column in range(scales.shape[1]):
            of_block = (slice(row * BLOCK, (row + 1) * BLOCK), slice(column * BLOCK, (column + 1) * BLOCK))
            scales[row, column] = weight[of_block].abs().max() / 448
            numbers[of_block] = (weight[of_block] / scales[row, column]).to(torch.float8_e4m3fn)
    return numbers, scales


def widened(numbers, scales):
    scales = scales.repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return numbers.float() * scales[:numbers.shape[0], :numbers.shape[1]]


def in_blocks(tensors):
    """The matrices of layers in FP8, but for those of routers."""
    others = {}
    for name, tensor in tensors.items():
        if name.startswith("model.layers.") and tensor.dim() == 2 and not name.endswith(".gate.weight"):
            others[name], others[f"{name}_scale_inv"] = scaled_blocks(tensor)
        else:
            others[name] = tensor
    return others


def without_blocks(tensors):
    """All tensors in float32, with the numbers that those in FP8 stand for."""
    wide = {}
    for name, tensor in tensors.items():
        if not name.endswith("_scale_inv"):
            scales = tensors.get(f"{name}_scale_inv")
            wide[name] = tensor.float() if scales is None else widened(tensor, scales)
    return wide


def write_blocks(folder, wide):
    """Writes the weights again in FP8 with block scales, as DeepSeek and Qwen publish them. Returns the folder `wide`
    with the same weights in float32: `transformers` multiplies FP8 on GPUs only, and with rounded activations.
    """
    write_experts(folder, in_blocks)
    shutil.copytree(folder, wide, dirs_exist_ok=True)
    write_experts(wide, without_blocks)
    path = folder / "config.json"
    quantization = dict(activation_scheme="dynamic", fmt="e4m3", quant_method="fp8", weight_block_size=[BLOCK, BLOCK])
    path.write_text(json.dumps(json.loads(path.read_text()) | {"quantization_config": quantization}, indent=2) + "\n")
    return wide


def as_older_versions_wrote(path):
    config = json.loads(path.read_text())
    rope = config.pop("rope_parameters")
    config["rope_theta"] = rope.pop("rope_theta")
    config["rope_scaling"] = rope
    config["torch_dtype"] = config.pop("dtype")
    path.write_text(json.dumps(config, indent=2) + "\n")


@torch.no_grad()
def main():
    for seed, (name, (config, dtype, shard)) in enumerate(MODELS.items()):
        if sys.argv[1:] and name not in sys.argv[1:]:
            continue
        torch.manual_seed(seed)
        generator = torch.Generator().manual_seed(seed)
        config._attn_implementation = "eager"
        model = AutoModelForCausalLM.from_config(config)
        randomize(model, generator)
        model.to(dtype).save_pretrained(HERE / name, max_shard_size=shard)
        if name == "llama3":
            as_older_versions_wrote(HERE / name / "config.json")
        prompt = torch.randint(2, SHAPE["vocab_size"], (N_PROMPT,), generator=generator).tolist()
        # Read again: a model that was cast to 16 bits and back has lost bits of its rotary frequencies too.
        with tempfile.TemporaryDirectory() as wide:
            source = write_blocks(HERE / name, pathlib.Path(wide)) if name.endswith("fp8") else HERE / name
            saved = AutoModelForCausalLM.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
        tokens, rows, lead = greedy(saved.eval(), prompt, N_STEPS_WINDOWED if is_windowed(config) else N_STEPS)
        golden = {"transformers": transformers.__version__, "torch": torch.__version__, "prompt": prompt,
                  "continuation": tokens, "smallest_lead": lead,
                  "first_logits": [round(float(v), 6) for v in rows[0]],
                  "last_logits": [round(float(v), 6) for v in rows[-1]]}
        if name.startswith("qwen3-moe"):
            write_experts(HERE / name, stacked_experts if name.endswith("stacked") else single_experts)
        if name == "deepseek-v3":
            add_prediction_layer(HERE / name)
        (HERE / name / "golden.json").write_text(json.dumps(golden) + "\n")
        print(name, tokens, f"lead {lead:.4f}")


main()
