"""JAX's epochs, run by test_iterators.py in a process of its own; PLAIN and DEMO are its data sets."""

from __future__ import annotations

import os
import pathlib

import jax
import numpy as np
import pytest

import stillhouse
import stillhouse.jax as sj
from stillhouse import Batch, Epochs, Ragged


@pytest.fixture
def plain() -> pathlib.Path:
    return pathlib.Path(os.environ["PLAIN"])


@pytest.fixture
def demo() -> pathlib.Path:
    return pathlib.Path(os.environ["DEMO"])


def test_epochs_of_exactly_their_length(plain: pathlib.Path) -> None:
    epochs = sj.Epochs(plain, batch_size=64, seed=1, columns=["sequence_id"])
    reference = Epochs(plain, batch_size=64, seed=1, columns=["sequence_id"], drop_last=True)
    for epoch in range(3):
        iterator = iter(epochs)
        drawn = [next(iterator)["sequence_id"].tolist() for _ in range(len(epochs))]
        assert drawn == [batch["sequence_id"].tolist() for batch in reference]
        assert epochs.epoch == epoch + 1 and epochs.state_dict() == reference.state_dict()


def test_jax_arrays(demo: pathlib.Path) -> None:
    truth = next(iter(Epochs(demo, batch_size=4, seed=2)))
    epochs = sj.Epochs(demo, batch_size=4, seed=2)
    batch = next(iter(epochs))
    assert type(batch) is Batch and batch.info == truth.info and batch.state == truth.state
    for name in ("input_ids", "logprob", "noise_count", "partition", "subtokens"):
        assert isinstance(batch[name], jax.Array) and batch[name].dtype == truth[name].dtype, name
        np.testing.assert_array_equal(batch[name], truth[name], err_msg=name)
    assert isinstance(batch["sequence_id"], np.ndarray) and batch["sequence_id"].dtype == np.uint64
    assert isinstance(batch["document_offsets"], Ragged) and isinstance(batch["noise_index"].values, np.ndarray)
    assert (epochs.rank, epochs.world_size) == (0, 1)
    # all batches of an epoch have one shape: nothing is compiled twice
    assert {made["input_ids"].shape for made in sj.Epochs(demo, batch_size=4)} == {(4, 256)}
    step = jax.jit(lambda ids: ids.sum())
    assert int(step(batch["input_ids"])) == truth["input_ids"].sum()


def test_integers_that_jax_would_cut_are_refused(demo: pathlib.Path) -> None:
    small = sj.Epochs(demo, batch_size=4, transform=lambda b: {"ids": b["input_ids"].astype(np.int64), "n": 3})
    made = next(iter(small))
    assert made["ids"].dtype == np.int32 and isinstance(made["ids"], jax.Array) and made["n"] == 3
    validation = stillhouse.open(demo, split="validation")
    large = sj.Epochs(validation, batch_size=1, transform=lambda b: b["sequence_id"])
    assert validation[0]["sequence_id"] >= 1 << 32
    with pytest.raises(ValueError, match=r"uint64 of values that need 64 bits, valid: 32 bits, as jax_enable_x64"):
        next(iter(large))
    with pytest.raises(ValueError, match=r"drop_last: got False"):
        mesh = jax.make_mesh((1,), ("data",))
        sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
        sj.Epochs(demo, batch_size=4, sharding=sharding, drop_last=False)
    with pytest.raises(ValueError, match="rank and world_size: got 0 and None, valid: both"):
        sj.Epochs(demo, batch_size=4, rank=0)
