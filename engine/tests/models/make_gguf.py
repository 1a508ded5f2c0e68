"""Makes the GGUF files in `gguf/`, and what llama.cpp's own package, SentencePiece and llama.cpp read in them.

    pip install gguf==0.19.0 sentencepiece xllamacpp
    python3 make_gguf.py

`tensors.gguf` has a matrix of every type, and `tensors.safetensors` the numbers. `pieces.gguf` has a tokenizer that
SentencePiece made, and `pieces.json` what SentencePiece makes of some texts. `bytes.json` is what llama.cpp makes of
texts with the demo model's vocabulary and each way to divide a text.
"""

import io
import json
import pathlib
import struct
import tempfile
import urllib.request

import gguf
import numpy as np
import sentencepiece
import xllamacpp

HERE = pathlib.Path(__file__).parent / "gguf"
DEMO = pathlib.Path(__file__).parents[3] / "models" / "demo"
HIDDEN, ROWS = 256, 4
K = gguf.GGMLQuantizationType
TEXTS = ["Hello, world!", "  two spaces,\ttab\n\nlines \n end ", "don't DON'T we'LL 1234567 12 3.5", "日本語とémigré e\u0301 🙂🙂",
         "a", "", " ", "x" * 40, "fn main() { println!(\"{}\", 1_000); }", "ÀÉ naïve\u00a0space", "Привет мир 42\r\n"]


def header(writer):
    for add, value in [(writer.add_context_length, 64), (writer.add_embedding_length, HIDDEN), (writer.add_block_count, 1),
                       (writer.add_feed_forward_length, ROWS), (writer.add_head_count, 1), (writer.add_head_count_kv, 1),
                       (writer.add_key_length, ROWS), (writer.add_value_length, ROWS),
                       (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_dimension_count, ROWS)]:
        add(value)


