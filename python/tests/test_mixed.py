"""Mixtures: proportions, order, resume, and what keys the random choices of their rows."""

from __future__ import annotations

import collections
import itertools
import math
import pathlib
import pickle
from typing import Any

import numpy as np
import pytest
import shared_fixtures
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import stillhouse
import stillhouse.torch as st
from stillhouse import noise, views
from stillhouse.torch._interleave import Interleave, Quota, largest_remainder

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital'")

EPOCHS = {"web": 0.5, "code": 2.5, "math": 3}


@pytest.fixture(scope="module")
def sets(plain: pathlib.Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, pathlib.Path]:
    """About 8,000, 600 and 100 rows of one tokenizer."""
    made = {"web": plain}
    for name, count, characters in (("code", 6, 20_000), ("math", 3, 6_000)):
        folder = tmp_path_factory.mktemp(name)
        paths = [shared_fixtures.write_corpus(folder, "corpus.jsonl", shared_fixtures.speeches(count, characters))]
        made[name] = shared_fixtures.run(
            folder,
            {
                "input": {"format": "jsonl", "paths": paths, "text": "text", "split_megabytes": 0.05},
                "tokenizer": {"path": str(shared_fixtures.ROOT / "assets/teacher-nano-gpt2")},
                "pack": {"mode": "wrap", "length": 32},
            },
        )
    return made


def mixture(sets: dict[str, pathlib.Path], **options: Any) -> st.MixtureDataset:
    proportions: dict[str, Any] = {} if {"weights", "tokens"} & options.keys() else {"epochs": EPOCHS}
    return st.MixtureDataset(
        sets, **{"batch_size": 300, "seed": 1, "columns": ["sequence_id"], **proportions, **options}
    )


def rows_of(batch: Any) -> list[tuple[int, int]]:
    return list(zip(batch["source"].tolist(), batch["sequence_id"].tolist()))


def flat(batches: Any) -> list[tuple[int, int]]:
    return list(itertools.chain.from_iterable(rows_of(batch) for batch in batches))


def reference(sets: dict[str, pathlib.Path], epochs: int, **options: Any) -> list[list[tuple[int, int]]]:
    ds = mixture(sets, **options)
    return [flat(ds) for _ in range(epochs)]


def ids_of(sets: dict[str, pathlib.Path]) -> list[list[int]]:
    return [stillhouse.open(folder, columns=["sequence_id"])[:]["sequence_id"].tolist() for folder in sets.values()]


def test_every_row_so_often_as_promised(sets: dict[str, pathlib.Path]) -> None:
    """Two epochs of 0.5, 2.5 and 3: every row once, five times, six times."""
    first, second = reference(sets, 2)
    for number, (ids, times) in enumerate(zip(ids_of(sets), (1, 5, 6))):
        both = collections.Counter(row for source, row in first + second if source == number)
        # half of an odd number of rows is rounded, the same in every epoch
        missed = sum(abs(both[row] - times) for row in ids)
        assert missed == (abs(2 * round(len(ids) * EPOCHS[list(sets)[number]]) - len(ids) * times))
        once = collections.Counter(row for source, row in first if source == number)
        assert max(once.values()) - min(once[row] for row in ids) <= 1
    assert first != second


def test_each_once_is_the_default(sets: dict[str, pathlib.Path]) -> None:
    ds = st.MixtureDataset(sets, batch_size=500, columns=["sequence_id"])
    assert sorted(flat(ds)) == [(number, row) for number, ids in enumerate(ids_of(sets)) for row in sorted(ids)]
    assert ds.rows_per_epoch == {name: len(ids) for name, ids in zip(sets, ids_of(sets))}
    assert ds.names == list(sets)


