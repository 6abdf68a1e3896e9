"""Loaders as frameworks drive them: ``len(loader)`` batches, and never one more."""

from __future__ import annotations

import itertools
import pathlib
import time
import warnings
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
LOADERS = ["ours", "torch", "torchdata"]


def dataset(kind: Any, folder: pathlib.Path, **options: Any) -> Any:
    return kind(folder, **{"batch_size": 300, "seed": 1, "columns": ["sequence_id"], **options})


def loader_of(name: str, ds: Any, **options: Any) -> Any:
    if name == "ours":
        return st.DataLoader(ds, **options)
    cls = DataLoader if name == "torch" else StatefulDataLoader
    if isinstance(ds, st.ShardDataset):
        return cls(ds, batch_sampler=ds.batch_sampler, **options)
    return cls(ds, batch_size=None, **options)


def ids(batch: Any) -> list[int]:
    found: list[int] = batch["sequence_id"].tolist()
    return found


def drawn(loader: Any, count: int | None = None) -> list[list[int]]:
    """Exactly so many batches, as Lightning and others draw them."""
    iterator = iter(loader)
    return [ids(next(iterator)) for _ in range(len(loader) if count is None else count)]


def reference(folder: pathlib.Path, epochs: int, **options: Any) -> list[list[list[int]]]:
    ds = dataset(st.StreamingShardDataset, folder, **options)
    return [[ids(batch) for batch in ds] for _ in range(epochs)]


