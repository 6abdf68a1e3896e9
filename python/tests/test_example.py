"""The example trainer: it learns, it resumes exactly, and its student uses the noise."""

from __future__ import annotations

import importlib.util
import math
from pathlib import Path
from statistics import mean, median
from types import ModuleType

import numpy as np
import pytest
import torch

from stillhouse import Batch, Info, NoiseInfo, Ragged

SMALL = ["--device=cpu", "--batch-size=1", "--width=32", "--layers=1", "--lr=2e-2", "--warmup=8"]


@pytest.fixture(scope="module")
def example() -> ModuleType:
    path = Path(__file__).resolve().parents[1] / "examples/train_mdlm.py"
    spec = importlib.util.spec_from_file_location("train_mdlm", path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_loss_goes_down_and_a_resumed_run_is_the_uninterrupted_one(
    example: ModuleType, demo: Path, tmp_path: Path
) -> None:
    def run(steps: int, *more: str) -> list[float]:
        losses: list[float] = example.train(example.arguments([str(demo), *SMALL, f"--steps={steps}", *more]))
        return losses

    whole = run(24)
    # ln 50,257 = 10.8 is a guess among all tokens, which a loop that trains nothing stays at. Medians: the weight 1/t of a row with
    # few masks makes some losses of one row large or small.
    assert median(whole[:3]) > 10
    assert 5 < median(whole[-12:]) < median(whole[:3]) - 1.5
    checkpoint = f"--checkpoint={tmp_path / 'run.pt'}"
    first = run(13, checkpoint)
    assert [*first, *run(24, checkpoint)] == whole
    assert run(24, checkpoint) == []


def teacher_rows(rows: int, length: int, vocab: int, first: int) -> tuple[Batch, float]:
    """Rows of independent tokens from one known distribution, with their noise stored in full; and the entropy of that distribution."""
    p = 1.0 / np.arange(1, vocab + 1)
    p /= p.sum()
    ids = np.random.default_rng(first).choice(vocab, (rows, length), p=p)
    others = np.arange(vocab - 1) + (np.arange(vocab - 1) >= ids.reshape(-1, 1))  # all but the token itself, ascending
    offsets = np.arange(rows + 1) * length * (vocab - 1)
    columns = {
        "sequence_id": np.arange(first, first + rows, dtype=np.uint64),
        "input_ids": ids.astype(np.int32),
        "logprob": np.log(p)[ids].astype(np.float32),
        "noise_count": np.full((rows, 1, length), vocab - 1, np.uint16),
        "noise_index": Ragged(others.reshape(-1).astype(np.uint16), offsets),
        "noise_logprob": Ragged(np.log(p)[others.reshape(-1)].astype(np.float16), offsets),
    }
    info = Info(vocab, length, NoiseInfo("replay", seed=7))
    return Batch(columns, info).torch(), float(-(p * np.log(p)).sum())


@pytest.mark.parametrize("noise", [True, False])
def test_only_a_student_with_the_noise_knows_what_nobody_can_guess(example: ModuleType, noise: bool) -> None:
    """Tokens that are independent of each other: without the noise no student gets below the entropy, with it nearly to 0, since
    x = argmax(l + ξ) and l is the same everywhere."""
    vocab, length = 12, 64
    args = example.arguments(["unused", "--device=cpu", "--noise" if noise else "--no-noise"])
    torch.manual_seed(0)
    student = example.Student(vocab, length, width=64, layers=1, noise=noise)
    optimizer = torch.optim.AdamW(student.parameters(), lr=3e-3, weight_decay=0.0)
    losses = []
    for step in range(120):
        batch, entropy = teacher_rows(8, length, vocab, step * 8)
        loss = example.loss_of(student, batch, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert math.isclose(losses[0], math.log(vocab), rel_tol=0.2)
    reached = mean(losses[-40:])
    if noise:
        assert reached < 0.7 * entropy
    else:
        assert reached > 0.95 * entropy


def test_a_text_is_generated_from_prior_noise(example: ModuleType) -> None:
    vocab, length = 12, 37
    for noise in (True, False):
        args = example.arguments(["unused", "--device=cpu", "--noise" if noise else "--no-noise"])
        student = example.Student(vocab, length, width=32, layers=1, noise=noise)
        tokens = example.generate(student, Info(vocab, length), args)
        assert len(tokens) == length
        assert all(0 <= token < vocab for token in tokens)  # no [MASK] is left
