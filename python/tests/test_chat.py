"""Conversations: ids and loss masks of the program beside transformers' apply_chat_template, with three tokenizers and their templates.

The tokenizers are those of published GGUF files. The program writes `tokenizer.json` and `chat_template.jinja` beside the shards, which
transformers loads. The training templates of TRL mark what is trained on, so transformers gives a mask of its own.
"""

from __future__ import annotations

import json
import pathlib
import subprocess
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from shared_fixtures import ROOT, program
from transformers import PreTrainedTokenizerFast

import stillhouse
from stillhouse import views
from stillhouse.views import ViewError

TEMPLATES = ROOT / "operators/chat/tests/templates"
CASES = {
    "smollm2": (ROOT / ".cache/smollm2/SmolLM2-135M-Instruct.Q4_1.gguf", None),
    "qwen2": (ROOT / ".cache/vocabularies/ggml-vocab-qwen2.gguf", TEMPLATES / "qwen3_training.jinja"),
    "llama-bpe": (ROOT / ".cache/vocabularies/ggml-vocab-llama-bpe.gguf", TEMPLATES / "llama3_training.jinja"),
}
CONVERSATIONS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "What is 2 + 2?"}, {"role": "assistant", "content": "4"}],
    [
        {"role": "system", "content": "Answer in one word, naïvely: 漢字 🦀"},
        {"role": "user", "content": "  Spaces\n\n\tand tabs  "},
        {"role": "assistant", "content": "  trimmed?\n"},
        {"role": "user", "content": "Write <|im_end|> and <|eot_id|> as text."},
        {"role": "assistant", "content": "I shall not.\n\nNever, 12345 times."},
    ],
    *(
        [{"role": "user", "content": f"Number {i}?"}, {"role": "assistant", "content": f"It is {i * 7919}."}]
        for i in range(30)
    ),
]
LENGTH = 256


def job(tokenizer: pathlib.Path, template: pathlib.Path | None, **more: Any) -> dict[str, Any]:
    chat = {"template": str(template)} if template else {}
    return {
        "version": 1,
        "name": "chat",
        "input": {"format": "jsonl", "paths": "chat.jsonl", "messages": "messages"},
        "chat": {**chat, **more},
        "tokenizer": {"path": str(tokenizer), "special_tokens": "parse"},
        "pack": {"mode": "pad", "length": LENGTH, "separator": "none", "boundary": "none"},
        "output": {"path": "out"},
    }


