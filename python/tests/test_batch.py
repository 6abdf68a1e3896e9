"""Batches and examples: rows of them, micro-batches, copies that keep what they know, and types that losses take."""

from __future__ import annotations

import copy
import io
import pathlib
import pickle
import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from accelerate.utils import send_to_device
from lightning.fabric.utilities import move_data_to_device
from test_views_keyed import batch_of
from torch.utils.data._utils.collate import default_convert
from torch.utils.data._utils.pin_memory import pin_memory
from transformers import Trainer

import stillhouse
from stillhouse import Batch, ColumnError, Info, Ragged, StillhouseError
from stillhouse.views import ViewError, armd, bd3lm, mdlm, medusa, pgm, prime

LENGTHS = [16, 16, 3, 1, 16, 9, 2]
EVERY = {
    "mdlm": lambda b: mdlm.mask(b, sampling="sequence"),
    "second half": lambda b: mdlm.complementary(b, sampling="sequence")[1],
    "bd3lm": lambda b: bd3lm.mask(b, block_size=4, sampling="sequence"),
    "pgm": lambda b: pgm.partition(b, sampling="sequence"),
    "prime": lambda b: prime.mask(b, sampling="sequence"),
    "medusa": lambda b: medusa.targets(b),
    "armd": lambda b: armd.strided(b, streams=2),
}
FEW = {"slice": slice(2, 5), "stride": slice(None, None, -2), "list": [6, 0, 0, -2], "none": [], "bool": None}


def filled(kind: str = "numpy") -> Batch[Any]:
    """Seven rows with ragged columns, facts and a state."""
    offsets = np.array([0, 1, 3, 4, 8, 8, 9, 12])
    batch = batch_of(
        rows=7,
        vocab=997,
        lengths=LENGTHS,
        epoch=3,
        logprob=np.linspace(-1, 0, 7 * 16, dtype=np.float32).reshape(7, 16),
        noise_index=Ragged(np.arange(12, dtype=np.uint16), offsets),
    )
    return batch.torch() if kind == "torch" else batch


def few(rows: Any, kind: str) -> tuple[Any, list[int]]:
    """An index of seven rows as numpy or torch has it, and the rows it stands for."""
    if rows is None:
        rows = np.array([True, False, False, True, True, False, True])
        return (torch.from_numpy(rows) if kind == "torch" else rows), [0, 3, 4, 6]
    if isinstance(rows, list) and kind == "torch":
        return torch.tensor(rows, dtype=torch.int64), [row % 7 for row in rows]
    return rows, list(range(7))[rows] if isinstance(rows, slice) else [row % 7 for row in rows]


def arrays(thing: Any) -> dict[str, Any]:
    return {name: value for name, value in vars(thing).items() if hasattr(value, "dtype")}


@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("rows", FEW.values(), ids=FEW)
def test_rows_of_a_batch(kind: str, rows: Any) -> None:
    batch = filled(kind)
    index, wanted = few(rows, kind)
    part = batch[index]
    assert type(part) is Batch and part.rows == len(wanted)
    assert (part.info, part.state) == (batch.info, {"epoch": 3})
    for name in ("sequence_id", "input_ids", "attention_mask", "logprob"):
        assert type(part[name]) is type(batch[name]) and part[name].dtype == batch[name].dtype
        np.testing.assert_array_equal(np.asarray(part[name]), np.asarray(batch[name])[wanted], err_msg=name)
    ragged, whole = part["noise_index"], batch["noise_index"]
    assert ragged.values.dtype == whole.values.dtype and ragged.offsets.dtype == whole.offsets.dtype
    assert [row.tolist() for row in ragged] == [whole[row].tolist() for row in wanted]
    assert [len(rows) for rows in whole.split(3)] == [3, 3, 1]
    assert [row.tolist() for rows in whole.split(3) for row in rows] == [row.tolist() for row in whole]
    assert ragged.lengths.tolist() == [len(whole[row]) for row in wanted] and int(ragged.offsets[0]) == 0


