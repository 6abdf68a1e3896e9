"""The small experiments of all methods (research/proof/methods): each runs from job file to JSON, no model sees what it is to predict, and the page shows them."""

from __future__ import annotations

import argparse
import importlib
import json
import math
import pathlib
from collections.abc import Iterator
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from shared_fixtures import program

from stillhouse.views import armd, bd3lm, prime

METHODS = ["pgm", "prime", "armd", "bd3lm", "medusa", "distill"]
STUDENTS = {
    "pgm": ["mdlm", "complementary", "pgm"],
    "prime": ["text 1", "text 2", "text 4", "images 1", "images 2", "images 4"],
    "armd": ["ar", "ar + strided", "progressive", "progressive + strided", "random", "mdlm"],
    "bd3lm": ["4", "4 noise", "16", "16 noise"],
    "medusa": ["heads", "noise"],
    "distill": ["mdlm", "topk", "noise"],
    "tolerance": ["dense", "dense, own", "stored 1e-3", "stored 0.3"],
}
SMALL = argparse.Namespace(vocab=28, length=32, width=32, layers=2, texts=2)


@pytest.fixture(scope="module")
def load() -> Iterator[Any]:
    threads = torch.get_num_threads()
    yield importlib.import_module
    torch.set_num_threads(threads)


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("methods")
    np.save(folder / "images.npy", np.random.default_rng(0).integers(0, 16, (96, 64)).astype(np.uint8))
    return folder


def run(module: ModuleType, work: pathlib.Path, file: str, *more: str) -> dict[str, Any]:
    """A few steps of a method; what its file holds then."""
    small = [
        "--steps=4",
        "--teacher-steps=4",
        "--documents=3",
        "--length=32",
        "--width=32",
        "--layers=2",
        "--rows=4",
        "--batch-size=4",
        "--seeds=1",
    ]
    module.main(["--work", str(work), "--program", str(program()), "--json", str(work / file), *small, *more])
    found: dict[str, Any] = json.loads((work / file).read_text())
    return found


def more_of(name: str, work: pathlib.Path) -> list[str]:
    if name == "prime":
        return ["--images", str(work / "images.npy"), "--held-out=16"]
    return [] if name in ("pgm", "medusa") else ["--texts=2"]


@pytest.mark.parametrize("name", METHODS)
def test_a_method_runs_from_job_to_result_and_keeps_what_it_has(name: str, load: Any, work: pathlib.Path) -> None:
    module, more = load(name), more_of(name, work)
    found = run(module, work, f"methods-{name}.json", *more)
    assert [done["student"] for done in found["students"]] == STUDENTS[name]
    for done in found["students"]:
        losses = [value for key, value in done.items() if key in ("validation", "conditional")]
        assert all(math.isfinite(loss) for loss in losses) and (losses or name == "medusa"), done
        assert all(of["perplexity"] > 1 for of in done.get("written", {}).values())
    again = run(module, work, f"methods-{name}.json", *more)
    assert again == found
    with pytest.raises(SystemExit, match="holds students of"):
        run(module, work, f"methods-{name}.json", *more, "--lr=1")


def test_tolerance_and_the_page_of_all(load: Any, work: pathlib.Path) -> None:
    found = run(load("tolerance"), work, "tolerance-28.json", "--tolerances", "1e-3", "0.3")
    assert [done["student"] for done in found["students"]] == STUDENTS["tolerance"]
    for tolerance, of in found["tolerances"].items():
        assert of["largest"] <= 1.02 * float(tolerance)
    dense, _, tight, _ = (done["validation"] for done in found["students"])
    assert tight == pytest.approx(dense, abs=1e-3), "of four steps, noise within 1e-3 gives nearly the same student"
    for name in METHODS:
        if not (work / f"methods-{name}.json").exists():
            run(load(name), work, f"methods-{name}.json", *more_of(name, work))
    texts, plots = load("page").made(work, work / "PROOF.md")
    methods, tolerance = texts[work / "methods.md"], texts[work / "tolerance.md"]
    assert "**Missing:**" not in methods and "## Letters of the speeches, V = 28" in tolerance
    for names in STUDENTS.values():
        assert all(f"| `{name}`" in methods + tolerance for name in names)
    assert {"methods-pgm.png", "methods-prime.png"} <= set(plots)


def ids_of(rows: int, seed: int) -> torch.Tensor:
    return torch.randint(0, SMALL.vocab, (rows, SMALL.length), generator=torch.Generator().manual_seed(seed))


def one_changed(ids: torch.Tensor, at: int) -> torch.Tensor:
    made = ids.clone()
    made[:, at] = (made[:, at] + 1) % SMALL.vocab
    return made


@torch.no_grad()
def test_pgm_predicts_a_group_from_the_other_alone(load: Any) -> None:
    torch.manual_seed(0)
    model = load("pgm").Partition(SMALL).eval()
    ids, one = ids_of(1, 0), torch.rand(1, SMALL.length) < 0.5
    group = one[:, :, None] == one[:, None, :]
    before, after = (model(of, group, ~group)[0] for of in (ids, one_changed(ids, 5)))
    changed = (before - after).abs().amax(1) > 1e-6
    assert not changed[one[0] == one[0, 5]].any()
    assert changed[one[0] != one[0, 5]].all()


