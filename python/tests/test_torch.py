"""Data sets for DataLoaders: the order, who gets what, and going on in the middle."""

from __future__ import annotations

import copy
import itertools
import pathlib
import pickle
import shutil
import time
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader

import stillhouse
import stillhouse.torch as st

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create", "ignore:'set_vital'")

KINDS = [st.StreamingShardDataset, st.ShardDataset]
WORKERS = [(0, False), (1, False), (2, False), (2, True), (3, True)]
Set = Any


def dataset(kind: Set, folder: pathlib.Path, **options: Any) -> Set:
    return kind(
        folder, **{"batch_size": 64, "seed": 1, "drop_last": False, "columns": ["sequence_id", "input_ids"], **options}
    )


def ids(batch: Any) -> list[int]:
    found: list[int] = batch["sequence_id"].tolist()
    return found


def plain_loader(ds: Set, cls: Any = DataLoader, **options: Any) -> Any:
    """A loader of torch or torchdata."""
    if isinstance(ds, st.ShardDataset):
        return cls(ds, batch_sampler=ds.batch_sampler, collate_fn=ds.collate, **options)
    return cls(ds, batch_size=None, **options)


def workers(count: int, persistent: bool) -> dict[str, Any]:
    return {"num_workers": count, "persistent_workers": persistent}


@pytest.fixture(scope="module")
def epochs(plain: pathlib.Path) -> list[list[list[int]]]:
    """The batches of two epochs, without workers."""
    ds = dataset(st.StreamingShardDataset, plain)
    return [[ids(batch) for batch in ds] for _ in range(2)]


@pytest.mark.parametrize("kind", [*KINDS, stillhouse.Epochs])
def test_the_facts_are_those_of_the_data_set(kind: Set, plain: pathlib.Path) -> None:
    made = dataset(kind, plain)
    assert made.info == stillhouse.open(plain).info == next(iter(made)).info


def test_epochs_are_complete_and_mixed(epochs: list[list[list[int]]], plain: pathlib.Path) -> None:
    rows = stillhouse.open(plain, columns=["sequence_id"])[:]["sequence_id"].tolist()
    for epoch in epochs:
        assert sorted(itertools.chain(*epoch)) == sorted(rows)
        assert {len(batch) for batch in epoch[:-1]} == {64}
        shards = [len({i >> 32 for i in batch}) for batch in epoch[:-1]]
        assert np.mean(shards) > 4  # of eight shards
    assert epochs[0] != epochs[1]


def test_rows_are_whole(plain: pathlib.Path) -> None:
    truth = dict(zip(*(stillhouse.open(plain)[:][name].tolist() for name in ("sequence_id", "input_ids")), strict=True))
    for kind in KINDS:
        for batch in (
            dataset(kind, plain, batch_size=500)
            if kind is st.StreamingShardDataset
            else plain_loader(dataset(kind, plain))
        ):
            assert all(truth[i] == row for i, row in zip(ids(batch), batch["input_ids"].tolist(), strict=True))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "persistent"), WORKERS)
def test_every_loader_gives_the_same(kind: Set, count: int, persistent: bool, plain: pathlib.Path, epochs: Any) -> None:
    ours = st.DataLoader(dataset(kind, plain), pin_memory=False, **workers(count, persistent))
    theirs = plain_loader(dataset(kind, plain), **workers(count, persistent))
    stateful = plain_loader(dataset(kind, plain), StatefulDataLoader, **workers(count, persistent))
    for loader in (ours, theirs, stateful):
        assert len(loader) == len(epochs[0])
        assert [ids(batch) for batch in loader] == epochs[0]
        assert [ids(batch) for batch in loader] == epochs[1]  # the next epoch follows by itself
    assert ours.epoch == 2


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "persistent"), WORKERS)
def test_an_epoch_that_is_left_begins_anew(
    kind: Set, count: int, persistent: bool, plain: pathlib.Path, epochs: Any
) -> None:
    loader = st.DataLoader(dataset(kind, plain), **workers(count, persistent))
    for stop in (1, 3, len(epochs[0]) - 1):
        assert [ids(batch) for batch in itertools.islice(loader, stop)] == epochs[0][:stop]
    assert [ids(batch) for batch in loader] == epochs[0]
    loader = plain_loader(dataset(kind, plain), **workers(count, persistent))
    for stop in (1, 3, 20):
        assert [ids(batch) for batch in itertools.islice(loader, stop)] == epochs[0][:stop]
    loader.dataset.set_epoch(1)
    assert [ids(batch) for batch in loader] == epochs[1]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "persistent"), WORKERS)
