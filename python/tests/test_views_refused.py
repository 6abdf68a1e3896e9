"""What is no batch of a data set is refused by every view, with the line to write instead."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from test_views_keyed import batch_of

from stillhouse import Batch, ColumnError
from stillhouse.views import ViewError, armd, bd3lm, mdlm, medusa, pgm, prime

EVERY = {
    "mdlm": lambda b: mdlm.mask(b, mask_id=9),
    "complementary": lambda b: mdlm.complementary(b, mask_id=9),
    "pgm": pgm.partition,
    "pgm stored": lambda b: pgm.partition(b, view=0),
    "prime": lambda b: prime.mask(b, length=2),
    "bd3lm": lambda b: bd3lm.mask(b, block_size=4, mask_id=9),
    "medusa": medusa.targets,
    "progressive": lambda b: armd.progressive(b, 0),
    "strided": armd.strided,
    "masking steps": lambda b: armd.masking_steps(b, np.ones(16, int)),
    "stored": armd.stored,
}


def row_of(batch):
    """What `ds[7]` gives."""
    return {name: column[0] for name, column in batch.items()}


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
def test_a_row_or_a_plain_dict_says_what_to_pass(view):
    batch = batch_of()
    got = [
        (row_of(batch), "got one row, a dict, valid: a stillhouse.Batch, such as ds[[7]] instead of ds[7]"),
        (row_of(batch.torch()), "got one row, a dict, valid: a stillhouse.Batch, such as ds[[7]] instead of ds[7]"),
        (dict(batch), "got a dict, which does not know its data set, valid: a stillhouse.Batch: stillhouse.Batch(columns, info=ds.info)"),
        (dict(batch.torch()), "stillhouse.Batch(columns, info=ds.info)"),
        ({"input_ids": [[1, 2], [3, 4]]}, "stillhouse.Batch(columns, info=ds.info)"),
        ({"tokens": batch["input_ids"]}, "got a dict, valid: a stillhouse.Batch: ds[[7]], ds[:32], or a batch of a stillhouse.torch loader"),
        (batch["input_ids"], "got a ndarray, valid: a stillhouse.Batch"),
        (torch.ones(2, 3), "got a Tensor, valid: a stillhouse.Batch"),
        ([batch], "got a list, valid: a stillhouse.Batch"),
        (Batch(row_of(batch), batch.info), "input_ids: got shape [16], valid: [B, L]; for one row of a data set, ds[[7]] instead of ds[7]"),
    ]  # fmt: skip
    for given, message in got:
        with pytest.raises(ViewError, match=re.escape(message)):
            view(given)


def test_what_the_messages_say_to_write_works():
    batch = batch_of(rows=1)
    plain = dict(batch)
    example = mdlm.mask(Batch(plain, info=batch.info))
    np.testing.assert_array_equal(example.input_ids, mdlm.mask(batch).input_ids)


@pytest.mark.parametrize("columns", [dict, lambda b: dict(b.torch())], ids=["numpy", "torch"])
def test_a_batch_that_lost_its_info_is_refused_where_the_info_is_needed(columns):
    lost = Batch(columns(batch_of()), state={"epoch": 0})
    for view in ("mdlm", "complementary", "pgm", "bd3lm"):
        with pytest.raises(
            ViewError,
            match=r"schedule: the batch has no info.*stillhouse\.Batch\(columns, info=ds\.info\), or schedule='linear'",
        ):
            EVERY[view](lost)
    with pytest.raises(
        ViewError, match=r"no info.*size of its vocabulary; valid: stillhouse\.Batch\(columns, info=ds\.info\)"
    ):
        prime.mask(lost, length=2, schedule="linear")
    with pytest.raises(
        ViewError, match=r"mask_id: the batch has no info.*stillhouse\.Batch\(columns, info=ds\.info\), or an id"
    ):
        mdlm.mask(lost, schedule="linear")
    # What needs no info works without.
    assert mdlm.mask(lost, schedule="linear", mask_id=9).targets.any()
    assert pgm.partition(lost, schedule="linear").groups.any()
    assert medusa.targets(lost).targets.any() and armd.strided(lost).targets.all()


def test_the_keys_of_the_choices_must_be_there():
    batch = batch_of()
    del batch["sequence_id"]
    with pytest.raises(
        ColumnError, match=r"no column 'sequence_id', the key of the views.*it has input_ids\. .*select_columns"
    ):
        mdlm.mask(batch)
    with pytest.raises(ColumnError, match="no column 'input_ids'; it has none"):
        mdlm.mask(Batch({}))
