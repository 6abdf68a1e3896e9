"""Medusa's targets and ARMD's orders, blocks and masks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats
from test_views_keyed import batch_of
from test_views_masks import V, noise  # noqa: F401

from stillhouse import Batch, ColumnError, Info, Ragged
from stillhouse.views import ViewError, armd, medusa
from stillhouse.views.armd import LM1B, OWT, strided_order


@pytest.mark.parametrize(("heads", "first"), [(3, 1), (4, 1), (3, 2), (1, 16), (20, 1)])
@pytest.mark.parametrize("kind", ["numpy", "torch"])
@pytest.mark.parametrize("anchors", [None, [0, 5, 15, 2], "rows"])
def test_medusa_targets_by_brute_force(heads, first, kind, anchors, noise):  # noqa: F811
    batch = batch_of(rows=4, lengths=[16, 7, 1, 0])
    rows = [[0, 9], [5, 6], [0, 1], [3, 15]]
    at = np.arange(16) if anchors is None else np.array(rows if anchors == "rows" else anchors)
    every = np.broadcast_to(at, (4, at.shape[-1]))
    columns = batch if kind == "numpy" else batch.torch()
    given = None if anchors is None else at if kind == "numpy" else torch.from_numpy(at)
    example = medusa.targets(columns, heads=heads, first=first, anchors=given)
    context, xi, tokens = example.triplet()
    np.testing.assert_array_equal(context, batch["input_ids"])
    assert xi.shape == (*every.shape, heads, V) and tokens.shape == (*every.shape, heads)
    for row in range(4):
        for p, i in enumerate(every[row]):
            for head in range(heads):
                j = i + first + head
                there = j < 16 and bool(batch["attention_mask"][row, [i, j]].all())
                assert bool(example.targets[row, p, head]) == there
                assert float(example.weights[row, p, head]) == there
                assert int(tokens[row, p, head]) == (batch["input_ids"][row, j] if there else -100)
                expected = row * 1000 + j + np.arange(V) / 100 + 0.5 if there else np.zeros(V)
                np.testing.assert_allclose(xi[row, p, head], expected)
    assert isinstance(xi, torch.Tensor) == (kind == "torch")


def test_the_two_readings_of_medusas_offsets_by_hand(noise):  # noqa: F811
    batch = batch_of(rows=1, lengths=[6])
    ids = batch["input_ids"][0]
    # i = 1, k = 3: §4.2 predicts positions 2, 3, 4; behind the frozen head 3, 4, 5
    for offsets, positions in (("next", [2, 3, 4]), ("lookahead", [3, 4, 5])):
        example = medusa.targets(batch, offsets=offsets, anchors=np.array([1]))
        assert example.positions[0, 0].tolist() == positions and example.targets.all()
        _, xi, tokens = example.triplet()
        assert tokens[0, 0].tolist() == [ids[p] for p in positions]
        np.testing.assert_allclose(xi[0, 0, :, 0], [p + 0.5 for p in positions])
    # i = 3: the row of six tokens ends with position 5
    last = {offsets: medusa.targets(batch, offsets=offsets, anchors=np.array([3])) for offsets in ("next", "lookahead")}
    assert last["next"].targets[0, 0].tolist() == [True, True, False]
    assert last["lookahead"].targets[0, 0].tolist() == [True, False, False]
    assert last["lookahead"].target_ids()[0, 0].tolist() == [ids[5], -100, -100]
    # head 0 and the three behind it are the four of the other reading
    four, three = medusa.targets(batch, offsets="next", heads=4), medusa.targets(batch, offsets="lookahead")
    np.testing.assert_array_equal(four.target_ids()[..., 1:], three.target_ids())
    plain = medusa.targets(batch)
    np.testing.assert_array_equal(plain.positions, medusa.targets(batch, offsets="next").positions)
    np.testing.assert_array_equal(three.positions, medusa.targets(batch, first=2).positions)


def test_medusa_refuses_what_cannot_be():
    batch = batch_of()
    for options, message in (
        ({"heads": 0}, "got 0, 1, valid: 1 or more"),
        ({"offsets": "last"}, "offsets: got 'last', valid: 'next', 'lookahead'"),
        ({"offsets": "next", "first": 1}, "offsets, first: got 'next' and 1, valid: one of them"),
        ({"anchors": np.array([16])}, "got 16 to 16, valid: 0 to 15"),
        ({"anchors": np.zeros((5, 2), int)}, r"got shape \[5, 2\], valid: \[P\] or \[6, P\]"),
    ):
        with pytest.raises(ViewError, match=message):
            medusa.targets(batch, **options)


def test_the_strided_order_of_the_paper():
    order, block = strided_order(8, 2)
    assert (order + 1).tolist() == [1, 5, 2, 6, 3, 7, 4, 8]
    blocks = [set((order[block == b] + 1).tolist()) for b in range(1, 6)]
    assert blocks == [{1}, {5}, {2, 6}, {3, 7}, {4, 8}] and block.max() == 5


@pytest.mark.parametrize("length", [0, 1, 2, 7, 16, 1024])
@pytest.mark.parametrize("streams", [1, 2, 4, 5])
def test_strided_orders_are_streams_interleaved(length, streams):
    order, block = strided_order(length, streams)
    assert sorted(order.tolist()) == list(range(length)) and (np.diff(block) >= 0).all()
    s = max(min(streams, length), 1)
    cuts = np.cumsum([0] + [length // s + (i < length % s) for i in range(s)])
    pieces = [list(range(a, b)) for a, b in zip(cuts, cuts[1:])]
    expected = [[piece[0]] for piece in pieces if piece]
    expected += [[p[j] for p in pieces if j < len(p)] for j in range(1, max(map(len, pieces)))]
    assert [order[block == b].tolist() for b in range(1, block.max(initial=0) + 1)] == expected
    if streams == 1:
        assert order.tolist() == list(range(length)) and block.tolist() == list(range(1, length + 1))


EVERY = {
    "left to right": lambda b, **k: armd.progressive(b, 0, **k),
    "progressive": lambda b, **k: armd.progressive(b, 20_000, **k),
    "strided": lambda b, **k: armd.strided(b, **k),
}


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
def test_orders_hold_their_invariants(view, noise):  # noqa: F811
    batch = batch_of(rows=6, lengths=[16, 16, 9, 3, 1, 0])
    for columns in (batch, batch.torch()):
        example = view(columns)
        found = {name: np.asarray(value) for name, value in vars(example).items() if hasattr(value, "dtype")}
        for row in range(6):
            n = int(batch["attention_mask"][row].sum())
            order, block = found["order"][row], found["block"][row]
            assert sorted(order.tolist()) == list(range(16)) and sorted(order[:n].tolist()) == list(range(n))
            assert found["input_ids"][row].tolist() == batch["input_ids"][row, order].tolist()
            assert (np.diff(block[:n]) >= 0).all() and set(block[:n]) == set(range(1, block[:n].max(initial=0) + 1))
            assert (block[n:] == block[:n].max(initial=0) + 1).all()
            assert found["targets"][row].tolist() == [True] * n + [False] * (16 - n)
            np.testing.assert_allclose(found["weights"][row], [1 / max(n, 1)] * n + [0] * (16 - n), rtol=1e-6)
            causal, strict = np.asarray(example.causal()[row]), np.asarray(example.strictly_causal()[row])
            for q in range(16):
                for k in range(16):
                    assert causal[q, k] == (max(q, k) < n and block[k] <= block[q])  # Eq. 3
                    assert strict[q, k] == (max(q, k) < n and block[k] < block[q])  # Eq. 5
        context, xi, tokens = example.triplet()
        where = [(row, found["order"][row, i]) for row in range(6) for i in range(16) if found["targets"][row, i]]
        assert np.asarray(tokens).tolist() == [int(batch["input_ids"][row, i]) for row, i in where]
        np.testing.assert_allclose(np.asarray(xi)[:, 0], [row * 1000 + i + 0.5 for row, i in where])
        np.testing.assert_array_equal(context, found["input_ids"])


@pytest.mark.parametrize("view", list(EVERY.values())[1:], ids=list(EVERY)[1:])
def test_orders_are_keyed(view):
    batch = batch_of(rows=40, epoch=1)
    order = view(batch, seed=2).order
    part = Batch({name: value[[30, 3]] for name, value in batch.items()}, batch.info, batch.state)
    np.testing.assert_array_equal(view(part, seed=2).order, order[[30, 3]])
    for other in (view(batch, seed=3), view(batch, seed=2, epoch=0)):
        assert not np.array_equal(other.order, order)
    np.testing.assert_array_equal(view(batch.torch(), seed=2).order.numpy(), order)


def test_progressive_schedules_of_the_paper():
    assert (OWT.i_ar, OWT.i_perm, OWT.rho_max) == (9_000, 48_000, 32)
    assert (LM1B.i_ar, LM1B.i_perm, LM1B.rho_max) == (100_000, 300_000, 8)
    for schedule in (OWT, LM1B):
        assert schedule.rho(0) == schedule.rho(schedule.i_ar - 1) == 0
        assert schedule.rho(schedule.i_ar) == 1
        assert schedule.rho(schedule.i_perm - 1) == schedule.rho_max - 1
        assert schedule.rho(schedule.i_perm) == schedule.rho(10**7) == schedule.rho_max
        steps = [schedule.rho(step) for step in range(0, schedule.i_perm, 500)]
        assert steps == sorted(steps)


def test_progressive_orders_move_rho_tokens():
    batch = batch_of(rows=3000, length=24)
    for step, rho in ((0, 0), (9_000, 1), (48_000, 32), (10_300, 2)):
        order = armd.progressive(batch, step).order
        moved = (order != np.arange(24)).sum(axis=1)
        assert moved.max() <= min(rho, 24) and OWT.rho(step) == rho
        if rho < 2:
            assert (moved == 0).all()
        if rho == 2:
            assert abs((moved == 2).mean() - 0.5) < 0.04  # both orders of the two are equally likely
            places = np.bincount(np.nonzero(order != np.arange(24))[1], minlength=24)
            assert stats.chisquare(places).pvalue > 1e-3
        if rho == 32:  # all 24: a uniform permutation
            for place in (0, 11, 23):
                assert stats.chisquare(np.bincount(order[:, place], minlength=24)).pvalue > 1e-3
    few = armd.progressive(batch, 10**6, schedule=LM1B).order
    assert (few != np.arange(24)).sum(axis=1).max() == 8


def test_the_number_of_streams_is_drawn_evenly():
    batch = batch_of(rows=3000, length=8)
    order = armd.strided(batch).order
    counts = [(order == strided_order(8, s)[0]).all(axis=1).sum() for s in (1, 2, 4)]
    assert sum(counts) == 3000 and stats.chisquare(counts).pvalue > 1e-3
    assert (armd.strided(batch, streams=4).order == strided_order(8, 4)[0]).all()
    for streams in (0, (), (1, -2)):
        with pytest.raises(ViewError, match="streams: got .* valid: 1 or more"):
            armd.strided(batch, streams=streams)


def test_masking_steps_give_order_and_blocks():
    # Figure 1 of the paper, T = 4: X(1) = {3, 5}, X(2) = {1, 6}, X(3) = {2, 7}, X(4) = {4}; it prints X(1) = {3, 4}.
    tau = np.array([3, 2, 4, 1, 4, 3, 2])
    batch = batch_of(rows=2, length=7, lengths=[7, 5])
    for columns, given in ((batch, tau), (batch.torch(), torch.from_numpy(tau))):
        example = armd.masking_steps(columns, given)
        assert (np.asarray(example.order[0]) + 1).tolist() == [3, 5, 1, 6, 2, 7, 4]
        assert np.asarray(example.block[0]).tolist() == [1, 1, 2, 2, 3, 3, 4]
        assert (np.asarray(example.order[1]) + 1).tolist() == [3, 5, 1, 2, 4, 6, 7]
        assert np.asarray(example.block[1]).tolist() == [1, 1, 2, 3, 4, 5, 5]
        assert np.asarray(example.strictly_causal()[0]).sum(axis=1).tolist() == [0, 0, 2, 2, 4, 4, 6]
        assert np.asarray(example.causal()[0]).sum(axis=1).tolist() == [2, 2, 4, 4, 6, 6, 7]
    assert armd.masking_steps(batch, tau, steps=6).block[0].tolist() == [3, 3, 4, 4, 5, 5, 6]
    with pytest.raises(ViewError, match="tau: got 0 to 3, valid: 1 to 3"):
        armd.masking_steps(batch, np.array([3, 2, 3, 1, 0, 3, 2]))
    with pytest.raises(ViewError, match=r"tau: got shape \[6\], valid: \[2, 7\] or \[7\]"):
        armd.masking_steps(batch, tau[:6])


def test_stored_orders_are_read():
    batch = batch_of(rows=3, length=8)
    with pytest.raises(ColumnError, match=r"no column 'order'.*`orders: \{kind: strided\}`.*draw one with"):
        armd.stored(batch)
    drawn = armd.strided(batch)
    batch["order"], batch["block"] = drawn.order.astype(np.uint16), drawn.block.astype(np.uint16)
    for columns in (batch, batch.torch()):
        for name in ("input_ids", "order", "block", "targets", "weights"):
            np.testing.assert_array_equal(getattr(armd.stored(columns), name), getattr(drawn, name))


def test_stored_orders_of_rows_of_different_lengths():
    """Padding comes last, after every block, and is no target."""
    order = Ragged(np.array([2, 0, 1, 1, 0], np.uint16), np.array([0, 3, 5]))
    block = Ragged(np.array([1, 2, 2, 1, 2], np.uint16), np.array([0, 3, 5]))
    ids = Ragged(np.array([10, 11, 12, 20, 21], np.int32), np.array([0, 3, 5]))
    columns = {"sequence_id": np.arange(2, dtype=np.uint64), "input_ids": ids, "order": order, "block": block}
    example = armd.stored(Batch(columns, Info(100, 3)).padded())
    np.testing.assert_array_equal(example.input_ids[:, :2], [[12, 10], [21, 20]])
    np.testing.assert_array_equal(example.targets, [[True, True, True], [True, True, False]])
    np.testing.assert_allclose(example.weights, [[1 / 3] * 3, [1 / 2, 1 / 2, 0]], rtol=1e-6)
    assert not example.strictly_causal()[:, 0].any() and not example.causal()[1, :, 2].any()
