"""Batches by tokens: how the order is cut, who takes what, states."""

from __future__ import annotations

import collections
import itertools
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
import shared_fixtures
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import stillhouse
import stillhouse.torch as st
from stillhouse import noise, views
from stillhouse.torch._token_batches import TokenBatches

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital'")

MOST = 1500


@pytest.fixture(scope="module")
def documents(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """About 2,000 documents of 3 to 256 tokens, in several shards."""
    folder = tmp_path_factory.mktemp("documents")
    random = np.random.default_rng(2)
    whole = " ".join(shared_fixtures.speeches(20, 60_000)).replace("\n", " ")
    ends = np.cumsum(random.integers(10, 1400, 1500) ** random.uniform(0.7, 1, 1500)).astype(int).tolist()
    texts = [whole[a:b] for a, b in zip([0, *ends], ends) if whole[a:b].strip()]
    paths = [shared_fixtures.write_corpus(folder, f"part-{i}.jsonl", texts[i::3]) for i in range(3)]
    return shared_fixtures.run(
        folder,
        {
            "input": {"format": "jsonl", "paths": paths, "text": "text", "split_megabytes": 0.1},
            "tokenizer": {"path": str(shared_fixtures.ROOT / "assets/teacher-nano-gpt2")},
            "pack": {"mode": "pad", "length": 256},
        },
    )


def dataset(folder: pathlib.Path, **options: Any) -> st.TokenBatchDataset:
    return st.TokenBatchDataset(folder, **{"max_tokens": MOST, "seed": 1, "length_window": 300, **options})


def ids(batch: Any) -> list[int]:
    found: list[int] = batch["sequence_id"].tolist()
    return found


def loader_of(name: str, ds: Any, workers: int) -> Any:
    if name == "ours":
        return st.DataLoader(ds, num_workers=workers)
    return (DataLoader if name == "torch" else StatefulDataLoader)(ds, batch_size=None, num_workers=workers)


def drawn(loader: Any) -> list[list[int]]:
    """As frameworks draw: never one more."""
    iterator = iter(loader)
    return [ids(next(iterator)) for _ in range(len(loader))]


def in_turn(ranks: list[list[Any]]) -> list[Any]:
    """Batches of all ranks, step by step."""
    return [batch for step in itertools.zip_longest(*ranks) for batch in step if batch is not None]


def test_every_row_once_and_no_batch_too_large(documents: pathlib.Path) -> None:
    whole = stillhouse.open(documents)[:]
    expected = {
        i: row[valid].tolist() for i, row, valid in zip(ids(whole), whole["input_ids"], whole["attention_mask"])
    }
    orders = []
    ds = dataset(documents)
    assert ds.lengths.tolist() == [len(row) for row in expected.values()] and len(set(ds.lengths.tolist())) > 100
    for epoch in range(3):
        assert ds.epoch == epoch
        count, tokens, area, order = len(ds), 0, 0, []
        for batch in ds:
            shape, valid = batch["input_ids"].shape, batch["attention_mask"]
            assert valid.shape == shape and shape[0] * shape[1] <= MOST and valid.sum(1).max() == shape[1]
            tokens, area, order = tokens + int(valid.sum()), area + shape[0] * shape[1], order + ids(batch)
            for row, i in enumerate(ids(batch)):
                assert batch["input_ids"][row][valid[row]].tolist() == expected[i]
            count -= 1
        assert count == 0 and sorted(order) == sorted(expected)
        assert tokens / area > 0.9  # of a batch's places hold tokens
        orders.append(order)
    assert orders[0] != orders[1] != orders[2]
    ds.set_epoch(1)
    assert list(itertools.chain(*drawn(ds))) == orders[1]


def test_without_sorting_the_order_stays(documents: pathlib.Path) -> None:
    alone = st.StreamingShardDataset(documents, batch_size=100, seed=1)
    assert list(itertools.chain(*map(ids, dataset(documents, length_window=1)))) == list(
        itertools.chain(*map(ids, alone))
    )
    rows = stillhouse.open(documents)[:]["sequence_id"].tolist()
    assert list(itertools.chain(*map(ids, dataset(documents, shuffle=False)))) == rows


def test_cuts_are_greedy() -> None:
    """Every batch has as many rows as fit: with the next row of its window it would be too large."""
    random = np.random.default_rng(3)
    for _ in range(60):
        count, window = int(random.integers(1, 2000)), int(random.integers(1, 700))
        lengths = random.integers(1, int(random.integers(2, 200)), count).astype(np.int32)
        most = int(lengths.max() * random.uniform(1, 40))
        order = random.permutation(count)
        cut = TokenBatches.cut(order, lengths, most, window, None, 0)
        assert cut.bounds[0] == 0 and cut.bounds[-1] == count and (np.diff(cut.bounds) > 0).all()
        for begin in range(0, count, window) if window > 1 else ():
            part = cut.rows[begin : begin + window]
            assert sorted(part) == sorted(order[begin : begin + window]) and (np.diff(lengths[part]) >= 0).all()
        for a, b in zip(cut.bounds, cut.bounds[1:]):
            assert (b - a) * lengths[cut.rows[a:b]].max() <= most
            if b < count and (window == 1 or b % window):
                assert (b - a + 1) * lengths[cut.rows[a : b + 1]].max() > most
        shuffled = TokenBatches.cut(order, lengths, most, window, 5, 0)
        batches = [
            collections.Counter(tuple(c.rows[a:b]) for a, b in zip(c.bounds, c.bounds[1:])) for c in (cut, shuffled)
        ]
        assert batches[0] == batches[1]
        wanted = len(cut.bounds) - 1 + int(random.integers(0, 50))
        filled = cut.filled(wanted)
        assert len(filled.bounds) - 1 == min(wanted, count) and set(cut.bounds) <= set(filled.bounds)
        assert (np.diff(filled.bounds) > 0).all() and (filled.rows == cut.rows).all()


def test_ranks_take_equally_many_batches(documents: pathlib.Path) -> None:
    lengths = dataset(documents).lengths
    for world in range(1, 12):
        for most in (300, 1500, 20_000, 200_000):
            sets = [dataset(documents, max_tokens=most, rank=rank, world_size=world, columns=["sequence_id"], lengths=lengths) for rank in range(world)]  # fmt: skip
            given: list[int] = []
            counts = set()
            for ds in sets:
                got = [ids(batch) for batch in ds]
                counts.add(len(got))
                given += itertools.chain(*got)
            assert len(counts) == 1 and len(given) == len(set(given)) and len(lengths) - len(given) < world
            # where the last rows are too few for all ranks, they are left out with their step
            assert {len(ds) for ds in sets} == {counts.pop() + (len(given) < len(lengths))}
            left_out = [dataset(documents, max_tokens=most, rank=rank, world_size=world, lengths=lengths, drop_last=True) for rank in range(world)]  # fmt: skip
            never = [dataset(documents, max_tokens=most, rank=rank, world_size=world, lengths=lengths, drop_last=False) for rank in range(world)]  # fmt: skip
            alone = len(dataset(documents, max_tokens=most, lengths=lengths))
            assert {len(ds) for ds in left_out} == {alone // world}
            assert [len(ds) for ds in never] == [len(range(rank, alone, world)) for rank in range(world)]


@pytest.mark.parametrize("name", ["ours", "torch", "torchdata"])
@pytest.mark.parametrize("workers", [0, 2])
def test_worlds_and_stops(name: str, workers: int, documents: pathlib.Path) -> None:
    """Stopped after random batches and gone on with other ranks and workers: the batches of the reference."""
    random = np.random.default_rng(8)
    lengths = dataset(documents).lengths
    options: Any = {"columns": ["sequence_id"], "lengths": lengths}
    ds = dataset(documents, **options)
    expected = [[ids(batch) for batch in ds] for _ in range(2)]
    for world in (1, 2, 3):
        loaders = [
            loader_of(name, dataset(documents, rank=r, world_size=world, **options), workers) for r in range(world)
        ]
        for epoch in range(2):
            got = in_turn([drawn(loader) for loader in loaders])
            whole = len(expected[epoch]) // world * world
            assert got[:whole] == expected[epoch][:whole]
            rest = list(itertools.chain(*got[whole:]))
            assert rest == list(itertools.chain(*expected[epoch][whole:]))[: len(rest)]
    if name == "torchdata":
        return  # its own state resumes in the same shape alone
    state: Any = None
    given: list[list[int]] = []
    target = len(expected[0]) + len(expected[1]) // 2
    while len(given) < target:
        world = int(random.integers(1, 4))
        got, states = [], []
        taken = int(random.integers(1, 25))
        for rank in range(world):
            ds = dataset(documents, rank=rank, world_size=world, drop_last=False, **options)
            if state is not None:
                ds.load_state_dict(state)
            loader = loader_of(name, ds, workers)
            batches = list(itertools.islice(loader, taken))
            got.append([ids(batch) for batch in batches])
            states.append(batches[-1].state if name == "torch" or not batches else loader.state_dict())
        given += in_turn(got)
        state = max(states, key=lambda s: (s["epoch"], s["position"]))
        assert state["epoch"] * len(lengths) + state["position"] == sum(map(len, given))
    assert given == (expected[0] + expected[1])[: len(given)]


def test_stateful_loader_resumes(documents: pathlib.Path) -> None:
    expected = [ids(batch) for batch in dataset(documents)]
    for workers in (0, 2):
        loader = loader_of("torchdata", dataset(documents), workers)
        iterator = iter(loader)
        before = [ids(next(iterator)) for _ in range(7)]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        del iterator
        loader = loader_of("torchdata", dataset(documents), workers)
        loader.load_state_dict(state)
        assert before + [ids(batch) for batch in loader] == expected


def test_what_is_left(documents: pathlib.Path) -> None:
    loader = st.DataLoader(dataset(documents))
    total = len(loader)
    iterator = iter(loader)
    for given in range(1, total):
        next(iterator)
        assert (len(loader), loader.remaining, loader.epoch) == (total, total - given, 0)
    next(iterator)
    assert loader.epoch == 1 and len(loader) == loader.remaining == total
    assert {len(loader.dataset.batches(epoch).bounds) - 1 for epoch in range(20)} == {total}


def test_rows_of_one_length(plain: pathlib.Path) -> None:
    """Batches of max_tokens // L rows; nothing is read to know that."""
    ds = dataset(plain, max_tokens=32 * 7 + 31, length_window=700)
    sizes = [batch.rows for batch in ds]
    rows = len(ds.dataset)
    assert sum(sizes) == rows and sorted(sizes)[1:] == [7] * (rows // 7)


def test_refusals(documents: pathlib.Path, plain: pathlib.Path) -> None:
    ds = dataset(documents)
    row = int(ds.lengths.argmax())
    with pytest.raises(
        ValueError, match=rf"max_tokens: got 100, but row {row} of .* has 256 tokens; valid: 256 or more"
    ):
        dataset(documents, max_tokens=100)
    with pytest.raises(ValueError, match="max_tokens: got 31, but row 0 of .* has 32 tokens"):
        dataset(plain, max_tokens=31)
    with pytest.raises(ValueError, match="max_tokens: got 0, valid"):
        dataset(documents, max_tokens=0)
    with pytest.raises(ValueError, match="length_window: got 0, valid"):
        dataset(documents, length_window=0)
    with pytest.raises(ValueError, match=r"lengths: got shape \[3\], valid: \[\d+\]"):
        dataset(documents, lengths=[1, 2, 3])
    with pytest.raises(ValueError, match="an epoch has no batch"):
        next(iter(dataset(documents, rank=0, world_size=len(ds.lengths) + 1)))
    next(iter(ds))
    state = ds.state_dict()
    for options in ({"max_tokens": 2000}, {"length_window": 17}):
        (name,) = options
        with pytest.raises(ValueError, match=f"state: is of another data set: got {name}"):
            dataset(documents, **options).load_state_dict(state)
    wrong = dataset(documents)
    wrong.load_state_dict({**state, "position": state["position"] + 1})
    with pytest.raises(ValueError, match="state: got position .*where a batch begins"):
        next(iter(wrong))


def test_all_columns_end_with_the_longest_row(small: shared_fixtures.Maker) -> None:
    """Stored with padding or without: the noise and the views of the rows are those of the whole data set."""
    patch = {"extract": {"noise": {"draws": 2}, "topk": 3}}
    for folder in (
        small("documents", {"pack": {"mode": "pad"}, **patch}),
        small("keep", {"pack": {"remainder": "keep", "separator": "none"}, **patch}),
    ):
        opened = stillhouse.open(folder)
        whole = opened[:].padded()
        where = {i: row for row, i in enumerate(ids(whole))}
        expected = noise.replay(whole, draw=1)
        ds = st.TokenBatchDataset(folder, max_tokens=70, seed=2)
        widths = set()
        for batch in ds:
            padded = batch.padded()
            rows, length = padded["input_ids"].shape
            widths.add(length)
            got = noise.replay(padded, draw=1)
            for row, i in enumerate(ids(padded)):
                count = int(padded["attention_mask"][row].sum())
                np.testing.assert_array_equal(got[row, :count], expected[where[i], :count])
                for name in ("input_ids", "attention_mask", "logprob", "topk_index", "subtokens"):
                    assert padded[name].shape[:2] == (rows, length)
                    np.testing.assert_array_equal(padded[name][row, :count], whole[name][where[i]][:count])
                np.testing.assert_array_equal(
                    padded["partition"][row, :, :count], whole["partition"][where[i]][:, :count]
                )
            assert views.mdlm.mask(padded, mask_id=0).targets.shape == (rows, length)
        assert max(widths) <= 24 and (len(widths) > 3 or "keep" in str(folder))


def test_a_state_is_of_one_kind_of_loader(plain: pathlib.Path) -> None:
    """Positions of batches by tokens are others than those of batches by rows: loaded there, rows would come twice, or never."""
    by_tokens = st.TokenBatchDataset(plain, max_tokens=4096)
    by_rows = st.StreamingShardDataset(plain, batch_size=4)
    for state in (by_tokens.state_dict(), st.DataLoader(by_rows).state_dict() | {"max_tokens": 4096}):
        with pytest.raises(ValueError, match="is of another kind of loader, which has max_tokens"):
            by_rows.load_state_dict(state)
        with pytest.raises(ValueError, match="is of another kind of loader, which has max_tokens"):
            stillhouse.Epochs(plain, batch_size=4).load_state_dict(state)
    with pytest.raises(ValueError, match="has no max_tokens"):
        by_tokens.load_state_dict(by_rows.state_dict())
    # a loader's own count is no obstacle to the data set, nor to the arrays
    state = st.DataLoader(by_rows).state_dict()
    by_rows.load_state_dict(state)
    stillhouse.Epochs(plain, batch_size=4).load_state_dict(state)


def test_batches_that_are_read_ahead_end_quietly_with_the_interpreter() -> None:
    """What is still referred to at the exit is collected when the modules that it needs are gone: stderr stays empty."""
    program = """
import time
from stillhouse.torch._ahead import ReadAhead
class Steps:
    def read(self):
        time.sleep(0.05)
        return None
ahead = ReadAhead(Steps())
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")