def run(folder: pathlib.Path, spec: dict[str, Any]) -> pathlib.Path:
    (folder / "chat.jsonl").write_text("".join(json.dumps({"messages": messages}) + "\n" for messages in CONVERSATIONS))
    (folder / "job.yaml").write_text(json.dumps(spec))
    done = subprocess.run([program(), "run", folder / "job.yaml"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return folder / "out"


def rows(made: pathlib.Path) -> list[tuple[list[int], list[bool]]]:
    """Tokens and loss mask of each row, without its padding."""
    table = pa.concat_tables([pq.read_table(file) for file in sorted((made / "data").glob("*.parquet"))])
    columns = (table[name].to_pylist() for name in ("input_ids", "attention_mask", "loss_mask"))
    return [(ids[: sum(mask)], trained[: sum(mask)]) for ids, mask, trained in zip(*columns, strict=True)]


def tokenizer_of(made: pathlib.Path) -> PreTrainedTokenizerFast:
    names = json.loads((made / "manifest.json").read_text())["tokenizer"]["special_tokens"]
    tokens = {f"{role}_token": names[role]["token"] for role in ("bos", "eos", "pad") if role in names}
    loaded = PreTrainedTokenizerFast(tokenizer_file=str(made / "tokenizer.json"), **tokens)
    loaded.chat_template = (made / "chat_template.jinja").read_text()
    return loaded


@pytest.mark.parametrize("name", CASES)
def test_ids_and_masks_are_those_of_transformers(name: str, tmp_path: pathlib.Path) -> None:
    tokenizer, template = CASES[name]
    made = run(tmp_path, job(tokenizer, template))
    loaded = tokenizer_of(made)
    got = rows(made)
    assert len(got) == len(CONVERSATIONS)
    for messages, (ids, trained) in zip(CONVERSATIONS, got, strict=True):
        expected = loaded.apply_chat_template(
            messages, return_dict=True, return_assistant_tokens_mask=template is not None
        )
        assert ids == list(expected["input_ids"])
        if template is not None:
            assert trained == [bool(mask) for mask in expected["assistant_masks"]]
    if template is None:  # by hand: what the assistant says, and the end of its turn
        said = [
            loaded.decode([i for i, is_trained in zip(ids, trained, strict=True) if is_trained]) for ids, trained in got
        ]
        ends = [
            "".join(m["content"] + "<|im_end|>\n" for m in messages if m["role"] == "assistant")
            for messages in CONVERSATIONS
        ]
        # a token that holds the line break of the header and the first spaces of an answer counts
        assert [text.lstrip("\n") for text in said] == ends


def test_parquet_gives_what_json_lines_give(tmp_path: pathlib.Path) -> None:
    tokenizer, template = CASES["smollm2"]
    made = run(tmp_path, job(tokenizer, template))
    other = tmp_path / "parquet"
    other.mkdir()
    table = pa.table({"id": list(range(len(CONVERSATIONS))), "messages": CONVERSATIONS})
    pq.write_table(table, other / "chat.parquet", row_group_size=5)
    spec = job(tokenizer, template)
    spec["input"] |= {"format": "parquet", "paths": "chat.parquet", "split_megabytes": 0.001}
    (other / "job.yaml").write_text(json.dumps(spec))
    subprocess.run([program(), "run", other / "job.yaml"], capture_output=True, check=True)
    assert len(list((other / "out/data").glob("*.parquet"))) > 1
    assert rows(other / "out") == rows(made)
    as_text = pa.table({"messages": [json.dumps(messages) for messages in CONVERSATIONS]})
    pq.write_table(as_text, other / "chat.parquet")
    (other / "job.yaml").write_text(json.dumps(spec | {"output": {"path": "text"}}))
    subprocess.run([program(), "run", other / "job.yaml"], capture_output=True, check=True)
    assert rows(other / "text") == rows(made)


@pytest.mark.parametrize("fill", ["eos", "pad"])
def test_answers_fill_whole_blocks(fill: str, tmp_path: pathlib.Path) -> None:
    tokenizer, template = CASES["qwen2"]
    made = run(tmp_path / "", job(tokenizer, template))
    plain, special = rows(made), json.loads((made / "manifest.json").read_text())["tokenizer"]["special_tokens"]
    blocks = tmp_path / "blocks"
    blocks.mkdir()
    filled = rows(run(blocks, job(tokenizer, template, block={"length": 8, "fill": fill})))
    for (ids, trained), (got, mask) in zip(plain, filled, strict=True):
        expected: list[tuple[int, bool]] = []
        answer = 0
        for i, (token, is_trained) in enumerate(zip(ids, trained, strict=True)):
            expected.append((token, is_trained))
            answer = answer + 1 if is_trained else 0
            if is_trained and (i + 1 == len(ids) or not trained[i + 1]):
                expected += [(special[fill]["id"], fill == "eos")] * (-answer % 8)
        assert (got, mask) == ([token for token, _ in expected], [is_trained for _, is_trained in expected])


def test_views_train_on_the_assistant_alone(tmp_path: pathlib.Path) -> None:
    """The first loss of a model that knows nothing is ln V per trained token, whatever share of the tokens that is."""
    tokenizer, template = CASES["smollm2"]
    ds = stillhouse.open(run(tmp_path, job(tokenizer, template)))
    batch = ds[:8].torch()
    vocabulary = ds.info.vocab_size
    trained, found = batch["loss_mask"], torch.zeros_like(batch["loss_mask"])
    for epoch in range(40):
        example = views.mdlm.mask(batch, mask_id=vocabulary, epoch=epoch)
        found |= example.targets
        assert not (example.targets & ~trained).any()
        assert (example.input_ids[~trained] == batch["input_ids"][~trained]).all()
    assert (found == trained).all()
    weights = (
        sum(
            float(views.mdlm.mask(batch, mask_id=vocabulary, epoch=epoch).target_weights().sum())
            for epoch in range(400)
        )
        / 400
    )
    np.testing.assert_allclose(weights, float(trained.sum()), rtol=0.1)
    blocks = views.bd3lm.mask(batch, block_size=16, mask_id=vocabulary)
    assert not (blocks.targets & ~trained).any()
    with pytest.raises(ViewError, match="has a loss_mask, which excludes prompts"):
        views.mdlm.complementary(batch, mask_id=vocabulary)