def test_strings_are_columns_and_a_number_is_a_row() -> None:
    batch = filled()
    assert batch["input_ids"] is dict(batch)["input_ids"]
    row = batch[-1]
    assert type(row) is dict and row["noise_index"].tolist() == [9, 10, 11] and row["sequence_id"] == 6
    assert batch[np.int64(2)]["sequence_id"] == batch.torch()[torch.tensor(2)]["sequence_id"] == 2
    assert batch["noise_index"][np.int64(3)].tolist() == [4, 5, 6, 7]
    for wrong, error in (
        (7, IndexError), ([0, 7], IndexError), ([True] * 6, IndexError), ([0.5], TypeError), ([[1]], TypeError),
        ("logprobs", ColumnError), (None, TypeError),
    ):  # fmt: skip
        with pytest.raises(error):
            batch[wrong]
    with pytest.raises(IndexError, match=r"bool \[6\], valid: bool \[7\]"):
        batch["noise_index"][[True] * 6]


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_rows_of_an_example_are_the_example_of_the_rows(view: Any, kind: str) -> None:
    batch = filled(kind)
    example = view(batch)
    assert example.rows == 7
    for rows in FEW.values():
        index, _ = few(rows, kind)
        part, expected = example[index], view(batch[index])
        assert type(part) is type(example) and part.batch.info == batch.info and part.batch.state == batch.state
        for name, value in vars(expected).items():
            if name == "batch":
                continue
            got = getattr(part, name)
            if hasattr(value, "dtype") and not (name in ("block", "order") and not len(value)):
                assert got.dtype == value.dtype
                np.testing.assert_array_equal(np.asarray(got), np.asarray(value), err_msg=name)
            elif not hasattr(value, "dtype"):
                assert got == value, name
        np.testing.assert_array_equal(np.asarray(part.target_ids()), np.asarray(expected.target_ids()))
    with pytest.raises(TypeError, match=r"example\[2:5\]"):
        example[2]
    with pytest.raises(TypeError, match="not iterable"):
        iter(example)


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
def test_losses_of_micro_batches_add_up(view: Any) -> None:
    example = view(filled("torch"))
    logits = torch.randn(2048, 997, generator=torch.Generator().manual_seed(0))

    def loss(part: Any) -> torch.Tensor:
        truth = part.target_ids()  # no .long()
        assert truth.dtype == torch.int64
        each = F.cross_entropy(logits[truth.reshape(-1) % 2048], truth.reshape(-1), reduction="none")
        return (each * part.target_weights().reshape(-1)).sum(dtype=torch.float64)

    parts = example.split(3)
    assert [part.rows for part in parts] == [3, 3, 1]
    torch.testing.assert_close(sum(loss(part) for part in parts), loss(example))
    again = type(example).concat(parts)
    for name, value in arrays(example).items():
        assert torch.equal(getattr(again, name), value), name
    for name, column in example.batch.items():
        if name != "noise_index":
            assert torch.equal(again.batch[name], column)
    with pytest.raises(ValueError, match="rows: got 0"):
        example.split(0)
    # parts are views: micro-batches cost no memory
    assert parts[1].input_ids.untyped_storage().data_ptr() == example.input_ids.untyped_storage().data_ptr()


def test_digits_go_into_a_loss() -> None:
    example = prime.mask(filled("torch"))
    truth = example.digits[example.digit_mask]
    assert F.cross_entropy(torch.zeros(len(truth), example.base), truth).item() == pytest.approx(np.log(15), rel=1e-5)
    assert prime.mask(filled()).digits.dtype == np.int32


def test_concatenation_is_what_was_split() -> None:
    for kind in ("numpy", "torch"):
        batch = filled(kind)
        again = Batch.concat(batch.split(2))
        assert (again.info, again.state) == (batch.info, batch.state) and list(again) == list(batch)
        assert [row.tolist() for row in again["noise_index"]] == [row.tolist() for row in batch["noise_index"]]
        assert again["input_ids"].tolist() == batch["input_ids"].tolist()
    with pytest.raises(ValueError, match="got none"):
        Batch.concat([])
    with pytest.raises(ValueError, match="got columns a"):
        Batch.concat([batch, Batch({"a": np.zeros(1)})])
    with pytest.raises(ValueError, match="facts"):
        Batch.concat([filled(), Batch(filled(), Info(5, 16))])
    with pytest.raises(ValueError, match=r"block_size: got 4, 8"):
        bd3lm.BlockExample.concat([bd3lm.mask(filled(), block_size=size) for size in (4, 8)])


class OnItsDevice:
    """transformers.Trainer where accelerate has brought the batch to its device already."""

    _prepare_input = Trainer._prepare_input
    args = SimpleNamespace(device=torch.device("cpu"))
    is_deepspeed_enabled = False


COPIES = {
    "copy.copy": copy.copy, "copy.deepcopy": copy.deepcopy, "copy": lambda b: b.copy(), "or": lambda b: b | {},
    "ror": lambda b: {} | b, "pickle": lambda b: pickle.loads(pickle.dumps(b)), "slice": lambda b: b[:],
    "torch": lambda b: b.torch(), "numpy": lambda b: b.numpy(), "to": lambda b: b.to("cpu"),
    "default_convert": default_convert, "accelerate": lambda b: send_to_device(b, "cpu"),
    "lightning": lambda b: move_data_to_device(b, "cpu"), "padded": lambda b: b.padded(),
}  # fmt: skip