def test_the_loss_of_prime_is_no_bound_and_that_of_digits_is(load: Any) -> None:
    """Tokens 0 and 3 of four, as two digits that are always equal: a perfect p has Eq. 5 below the entropy, ln 2, and the digits' own above it. By all masks, with their
    chances B(|S|, ℓ − |S| + 1)."""
    module = load("prime")
    shares = np.array([0.5, 0.0, 0.0, 0.5])
    torch.manual_seed(0)
    model = module.Digits(argparse.Namespace(width=32, layers=1), 4, 8, 2)
    truth, logits = torch.tensor([[1, 1]]), torch.tensor([[0.5, 0.0, 0.0, 0.5]]).log()
    whole = model.of_digits(logits, truth, torch.tensor([[True, True]])).item()
    half = logits.masked_fill(torch.tensor([[True, True, True, False]]), -math.inf)
    one = model.of_digits(half, truth, torch.tensor([[True, False]])).item()
    assert (whole, one) == (pytest.approx(2 * math.log(2)), pytest.approx(0.0))
    joint = -logits[0, 3].item()
    assert joint / 2 == pytest.approx(module.of_the_perfect(shares, 2)) == pytest.approx(math.log(2) / 2)
    assert whole / 2 == pytest.approx(math.log(2))
    even = np.full(4, 0.25)
    assert module.of_the_perfect(even, 2) == pytest.approx(math.log(4)), "digits that tell nothing of each other"
    uneven = np.array([0.1, 0.2, 0.3, 0.4])
    assert module.of_the_perfect(uneven, 1) == pytest.approx(-(uneven * np.log(uneven)).sum())


@torch.no_grad()
@pytest.mark.parametrize("streams", [1, 2, 4])
def test_armd_sees_earlier_blocks_alone(load: Any, streams: int) -> None:
    torch.manual_seed(0)
    model = load("armd").Ordered(SMALL).eval()
    order, block = (torch.from_numpy(part)[None] for part in armd.strided_order(SMALL.length, streams))
    ids = ids_of(1, 0)
    before, after = (model(of, order, block)[0] for of in (ids, one_changed(ids, 9)))
    changed = (before - after).abs().amax(1) > 1e-6
    assert changed.tolist() == (block[0] > block[0, 9]).tolist()


@torch.no_grad()
def test_bd3lm_sees_its_noised_block_and_clean_ones_before(load: Any) -> None:
    torch.manual_seed(0)
    model = load("bd3lm").Blockwise(SMALL, 4, False).eval()
    clean = ids_of(1, 0)
    noised = clean.masked_fill(torch.rand(1, SMALL.length) < 0.5, SMALL.vocab)
    targets = torch.ones(1, SMALL.length, dtype=torch.bool)
    block = torch.arange(SMALL.length) // 4
    before, after = (model(torch.cat([noised, of], 1), targets, None) for of in (clean, one_changed(clean, 9)))
    assert ((before - after).abs().amax(1) > 1e-6).tolist() == (block > block[9]).tolist()
    other = noised.clone()
    other[0, 9] = (other[0, 9] + 1) % SMALL.vocab
    after = model(torch.cat([other, clean], 1), targets, None)
    assert ((before - after).abs().amax(1) > 1e-6).tolist() == (block == block[9]).tolist()
    assert bd3lm.block_attention(SMALL.length, 4).shape == model.seen.shape


@torch.no_grad()
def test_prime_gives_no_probability_to_what_does_not_agree(load: Any) -> None:
    torch.manual_seed(0)
    model = load("prime").Digits(SMALL, SMALL.vocab, SMALL.length, 2).eval()
    base = prime.base_of(SMALL.vocab, 2)
    ids = ids_of(1, 0)
    digits = torch.from_numpy(prime.encode(ids.numpy(), base, 2)).long()
    digits[..., 1] = base
    p = model(digits, torch.ones_like(ids, dtype=torch.bool)).softmax(-1)
    same_first = torch.arange(SMALL.vocab)[None] // base == ids[0][:, None] // base
    assert (p > 0).tolist() == same_first.tolist()
    assert p.sum(1).allclose(torch.ones(SMALL.length))


def test_the_top_of_all_is_the_whole_cross_entropy(load: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    logits, teacher = (torch.randn(7, 28, generator=generator).double() for _ in range(2))
    p = teacher.log_softmax(-1)
    whole = -(p.exp() * logits.log_softmax(-1)).sum(1)
    top, index = p.topk(28, dim=1)
    assert load("distill").of_topk(logits, index, top).allclose(whole, atol=1e-5)
    top, index = p.topk(4, dim=1)
    coarse = load("distill").of_topk(logits, index, top)
    assert (coarse <= whole + 1e-9).all(), "outcomes that are joined lose nothing but what tells them apart"


def test_medusa_heads_begin_as_the_teacher(load: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    head, h = torch.randn(28, 32, generator=generator), torch.randn(5, 32, generator=generator)
    made = load("medusa").Heads(head, False)(h, None)
    assert made.allclose((h @ head.T)[:, None].expand(-1, 3, -1), atol=1e-5)
