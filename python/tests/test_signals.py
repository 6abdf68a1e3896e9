"""The other signals of a teacher: against transformers' logits of the real small GPT-2, and through the readers.

What is expected is computed here in float64 from docs/FORMAT.md; the logits of two programs differ by about 1e-4.
"""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from noise_f64 import philox
from shared_fixtures import ROOT, WORDS, Maker, run, speeches, write_corpus
from transformers import AutoModelForCausalLM

import stillhouse
import stillhouse.torch as st

TEACHER = ROOT / "assets/teacher-nano-gpt2"
TEMPERATURES = [1.0, 0.5, 3.0]
CANDIDATES = [50_256, 11, 262, 13]
MASS, MOST = 0.7, 300
DRAWS, POWER, SEED = 40, 0.75, 42
CLOSE = 4e-4
SIGNALS = {
    "topk": 5,
    "logz_temperatures": TEMPERATURES,
    "entropy": True,
    "candidates": CANDIDATES,
    "samples": {"draws": DRAWS, "power": POWER},
    "top_p": {"mass": MASS, "most": MOST},
}


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """A few rows of speeches with every signal."""
    folder = tmp_path_factory.mktemp("signals")
    job = {
        "input": {"format": "jsonl", "paths": [write_corpus(folder, "corpus.jsonl", speeches(3, 900))], "text": "text"},
        "tokenizer": {"path": str(TEACHER)},
        "pack": {"mode": "wrap", "length": 96, "separator": "eos", "boundary": "none"},
        "extract": {"teacher": {"path": str(TEACHER), "device": "cpu"}, **SIGNALS},
    }
    return run(folder, job)


@pytest.fixture(scope="module")
def logits(real: pathlib.Path) -> np.ndarray:
    """l [rows, L, V] by transformers, each row behind bos."""
    model = AutoModelForCausalLM.from_pretrained(str(TEACHER), dtype=torch.float32).eval()
    ids = stillhouse.open(real)[:]["input_ids"]
    bos = stillhouse.open(real).info.special_tokens["bos"]
    assert len(ids) > 3 and not (ids[:, 0] == bos).any()
    seen = torch.tensor(np.insert(ids[:, :-1], 0, bos, axis=1).astype(np.int64))
    with torch.no_grad():
        found: np.ndarray = model(seen).logits.double().numpy()
    return found


def logsumexp(l: np.ndarray) -> np.ndarray:
    top = l.max(-1, keepdims=True)
    found: np.ndarray = top[..., 0] + np.log(np.exp(l - top).sum(-1))
    return found


def test_log_partitions_entropy_and_candidates(real: pathlib.Path, logits: np.ndarray) -> None:
    batch = stillhouse.open(real)[:]
    logp = logits - logsumexp(logits)[..., None]
    for number, temperature in enumerate(TEMPERATURES):
        # ln Σ exp(l/T) moves with l by at most as much divided by T
        np.testing.assert_allclose(
            batch["logz"][..., number], logsumexp(logits / temperature), atol=CLOSE / temperature, rtol=0
        )
    np.testing.assert_allclose(batch["entropy"], -(np.exp(logp) * logp).sum(-1), atol=CLOSE, rtol=0)
    np.testing.assert_allclose(batch["candidate_logprob"], logp[..., CANDIDATES], atol=CLOSE, rtol=0)
    ids = batch["input_ids"].astype(np.int64)[..., None]
    np.testing.assert_allclose(batch["logprob"], np.take_along_axis(logp, ids, -1)[..., 0], atol=CLOSE, rtol=0)
    np.testing.assert_allclose(batch["topk_logprob"], -np.sort(-logp, -1)[..., :5], atol=CLOSE, rtol=0)


def test_the_likeliest_up_to_a_mass_and_the_tail(real: pathlib.Path, logits: np.ndarray) -> None:
    batch = stillhouse.open(real)[:]
    logp = logits - logsumexp(logits)[..., None]
    capped = 0
    for row in range(len(logp)):
        at = 0
        for position, count in enumerate(batch["top_p_count"][row].astype(int)):
            index = batch["top_p_index"][row][at : at + count].astype(np.int64)
            stored = batch["top_p_logprob"][row][at : at + count]
            at += count
            said = logp[row, position]
            falling = -np.sort(-said)
            assert len(set(index.tolist())) == count >= 1
            np.testing.assert_allclose(stored, said[index], atol=CLOSE, rtol=0)
            np.testing.assert_allclose(stored, falling[:count], atol=CLOSE, rtol=0)
            held = np.exp(falling).cumsum()
            assert count == 1 or held[count - 2] < MASS + 1e-4
            assert held[count - 1] > MASS - 1e-4 or count == MOST
            capped += count == MOST
            tail = logsumexp(falling[count:])
            np.testing.assert_allclose(batch["top_p_tail"][row, position], tail, atol=2 * CLOSE, rtol=0)
        assert at == len(batch["top_p_index"][row]) == len(batch["top_p_logprob"][row])
    counts = batch["top_p_count"]
    assert capped > 0 and counts.min() < 20 < counts.max(), "all of one kind"


