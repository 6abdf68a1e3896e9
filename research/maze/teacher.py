"""The autoregressive teacher: a GPT-2 of 8 layers, 8 heads, width 128, saved as Stillhouse reads it (config.json, safetensors, tokenizer.json)."""

from __future__ import annotations

import json
import pathlib

import torch
from grid import BOS, EOS, LENGTH, VOCABULARY, Training
from torch import Tensor
from transformers import GPT2Config, GPT2LMHeadModel


def tokenizer() -> dict[str, object]:
    """A tokenizer.json: a word is a token."""
    special = [
        {"id": i, "content": VOCABULARY[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i in (BOS, EOS)
    ]  # fmt: skip
    return {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {word: i for i, word in enumerate(VOCABULARY)}, "unk_token": "<eos>"},
    }  # fmt: skip


def train(rows: Tensor, folder: pathlib.Path, how: Training, seed: int) -> None:
    """Trains on rows [N, 12] and saves the checkpoint."""
    torch.manual_seed(seed)
    config = GPT2Config(
        vocab_size=len(VOCABULARY), n_positions=LENGTH, n_embd=how.width, n_layer=how.layers, n_head=how.heads, bos_token_id=BOS, eos_token_id=EOS,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0,
    )  # fmt: skip
    model = GPT2LMHeadModel(config)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, fused=True)
    step = 0
    for epoch in range(how.epochs):
        for part in torch.randperm(len(rows)).split(how.batch):
            loss = model(rows[part], labels=rows[part]).loss
            for group in optimizer.param_groups:
                group["lr"] = how.rate(step, -(-len(rows) // how.batch))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
        if (epoch + 1) % 20 == 0:
            print(f"teacher: epoch {epoch + 1} of {how.epochs}, loss {loss.item():.4f} nats/token", flush=True)
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer()))


@torch.no_grad()
def walk(folder: pathlib.Path, count: int, seed: int) -> Tensor:
    """Rows [count, 12] that the teacher writes, token after token."""
    torch.manual_seed(seed)
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    rows = torch.full((count, 1), BOS)
    while rows.shape[1] < LENGTH:
        drawn = torch.multinomial(model(rows).logits[:, -1].softmax(-1), 1)
        rows = torch.cat([rows, drawn], 1)
    return rows


@torch.no_grad()
def probabilities(folder: pathlib.Path, rows: Tensor) -> Tensor:
    """p(x_i = k | x_<i) [N, 12, V]; of the first position, which is given, one-hot."""
    model = GPT2LMHeadModel.from_pretrained(folder).eval()
    p = torch.cat([model(part).logits.softmax(-1) for part in rows.split(256)])
    first = torch.nn.functional.one_hot(rows[:, :1], len(VOCABULARY)).to(p.dtype)
    return torch.cat([first, p[:, :-1]], 1)
