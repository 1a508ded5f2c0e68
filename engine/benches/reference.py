"""What others reach on this machine, for the same shapes as benches/cpu.rs.

    pip install numpy torch gguf llama-cpp-python
    python3 reference.py ../../bench/shapes/qwen3-0.6b 2

Matrix rates come from numpy (OpenBLAS) and torch (oneDNN, MKL). llama.cpp runs a model of the same shape with random
bf16 weights; its arithmetic is bf16, as ours is with `Arithmetic::Bf16`.
"""

import json
import os
import pathlib
import sys
import tempfile
import time

FOLDER, THREADS = pathlib.Path(sys.argv[1]), int(sys.argv[2])
os.environ["OPENBLAS_NUM_THREADS"] = str(THREADS)
N_PROMPT = 512


def best(times, work):
    """The shortest of some runs, in seconds."""
    found = []
    for _ in range(times):
        start = time.perf_counter()
        work()
        found.append(time.perf_counter() - start)
    return min(found)


def shapes(config):
    """Outputs and inputs of a layer's products."""
    hidden, heads = config["hidden_size"], config["num_attention_heads"] * config["head_dim"]
    return [(heads, hidden), (hidden, heads), (config["intermediate_size"], hidden), (hidden, config["intermediate_size"])]


def matrix_rates(config):
    import numpy
    import torch
    torch.set_num_threads(THREADS)
    for rows, cols in shapes(config):
        gflop = 2 * N_PROMPT * rows * cols / 1e9
        rates = {}
        x, w = numpy.random.rand(N_PROMPT, cols).astype("f"), numpy.random.rand(rows, cols).astype("f")
        rates["numpy f32"] = gflop / best(10, lambda: x @ w.T)
        for dtype in (torch.float32, torch.bfloat16):
            a, b = torch.rand(N_PROMPT, cols).to(dtype), torch.rand(rows, cols).to(dtype)
            rates[f"torch {dtype}"] = gflop / best(10, lambda: torch.nn.functional.linear(a, b))
        print(f"{N_PROMPT} x {cols} x {rows}:", ", ".join(f"{name} {rate:.0f} GFLOP/s" for name, rate in rates.items()))


def write_gguf(path, config):
    import gguf
    import numpy
    writer = gguf.GGUFWriter(path, "qwen3")
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(4096)
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_key_length(config["head_dim"])
    writer.add_value_length(config["head_dim"])
    writer.add_rope_freq_base(config["rope_theta"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_tokenizer_model("none")
    random = numpy.random.default_rng(0)

    def matrix(name, rows, cols):
        numbers = (random.random((rows, cols), dtype=numpy.float32) - 0.5) * (12 / cols) ** 0.5
        bf16 = (numbers.view(numpy.uint32) >> 16).astype(numpy.uint16)
        writer.add_tensor(name, bf16.view(numpy.uint8), raw_dtype=gguf.GGMLQuantizationType.BF16)

    def norm(name, width):
        writer.add_tensor(name, numpy.ones(width, dtype=numpy.float32))

    hidden, head_dim = config["hidden_size"], config["head_dim"]
    heads, kv_heads = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    matrix("token_embd.weight", config["vocab_size"], hidden)
    norm("output_norm.weight", hidden)
    for layer in range(config["num_hidden_layers"]):
        block = f"blk.{layer}."
        norm(block + "attn_norm.weight", hidden)
        norm(block + "ffn_norm.weight", hidden)
        norm(block + "attn_q_norm.weight", head_dim)
        norm(block + "attn_k_norm.weight", head_dim)
        matrix(block + "attn_q.weight", heads, hidden)
        matrix(block + "attn_k.weight", kv_heads, hidden)
        matrix(block + "attn_v.weight", kv_heads, hidden)
        matrix(block + "attn_output.weight", hidden, heads)
        matrix(block + "ffn_gate.weight", config["intermediate_size"], hidden)
        matrix(block + "ffn_up.weight", config["intermediate_size"], hidden)
        matrix(block + "ffn_down.weight", hidden, config["intermediate_size"])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def llama_cpp(config):
    import llama_cpp
    with tempfile.TemporaryDirectory() as folder:
        path = f"{folder}/model.gguf"
        write_gguf(path, config)
        model = llama_cpp.Llama(path, n_ctx=1024, n_batch=N_PROMPT, n_ubatch=N_PROMPT, n_threads=THREADS,
                                n_threads_batch=THREADS, verbose=False)

        def prefill():
            model.reset()
            model.eval([5 + i * 37 % 1000 for i in range(N_PROMPT)])

        prefill_s = best(4, prefill)
        decode_s = best(30, lambda: model.eval([5]))
        print(f"llama.cpp {llama_cpp.__version__} bf16: prefill of {N_PROMPT} {prefill_s * 1e3:.0f} ms, "
              f"{N_PROMPT / prefill_s:.0f} tokens/s; decode {decode_s * 1e3:.1f} ms, {1 / decode_s:.1f} tokens/s")


def main():
    config = json.loads((FOLDER / "config.json").read_text())
    matrix_rates(config)
    if config["model_type"] == "qwen3":
        llama_cpp(config)


main()