def test_rows_are_those_of_their_data_sets(sets: dict[str, pathlib.Path]) -> None:
    """Every column, ragged ones too, against the data set read alone."""
    whole = [stillhouse.open(folder)[:].torch() for folder in sets.values()]
    where = [{int(i): row for row, i in enumerate(batch["sequence_id"])} for batch in whole]
    ds = mixture(sets, columns=None, batch_size=256)
    for batch in itertools.islice(ds, 6):
        assert batch.info.vocab_size == whole[0].info.vocab_size and list(batch.info.sources) == list(sets)
        assert set(batch["source"].tolist()) == {0, 1, 2}
        for row, (source, i) in enumerate(rows_of(batch)):
            for name, column in whole[source].items():
                assert torch.equal(batch[name][row], column[where[source][i]]), name
        parts = stillhouse.by_source(batch)
        assert list(parts) == ds.names
        for number, (name, part) in enumerate(parts.items()):
            at = (batch["source"] == number).nonzero()[:, 0]
            assert part.info == stillhouse.open(sets[name]).info
            assert torch.equal(part["input_ids"], batch["input_ids"][at])
            for row, place in enumerate(at.tolist()):
                assert torch.equal(part["document_ids"][row], batch["document_ids"][place])


def test_weights_and_tokens(sets: dict[str, pathlib.Path]) -> None:
    total = sum(map(len, ids_of(sets)))
    ds = mixture(sets, weights={"math": 2, "code": 5, "web": 3})
    assert ds.rows_per_epoch == dict(zip(sets, largest_remainder(total, [3, 5, 2])))
    given = collections.Counter(source for source, _ in flat(ds))
    assert dict(given) == dict(enumerate(ds.rows_per_epoch.values()))
    assert len(mixture(sets, weights=dict.fromkeys(sets, 1), rows_per_epoch=1500)) == 5
    ds = mixture(sets, tokens={"web": 32_000, "code": 64_000, "math": 320})
    assert ds.rows_per_epoch == {"web": 1000, "code": 2000, "math": 10}


@pytest.mark.parametrize("seed", [None, 3])
def test_quotas_at_every_position(seed: int | None) -> None:
    random = np.random.default_rng(5)
    for count in (1, 2, 3, 5, 16):
        for _ in range(3):
            sizes = [int(n) for n in random.integers(1, 20_000, count) ** random.uniform(0.3, 1)]
            counts = [max(1, int(size * random.uniform(0.2, 3))) for size in sizes]
            epoch = int(random.integers(0, 4))
            quotas = [Quota(epoch * n, (epoch + 1) * n, size) for n, size in zip(counts, sizes)]
            order = Interleave(quotas, epoch, seed)
            parts = [order.stretch(i) for i in range(order.stretches)]
            assert [order.begin(i) for i in range(order.stretches + 1)] == [0, *np.cumsum([len(p[0]) for p in parts])]
            sources, places = (np.concatenate(part) for part in zip(*parts))
            total = len(sources)
            assert total == sum(counts)
            for position in random.integers(0, total, 20).tolist():
                found = order.find(position)
                assert order.begin(found) <= position < order.begin(found + 1)
            for number, quota in enumerate(quotas):
                mine = sources == number
                assert sorted(places[mine]) == list(range(quota.begin, quota.end))
                off = np.cumsum(mine) - np.arange(1, total + 1) * counts[number] / total
                assert np.abs(off).max() < 64 * (2 + math.log2(count))
                if seed is None:
                    assert (np.diff(places[mine]) == 1).all()


def test_a_rank_meets_its_lanes_alone() -> None:
    """Whatever the data set: a row of lane i of its own order is at a position of lane i, if nothing came to an end before."""
    order = Interleave([Quota(0, 64 * 700, 64 * 700), Quota(0, 64 * 90, 64 * 300)], 0, 9)
    lanes = np.concatenate([order.stretch(i)[1] for i in range(order.stretches)]) % 64
    assert (lanes == np.arange(64 * 790) % 64).all()
    # and each 64 rows are of both data sets, each lane as well
    sources = order.stretch(2)[0].reshape(-1, 64)
    for axis in (0, 1):
        assert np.abs(sources.mean(axis) - 90 / 790).max() < 0.15
    assert len({row.tobytes() for row in sources}) > 100


def test_the_order_is_this_one_for_ever() -> None:
    """States of older versions must go on."""
    sources, places = Interleave([Quota(0, 300, 100), Quota(50, 250, 1000)], 2, 7).stretch(0)
    import hashlib

    assert len(sources) == 500
    digest = hashlib.sha256(np.stack([sources, places]).astype("<i8").tobytes()).hexdigest()
    assert digest[:16] == "a505e6a3e7f7a489"


@pytest.mark.parametrize("name", ["ours", "torch", "torchdata"])
@pytest.mark.parametrize("workers", [0, 2])
def test_worlds_and_stops(name: str, workers: int, sets: dict[str, pathlib.Path]) -> None:
    """World sizes 1 to 3, stopped after random batches and gone on in another shape: the order of the reference, all of it."""
    random = np.random.default_rng(4)
    expected = reference(sets, 2, batch_size=97)
    for world in (1, 2, 3):
        size = int(random.integers(150, 400))
        sources = [mixture(sets, batch_size=size, rank=rank, world_size=world) for rank in range(world)]
        loaders: list[Any] = [_loader(name, ds, workers) for ds in sources]
        assert len({len(loader) for loader in loaders}) == 1
        for epoch in range(2):
            got = [_drawn(loader) for loader in loaders]
            dealt = _dealt(got)
            assert dealt == expected[epoch][: len(dealt)] and len(expected[epoch]) - len(dealt) < world
    if name == "torchdata":
        return  # its own state resumes in the same shape alone
    state: Any = None
    position = 0
    given: list[tuple[int, int]] = []
    while len(given) < len(expected[0]) + len(expected[1]) // 2:
        world, size = int(random.integers(1, 4)), int(random.integers(50, 500))
        sources = [
            mixture(sets, batch_size=size, rank=rank, world_size=world, drop_last=False) for rank in range(world)
        ]
        for ds in sources:
            if state is not None:
                ds.load_state_dict(state)
        loaders = [_loader(name, ds, workers) for ds in sources]
        taken = int(random.integers(1, 6))
        got, states = [], []
        for loader in loaders:
            batches = list(itertools.islice(loader, taken))
            got.append([rows_of(batch) for batch in batches])
            states.append(batches[-1].state if name == "torch" or not batches else loader.state_dict())
        given += _dealt(got)
        state = max(states, key=lambda s: (s["epoch"], s["position"]))
        position = state["epoch"] * len(expected[0]) + state["position"]
        assert position == len(given)
    assert given == (expected[0] + expected[1])[: len(given)]


def _loader(name: str, ds: Any, workers: int) -> Any:
    if name == "ours":
        return st.DataLoader(ds, num_workers=workers)
    return (DataLoader if name == "torch" else StatefulDataLoader)(ds, batch_size=None, num_workers=workers)


def _drawn(loader: Any) -> list[list[tuple[int, int]]]:
    """As frameworks draw: never one more."""
    iterator = iter(loader)
    return [rows_of(next(iterator)) for _ in range(len(loader))]


def _dealt(ranks: list[list[list[tuple[int, int]]]]) -> list[tuple[int, int]]:
    turns = itertools.zip_longest(*ranks, fillvalue=[])
    return [row for turn in turns for some in itertools.zip_longest(*turn) for row in some if row is not None]


def test_stateful_loader_resumes(sets: dict[str, pathlib.Path]) -> None:
    expected = reference(sets, 1)[0]
    for workers in (0, 2):
        loader = _loader("torchdata", mixture(sets), workers)
        iterator = iter(loader)
        before = [rows_of(next(iterator)) for _ in range(4)]
        state = loader.state_dict()
        del iterator
        loader = _loader("torchdata", mixture(sets), workers)
        loader.load_state_dict(pickle.loads(pickle.dumps(state)))
        assert list(itertools.chain(*before)) + flat(loader) == expected


def test_epochs_and_seeds_differ(sets: dict[str, pathlib.Path]) -> None:
    ds = mixture(sets, batch_size=1000)
    orders = [flat(ds) for _ in range(3)]
    ds.set_epoch(1)
    assert flat(ds) == orders[1] and ds.epoch == 2
    assert flat(mixture(sets, seed=2)) != orders[0]
    assert len({tuple(order) for order in orders}) == 3
    assert len({len(order) for order in orders}) == 1
    in_order = flat(mixture(sets, shuffle=False))
    for number, ids in enumerate(ids_of(sets)):
        mine = [row for source, row in in_order if source == number]
        assert mine == (ids * 3)[: len(mine)]


