"""Epochs without torch: the order of stillhouse.torch, states that both take, and epochs that move however they are driven."""

from __future__ import annotations

import itertools
import json
import os
import pathlib
import pickle
import subprocess
import sys
from typing import Any

import numpy as np
import pytest
from shared_fixtures import free_ports

import stillhouse
import stillhouse.torch as st
from stillhouse import Batch, Epochs
from stillhouse.views import mdlm

COLUMNS = ["sequence_id", "input_ids"]
BATCH = 64


def epochs_of(path: Any, **options: Any) -> Epochs[Batch[Any]]:
    return Epochs(path, **{"batch_size": BATCH, "seed": 1, "columns": COLUMNS, **options})


def ids(batch: Any) -> list[int]:
    found: list[int] = np.asarray(batch["sequence_id"]).tolist()
    return found


def drawn(epochs: Any) -> list[list[int]]:
    return [ids(batch) for batch in epochs]


@pytest.fixture(scope="module")
def order(plain: pathlib.Path) -> list[list[int]]:
    """The rows of three epochs, in their order, as stillhouse.torch gives them to a single trainer."""
    ds = st.StreamingShardDataset(plain, batch_size=1000, seed=1, columns=COLUMNS)
    made = []
    for epoch in range(3):
        ds.set_epoch(epoch)
        made.append([i for batch in ds for i in ids(batch)])
    assert len(made[0]) == len(set(made[0])) and made[0] != made[1]
    return made


def dealt(rows: list[int], world: int, batch: int = BATCH, drop_last: bool | None = None) -> list[list[list[int]]]:
    """By the definition: global batch n is the next world × batch rows; rank r takes every world-th of them. (None: a last one with less
    than a row for each rank is left out.)
    """
    ranks: list[list[list[int]]] = [[] for _ in range(world)]
    for start in range(0, len(rows), world * batch):
        whole = rows[start : start + world * batch]
        for rank in range(world):
            least = {False: 1, None: world, True: world * batch}[drop_last]
            if whole[rank::world] and len(whole) >= least:
                ranks[rank].append(whole[rank::world])
    return ranks


@pytest.mark.parametrize("drop_last", [False, True, None])
@pytest.mark.parametrize("world", [1, 2, 3])
def test_the_order_is_that_of_torch(
    world: int, drop_last: bool | None, plain: pathlib.Path, order: list[list[int]]
) -> None:
    for rank in range(world):
        epochs = epochs_of(plain, rank=rank, world_size=world, drop_last=drop_last)
        for epoch in range(3):
            assert epochs.epoch == epoch
            expected = dealt(order[epoch], world, drop_last=drop_last)[rank]
            assert len(epochs) == epochs.remaining == len(expected)
            batches = list(epochs)
            assert [ids(batch) for batch in batches] == expected
            assert all(batch.state is not None and batch.state["epoch"] == epoch for batch in batches)
    torch_like = st.StreamingShardDataset(
        plain, batch_size=BATCH, seed=1, columns=COLUMNS, rank=world - 1, world_size=world, drop_last=drop_last
    )
    assert drawn(torch_like) == dealt(order[0], world, drop_last=drop_last)[-1]
    if drop_last is False:
        rows = [i for rank in dealt(order[0], world, drop_last=False) for batch in rank for i in batch]
        assert sorted(rows) == sorted(order[0])


def test_rows_are_numpy_and_whole(plain: pathlib.Path) -> None:
    truth = stillhouse.open(plain)[:]
    row_of = {i: row for row, i in enumerate(truth["sequence_id"].tolist())}
    for batch in Epochs(plain, batch_size=500, seed=3):
        assert type(batch) is Batch and batch.info == stillhouse.open(plain).info
        rows = [row_of[i] for i in ids(batch)]
        np.testing.assert_array_equal(batch["input_ids"], truth["input_ids"][rows])
        assert [r.tolist() for r in batch["document_offsets"]] == [r.tolist() for r in truth["document_offsets"][rows]]
    assert drawn(epochs_of(plain, shuffle=False, batch_size=10**4)) == [truth["sequence_id"].tolist()]


def test_epochs_move_however_they_are_driven(plain: pathlib.Path, order: list[list[int]]) -> None:
    expected = [dealt(rows, 1)[0] for rows in order]
    by_length, by_end, by_both = (epochs_of(plain) for _ in range(3))
    for epoch in range(3):
        iterator = iter(by_length)
        assert [ids(next(iterator)) for _ in range(len(by_length))] == expected[epoch]
        assert by_length.epoch == epoch + 1
        assert drawn(by_end) == expected[epoch]
        batches = iter(by_both)
        assert [ids(batch) for batch in itertools.islice(batches, len(by_both))] == expected[epoch]
        for _ in range(2):  # it stays ended, and moves nothing any more
            with pytest.raises(StopIteration):
                next(batches)
        assert by_both.epoch == epoch + 1
        assert by_both.state_dict() == {**by_end.state_dict(), "epoch": epoch + 1, "position": 0}


