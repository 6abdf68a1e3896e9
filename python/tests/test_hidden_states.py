"""Hidden states of the teacher, as the reader gives them, against transformers in float64; and other signals of rows of different lengths."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from shared_fixtures import ROOT, Maker
from transformers import AutoModelForCausalLM

import stillhouse
import stillhouse.torch as st
from stillhouse import Batch, Ragged

TEACHER = ROOT / "operators/teacher/testdata/llama-gqa"
BOS = 1
TEMPERATURES, CANDIDATES, LAYERS = [1.0, 2.5], [5, 198], [3, 0, 1]
SIGNALS: dict[str, Any] = {
    "logz_temperatures": TEMPERATURES,
    "entropy": True,
    "candidates": CANDIDATES,
    "samples": {"draws": 30, "power": 0.8},
    "top_p": {"mass": 0.6, "most": 150},
    "hidden_states": {"layers": LAYERS, "precision": "f32"},
}


@pytest.fixture(scope="module")
def signals(small: Maker) -> pathlib.Path:
    return small("signals", {"extract": SIGNALS})


@pytest.fixture(scope="module")
def model() -> Any:
    return AutoModelForCausalLM.from_pretrained(TEACHER, dtype=torch.float64, attn_implementation="eager").eval()


def seen_by_the_teacher(model: Any, ids: np.ndarray) -> tuple[np.ndarray, np.ndarray, int]:
    """Logits [n, V] and hidden states [n, layers, H] that the positions of a row are predicted from, and the first such position."""
    given = int(ids[0] == BOS)
    inputs = ids if given else np.concatenate([[BOS], ids[:-1]])
    with torch.no_grad():
        out = model(torch.from_numpy(inputs.astype(np.int64))[None], output_hidden_states=True)
    end = len(ids) - given
    states = torch.stack([out.hidden_states[layer][0] for layer in LAYERS], dim=1)
    return out.logits[0, :end].numpy(), states[:end].numpy(), given


def test_they_are_those_of_transformers(signals: pathlib.Path, model: Any) -> None:
    ds = stillhouse.open(signals)
    batch = ds[:]
    rows, length = batch["input_ids"].shape
    assert batch["logz"].shape == (rows, length, 2) and batch["candidate_logprob"].shape == (rows, length, 2)
    assert batch["hidden_states"].shape == (rows, length, 3, 48) and batch["hidden_states"].dtype == np.float32
    for row in range(rows):
        one = batch[row]
        logits, states, first = seen_by_the_teacher(model, one["input_ids"])
        there = slice(first, None)
        np.testing.assert_allclose(one["hidden_states"][there], states, atol=1e-4)
        logz = np.stack([np.log(np.exp(logits / t).sum(-1)) for t in TEMPERATURES], -1)
        np.testing.assert_allclose(one["logz"][there], logz, atol=1e-4)
        logprob = logits - logz[:, :1]
        np.testing.assert_allclose(one["entropy"][there], -(np.exp(logprob) * logprob).sum(-1), atol=1e-4)
        np.testing.assert_allclose(one["candidate_logprob"][there], logprob[:, CANDIDATES], atol=1e-4)
        if first:
            assert one["logz"][0].tolist() == [0, 0] and one["entropy"][0] == 0 and not one["hidden_states"][0].any()


def test_they_come_out_of_the_loader_as_they_are_stored(signals: pathlib.Path) -> None:
    stored = stillhouse.open(signals)
    place = {int(number): row for row, number in enumerate(stored[:]["sequence_id"])}
    seen = 0
    for batch in st.DataLoader(st.StreamingShardDataset(signals, batch_size=4, seed=1)):
        expected = stored[[place[int(number)] for number in batch["sequence_id"]]]
        seen += batch.rows
        for name in (
            "logz",
            "entropy",
            "candidate_logprob",
            "top_p_tail",
            "hidden_states",
            "sampled_count",
            "top_p_count",
        ):
            np.testing.assert_array_equal(batch[name].numpy(), expected[name], err_msg=name)
        for name in ("sampled_index", "sampled_times", "sampled_ratio", "top_p_index", "top_p_logprob"):
            assert isinstance(batch[name], Ragged)
            np.testing.assert_array_equal(batch[name].values.numpy(), expected[name].values, err_msg=name)
            np.testing.assert_array_equal(batch[name].offsets.numpy(), expected[name].offsets, err_msg=name)
    assert seen == len(stored)


def test_rows_of_different_lengths(small: Maker, signals: pathlib.Path) -> None:
    """`remainder: keep`: the same values in lists, and padded ones."""
    extract = {**SIGNALS, "hidden_states": {"layers": LAYERS}}
    ds = stillhouse.open(small("signals-keep", {"pack": {"remainder": "keep"}, "extract": extract}))
    assert ds.columns["hidden_states"].dtype == np.float16
    batch = ds[:]
    whole = stillhouse.open(signals)[0]
    values = 3 * 48
    assert all(len(batch["hidden_states"][i]) == values * len(batch["input_ids"][i]) for i in range(batch.rows))
    first = batch["hidden_states"][0].reshape(-1, 3, 48)
    np.testing.assert_allclose(first.astype(np.float32), whole["hidden_states"], atol=2**-10 * 8)
    padded: Batch[Any] = batch.padded()
    rows, length = padded["input_ids"].shape
    assert padded["hidden_states"].shape == (rows, length, values) and padded["entropy"].shape == (rows, length)
    assert padded["logz"].shape == (rows, length, 2)
    np.testing.assert_array_equal(padded["hidden_states"][0].reshape(-1, 3, 48), first)
    last = int(batch["input_ids"].lengths[-1])
    assert not padded["entropy"][-1, last:].any() and not padded["hidden_states"][-1, last:].any()
