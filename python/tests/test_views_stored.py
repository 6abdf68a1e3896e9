"""What jobs store equals what the views draw, and what a position may see: job file, shards, package.

Two ways meet in `operators/testdata/views.json`: the package draws what stands in it (here), the operators store it (their Rust tests). The data sets here are
the program's own, so that the way through Parquet and manifest is looked at, too.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import io
import itertools
import json
import pathlib

import numpy as np
import pytest
import torch
from conftest import ROOT, run, words
from test_views_keyed import batch_of

import stillhouse
from stillhouse import Info
from stillhouse.views import ViewError, armd, bd3lm, prime


@pytest.fixture(scope="module")
def make(tmp_path_factory):
    """Makes a data set of words, rows padded to 24, without a teacher; seed 42."""

    def made(**sections) -> pathlib.Path:
        folder = tmp_path_factory.mktemp("stored")
        words(folder)
        numbers = np.random.default_rng(5).permutation(199)
        np.save(folder / "numbers.npy", numbers.astype(np.int64))
        (folder / "numbers.json").write_text(json.dumps(numbers.tolist()))
        job = {
            "input": {"format": "jsonl", "paths": ["corpus.jsonl"], "text": "text"},
            "tokenizer": {"path": "tokenizer.json", "bos": "<s>", "eos": "</s>", "pad": "<pad>"},
            "pack": {"mode": "pad", "length": 24},
        }
        return run(folder, job | sections)

    return made


def test_the_golden_file_of_the_operators_is_what_the_views_draw():
    path = ROOT / "scripts/view-goldens"
    loader = importlib.machinery.SourceFileLoader("view_goldens", str(path))
    spec = importlib.util.spec_from_loader("view_goldens", loader)
    script = importlib.util.module_from_spec(spec)
    loader.exec_module(script)
    golden = json.loads((ROOT / "operators/testdata/views.json").read_text())
    assert set(golden) == {"orders", "partitions"}
    for name, cases in golden.items():
        assert json.loads(json.dumps(list(getattr(script, name)()))) == cases and len(cases) > 10


@pytest.mark.parametrize(
    ("orders", "draw"),
    [
        ({"kind": "progressive", "rho": 7}, lambda b: armd.progressive(b, rho=7, seed=42)),
        ({"kind": "strided", "streams": [1, 2, 4]}, lambda b: armd.strided(b, streams=(1, 2, 4), seed=42)),
        ({"kind": "strided", "streams": [5]}, lambda b: armd.strided(b, streams=5, seed=42)),
        ({"kind": "random", "steps": 6}, lambda b: armd.random(b, steps=6, seed=42)),
    ],
)
def test_stored_orders_are_those_that_the_views_draw(orders, draw, make):
    ds = stillhouse.open(make(orders=orders))
    batch = ds[:]
    assert len(ds) == 48 and not batch["attention_mask"].all()
    stored, drawn = armd.stored(batch), draw(batch)
    for name in ("input_ids", "order", "block", "targets", "weights", "valid"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(drawn, name), name)
    np.testing.assert_array_equal(stored.strictly_causal(), drawn.strictly_causal())


def test_the_schedule_of_orders_goes_by_the_place_in_the_data_set(make):
    schedule = {"i_ar_sequences": 10, "i_perm_sequences": 30, "rho_max": 9, "sequences_per_split": 48}
    batch = stillhouse.open(make(orders={"kind": "progressive", "schedule": schedule}))[:]
    stored, rule = armd.stored(batch), armd.ProgressiveSchedule(10, 30, 9)
    assert [rule.rho(n) for n in (9, 10, 20, 29, 30)] == [0, 1, 5, 8, 9]
    for row, sequence in enumerate(batch["sequence_id"].tolist()):
        rho = rule.rho(sequence & 0xFFFFFFFF)
        drawn = armd.progressive(batch, rho=rho, seed=42)
        np.testing.assert_array_equal(stored.order[row], drawn.order[row])
        assert (stored.order[row] != np.arange(24)).sum() <= rho


@pytest.mark.parametrize("length", [4, 16, 5])
def test_stored_blocks_are_those_that_the_view_draws(length, make):
    batch = stillhouse.open(make(partitions={"level": "block", "block_length": length}))[:]
    stored = bd3lm.stored(batch, mask_id=500)
    drawn = bd3lm.mask(batch, block_size=length, seed=42, sampling="sequence", t_range=(1e-3, 1 - 1e-3), mask_id=500)
    for name in ("input_ids", "targets", "t", "weights", "valid"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(drawn, name), name)
    assert stored.t.shape == (48, -(-24 // length)) and stored.targets.any() and not stored.targets.all()


NAMED = {"none": None, "shipped": "shipped", "npy": "numbers.npy", "json": "numbers.json"}


@pytest.mark.parametrize("permutation", NAMED)
def test_stored_digits_masks_and_tables_are_those_that_the_view_makes(permutation, make):
    named = NAMED[permutation]
    subtokens = {"length": 3, "filter_table": True} | ({"permutation": named} if named else {})
    path = make(subtokens=subtokens, partitions={"level": "subtoken"})
    ds = stillhouse.open(path)
    batch, info = ds[:], ds.info.subtokens
    expected = None
    if named == "shipped":
        expected = prime.shipped_permutation(199)
    elif named:
        expected = np.load(path.parent / "numbers.npy")
    if expected is None:
        assert info.permutation is None and "permutation.npy" not in ds.manifest["beside"]
    else:
        np.testing.assert_array_equal(info.permutation, expected)
        np.testing.assert_array_equal(np.load(path / "permutation.npy"), expected)
    digits = prime.encode(batch["input_ids"], 6, 3, expected)
    np.testing.assert_array_equal(batch["subtokens"], digits)
    np.testing.assert_array_equal(prime.decode(batch["subtokens"], 6, 199, info.permutation), batch["input_ids"])
    # another program's view of it: the digits of numbers[id]
    numbers = np.arange(199) if expected is None else expected
    np.testing.assert_array_equal(batch["subtokens"].astype(int) @ [36, 6, 1], numbers[batch["input_ids"]])

    stored = prime.mask(batch, view=0)
    drawn = prime.mask(batch, seed=42, sampling="sequence", t_range=(1e-3, 1 - 1e-3))
    for name in ("input_ids", "digits", "digit_mask", "targets", "t", "weights"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(drawn, name), name)

    table = np.load(io.BytesIO(ds.file("filter_table.npy")))
    assert table.dtype == bool
    np.testing.assert_array_equal(table, prime.filter_table(199, 3, info.permutation))
    allowed = prime.valid_set(stored.input_ids[stored.targets], table)
    assert allowed[np.arange(len(allowed)), stored.target_ids()].all()


def test_a_file_beside_the_shards_is_what_the_manifest_says_or_an_error(make):
    path = make(subtokens={"length": 3, "permutation": "shipped"})
    ds = stillhouse.open(path)
    with pytest.raises(ValueError, match='got the file "filter_table.npy", valid: permutation.npy'):
        ds.file("filter_table.npy")
    whole = (path / "permutation.npy").read_bytes()
    (path / "permutation.npy").write_bytes(whole[:-4] + whole[-8:-4])
    with pytest.raises(stillhouse.DatasetError, match="permutation.npy: is damaged: it has sha256"):
        stillhouse.open(path)
    (path / "permutation.npy").unlink()
    with pytest.raises(stillhouse.DatasetError, match="permutation.npy: is missing, though the manifest lists it"):
        stillhouse.open(path)
    bare = Info.of_manifest(ds.manifest)
    assert bare.subtokens != stillhouse.SubtokenInfo(6, 3) and bare == ds.info
    with pytest.raises(ViewError, match="has a permutation.npy"):
        prime.mask(stillhouse.Batch({k: ds[:][k] for k in ("sequence_id", "input_ids")}, info=bare))


def sees(allowed, n):
    """The positions in the order of generation that the n-th one may see, by following the mask any number of times."""
    reached, front = set(), {n}
    while front:
        front = {i for k in front for i in np.flatnonzero(allowed[k]).tolist()} - reached
        reached |= front
    return reached


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_no_position_ever_sees_its_own_or_a_later_block(kind):
    """By brute force: all masking steps of sequences of up to 4 tokens, and every kind of order; also through any number of layers."""
    cases = [
        (batch_of(rows=1, length=length), lambda b, tau=tau: armd.masking_steps(b, np.array(tau), steps=3))
        for length in range(1, 5)
        for tau in itertools.product((1, 2, 3), repeat=length)
    ]
    small = batch_of(rows=5, length=9, lengths=[9, 8, 3, 1, 0])
    cases += [
        (small, lambda b, seed=seed, draw=draw: draw(b, seed))
        for seed in range(6)
        for draw in (
            lambda b, seed: armd.progressive(b, rho=5, seed=seed),
            lambda b, seed: armd.strided(b, seed=seed),
            lambda b, seed: armd.random(b, steps=4, seed=seed),
        )
    ]
    for batch, draw in cases:
        example = draw(batch.torch() if kind == "torch" else batch)
        strict, causal = (np.asarray(mask) for mask in (example.strictly_causal(), example.causal()))
        block, valid = np.asarray(example.block), np.asarray(example.valid)
        for row in range(len(block)):
            count = int(valid[row].sum())
            for n in range(block.shape[1]):
                seen = sees(strict[row], n)
                assert all(block[row, i] < block[row, n] and valid[row, i] for i in seen)
                # and all of the earlier blocks, so that nothing is lost
                assert np.flatnonzero(strict[row, n]).tolist() == (
                    [i for i in range(count) if block[row, i] < block[row, n]] if n < count else []
                )
                assert np.flatnonzero(causal[row, n]).tolist() == (
                    [i for i in range(count) if block[row, i] <= block[row, n]] if n < count else []
                )
            # the tokens that a token is predicted from do not hold it: another token there changes no prediction up to its block
            tokens = torch.arange(block.shape[1], dtype=torch.float64)[None, :] + 1
            sums = strict[row].astype(float) @ tokens[0].numpy()
            for changed in range(count):
                other = tokens[0].numpy().copy()
                other[changed] += 100
                differs = strict[row].astype(float) @ other != sums
                assert not differs[block[row] <= block[row, changed]].any()