def test_torchdata_resumes(kind: Set, count: int, persistent: bool, plain: pathlib.Path, epochs: Any) -> None:
    def make() -> Any:
        return plain_loader(dataset(kind, plain), StatefulDataLoader, **workers(count, persistent))

    for stop in (0, 1, 7, len(epochs[0]) - 1, len(epochs[0])):
        loader = make()
        got = [ids(batch) for batch in itertools.islice(iter(loader), stop)]
        state = pickle.loads(pickle.dumps(loader.state_dict()))
        resumed = make()
        resumed.load_state_dict(state)
        assert got + [ids(batch) for batch in resumed] == epochs[0], stop
        assert [ids(batch) for batch in resumed] == epochs[1], stop


def rank_loaders(kind: Set, folder: pathlib.Path, world: int, batch_size: int, count: int) -> list[Any]:
    return [
        st.DataLoader(dataset(kind, folder, batch_size=batch_size, rank=rank, world_size=world), num_workers=count)
        for rank in range(world)
    ]


@pytest.mark.parametrize("kind", KINDS)
def test_any_shape_goes_on_from_any_other(kind: Set, plain: pathlib.Path, epochs: Any) -> None:
    """Stopped at random and gone on with other world sizes, batch sizes and workers: two whole epochs, in one order."""
    random = np.random.default_rng(5)
    expected = [list(itertools.chain(*epoch)) for epoch in epochs]
    for _ in range(3):
        state: Any = None
        seen: list[list[int]] = [[], []]
        while state is None or (state["epoch"], state["position"]) != (1, len(expected[1])):
            world, count = int(random.integers(1, 5)), int(random.choice([0, 0, 1, 2]))
            loaders = rank_loaders(kind, plain, world, int(random.integers(10, 400)), count)
            if state is not None:
                if state["position"] == len(expected[0]):
                    state = {**state, "epoch": 1, "position": 0}
                for loader in loaders:
                    loader.load_state_dict(state)
            epoch, stop = loaders[0].epoch, int(random.integers(1, 12))
            given = [list(itertools.islice(loader, stop)) for loader in loaders]
            for turn in itertools.zip_longest(*given):
                rows = [ids(batch) for batch in turn if batch is not None]
                # rank r has the rows r, r + W, … of the global batch
                seen[epoch] += [i for some in itertools.zip_longest(*rows) for i in some if i is not None]
            state = given[0][-1].state
            assert state["position"] == len(seen[epoch])
            if len(given[0]) == stop:
                kept = loaders[0].state_dict()
                kept.pop("given", None)  # a loader's own count
                assert kept == state
        assert seen == expected


