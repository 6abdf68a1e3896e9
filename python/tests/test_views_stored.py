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
from shared_fixtures import ROOT, run, words
from test_views_keyed import batch_of

import stillhouse
from stillhouse import Info
from stillhouse.views import ARCCOS, Schedule, ViewError, armd, bd3lm, pgm, prime
from stillhouse.views.keyed import shuffles, uniforms

CORPUS = {"format": "jsonl", "paths": ["corpus.jsonl"], "text": "text"}


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
            "input": CORPUS,
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
    schedule = {"i_ar_sequences": 10, "i_perm_sequences": 30, "rho_max": 9}
    orders = {"kind": "progressive", "schedule": schedule | {"bytes_per_sequence": 60}}
    ds = stillhouse.open(make(orders=orders, input=CORPUS | {"split_megabytes": 0.001}))
    places = {split["split"]: split["place"] for split in ds.manifest["splits"]}
    ends = [place["first"] + place["sequences"] for place in places.values()]
    assert len(places) > 2 and [place["first"] for place in places.values()] == [0, *ends[:-1]]
    batch = ds[:]
    stored, rule = armd.stored(batch), armd.ProgressiveSchedule(10, 30, 9)
    assert [rule.rho(n) for n in (9, 10, 20, 29, 30)] == [0, 1, 5, 8, 9]
    seen = set()
    for row, sequence in enumerate(batch["sequence_id"].tolist()):
        place = places[sequence >> 32]
        rho = rule.rho(place["first"] + min(sequence & 0xFFFFFFFF, place["sequences"] - 1))
        seen.add(rho)
        drawn = armd.progressive(batch, rho=rho, seed=42)
        np.testing.assert_array_equal(stored.order[row], drawn.order[row])
        assert (stored.order[row] != np.arange(24)).sum() <= rho
    assert {0, 9} < seen


@pytest.mark.parametrize(
    ("orders", "draw"),
    [
        ({"kind": "progressive", "rho": 7}, lambda b: armd.progressive(b, rho=7, seed=42, epoch=3)),
        ({"kind": "strided", "streams": [1, 2, 4]}, lambda b: armd.strided(b, streams=(1, 2, 4), seed=42, epoch=3)),
        ({"kind": "random", "steps": 6}, lambda b: armd.random(b, steps=6, seed=42, epoch=3)),
    ],
)
def test_stored_orders_of_a_later_epoch_are_those_that_the_views_draw_there(orders, draw, make):
    batch = stillhouse.open(make(orders=orders | {"epoch": 3}))[:]
    stored, drawn = armd.stored(batch), draw(batch)
    np.testing.assert_array_equal(stored.order, drawn.order)
    np.testing.assert_array_equal(stored.block, drawn.block)


POLYNOMIAL = {"schedule": "polynomial", "power": 3}