def uniforms(sequence: int, position: int, count: int) -> np.ndarray:
    """Of purpose `sampled_logits`, stream the position: docs/FORMAT.md, "Other randomness"."""
    mask = (1 << 64) - 1
    h = 0xCBF29CE484222325
    for byte in b"sampled_logits":
        h = ((h ^ byte) * 0x100000001B3) & mask
    z = ((SEED ^ h) + 0x9E3779B97F4A7C15) & mask
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) & mask
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) & mask
    s = z ^ (z >> 31)
    blocks = np.arange((count + 1) // 2, dtype=np.uint64)
    one = np.ones(len(blocks), np.uint64)
    counter = (
        blocks,
        one * np.uint64(position),
        one * np.uint64(sequence & 0xFFFFFFFF),
        one * np.uint64(sequence >> 32),
    )
    words = np.stack(philox(counter, (s & 0xFFFFFFFF, s >> 32)), 1).reshape(-1, 2)
    whole = words[:, 0] + (words[:, 1] << np.uint64(32))
    return ((whole >> np.uint64(11)).astype(np.float64) * 2.0**-53)[:count]


def test_sampled_logits_are_the_draws_of_their_uniforms(real: pathlib.Path, logits: np.ndarray) -> None:
    batch = stillhouse.open(real)[:]
    elsewhere = drawn = 0
    for row, sequence in enumerate(batch["sequence_id"].tolist()):
        at = 0
        for position, count in enumerate(batch["sampled_count"][row].astype(int)):
            index, times, ratio = (
                batch[name][row][at : at + count] for name in ("sampled_index", "sampled_times", "sampled_ratio")
            )
            at += count
            assert times.sum() == DRAWS and (np.diff(index.astype(int)) > 0).all()
            l = logits[row, position]
            running = np.exp(POWER * (l - l.max())).cumsum()
            where = np.searchsorted(running, uniforms(sequence, position, DRAWS) * running[-1], side="right")
            expected = np.bincount(where, minlength=len(l))
            got = np.zeros(len(l), int)
            got[index] = times
            elsewhere += np.abs(expected - got).sum() // 2
            drawn += DRAWS
            # p/q: p = softmax(l), q = softmax(t·l)
            want = np.exp((l - logsumexp(l)) - (POWER * l - logsumexp(POWER * l)))[index]
            np.testing.assert_allclose(ratio, want, rtol=CLOSE)
        assert at == len(batch["sampled_index"][row])
    # a draw between two tokens falls to the other one where logits differ by 1e-4
    assert drawn > 10_000 and elsewhere < drawn / 200, (elsewhere, drawn)


SMALL = {
    "topk": 8,
    "logz_temperatures": [1.0, 2.0],
    "entropy": True,
    "candidates": [4, 9, 100],
    "samples": {"draws": 16, "power": 0.8},
    "top_p": {"mass": 0.4, "most": 60},
}
DENSE = {
    "logz": (2, np.float32), "entropy": (None, np.float32), "candidate_logprob": (3, np.float32), "sampled_count": (None, np.uint16),
    "top_p_count": (None, np.uint16), "top_p_tail": (None, np.float32), "topk_index": (8, np.int32), "topk_logprob": (8, np.float32),
}  # fmt: skip
RAGGED = {
    "sampled_index": np.uint16, "sampled_times": np.uint16, "sampled_ratio": np.float32,
    "top_p_index": np.uint16, "top_p_logprob": np.float32,
}  # fmt: skip


@pytest.fixture(scope="module")
def padded(small: Maker) -> pathlib.Path:
    return small("signals-padded", {"pack": {"mode": "pad"}, "extract": {**SMALL, "noise": None}})


def test_columns_come_out_with_their_shapes_and_types(padded: pathlib.Path) -> None:
    data = stillhouse.open(padded)
    batch, length = data[:7], data.info.length
    for name, (last, kind) in DENSE.items():
        shape = (7, length) if last is None else (7, length, last)
        assert (batch[name].shape, batch[name].dtype) == (shape, kind), name
    for name, kind in RAGGED.items():
        column = batch[name]
        assert isinstance(column, stillhouse.Ragged) and len(column) == 7 and column.values.dtype == kind, name
        count = "sampled_count" if name.startswith("sampled") else "top_p_count"
        np.testing.assert_array_equal(column.lengths, batch[count].astype(np.int64).sum(-1))
    assert batch["top_p_index"].values.max() < WORDS and (batch["sampled_count"] > 0).all()


def test_a_certain_position_is_one_hot(padded: pathlib.Path) -> None:
    """Padding: l is 0 at the token and −∞ elsewhere."""
    data = stillhouse.open(padded)
    batch = data[:]
    padding = ~batch["attention_mask"]
    assert 100 < padding.sum() < padding.size
    assert (batch["logz"][padding] == 0).all() and (batch["entropy"][padding] == 0).all()
    # pad is none of the candidates
    assert np.isneginf(batch["candidate_logprob"][padding]).all() and np.isneginf(batch["top_p_tail"][padding]).all()
    assert (batch["sampled_count"][padding] == 1).all() and (batch["top_p_count"][padding] == 1).all()
    row = int(np.flatnonzero(padding[:, -1])[0])
    assert batch["sampled_index"][row][-1] == batch["top_p_index"][row][-1] == batch["input_ids"][row, -1]
    assert (batch["sampled_times"][row][-1], batch["sampled_ratio"][row][-1], batch["top_p_logprob"][row][-1]) == (
        16,
        1,
        0,
    )
    # so is a bos at the start of a row, and nothing else
    first = np.zeros_like(padding)
    first[:, 0] = batch["input_ids"][:, 0] == data.info.special_tokens["bos"]
    assert first.any()
    np.testing.assert_array_equal(batch["entropy"] > 0, ~(padding | first))
    np.testing.assert_array_equal(np.isfinite(batch["top_p_tail"]), ~(padding | first))


@pytest.mark.parametrize("workers", [0, 2])
def test_loaders_give_the_same_columns_as_tensors(padded: pathlib.Path, workers: int) -> None:
    whole: Any = stillhouse.open(padded)[:]
    rows = {int(id): row for row, id in enumerate(whole["sequence_id"])}
    columns = ["sequence_id", *DENSE, *RAGGED]
    data = st.StreamingShardDataset(padded, batch_size=5, seed=3, columns=columns, drop_last=False)
    seen = 0
    for batch in st.DataLoader(data, num_workers=workers):
        at = [rows[id] for id in batch["sequence_id"].tolist()]
        for name in DENSE:
            assert isinstance(batch[name], torch.Tensor)
            np.testing.assert_array_equal(batch[name].numpy(), whole[name][at], err_msg=name)
        for name, kind in RAGGED.items():
            column = batch[name]
            assert isinstance(column, stillhouse.Ragged) and isinstance(column.values, torch.Tensor)
            # torch has int32 where numpy has uint16
            widened = torch.int32 if kind == np.uint16 else torch.float32
            assert (column.values.dtype, column.offsets.dtype) == (widened, torch.int64), name
            expected = whole[name][at]
            np.testing.assert_array_equal(column.values.numpy(), expected.values, err_msg=name)
            np.testing.assert_array_equal(column.offsets.numpy(), expected.offsets, err_msg=name)
        seen += len(at)
    assert seen == len(rows)