def test_ranks_differ_by_one_row_at_most(plain: pathlib.Path) -> None:
    total = len(stillhouse.open(plain))
    for world, size in ((3, 100), (7, 64), (5, total)):
        counts = []
        for rank in range(world):
            ds = dataset(st.StreamingShardDataset, plain, batch_size=size, rank=rank, world_size=world)
            batches = [len(ids(batch)) for batch in ds]
            assert len(batches) == len(
                dataset(st.StreamingShardDataset, plain, batch_size=size, rank=rank, world_size=world)
            )
            counts.append(sum(batches))
        assert sum(counts) == total and max(counts) - min(counts) <= 1
    even = [
        [
            len(ids(b))
            for b in dataset(st.StreamingShardDataset, plain, batch_size=100, rank=r, world_size=3, drop_last=True)
        ]
        for r in range(3)
    ]
    assert even == [[100] * (total // 300)] * 3


def test_no_worker_is_idle(plain: pathlib.Path) -> None:
    """More workers than shards: all of them work."""
    ds = dataset(st.StreamingShardDataset, plain, batch_size=100, transform=_with_worker)
    given = list(st.DataLoader(ds, num_workers=10))
    counts = np.bincount([worker for worker, _ in given], minlength=10)
    assert counts.min() >= counts.max() - 1 > 0


def _with_worker(batch: stillhouse.Batch) -> Any:
    info = torch.utils.data.get_worker_info()
    return (-1 if info is None else info.id), ids(batch)


def test_the_state_of_our_loader_needs_no_batches(plain: pathlib.Path, epochs: Any) -> None:
    """A transform may give anything; the loader counts."""
    for kind in KINDS:
        loader = st.DataLoader(dataset(kind, plain, transform=_with_worker), num_workers=2)
        given = [rows for _, rows in itertools.islice(loader, 5)]
        resumed = st.DataLoader(dataset(kind, plain, batch_size=9))
        resumed.load_state_dict(loader.state_dict())
        rest = itertools.chain(*(ids(batch) for batch in resumed))
        assert [*itertools.chain(*given), *rest] == list(itertools.chain(*epochs[0]))


def test_order_as_it_lies(plain: pathlib.Path) -> None:
    rows = stillhouse.open(plain, columns=["sequence_id"])[:]["sequence_id"].tolist()
    for kind in KINDS:
        loader = st.DataLoader(dataset(kind, plain, shuffle=False, batch_size=1000), num_workers=1)
        for _ in range(2):
            assert list(itertools.chain(*(ids(batch) for batch in loader))) == rows


def test_small_caches_are_right_too(plain: pathlib.Path, epochs: Any) -> None:
    ds = dataset(st.StreamingShardDataset, plain, cache_megabytes=1)
    assert [ids(batch) for batch in ds] == epochs[0]


def test_epochs_of_several_windows(long: pathlib.Path) -> None:
    """Blocks are read ahead and let go of; ranks and workers see the parts of one order; a resumed run begins in any window."""
    rows = stillhouse.open(long, columns=["sequence_id"])[:]["sequence_id"].tolist()
    assert len(rows) > 2 * 64 * 64
    whole = [ids(batch) for batch in dataset(st.StreamingShardDataset, long, shuffle_blocks=64)]
    order = list(itertools.chain(*whole))
    assert sorted(order) == sorted(rows)
    assert [
        ids(batch) for batch in dataset(st.StreamingShardDataset, long, shuffle_blocks=64, cache_megabytes=4)
    ] == whole
    loaders = [
        st.DataLoader(dataset(st.StreamingShardDataset, long, shuffle_blocks=64, batch_size=16, rank=rank, world_size=4), num_workers=rank % 2)
        for rank in range(4)
    ]  # fmt: skip
    state = {**loaders[0].state_dict(), "position": len(rows) // 2}
    for loader in loaders:
        loader.load_state_dict(state)
    given = [[ids(batch) for batch in loader] for loader in loaders]
    together = [
        row
        for turn in itertools.zip_longest(*given, fillvalue=[])
        for some in itertools.zip_longest(*turn)
        for row in some
        if row is not None
    ]
    assert together == order[len(rows) // 2 :]
    shards = [len({i >> 32 for i in batch}) for batch in whole]
    assert np.mean(shards) > 6


def test_batches_are_pinned_whole(demo: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What `pin_memory=True` does to a batch, with a stand-in for the memory that only a machine with a GPU has."""
    from torch.utils.data._utils.pin_memory import pin_memory

    batch = next(iter(st.DataLoader(st.StreamingShardDataset(demo, batch_size=3))))
    pinned_tensors: list[Any] = []

    def stand_in(tensor: torch.Tensor, *_: Any) -> torch.Tensor:
        pinned_tensors.append(tensor)
        return tensor.clone()

    monkeypatch.setattr(torch.Tensor, "pin_memory", stand_in)
    pinned = pin_memory(batch)
    assert type(pinned) is stillhouse.Batch and pinned.state == batch.state and pinned.info == batch.info
    assert list(pinned) == list(batch)
    ragged = sum(isinstance(column, stillhouse.Ragged) for column in batch.values())
    assert len(pinned_tensors) == len(batch) + ragged > len(batch)
    assert torch.equal(pinned["noise_index"].values, batch["noise_index"].values)
    assert pinned["noise_index"].values is not batch["noise_index"].values


def _slow(batch: stillhouse.Batch) -> stillhouse.Batch:
    time.sleep(0.3)
    return batch


def test_a_worker_that_is_left_behind_moves_nothing(plain: pathlib.Path) -> None:
    """It still has batches to make of an iteration that was left, to the end of the epoch, when the place is set."""
    half = -(-len(stillhouse.open(plain)) // 2)
    expected = [set(ids(batch)) for batch in dataset(st.StreamingShardDataset, plain, batch_size=half)]
    for again in ("load", "set"):
        ds = dataset(st.StreamingShardDataset, plain, batch_size=half, transform=_slow)
        loader = plain_loader(ds, num_workers=1, persistent_workers=True)
        first = next(iter(loader))
        if again == "load":
            ds.load_state_dict(first.state)
        else:
            ds.set_epoch(1)
            ds.set_epoch(0)
        assert [set(ids(batch)) for batch in loader] == (expected[1:] if again == "load" else expected)


def test_after_an_error_the_rest_is_still_there(plain: pathlib.Path, tmp_path: pathlib.Path) -> None:
    copied = pathlib.Path(shutil.copytree(plain, tmp_path / "copy"))
    shard = sorted((copied / "data").glob("*.parquet"))[2]
    batches = iter(dataset(st.StreamingShardDataset, copied, cache_megabytes=1))
    shard.rename(tmp_path / "hidden")
    with pytest.raises(stillhouse.DatasetError, match="is missing"):
        while True:
            next(batches)
    (tmp_path / "hidden").rename(shard)
    seen = list(itertools.chain(*(ids(batch) for batch in batches)))
    assert len(seen) == len(set(seen)) == len(stillhouse.open(plain))


def _ranks_of(rank: int, ds: Any, folder: str, queue: Any) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{folder}/rendezvous", rank=rank, world_size=2)
    queue.put((ds.rank, ds.world_size))


def test_a_data_set_that_is_made_before_the_ranks(plain: pathlib.Path, tmp_path: pathlib.Path) -> None:
    context = torch.multiprocessing.get_context("spawn")
    queue = context.SimpleQueue()
    ds = dataset(st.StreamingShardDataset, plain)
    torch.multiprocessing.spawn(_ranks_of, (ds, str(tmp_path), queue), nprocs=2)
    assert sorted(queue.get() for _ in range(2)) == [(0, 2), (1, 2)]


def test_loaders_of_both_kinds_over_one_data_set(plain: pathlib.Path, epochs: Any) -> None:
    for kind in KINDS:
        ds = dataset(kind, plain)
        ours = st.DataLoader(ds, num_workers=1)
        assert [ids(batch) for batch in itertools.islice(ours, 3)] == epochs[0][:3]
        theirs = plain_loader(copy.deepcopy(ds), num_workers=1)
        assert [[ids(batch) for batch in theirs] for _ in range(2)] == epochs
        assert [ids(batch) for batch in plain_loader(ds, num_workers=1)] == epochs[0]
        assert [ids(batch) for batch in ours] == epochs[1]


def test_distributed_is_asked(plain: pathlib.Path, tmp_path: pathlib.Path) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    try:
        ds = dataset(st.StreamingShardDataset, plain)
        assert (ds.rank, ds.world_size) == (0, 1)
        assert len(list(st.DataLoader(ds, num_workers=1, multiprocessing_context="spawn"))) == len(ds)
    finally:
        torch.distributed.destroy_process_group()


def test_all_columns_travel_through_workers(demo: pathlib.Path) -> None:
    expected = {int(row["sequence_id"]): row for row in stillhouse.open(demo)}
    for kind in KINDS:
        for count in (0, 2):
            for batch in st.DataLoader(kind(demo, batch_size=7), num_workers=count):
                assert isinstance(batch, stillhouse.Batch) and batch.info is not None and batch.state is not None
                for i, sequence in enumerate(ids(batch)):
                    row = expected[sequence]
                    for name, column in batch.items():
                        np.testing.assert_array_equal(np.asarray(column[i]).astype(row[name].dtype), row[name])


def test_items_of_the_map(demo: pathlib.Path) -> None:
    ds = st.ShardDataset(demo, batch_size=4)
    row = ds[-3]
    np.testing.assert_array_equal(row["logprob"].numpy(), stillhouse.open(demo)[-3]["logprob"])
    assert len(ds) == len(stillhouse.open(demo))
    random = DataLoader(ds, batch_size=16, shuffle=True, collate_fn=ds.collate)
    assert sum(batch.rows for batch in random) == len(ds)


def test_spawned_workers(plain: pathlib.Path, epochs: Any) -> None:
    for kind in KINDS:
        loader = st.DataLoader(
            dataset(kind, plain), num_workers=2, multiprocessing_context="spawn", persistent_workers=True
        )
        assert [[ids(batch) for batch in loader] for _ in range(2)] == epochs


@pytest.mark.parametrize("kind", KINDS)
def test_wrong_use_is_told(kind: Set, plain: pathlib.Path, demo: pathlib.Path) -> None:
    def bad(message: str, error: type[Exception] = ValueError, **options: Any) -> None:
        with pytest.raises(error, match=message):
            dataset(kind, plain, **options)

    bad("batch_size: got 0, valid: 1 to", batch_size=0)
    bad("rank: got 3, valid: 0 to 2", rank=3, world_size=3)
    bad("rank and world_size: got 1 and None, valid: both or none", rank=1)
    bad("seed: got -1", seed=-1)
    ds = dataset(kind, plain)
    state = ds.state_dict()
    other = kind(demo, batch_size=1)
    with pytest.raises(ValueError, match="is of another data set: got dataset"):
        other.load_state_dict(state)
    with pytest.raises(ValueError, match="state: got version 9"):
        ds.load_state_dict({**state, "version": 9})
    with pytest.raises(ValueError, match="got position 99999999"):
        ds.load_state_dict({**state, "position": 99_999_999})
    with pytest.raises(ValueError, match="has no version.*StatefulDataLoader"):
        ds.load_state_dict(plain_loader(ds, StatefulDataLoader).state_dict())
    with pytest.raises(TypeError, match="batch_size: give it to"):
        st.DataLoader(ds, batch_size=3)
    with pytest.raises(TypeError, match="in_order: got False"):
        st.DataLoader(ds, num_workers=1, in_order=False)
    with pytest.raises(ValueError, match="epoch: got 4294967296"):
        ds.set_epoch(1 << 32)
    with pytest.raises(TypeError, match="valid: StreamingShardDataset, ShardDataset"):
        st.DataLoader([1, 2])  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="belong to stillhouse.open"):
        kind(stillhouse.open(plain), batch_size=1, columns=["input_ids"])


def test_torchdata_in_another_shape_is_told(plain: pathlib.Path) -> None:
    loader = plain_loader(dataset(st.StreamingShardDataset, plain), StatefulDataLoader)
    next(iter(loader))
    other = plain_loader(dataset(st.StreamingShardDataset, plain, rank=0, world_size=2), StatefulDataLoader)
    other.load_state_dict(loader.state_dict())
    with pytest.raises(ValueError, match="got world_size 1, this iteration has 2.*save batch.state"):
        next(iter(other))


def test_seeds_are_part_of_the_state(plain: pathlib.Path, epochs: Any) -> None:
    ds = dataset(st.StreamingShardDataset, plain)
    batches: Iterator[Any] = iter(ds)
    first = ids(next(batches))
    other = dataset(st.StreamingShardDataset, plain, seed=2**64 - 1, shuffle_blocks=7)
    assert ids(next(iter(other))) != first
    other.load_state_dict(ds.state_dict())
    assert [ids(batch) for batch in other] == epochs[0][1:]
    assert ds.set_epoch(1) is None and ids(next(iter(ds))) == epochs[1][0]
