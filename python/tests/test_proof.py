"""The page of proofs: it is what its raw results make, its intervals are right, and noise without loss is what the shards store."""

from __future__ import annotations

import json
import math
import pathlib
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from conftest import ROOT, imported

import stillhouse


@pytest.fixture(scope="module")
def page() -> ModuleType:
    return imported("page")


@pytest.fixture(scope="module")
def parts() -> ModuleType:
    return imported("page_parts")


def test_the_page_is_what_its_results_make(page: ModuleType) -> None:
    words, plots = page.made(ROOT / "docs/proof", ROOT / "docs/PROOF.md")
    assert (ROOT / "docs/PROOF.md").read_text() == words, "run `make proof`"
    for name in plots:  # drawn by `make proof`, with a package that is not needed here
        assert (ROOT / "docs/proof" / name).read_bytes().startswith(b"\x89PNG"), name
    assert {file.name for file in (ROOT / "docs/proof").glob("*.png")} == set(plots)


def test_what_is_missing_or_against_the_paper_stands_first(page: ModuleType, tmp_path: pathlib.Path) -> None:
    words, plots = page.made(tmp_path, tmp_path / "PROOF.md")
    assert words.count("**Missing:**") == 12 and not plots
    students = [
        {"variant": name, "seed": 0, "hits": [hits] * 5, "loss": [1.0, 0.5]}
        for name, hits in (("mdlm", 600), ("stored 1", 500), ("fresh", 900))
    ]
    raw = {"paths": 1000, "passes": [1, 2, 4, 8, 16], "teacher": 990, "paper": {"mdlm": [53.0] * 5}, "seconds": 1, "machine": {"processor": "x86_64", "cores": 2, "torch": "2"}, "jobs": 1, "training": {"epochs": 2}, "students": students}  # fmt: skip
    (tmp_path / "maze.json").write_text(json.dumps(raw))
    words, plots = page.made(tmp_path, tmp_path / "PROOF.md")
    first = words.split("## The maze")[0]
    assert "`stored 1` (50.0 %) is not above `mdlm` (60.0 %)" in first
    assert "teaches less than fresh noise (90.0 %)" in first
    assert "`fresh`" not in first
    assert "maze.json was run with 1 seed instead of 5" in first
    assert len(plots["maze.png"].series) == 3


def test_intervals(parts: ModuleType) -> None:
    from scipy import stats

    values = [3.0, 5.0, 4.0, 8.0, 1.0]
    low, high = stats.t.interval(0.95, 4, loc=np.mean(values), scale=stats.sem(values))
    mean, half = parts.mean_and_half(values)
    assert mean - half == pytest.approx(low, abs=1e-3) and mean + half == pytest.approx(high, abs=1e-3)
    assert math.isnan(parts.mean_and_half([2.0])[1])
    wilson = stats.binomtest(987, 1000).proportion_ci(0.95, "wilson")
    assert parts.binomial(987, 1000) == f"98.7 ({100 * wilson.low:.1f} to {100 * wilson.high:.1f})"


def test_dense_noise_of_the_live_teacher_is_what_the_shards_store(demo: pathlib.Path) -> None:
    """transformers' own pass and Eq. 4 against what the Rust teacher, the encoder and the replay make of the same seed."""
    text: Any = imported("text")
    ds = stillhouse.open(str(demo))
    teacher = text.Teacher(ROOT / "assets/teacher-nano-gpt2")
    example = text.masked(ds[:1].torch(), 1)
    far = (text.stored(example) - teacher.dense(example)).abs().sum(1) / 2
    assert len(far) > 10
    assert far.max() <= 1.02 * ds.info.noise.tolerance