def blocks(kind, rng):
    """Random blocks, with scales that are numbers."""
    block, size = gguf.GGML_QUANT_SIZES[kind]
    raw = rng.integers(0, 256, (ROWS * HIDDEN // block, size), dtype=np.uint8)
    scales = {K.Q4_K: [0, 2], K.Q5_K: [0, 2], K.Q6_K: [size - 2], K.Q8_0: [0]}[kind]
    for at in scales:
        raw[:, at:at + 2] = rng.uniform(0.001, 0.02, (len(raw), 1)).astype(np.float16).view(np.uint8)
    return raw.reshape(ROWS, -1)


def bf16(numbers):
    bits = numbers.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def pairs(rows):
    """What llama.cpp's conversion of Llama does: rows that are turned together become neighbours."""
    return rows.reshape(1, 2, ROWS // 2, *rows.shape[1:]).swapaxes(1, 2).reshape(rows.shape)


def tensors():
    rng = np.random.default_rng(0)
    writer = gguf.GGUFWriter(HERE / "tensors.gguf", "llama")
    header(writer)
    names = gguf.get_tensor_name_map(gguf.MODEL_ARCH.LLAMA, 1)
    expected, layer = {}, "model.layers.0."
    for name, kind in [("model.embed_tokens.weight", K.Q6_K), ("model.norm.weight", K.F32), ("lm_head.weight", K.F16),
                       (layer + "input_layernorm.weight", K.F32), (layer + "post_attention_layernorm.weight", K.F32),
                       (layer + "self_attn.q_proj.weight", K.Q4_K), (layer + "self_attn.k_proj.weight", K.BF16),
                       (layer + "self_attn.v_proj.weight", K.Q5_K), (layer + "self_attn.o_proj.weight", K.F32),
                       (layer + "mlp.gate_proj.weight", K.Q8_0), (layer + "mlp.up_proj.weight", K.BF16),
                       (layer + "mlp.down_proj.weight", K.F32)]:
        turned = "q_proj" in name or "k_proj" in name
        there = names.get_name(name, try_suffixes=(".weight",))
        if kind in gguf.GGML_QUANT_SIZES and gguf.GGML_QUANT_SIZES[kind][0] > 1:
            raw = blocks(kind, rng)
            writer.add_tensor(there, pairs(raw) if turned else raw, raw_dtype=kind)
            expected[name] = ("BF16", bf16(gguf.dequantize(raw, kind)))
            continue
        shape = {"norm": (HIDDEN,), "o_proj": (HIDDEN, ROWS), "down_proj": (HIDDEN, ROWS)}
        shape = next((shape[part] for part in shape if part in name), (ROWS, HIDDEN))
        numbers = rng.standard_normal(shape).astype(np.float32)
        numbers = {K.F32: numbers, K.F16: numbers.astype(np.float16), K.BF16: bf16(numbers)}[kind]
        there_numbers = pairs(numbers) if turned else numbers
        if kind == K.BF16:
            writer.add_tensor(there, there_numbers.view(np.uint8).reshape(*shape[:-1], -1), raw_dtype=kind)
        else:
            writer.add_tensor(there, there_numbers)
        expected[name] = (kind.name, numbers)
    finish(writer)
    data, entries = b"", {}
    for name, (dtype, numbers) in sorted(expected.items()):
        raw = numbers.tobytes()
        entries[name] = {"dtype": dtype, "shape": list(numbers.shape), "data_offsets": [len(data), len(data) + len(raw)]}
        data += raw
    text = json.dumps(entries).encode()
    (HERE / "tensors.safetensors").write_bytes(struct.pack("<Q", len(text)) + text + data)


def finish(writer):
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def pieces():
    model = io.BytesIO()
    corpus = [line for page in ["README.md", "docs/architecture.md", "docs/walk.md"]
              for line in (DEMO.parents[1] / page).read_text().splitlines()]
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(corpus), model_writer=model, vocab_size=700, model_type="bpe", byte_fallback=True,
        character_coverage=0.99, normalization_rule_name="identity", remove_extra_whitespaces=False, minloglevel=2)
    peer = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    writer = gguf.GGUFWriter(HERE / "pieces.gguf", "llama")
    header(writer)
    count = peer.vocab_size()
    kinds = [2 if peer.is_unknown(id) else 3 if peer.is_control(id) else 6 if peer.is_byte(id) else 1 for id in range(count)]
    writer.add_tokenizer_model("llama")
    writer.add_token_list([peer.id_to_piece(id) for id in range(count)])
    writer.add_token_scores([peer.get_score(id) for id in range(count)])
    writer.add_token_types(kinds)
    writer.add_bos_token_id(peer.bos_id())
    writer.add_eos_token_id(peer.eos_id())
    writer.add_unk_token_id(peer.unk_id())
    writer.add_tensor("token_embd.weight", np.zeros((count, 1), np.float16))
    finish(writer)
    table = [{"text": text, "tokens": peer.encode(text)} for text in TEXTS]
    (HERE / "pieces.json").write_text(json.dumps(table, ensure_ascii=False, indent=1) + "\n")


def with_demo_vocabulary(to, pre):
    """A whole model, because llama.cpp tokenizes for nothing less."""
    tokenizer = json.loads((DEMO / "tokenizer.json").read_text())
    writer = gguf.GGUFWriter(to, "llama")
    for add, value in [(writer.add_context_length, 64), (writer.add_embedding_length, 32), (writer.add_block_count, 1),
                       (writer.add_feed_forward_length, 32), (writer.add_head_count, 1), (writer.add_head_count_kv, 1),
                       (writer.add_layer_norm_rms_eps, 1e-5), (writer.add_rope_dimension_count, 32)]:
        add(value)
    vocab = sorted(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
    added = {token["content"] for token in tokenizer["added_tokens"]}
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in tokenizer["model"]["merges"]]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(vocab)
    writer.add_token_types([3 if text in added else 1 for text in vocab])
    writer.add_token_merges(merges)
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    writer.add_add_bos_token(False)
    writer.add_tensor("token_embd.weight", np.zeros((len(vocab), 32), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(32, np.float32))
    for name in ["attn_norm", "ffn_norm"]:
        writer.add_tensor(f"blk.0.{name}.weight", np.ones(32, np.float32))
    for name in ["attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"]:
        writer.add_tensor(f"blk.0.{name}.weight", np.zeros((32, 32), np.float32))
    finish(writer)


def served(path):
    """llama.cpp's server for a file, as a function from a path and a body to an answer."""
    params = xllamacpp.CommonParams()
    params.model.path = str(path)
    params.n_ctx, params.n_parallel, params.warmup, params.port = 256, 1, False, 0
    server = xllamacpp.Server(params)

    def ask(endpoint, body):
        request = urllib.request.Request(server.listening_address + endpoint, json.dumps(body).encode(),
                                         {"content-type": "application/json"})
        return json.load(urllib.request.urlopen(request, timeout=60))

    return ask


def byte_level():
    table = {}
    for pre in ["gpt-2", "llama-bpe", "qwen2", "tekken", "smollm"]:
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "a.gguf"
            with_demo_vocabulary(path, pre)
            ask = served(path)
            tokens = [ask("/tokenize", {"content": text, "add_special": False})["tokens"] for text in TEXTS]
        table[pre] = [{"text": text, "tokens": tokens} for text, tokens in zip(TEXTS, tokens)]
    (HERE / "bytes.json").write_text(json.dumps(table, ensure_ascii=False, indent=1) + "\n")


if __name__ == "__main__":
    HERE.mkdir(exist_ok=True)
    tensors()
    pieces()
    byte_level()