def slowly(batch: Any) -> Any:
    time.sleep(0.01)
    return batch


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("count", "persistent"), [(0, False), (2, False), (2, True)])
def test_epochs_move_without_a_last_question(
    name: str, kind: Any, count: int, persistent: bool, plain: pathlib.Path
) -> None:
    expected = reference(plain, 4)
    ds = dataset(kind, plain, transform=slowly)
    loader = loader_of(name, ds, num_workers=count, persistent_workers=persistent)
    assert len(loader) == len(expected[0])
    assert [drawn(loader), drawn(loader)] == expected[:2]
    assert [ids(batch) for batch in loader] == expected[2]  # to the end, in turn
    assert drawn(loader) == expected[3]
    assert ds.epoch == 4
    ds.set_epoch(1)
    assert drawn(loader) == expected[1]


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
def test_fewer_batches_than_workers(name: str, kind: Any, plain: pathlib.Path) -> None:
    """Workers without a batch, which nobody waits for, neither hold an epoch back nor give rows of the next one."""
    rows = len(stillhouse.open(plain))
    expected = reference(plain, 6, batch_size=rows // 2 + 1)
    for persistent in (False, True):
        loader = loader_of(
            name, dataset(kind, plain, batch_size=rows // 2 + 1), num_workers=5, persistent_workers=persistent
        )
        got = [drawn(loader) if epoch % 2 == 0 else [ids(batch) for batch in loader] for epoch in range(6)]
        assert got == expected


@pytest.mark.parametrize("name", LOADERS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("count", [0, 2])
def test_worlds_and_stops(name: str, kind: Any, count: int, plain: pathlib.Path) -> None:
    """World sizes 1 to 3, stopped after any batch: all rows of an epoch once (but fewer than world_size), in the order of the reference."""
    random = np.random.default_rng(11)
    for world in (1, 2, 3):
        size = int(random.integers(200, 500))
        whole = reference(plain, 2, batch_size=size * world)
        flat = [list(itertools.chain(*epoch)) for epoch in whole]
        shapes = {"batch_size": size, "world_size": world}
        states: list[Any] = [None] * world
        got: list[list[list[int]]] = [[] for _ in range(world)]
        done = 0
        total = len(loader_of(name, dataset(kind, plain, rank=0, **shapes)))
        while done < 2 * total:
            taken = min(int(random.integers(1, total + 3)), 2 * total - done)
            for rank in range(world):
                ds = dataset(kind, plain, rank=rank, **shapes)
                loader = loader_of(name, ds, num_workers=count)
                if states[rank] is not None:
                    (loader if name != "torch" else ds).load_state_dict(states[rank])
                assert len(loader) == total  # in mid-epoch too
                state: Any = None
                batches = itertools.chain.from_iterable(iter(loader) for _ in range(3))
                for batch in itertools.islice(batches, taken):
                    got[rank].append(ids(batch))
                    state = batch.state
                states[rank] = state if name == "torch" else loader.state_dict()
            done += taken
        assert {len(batches) for batches in got} == {2 * total}
        for epoch in range(2):
            turns = zip(*(batches[epoch * total : (epoch + 1) * total] for batches in got))
            dealt = [row for turn in turns for some in itertools.zip_longest(*turn) for row in some if row is not None]
            assert dealt == flat[epoch][: len(dealt)]
            assert len(flat[epoch]) - len(dealt) < world
        assert flat[0] != flat[1]


@pytest.mark.parametrize("kind", KINDS)
def test_batches_know_their_global_batch(kind: Any, plain: pathlib.Path) -> None:
    """What is drawn over a global batch is drawn alike by 1, 2 and 4 ranks, and after a resume at a global batch."""
    total = len(stillhouse.open(plain))
    for world in (1, 2, 4):
        rows: dict[int, list[Any]] = {}
        for rank in range(world):
            ds = dataset(kind, plain, batch_size=400 // world, rank=rank, world_size=world)
            ds.load_state_dict(ds.state_at(1, 800))
            for name in LOADERS:
                for batch in loader_of(name, ds, num_workers=world // 2):
                    place = batch.global_batch
                    assert (place.epoch, place.rank, place.world_size) == (1, rank, world)
                    assert place.begin + place.rows == batch.state["position"] and place.begin % 400 == 0
                    for index, row in zip(place.indices().tolist(), ids(batch), strict=True):
                        rows.setdefault(place.begin + index, []).append(row)
                ds.load_state_dict(ds.state_at(1, 800))
        assert sorted(rows) == list(range(800, total)) and all(len(set(same)) == 1 for same in rows.values())
        order = [rows[position][0] for position in sorted(rows)]
        assert order == list(itertools.chain(*reference(plain, 2)[1]))[800:]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_left(kind: Any, plain: pathlib.Path) -> None:
    loader = st.DataLoader(dataset(kind, plain))
    total = len(loader)
    assert loader.remaining == total
    iterator = iter(loader)
    for given in range(1, total + 1):
        next(iterator)
        assert (len(loader), loader.remaining) == (total, (total - given) or total)
        assert loader.epoch == int(given == total)


def test_ranks_take_equally_many_batches(plain: pathlib.Path) -> None:
    rows = len(stillhouse.open(plain))
    for world in range(1, 9):
        for size in (1 + rows // (world * 3), rows // world, (rows - 1) // world, 64):
            sets = [dataset(st.StreamingShardDataset, plain, batch_size=size, rank=r, world_size=world) for r in range(world)]  # fmt: skip
            counts = {len(ds) for ds in sets}
            given = sum(len(ids(batch)) for ds in sets for batch in ds)
            assert len(counts) == 1 and rows - given < world


def test_an_epoch_without_batches_is_refused(plain: pathlib.Path) -> None:
    rows = len(stillhouse.open(plain))
    for kind in KINDS:
        ds = dataset(kind, plain, batch_size=rows + 1, drop_last=True)
        for loader in (st.DataLoader(ds), loader_of("torch", ds)):
            with pytest.raises(ValueError, match="an epoch has no batch"):
                next(iter(loader))
        with pytest.raises(ValueError, match="an epoch has no batch"):
            next(iter(st.DataLoader(dataset(kind, plain, rank=0, world_size=rows + 1))))


@pytest.mark.parametrize("kind", KINDS)
def test_a_place_that_is_given_up_is_told(kind: Any, plain: pathlib.Path) -> None:
    loader = st.DataLoader(dataset(kind, plain))
    drawn(loader, 3)
    state = loader.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        loader.set_epoch(1)  # an epoch that was left by this loop
        loader.set_epoch(0)
        loader.load_state_dict(state)
        loader.set_epoch(0)  # the epoch of the state
    with pytest.warns(UserWarning, match=r"row 900 of [\d,]+ of epoch 0"):
        loader.set_epoch(1)


@pytest.mark.parametrize("count", [0, 2])
def test_batching_again_is_refused(count: int, plain: pathlib.Path) -> None:
    ds = dataset(st.StreamingShardDataset, plain)
    for cls in (DataLoader, StatefulDataLoader):
        for options in ({"batch_size": 8}, {"batch_size": 8, "collate_fn": list}):
            with pytest.raises(TypeError, match="gives whole batches"):
                next(iter(cls(ds, num_workers=count, **options)))
    with pytest.raises(TypeError, match="whole batches"):
        torch.utils.data.default_collate(list(itertools.islice(ds, 2)))


@pytest.mark.parametrize("count", [0, 2])
def test_any_sampler_over_the_map(count: int, demo: pathlib.Path) -> None:
    """``DataLoader(ds, shuffle=True)``: batches as ours are, ragged columns and the transform included."""
    ds = st.ShardDataset(demo, batch_size=1)
    whole = stillhouse.open(demo)[:].torch()
    by_id = {int(i): row for row, i in enumerate(whole["sequence_id"])}
    for loader in (
        DataLoader(ds, batch_size=5, shuffle=True, num_workers=count),
        DataLoader(ds, batch_size=5, shuffle=True, num_workers=count, collate_fn=st.collate),
        DataLoader(ds, batch_size=5, shuffle=True, num_workers=count, collate_fn=st.ShardDataset.collate),
        DataLoader(ds, batch_size=5, shuffle=True, num_workers=count, collate_fn=lambda rows: st.collate(list(rows))),
    ):
        seen = []
        for batch in loader:
            assert type(batch) is stillhouse.Batch and batch.info == whole.info
            for row, i in enumerate(ids(batch)):
                seen.append(i)
                for name, column in batch.items():
                    assert torch.equal(column[row], whole[name][by_id[i]]), name
                    assert isinstance(column, stillhouse.Ragged) == isinstance(whole[name], stillhouse.Ragged)
        assert sorted(seen) == sorted(by_id) and seen != sorted(seen)
    counted = st.ShardDataset(demo, batch_size=1, transform=lambda batch: batch.rows)
    assert sum(DataLoader(counted, batch_size=5, shuffle=True)) == len(counted)


def test_rows_of_something_else(plain: pathlib.Path) -> None:
    row = dataset(st.ShardDataset, plain)[0]
    for wrong in ([dict(row)], [], 3):
        with pytest.raises(TypeError, match="collate: got rows of type .*valid: rows of a stillhouse"):
            st.collate(wrong)


def worker(batch: Any) -> int:
    info = torch.utils.data.get_worker_info()
    return -1 if info is None else info.id


def test_workers_run_the_transform_alone(plain: pathlib.Path) -> None:
    ds = dataset(st.StreamingShardDataset, plain)
    loader = st.DataLoader(ds, num_workers=2, collate_fn=worker)
    assert set(loader) == {0, 1}
    assert set(st.DataLoader(dataset(st.ShardDataset, plain, transform=worker), num_workers=2)) == {0, 1}
    assert set(st.DataLoader(dataset(st.ShardDataset, plain, transform=worker))) == {-1}


def test_an_error_of_reading_comes_in_its_turn(plain: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """What was read before it is given out first, also from workers that are ahead."""
    import shutil

    copied = pathlib.Path(shutil.copytree(plain, tmp_path / "copy"))
    expected = reference(copied, 1, shuffle=False, batch_size=50)[0]
    shard = sorted((copied / "data").glob("*.parquet"))[4]
    for count in (0, 2):
        loader = st.DataLoader(
            dataset(st.StreamingShardDataset, copied, shuffle=False, batch_size=50, transform=slowly), num_workers=count
        )
        shard.rename(tmp_path / "hidden")
        got = []
        with pytest.raises(stillhouse.DatasetError, match="is missing"):
            for batch in loader:
                got.append(ids(batch))
        assert got == expected[: len(got)] and len(got) > 5
        assert loader.state_dict()["position"] == sum(map(len, got))
        (tmp_path / "hidden").rename(shard)
        loader.load_state_dict(loader.state_dict())
        assert got + [ids(batch) for batch in loader] == expected