def test_an_epoch_that_is_left_begins_anew(plain: pathlib.Path, order: list[list[int]]) -> None:
    expected = [dealt(rows, 1)[0] for rows in order]
    epochs = epochs_of(plain)
    last = len(expected[0]) - 1
    for stop in (1, 3, last):
        assert [ids(batch) for batch in itertools.islice(epochs, stop)] == expected[0][:stop]
        assert epochs.epoch == 0 and len(epochs) == epochs.remaining == last + 1
    old = iter(epochs)
    first = next(old)
    assert drawn(epochs) == expected[0] and epochs.epoch == 1
    # an iteration from before goes on, but it is not the one that counts
    assert [ids(first), *(ids(batch) for batch in old)] == expected[0]
    assert epochs.epoch == 1 and epochs.state_dict()["position"] == 0
    epochs.set_epoch(0)
    assert drawn(epochs) == expected[0]
    epochs.set_epoch(2)
    assert drawn(epochs) == expected[2] and epochs.epoch == 3
    with pytest.raises(ValueError, match=r"epoch: got -1, valid: 0 to 2\^32 - 1"):
        epochs.set_epoch(-1)


@pytest.mark.parametrize("into", ["numpy", "torch"])
@pytest.mark.parametrize("out_of", ["numpy", "torch"])
def test_a_state_of_one_loads_in_the_other(out_of: str, into: str, plain: pathlib.Path, order: list[list[int]]) -> None:
    def make(kind: str, **options: Any) -> Any:
        if kind == "numpy":
            return epochs_of(plain, **options)
        return st.StreamingShardDataset(plain, **{"batch_size": BATCH, "seed": 1, "columns": COLUMNS, **options})

    expected = dealt(order[1], 1)[0]
    for stop in (1, 7, len(expected) - 1):
        for how in ("state_dict", "batch.state"):
            first = make(out_of)
            first.set_epoch(1)
            batches = list(itertools.islice(first, stop))
            state = json.loads(json.dumps(first.state_dict() if how == "state_dict" else batches[-1].state))
            # another seed, batch size and world: the state brings its order along
            rest: list[int] = order[1][stop * BATCH :]
            for rank, share in enumerate(dealt(rest, 2, 48)):
                resumed = make(into, batch_size=48, seed=9, rank=rank, world_size=2)
                resumed.load_state_dict(state)
                assert resumed.epoch == 1
                assert drawn(resumed) == share
                assert resumed.epoch == 2