def test_state_is_small_and_of_this_mixture(sets: dict[str, pathlib.Path]) -> None:
    ds = mixture(sets)
    next(iter(ds))
    state = ds.state_dict()
    assert state["position"] == 300 and len(pickle.dumps(state)) < 1500
    for options, named in (
        ({"epochs": {"web": 1, "code": 1, "math": 1}}, "rows_per_epoch"),
        ({"weights": {"web": 1, "code": 1, "math": 1}}, "rows_per_epoch"),
    ):
        with pytest.raises(ValueError, match=f"state: is of another data set: got mixture.*{named}"):
            mixture(sets, **options).load_state_dict(state)
    with pytest.raises(ValueError, match="state: is of another data set"):
        mixture({"web": sets["web"], "code": sets["math"], "math": sets["code"]}).load_state_dict(state)
    alone = st.StreamingShardDataset(sets["web"], batch_size=8)
    with pytest.raises(ValueError, match="state: has no mixture"):
        ds.load_state_dict(alone.state_dict())
    with pytest.raises(ValueError, match="state: has no dataset, split, block_rows"):
        alone.load_state_dict(state)


def test_refusals(sets: dict[str, pathlib.Path], small: shared_fixtures.Maker) -> None:
    def refused(message: str, **options: Any) -> None:
        with pytest.raises(ValueError, match=message):
            mixture(sets, **options)

    refused("weights and epochs: got 2", weights=dict.fromkeys(sets, 1), epochs=EPOCHS)
    refused("epochs: got web, valid: one number each for web, code, math", epochs={"web": 1})
    refused("epochs: got 0 for code", epochs={**EPOCHS, "code": 0})
    refused("weights: got nan for math", weights={"web": 1, "code": 1, "math": math.nan})
    refused("epochs: got 0.0001 for math, which rounds to no row", epochs={**EPOCHS, "math": 0.0001})
    refused("rows_per_epoch: got 5 with epochs", rows_per_epoch=5)
    with pytest.raises(ValueError, match="datasets: got 0, valid"):
        st.MixtureDataset({}, batch_size=1)
    words = small("words", {})
    with pytest.raises(ValueError, match=r"columns: web has .*; words has .*only words has logprob"):
        st.MixtureDataset({"web": sets["web"], "words": words}, batch_size=1)
    with pytest.raises(ValueError, match=r"column input_ids: web has int32 \[32\], words has int32 \[24\]"):
        st.MixtureDataset({"web": sets["web"], "words": words}, batch_size=1, columns=["sequence_id", "input_ids"])
    with pytest.raises(ValueError, match=r"tokenizer: web has .*sha256 \w+\), words has .*sha256"):
        st.MixtureDataset({"web": sets["web"], "words": words}, batch_size=1, columns=["sequence_id"])
    with pytest.raises(ValueError, match="schedule_power: a has 1.0, b has 2.0"):
        other = small("power", {"partitions": {"schedule": "polynomial", "power": 2}})
        st.MixtureDataset({"a": words, "b": other}, batch_size=1)
    with pytest.raises(ValueError, match="is not of a mixture"):
        stillhouse.by_source(stillhouse.open(words)[:3])
    with pytest.raises(ValueError, match=r"stillhouse\.open"):
        st.MixtureDataset({"a": stillhouse.open(words)}, batch_size=1, columns=["input_ids"])


def test_an_error_of_reading_comes_in_its_turn(sets: dict[str, pathlib.Path], tmp_path: pathlib.Path) -> None:
    import shutil

    copied = {**sets, "web": pathlib.Path(shutil.copytree(sets["web"], tmp_path / "web"))}
    options: Any = {"shuffle": False, "batch_size": 50, "epochs": dict.fromkeys(sets, 1)}
    expected = flat(mixture(copied, **options))
    loader = st.DataLoader(mixture(copied, **options))
    shard = sorted((copied["web"] / "data").glob("*.parquet"))[4]
    shard.rename(tmp_path / "hidden")
    got = []
    with pytest.raises(stillhouse.DatasetError, match="is missing"):
        for batch in loader:
            got += rows_of(batch)
    assert got and got == expected[: len(got)] and loader.state_dict()["position"] == len(got)
    (tmp_path / "hidden").rename(shard)
    loader.load_state_dict(loader.state_dict())
    assert got + flat(loader) == expected