@pytest.mark.parametrize(
    ("length", "more", "t_range"),
    [
        (4, {}, (1e-3, 1 - 1e-3)),
        (16, {}, (1e-3, 1 - 1e-3)),
        (5, {}, (1e-3, 1 - 1e-3)),
        (4, {"t_range": [0.45, 0.95]}, (0.45, 0.95)),
        (16, {"t_range": [0.3, 0.8]}, (0.3, 0.8)),
        (5, {"t_range": [0.0, 1.0]} | POLYNOMIAL, (0.0, 1.0)),
        (4, {"eps": 0.1} | POLYNOMIAL, (0.1, 0.9)),
        (4, {"schedule": "arccos"}, (1e-3, 1 - 1e-3)),
    ],
)
def test_stored_blocks_are_those_that_the_view_draws(length, more, t_range, make):
    batch = stillhouse.open(make(partitions={"level": "block", "block_length": length} | more))[:]
    stored = bd3lm.stored(batch, mask_id=500)
    drawn = bd3lm.mask(batch, block_size=length, seed=42, sampling="sequence", t_range=t_range, mask_id=500)
    assert t_range[0] <= stored.t.min() and stored.t.max() <= t_range[1]
    for name in ("input_ids", "targets", "t", "weights", "valid"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(drawn, name), name)
    assert stored.t.shape == (48, -(-24 // length)) and stored.targets.any() and not stored.targets.all()


def test_stored_digits_have_the_schedule_of_the_job(make):
    batch = stillhouse.open(make(subtokens={"length": 3}, partitions={"level": "subtoken"} | POLYNOMIAL))[:]
    stored = prime.mask(batch, view=0)
    drawn = prime.mask(batch, seed=42, sampling="sequence", t_range=(1e-3, 1 - 1e-3))
    linear = prime.mask(batch, seed=42, sampling="sequence", t_range=(1e-3, 1 - 1e-3), schedule="linear")
    for name in ("input_ids", "digits", "digit_mask", "targets", "t", "weights"):
        np.testing.assert_array_equal(getattr(stored, name), getattr(drawn, name), name)
    assert (stored.digit_mask >= linear.digit_mask).all() and (stored.digit_mask != linear.digit_mask).any()


def test_arccos_is_a_schedule_and_the_share_of_pgms_images():
    """jdeschena/pgm, utils/masking_scheduler.py: arccos(r) / (π/2) with r uniform; its derivative and inverse."""
    r = np.linspace(0.01, 0.99, 99)
    np.testing.assert_allclose(ARCCOS.share(1 - r), np.arccos(r) / (np.pi / 2), rtol=1e-12)
    np.testing.assert_allclose(ARCCOS.time_of(ARCCOS.share(r)), r, rtol=1e-12)
    h = 1e-6
    np.testing.assert_allclose(ARCCOS.derivative(r), (ARCCOS.alpha(r + h) - ARCCOS.alpha(r - h)) / (2 * h), rtol=1e-6)
    np.testing.assert_allclose(ARCCOS.weight(r), -ARCCOS.derivative(r) / ARCCOS.share(r))
    # large shares more often than small ones: the mean is 1 − 2/π of the linear half
    np.testing.assert_allclose(ARCCOS.share((np.arange(1000) + 0.5) / 1000).mean(), 2 / np.pi, atol=1e-4)


def test_a_partition_of_the_authors_images_is_drawn_as_it_is_stored(make):
    batch = stillhouse.open(make(partitions={"views": 2, "schedule": "arccos"}))[:]
    valid = batch["attention_mask"]
    groups, t = pgm.draw_partitions(batch["sequence_id"], valid, views=2, seed=42, schedule=ARCCOS)
    np.testing.assert_array_equal(batch["partition"], groups)
    np.testing.assert_array_equal(batch["partition_t"], t)
    # the views take the schedule from the data set
    example = pgm.partition(batch, view=1)
    given = pgm.partition(batch, view=1, schedule="arccos")
    linear = pgm.partition(batch, view=1, schedule="linear")
    np.testing.assert_array_equal(example.weights, given.weights)
    assert (example.weights != linear.weights).any()


@pytest.mark.parametrize("sampling", ["stratified", "independent"])
@pytest.mark.parametrize("schedule", [{}, POLYNOMIAL, {"schedule": "arccos"}])
@pytest.mark.parametrize("level", ["block", "subtoken"])
def test_every_stored_view_is_drawn_as_the_format_says(level, schedule, sampling, make):
    """docs/FORMAT.md, "Other randomness", with the package's uniforms: strata, a time for each block, groups."""
    views, size = 3, 5
    more = {"block_length": size} if level == "block" else {}
    partitions = {"level": level, "views": views, "sampling": sampling, "t_range": [0.1, 0.7]} | more | schedule
    batch = stillhouse.open(make(subtokens={"length": 3}, partitions=partitions))[:]
    ids, valid = batch["sequence_id"], batch["attention_mask"]
    kind = ARCCOS if schedule.get("schedule") == "arccos" else Schedule(schedule.get("power", 1))
    strata = shuffles(42, "partition_strata", ids, views)
    for view in range(views):
        purpose = "bd3lm" if level == "block" else "prime"
        blocks = -(-24 // size) if level == "block" else 1
        part = uniforms(42, f"{purpose}_t", ids, blocks, view)
        if sampling == "stratified":
            part = (strata[:, (view + np.arange(blocks)) % views] + part) / views
        t = (0.1 + (0.7 - 0.1) * part).astype(np.float32)
        stored_t = batch["partition_t"][:, view].reshape(len(ids), blocks)
        np.testing.assert_array_equal(stored_t, np.clip(t, *np.float32([0.1, 0.7])))
        share = kind.share(stored_t)
        if level == "block":
            place, cells, there = np.arange(24) // size, 24, valid
        else:
            place, cells, there = np.zeros(72, int), 72, np.repeat(valid, 3, axis=1)
        groups = (uniforms(42, f"{purpose}_mask", ids, cells, view) < share[:, place]) & there
        np.testing.assert_array_equal(batch["partition"][:, view].reshape(len(ids), cells), groups)


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
