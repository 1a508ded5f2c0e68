"""Writes the results of Python's `tokenizers` for some texts, for router/src/text/tokenizer/tests.rs.

    pip install "tokenizers==0.23.*"
    python tests/python/tokenizer_fixtures.py

Two tokenizers: the demo model's (byte-level BPE), and a small one trained here, built as Llama 2's is (`▁` for spaces,
bytes for what has no token). Each line of a fixture is a text, its token ids, and the text that they give.
"""

import json
import random
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, processors, trainers

ROOT = Path(__file__).resolve().parents[2]
FIXTURES = ROOT / "router/src/text/tokenizer/fixtures"
SEED = 7

WORDS = """prefill decode the cache of a token, and What is KV? router nodes don't we'll 12 1024 3.14 GPU's Hello
naïve Größe façade 東京 こんにちは 안녕하세요 Привет мир שלום مرحبا हिन्दी ไทย 🦀 👩‍👩‍👧 🇩🇪 e\u0301 \u200b \ufeff ﬁ ½ → ∑ \t \n \n\n
\r\n fn main() { println!("{}", x); } <b>&amp;</b> https://example.org/?q=1&r=%20 ▁ Ġ <0x41> <s> \\ \x00 \x7f \xa0""".split(" ")

PROSE = """Prefill is the first phase of a request: the model reads the whole prompt at once and fills the KV cache.
Decode is the second one: it writes one token after the other, and every step reads what the cache holds.
When both share a processor, a long prompt stalls the steps beside it, and users see their stream stutter.
A router sends each prompt to a node that computes its cache and hands it over to another, which goes on from there."""

SPECIALS = ["<|begin|>", "<|end|>", "<|user|>", "<|assistant|>", "<|almost|>"]


def texts(draw, specials):
    """320 texts: words in any order with any spacing, runs of spaces, random characters, special tokens."""
    yield from ["", " ", "  ", "   a", "a   ", "\n", "\n\n \n", "a", "What is prefill?"]
    for n in range(311):
        if n % 8 == 7:
            yield "".join(chr(code) for code in draw.choices([*range(32, 0x250), *range(0x1F300, 0x1F320)], k=12))
            continue
        words = draw.choices(WORDS + (specials if n % 5 == 4 else []), k=draw.randint(1, 9))
        yield "".join(word + " " * draw.choice([0, 1, 1, 1, 1, 2, 5]) for word in words)


def write(name, tokenizer, specials):
    ids = lambda text: tokenizer.encode(text, add_special_tokens=False).ids
    lines = (json.dumps([text, ids(text), tokenizer.decode(ids(text))], ensure_ascii=False)
             for text in texts(random.Random(SEED), specials))
    (FIXTURES / f"{name}.jsonl").write_text("\n".join(lines) + "\n", encoding="utf-8")


def llama_like():
    """A small tokenizer with the pipeline of Llama 2."""
    tokenizer = Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>", fuse_unk=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    tokenizer.decoder = decoders.Sequence([
        decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0),
    ])
    specials = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)]
    trainer = trainers.BpeTrainer(vocab_size=600, special_tokens=specials, show_progress=False,
                                  initial_alphabet=[], limit_alphabet=90)
    tokenizer.train_from_iterator([PROSE, " ".join(WORDS[:24])] * 3, trainer)
    trained = json.loads(tokenizer.to_str())
    trained["added_tokens"] = [token for token in trained["added_tokens"] if not token["content"].startswith("<0x")]
    tokenizer = Tokenizer.from_str(json.dumps(trained))
    tokenizer.post_processor = processors.TemplateProcessing(
        single="<s> $A", pair="<s> $A <s> $B", special_tokens=[("<s>", tokenizer.token_to_id("<s>"))])
    tokenizer.add_tokens([AddedToken("<think>", normalized=False, special=False)])
    return tokenizer


def main():
    FIXTURES.mkdir(exist_ok=True)
    write("demo", Tokenizer.from_file(str(ROOT / "models/demo/tokenizer.json")), SPECIALS)
    llama = llama_like()
    llama.save(str(FIXTURES / "llama_like.tokenizer.json"), pretty=False)
    write("llama_like", llama, ["<s>", "</s>", "<think>", "<unk>"])


if __name__ == "__main__":
    main()