def test_noise_is_replayed_with_the_seed_of_each_row(small: shared_fixtures.Maker) -> None:
    folders = {"a": small("words", {}), "b": small("seven", {"seed": 7})}
    opened = {name: stillhouse.open(folder) for name, folder in folders.items()}
    assert opened["a"].info.noise != opened["b"].info.noise
    whole = {name: ds[:] for name, ds in opened.items()}
    every = {name: noise.replay(batch) for name, batch in whole.items()}
    batch = next(iter(st.MixtureDataset(folders, batch_size=23, seed=5)))
    assert batch.info.noise is None and batch.info.sources == {name: ds.info for name, ds in opened.items()}
    where = [{i: row for row, i in enumerate(b["sequence_id"].tolist())} for b in whole.values()]
    expected = np.stack([list(every.values())[s][where[s][i]] for s, i in rows_of(batch)])
    assert set(batch["source"].tolist()) == {0, 1}
    for given in (batch, batch.numpy(), pickle.loads(pickle.dumps(batch))):
        got = noise.replay(given)
        assert type(got) is type(given["input_ids"])
        np.testing.assert_array_equal(np.asarray(got), expected)
        mask = np.random.default_rng(1).random(expected.shape[:2]) < 0.3
        positions: Any = mask if isinstance(given["source"], np.ndarray) else torch.from_numpy(mask)
        np.testing.assert_array_equal(np.asarray(noise.replay(given, positions)), expected[mask])
        places = np.arange(23)[:, None] % np.asarray([[24, 5]])
        np.testing.assert_array_equal(noise.replay(given, places), np.take_along_axis(expected, places[:, :, None], 1))
    for name, part in stillhouse.by_source(batch).items():
        numbers = (batch["source"] == batch_number(batch, name)).nonzero()[:, 0]
        np.testing.assert_array_equal(noise.replay(part), expected[numbers])
    with pytest.raises(ValueError, match="positions has shape"):
        noise.replay(batch, mask[:3])
    alike = st.MixtureDataset({"a": folders["a"], "b": folders["a"]}, batch_size=23)
    assert alike.dataset.info.noise == opened["a"].info.noise


def batch_number(batch: Any, name: str) -> int:
    return list(batch.info.sources).index(name)


def test_views_draw_anew_for_each_data_set_and_round(small: shared_fixtures.Maker) -> None:
    folder = small("words", {})
    ds = st.MixtureDataset({"a": folder, "b": folder}, batch_size=1000, epochs={"a": 2, "b": 1}, seed=5)
    batch = next(iter(ds))
    example = views.mdlm.mask(batch, mask_id=0, seed=3)
    found: dict[int, list[Any]] = collections.defaultdict(list)
    for row, i in enumerate(batch["sequence_id"].tolist()):
        key = (int(batch["source"][row]), int(batch["source_repeat"][row]))
        found[i].append((key, example.targets[row].tolist(), float(example.t[row])))
    for i, rows in found.items():
        assert sorted(key for key, _, _ in rows) == [(0, 0), (0, 1), (1, 0)], i
    # 24 positions each: two masks of a row are the same by chance only where t is near an end
    same = sum(a[1] == b[1] for rows in found.values() for a, b in itertools.combinations(rows, 2))
    assert same < 0.1 * 3 * len(found)
    assert len({t for rows in found.values() for _, _, t in rows}) == 3 * len(found)
    # where each row is drawn for alone, the first data set's first round is as if it were alone
    apart = views.mdlm.mask(batch, mask_id=0, seed=3, sampling="sequence")
    alone = views.mdlm.mask(stillhouse.open(folder)[:], mask_id=0, seed=3, epoch=0, sampling="sequence")
    by_id = {i: row for row, i in enumerate(alone.batch["sequence_id"].tolist())}
    first = (batch["source"] == 0) & (batch["source_repeat"] == 0)
    for row in first.nonzero()[:, 0].tolist():
        i = int(batch["sequence_id"][row])
        assert apart.targets[row].tolist() == alone.targets[by_id[i]].tolist()
    # a part of the batch is as the batch
    part = stillhouse.by_source(batch)["b"]
    assert torch.equal(views.mdlm.mask(part, mask_id=0, seed=3).targets, example.targets[batch["source"] == 1])