def test_resuming_is_exact_and_lengths_are_those_of_the_epoch(plain: pathlib.Path, order: list[list[int]]) -> None:
    expected = [dealt(rows, 1)[0] for rows in order]
    count = len(expected[0])
    for stop in (0, 1, count // 2, count - 1, count):
        first = epochs_of(plain)
        given = [ids(batch) for batch in itertools.islice(iter(first), stop)]
        for state in (first.state_dict(), pickle.loads(pickle.dumps(first)).state_dict()):
            resumed = epochs_of(plain)
            resumed.load_state_dict(state)
            left = count - stop
            assert len(resumed) == count and resumed.remaining == (left or count)
            assert resumed.epoch == (0 if left else 1)
            assert given + drawn(resumed) == (expected[0] if left else expected[0] + expected[1])
            assert drawn(resumed) == expected[1 if left else 2]
    # the state of the last batch itself, which still tells the epoch that the batch is of
    batches = list(epochs_of(plain))
    assert batches[-1].state is not None and batches[-1].state["epoch"] == 0
    assert batches[-1].state["position"] == len(order[0])
    resumed = epochs_of(plain)
    resumed.load_state_dict(batches[-1].state)
    assert resumed.epoch == 1 and drawn(resumed) == expected[1]
    # where the last rows fill no batch, the last batch given out is the end as well
    dropped = epochs_of(plain, drop_last=True)
    last = list(dropped)[-1]
    assert last.state is not None and last.state["position"] < len(order[0])
    resumed = epochs_of(plain, drop_last=True)
    resumed.load_state_dict(last.state)
    assert resumed.epoch == 1


def test_a_trainer_without_a_last_batch_moves_on_too(plain: pathlib.Path, order: list[list[int]]) -> None:
    """One row is left for two trainers."""
    epochs = [epochs_of(plain, rank=rank, world_size=2, drop_last=False) for rank in range(2)]
    state = {**epochs[0].state_dict(), "position": len(order[0]) - 1}
    for rank in range(2):
        epochs[rank].load_state_dict(state)
        assert epochs[rank].epoch == 0 and epochs[rank].remaining == 1 - rank
        assert drawn(epochs[rank]) == [[order[0][-1]]][rank:]
        assert epochs[rank].epoch == 1
        # by default both leave it out, and are at the next epoch at once
        even = epochs_of(plain, rank=rank, world_size=2)
        even.load_state_dict(state)
        assert even.epoch == 1 and even.remaining == len(even)


def test_examples_are_those_of_torch(plain: pathlib.Path) -> None:
    """Times are drawn over the global batch: the same for one trainer, for two, and in torch; and in parts of a batch."""

    def times(epochs: Any) -> dict[int, float]:
        found = {}
        for batch in itertools.islice(epochs, 3):
            example = mdlm.mask(batch, mask_id=0, schedule="linear")
            found |= dict(zip(ids(batch), example.t.tolist(), strict=True))
            parts = [mdlm.mask(part, mask_id=0) for part in batch.split(5)] + [mdlm.mask(batch[[3, 1]], mask_id=0)]
            assert [t for part in parts for t in part.t.tolist()] == [*example.t.tolist(), *example[[3, 1]].t.tolist()]
            again = Batch.concat(batch.split(5))
            assert again.global_batch == batch.global_batch and again[::-1].global_batch != batch.global_batch
        return found

    whole = times(epochs_of(plain, batch_size=32))
    assert len(set(whole.values())) > 90
    ranks = [times(epochs_of(plain, batch_size=16, rank=rank, world_size=2)) for rank in range(2)]
    assert ranks[0] | ranks[1] == whole
    assert times(st.StreamingShardDataset(plain, batch_size=32, seed=1, columns=COLUMNS)) == whole


def test_transforms(plain: pathlib.Path, order: list[list[int]]) -> None:
    whole = Epochs(plain, batch_size=BATCH, seed=1, transform=lambda batch: batch["sequence_id"] + 1)
    assert [[i - 1 for i in array.tolist()] for array in whole] == dealt(order[0], 1)[0]

    calls = itertools.count()

    def sometimes(batch: Batch[Any]) -> list[int]:
        if next(calls) == 2:
            raise OSError("not now")
        return ids(batch)

    epochs = Epochs(plain, batch_size=BATCH, seed=1, transform=sometimes)
    iterator, got = iter(epochs), []
    for _ in range(len(epochs) + 1):
        try:
            got.append(next(iterator))
        except OSError:
            assert epochs.state_dict()["position"] == 2 * BATCH
    assert got == dealt(order[0], 1)[0] and epochs.epoch == 1  # what was not given out came again


def test_what_is_refused(plain: pathlib.Path, demo: pathlib.Path) -> None:
    for options, message in (
        ({"batch_size": 0}, "batch_size: got 0, valid: 1"),
        ({"shuffle_blocks": 0}, "shuffle_blocks: got 0"),
        ({"seed": -1}, "seed: got -1"),
        ({"rank": 2, "world_size": 2}, r"rank: got 2, valid: 0 to 1"),
        ({"batch_size": 10**6, "drop_last": True}, r"batch_size: got 1000000.*an epoch has no batch"),
    ):
        with pytest.raises(ValueError, match=message):
            epochs_of(plain, **options)
    with pytest.raises(ValueError, match="belong to stillhouse.open"):
        Epochs(stillhouse.open(plain), batch_size=1, columns=["input_ids"])
    epochs = epochs_of(plain)
    state = epochs.state_dict()
    for wrong, message in (
        (epochs_of(demo).state_dict(), "is of another data set"),
        ({"epoch": 1}, "state: has no version"),
        ({**state, "version": 2}, "newer stillhouse"),
        ({**state, "position": 10**9}, "position 1000000000"),
        ({**state, "epoch": -1}, "epoch: got -1"),
        ({"_snapshot": {}}, "StatefulDataLoader"),
    ):
        with pytest.raises(ValueError, match=message):
            epochs.load_state_dict(wrong)
    assert epochs.state_dict() == state


def run(program: str, *arguments: str, **environment: str) -> Any:
    """A program in a process of its own; what it prints as JSON."""
    done = subprocess.run(
        [sys.executable, "-c", program, *arguments],
        capture_output=True, text=True, check=False, env={**os.environ, **environment},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("module", ["stillhouse", "stillhouse.jax"])
def test_torch_is_not_imported(module: str, demo: pathlib.Path) -> None:
    """Reading, views, noise and documents; and JAX's epochs."""
    program = f"""
import json, sys
import {module} as m
import stillhouse
from stillhouse import documents, views
def example(batch):
    made = views.mdlm.mask(batch, mask_id=0)
    noise = stillhouse.noise.replay(batch[:1], made[:1].targets)
    documents.cu_seqlens(batch), documents.document_mask(batch), batch.copy() | {{}}, batch.split(1)
    return {{"input_ids": made.input_ids, "sum": noise.sum(axis=1)}}
epochs = m.Epochs(sys.argv[1], batch_size=2, transform=example)
state = epochs.state_dict()
first = next(iter(epochs))
epochs.load_state_dict(epochs.state_dict())
print(json.dumps([len(first["input_ids"]), [name for name in ("torch", "jax") if name in sys.modules]]))
"""
    assert run(program, str(demo)) == [2, ["jax"] if module == "stillhouse.jax" else []]


def test_jax_shards(plain: pathlib.Path) -> None:
    """Four devices (of the CPU): each holds its rows of the batch."""
    program = """
import json, sys
import jax, numpy as np
import stillhouse.jax as sj
mesh = jax.make_mesh((4,), ("data",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
pick = lambda batch: {"ids": batch["input_ids"]}
epochs = sj.Epochs(sys.argv[1], batch_size=8, seed=1, columns=["sequence_id", "input_ids"], sharding=sharding, transform=pick)
ids = next(iter(epochs))["ids"]
device = sj.Epochs(sys.argv[1], batch_size=8, columns=["input_ids"], sharding=jax.devices()[2])
on = next(iter(device))["input_ids"].devices()
shards = [[str(s.device), np.asarray(s.data).tolist()] for s in ids.addressable_shards]
print(json.dumps([list(ids.shape), shards, [str(d) for d in on]]))
"""
    shape, shards, on = run(program, str(plain), XLA_FLAGS="--xla_force_host_platform_device_count=4")
    truth = next(iter(epochs_of(plain, batch_size=8)))["input_ids"]
    assert shape == [8, 32] and len({device for device, _ in shards}) == 4 and len(on) == 1
    np.testing.assert_array_equal(np.concatenate([rows for _, rows in shards]), truth)
    assert [len(rows) for _, rows in shards] == [2] * 4


def test_jax_processes(plain: pathlib.Path) -> None:
    """Two processes make one global batch: rows of rank 0, then of rank 1, of the next 16."""
    program = """
import json, sys
import jax, numpy as np
jax.config.update("jax_cpu_collectives_implementation", "gloo")
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
import stillhouse.jax as sj
mesh = jax.make_mesh((2,), ("data",))
sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
pick = lambda batch: {"ids": batch["input_ids"], "row": batch["sequence_id"] % 1000}
epochs = sj.Epochs(sys.argv[1], batch_size=8, seed=1, columns=["sequence_id", "input_ids"], sharding=sharding, transform=pick)
made = next(iter(epochs))
total = jax.jit(lambda ids: ids.sum())(made["ids"])
mine = [np.asarray(shard.data).tolist() for shard in made["row"].addressable_shards]
print(json.dumps([epochs.rank, epochs.world_size, list(made["ids"].shape), int(total), mine]))
"""
    with free_ports(1) as (port,):
        processes = [
            subprocess.Popen(
                [sys.executable, "-c", program, str(plain), f"127.0.0.1:{port}", str(rank)],
                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env={**os.environ, "JAX_PLATFORMS": "cpu"},
            )
            for rank in range(2)
        ]  # fmt: skip
        outputs = [process.communicate(timeout=300) for process in processes]
    assert [process.returncode for process in processes] == [0, 0], outputs
    truth = next(iter(epochs_of(plain, batch_size=16)))
    for rank, (out, _) in enumerate(outputs):
        rows = [i % 1000 for i in ids(truth)[rank::2]]
        assert json.loads(out.splitlines()[-1]) == [rank, 2, [16, 32], int(truth["input_ids"].sum()), [rows]]


def test_jax_cases(plain: pathlib.Path, demo: pathlib.Path) -> None:
    """In a process of their own: with JAX's threads in this one, no other test could fork workers safely."""
    cases = pathlib.Path(__file__).parent / "jax_cases.py"
    done = subprocess.run(
        [sys.executable, "-m", "pytest", str(cases)],
        capture_output=True, text=True, check=False, env={**os.environ, "PLAIN": str(plain), "DEMO": str(demo)},
    )  # fmt: skip
    assert done.returncode == 0 and "3 passed" in done.stdout, done.stdout
