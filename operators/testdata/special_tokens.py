"""Makes special_tokens.json: texts that spell special tokens, with the ids that Python's `tokenizers` gives them both ways.

    pip install tokenizers==0.23.3 tiktoken==0.14.0 && python operators/testdata/special_tokens.py

`text` is `encode_special_tokens` switched on, `parse` is the default. For GPT-2 `text` is also held against tiktoken's `encode_ordinary`,
with ranks taken from the vocabulary.
"""
import json
import pathlib
import random

import tiktoken
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

ROOT = pathlib.Path(__file__).parents[2]
GPT2 = ROOT / "assets/teacher-nano-gpt2/tokenizer.json"
BERT = ROOT / "operators/testdata/bert-base-uncased/tokenizer.json"
PARTS = [
    "<|endoftext|>", "<|endoftext|", "|endoftext|>", "<|endof", "text|>", "[SEP]", "[CLS]", "[MASK]", "[UNK]", "[PAD]", "[sep]", "[SE", "P]",
    "<s>", "</s>", "<tool>", "<mask>", " ", "  ", "\n", "\n\n", "a", "Hello", " world", "don't", "漢字", "é", "\u200b", "1234", "<", ">", "|", "[", "]",
]


def bytes_of_unicode():
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(256) if b not in printable]
    return {chr(b): b for b in printable} | {chr(256 + i): b for i, b in enumerate(others)}


def ordinary_gpt2():
    """tiktoken's encoding with GPT-2's vocabulary: ids are ranks."""
    table = bytes_of_unicode()
    vocab = json.loads(GPT2.read_text())["model"]["vocab"]
    ranks = {bytes(table[c] for c in token): rank for token, rank in vocab.items() if token != "<|endoftext|>"}
    pattern = r"""'(?:[sdmt]|ll|ve|re)| ?\p{L}++| ?\p{N}++| ?[^\s\p{L}\p{N}]++|\s++$|\s+(?!\S)|\s"""
    return tiktoken.Encoding("gpt2", pat_str=pattern, mergeable_ranks=ranks, special_tokens={"<|endoftext|>": 50256})


def made():
    """GPT-2 with added tokens of every kind."""
    tokenizer = Tokenizer.from_str(GPT2.read_text())
    tokenizer.add_special_tokens([
        AddedToken("<s>", special=True), AddedToken("</s>", special=True, rstrip=True), AddedToken("<mask>", special=True, lstrip=True),
        AddedToken("[SEP]", special=True, single_word=True),
    ])
    tokenizer.add_tokens([AddedToken("<tool>", special=False, normalized=False), AddedToken("text|>", special=False, normalized=True)])
    return tokenizer


def texts(seed, count):
    rng = random.Random(seed)
    yield from PARTS
    for _ in range(count):
        yield "".join(rng.choices(PARTS, k=rng.randint(2, 14)))


def main():
    (ROOT / "operators/testdata/gpt2-added.json").write_text(json.dumps(added_only(made()), indent=1) + "\n")
    ordinary = ordinary_gpt2()
    cases = []
    for name, tokenizer in {"gpt2": Tokenizer.from_file(str(GPT2)), "bert": Tokenizer.from_file(str(BERT)), "gpt2-added": made()}.items():
        tokenizer.no_truncation()
        tokenizer.no_padding()
        for text in texts(1, 120):
            ids = {}
            for mode in ("text", "parse"):
                tokenizer.encode_special_tokens = mode == "text"
                ids[mode] = tokenizer.encode(text, add_special_tokens=False).ids
            if name == "gpt2":
                assert ids["text"] == ordinary.encode_ordinary(text), text
            cases.append({"tokenizer": name, "raw": text, **ids})
    lines = ",\n".join(json.dumps(case) for case in cases)
    (ROOT / "operators/testdata/special_tokens.json").write_text(f"[\n{lines}\n]\n")


def added_only(tokenizer):
    """The added tokens of a tokenizer, which the test puts into GPT-2's."""
    return json.loads(tokenizer.to_str())["added_tokens"]


main()