@pytest.mark.parametrize("make", COPIES.values(), ids=COPIES)
@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_copies_keep_what_a_batch_knows(make: Any, kind: str) -> None:
    batch = filled(kind)
    made = make(batch)
    assert type(made) is Batch and made.info == batch.info and made.state == batch.state and made.info is not None
    assert made.keys() == batch.keys()
    assert [row.tolist() for row in made["noise_index"]] == [row.tolist() for row in batch["noise_index"]]
    more = batch | {"labels": batch["input_ids"]}
    assert "labels" in more and "labels" not in batch
    assert ({"labels": 1, "input_ids": 2} | batch)["input_ids"] is batch["input_ids"]


def test_examples_are_copied_and_moved() -> None:
    for kind in ("numpy", "torch"):
        example = pgm.partition(filled(kind))
        for made in (
            copy.deepcopy(example), pickle.loads(pickle.dumps(example)), example.to("cpu"), send_to_device(example, "cpu"),
            move_data_to_device(example, "cpu"),
        ):  # fmt: skip
            assert type(made) is pgm.PartitionExample and made.batch.info == example.batch.info
            assert made.batch.state == {"epoch": 3}
            for name, value in arrays(example).items():
                np.testing.assert_array_equal(np.asarray(getattr(made, name)), np.asarray(value), err_msg=name)
    half = example.to(torch.bfloat16)
    assert half.weights.dtype == half.batch["logprob"].dtype == torch.bfloat16
    assert half.input_ids.dtype == torch.int32 and half.targets.dtype == torch.bool
    there = medusa.targets(filled()).to("meta")
    assert there.positions.device.type == there.batch["noise_index"].offsets.device.type == "meta" and there.t is None


def test_page_locked_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch's own walk over what a loader gives; locking itself needs an accelerator, so that a copy stands for it."""
    locked: list[int] = []

    def lock(tensor: torch.Tensor) -> torch.Tensor:
        copied = tensor.clone()
        locked.append(copied.data_ptr())
        return copied

    monkeypatch.setattr(torch.Tensor, "pin_memory", lock)
    for kind in ("numpy", "torch"):
        made = pin_memory({"batch": filled(kind), "example": mdlm.mask(filled(kind))})
        for batch in (made["batch"], made["example"].batch):
            assert type(batch) is Batch and batch.info is not None and batch.state == {"epoch": 3}
            tensors = [batch["noise_index"].values, batch["noise_index"].offsets, batch["input_ids"], batch["logprob"]]
            assert {tensor.data_ptr() for tensor in tensors} <= set(locked)
        assert {value.data_ptr() for value in arrays(made["example"]).values()} <= set(locked)


def test_what_the_trainer_of_transformers_rebuilds_keeps_its_facts() -> None:
    batch = filled("torch")
    made = OnItsDevice()._prepare_input(batch)
    assert type(made) is Batch and made is not batch and (made.info, made.state) == (batch.info, batch.state)
    np.testing.assert_array_equal(mdlm.mask(made).targets, mdlm.mask(batch).targets)
    # A device that the tensors are not on: there they are other tensors, and nothing can tell.
    moved = Batch({name: value.clone() if name != "noise_index" else value for name, value in batch.items()})
    assert (moved.info, moved.state) == (None, None)
    # What a tensor is remembered for is never written with it, and goes with it.
    file = io.BytesIO()
    torch.save(batch["input_ids"], file)
    file.seek(0)
    assert torch.equal(torch.load(file, weights_only=True), batch["input_ids"])
    kept = stillhouse.batch._facts_of_tensors()
    ids = batch["input_ids"]
    assert ids in kept
    before = len(kept)
    del batch, made, moved, ids
    assert len(kept) == before - 2


def test_a_batch_without_facts_says_what_to_do() -> None:
    lost = Batch(dict(filled()))
    for view in (mdlm.mask, pgm.partition, prime.mask, lambda b: bd3lm.mask(b, block_size=4), armd.strided):
        with pytest.raises(
            ViewError,
            match=r"(epoch: not given, and the batch has no facts.*Trainer.*info=dataset.info|the batch has no info.*info=ds.info)",
        ):
            view(lost)  # type: ignore[operator]
    assert mdlm.mask(lost, epoch=0, mask_id=1, schedule="linear").targets.any()  # what is needed is given
    with pytest.raises(StillhouseError, match=r"replaying noise needs facts.*no facts.*collate function"):
        stillhouse.noise.replay(lost)
    with pytest.raises(StillhouseError, match=r"give a stillhouse.Batch with its info, or info="):
        stillhouse.noise.replay(dict(filled()))


def test_a_typed_program_passes_mypy_strictly(demo: pathlib.Path) -> None:
    """What users' editors see: their program, checked by mypy, which also says what each expression is; and run."""
    program = pathlib.Path(__file__).parent / "typed_user.py"
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--strict", str(program)],
        capture_output=True, text=True, check=False, cwd=program.parents[1],
    )  # fmt: skip
    assert done.returncode == 0, done.stdout
    ran = subprocess.run([sys.executable, str(program), str(demo)], capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr
