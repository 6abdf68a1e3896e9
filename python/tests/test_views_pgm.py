"""PGM and complementary masks: groups, their weights and what they sum to, and what may be attended to."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from scipy import stats
from test_views_keyed import batch_of

from stillhouse import ColumnError
from stillhouse.views import Schedule, ViewError, mdlm, pgm
from stillhouse.views.example import rows_of


def test_complementary_masks_are_complements():
    batch = batch_of(rows=200, lengths=[16] * 100 + [9] * 100)
    first, second = mdlm.complementary(batch, seed=8)
    groups = pgm.partition(batch, seed=8)
    np.testing.assert_array_equal(first.targets ^ second.targets, first.valid)
    np.testing.assert_array_equal(first.targets, groups.groups)
    np.testing.assert_allclose(first.weights + second.weights, groups.weights)
    np.testing.assert_allclose(second.t, 1 - first.t, atol=1e-7)
    assert (first.targets.any(axis=1) & second.targets.any(axis=1)).all()
    drawn, rest = mdlm.complementary(batch, seed=8, repair="never")
    np.testing.assert_array_equal(drawn.targets ^ rest.targets, drawn.valid)
    np.testing.assert_allclose(drawn.weights, np.where(drawn.targets, 1 / drawn.t[:, None], 0), rtol=1e-6)
    np.testing.assert_allclose(
        rest.weights, np.where(rest.targets, 1 / (1 - drawn.t[:, None].astype(float)), 0), rtol=1e-5
    )
    half, other = mdlm.complementary(batch, schedule=Schedule(3.0))
    np.testing.assert_allclose((1 - half.t) ** 3, 1 - (1 - other.t) ** 3, atol=1e-5)


def in_group_one(t, tokens, power=1.0):
    """The probability of a token to be in group 1, by trying all partitions and giving an empty group each token in turn."""
    p, total = 1 - (1 - t) ** power, 0.0
    for groups in itertools.product((0, 1), repeat=tokens):
        ones = sum(groups)
        probability = p**ones * (1 - p) ** (tokens - ones)
        moved = 1 if ones == 0 else tokens - 1 if ones == tokens else ones
        total += probability * (moved if tokens > 1 else ones) / tokens
    return total


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_repaired_weights_are_those_of_the_probabilities_that_groups_really_have(power):
    batch = batch_of(rows=40, length=7, lengths=[7] * 10 + [3] * 10 + [2] * 10 + [1] * 9 + [0])
    schedule = Schedule(power)
    example = pgm.partition(batch, schedule=schedule, eps=1e-3)
    for row, tokens in enumerate(batch["attention_mask"].sum(axis=1)):
        t = float(example.t[row])
        slope, one = power * (1 - t) ** (power - 1), in_group_one(t, int(tokens), power) if tokens else 1.0
        expected = np.where(example.groups[row], slope / one, slope / (1 - one) if tokens else 0)
        np.testing.assert_allclose(example.weights[row], expected * example.valid[row], rtol=1e-5)
        if tokens >= 2:
            assert example.weights[row].max() <= tokens * slope * 1.00001  # not 1/eps = 1000


@pytest.mark.parametrize("repair", ["bounded", "never"])
@pytest.mark.parametrize("power", [1.0, 3.0])
def test_the_expected_sum_of_the_weights_is_what_it_is_said_to_be(repair, power):
    """Exactly, for a fixed t: every token has −α'(t) in expectation, whatever the number of tokens and t; 2 n in all when t is uniform."""
    schedule, tokens = Schedule(power), 6
    for t in (1e-4, 0.01, 0.3, 0.99):
        rows = rows_of(batch_of(rows=1, length=tokens))
        groups = pgm.Groups(np.zeros((1, tokens), bool), np.array([t], np.float32), repair == "bounded")
        of_zero, of_one = pgm.group_weights(rows, groups, schedule)
        t = float(np.float32(t))
        one = in_group_one(t, tokens, power) if repair == "bounded" else 1 - (1 - t) ** power
        slope = power * (1 - t) ** (power - 1)
        np.testing.assert_allclose([one * of_one[0], (1 - one) * of_zero[0]], slope, rtol=1e-9)


@pytest.mark.parametrize("length", [2, 4, 16, 64])
@pytest.mark.parametrize("repair", ["bounded", "never"])
def test_weights_sum_to_twice_the_length(repair, length):
    rows = 20_000
    example = pgm.partition(batch_of(rows=rows, length=length), repair=repair)
    halves = mdlm.complementary(batch_of(rows=rows, length=length), repair=repair)
    sums = example.weights.sum(axis=1, dtype=float) / length
    assert abs(sums.mean() - 2) <= 4 * sums.std() / rows**0.5
    if repair == "bounded":  # tight where no weight is large; w(t) would be off by 0.4 at L = 16 and by 3 at L = 2
        assert abs(sums.mean() - 2) < 0.03
        assert example.weights.max() <= length
    for half in halves:
        sums = half.weights.sum(axis=1, dtype=float) / length
        assert abs(sums.mean() - 1) <= 4 * sums.std() / rows**0.5
    np.testing.assert_allclose(halves[0].weights + halves[1].weights, example.weights)


def test_without_repair_groups_are_as_they_are_drawn():
    batch = batch_of(rows=4000, length=8)
    never, bounded = (pgm.partition(batch, repair=repair) for repair in ("never", "bounded"))
    np.testing.assert_array_equal(never.t, bounded.t)
    empty = (never.sizes == 0).any(axis=1)
    np.testing.assert_array_equal(never.groups[~empty], bounded.groups[~empty])
    assert (never.groups[empty] != bounded.groups[empty]).sum(axis=1).tolist() == [1] * int(empty.sum())
    # P(empty | t) = t^8 + (1 − t)^8, whose mean is 2/9
    assert abs(empty.mean() - 2 / 9) < 0.02 and (bounded.sizes > 0).all()
    t = never.t.astype(float)[:, None]
    np.testing.assert_allclose(never.weights, np.where(never.groups, 1 / t, 1 / (1 - t)), rtol=1e-5)
    with pytest.raises(ViewError, match="got 'x', valid: 'bounded', 'never'"):
        pgm.partition(batch, repair="x")
    batch["partition"], batch["partition_t"] = pgm.draw_partitions(batch["sequence_id"], np.ones((4000, 8), bool))
    with pytest.raises(ViewError, match="repair: got 'never'.*leave out `view`"):
        pgm.partition(batch, view=0, repair="never")


def test_eq6_is_as_printed():
    example = pgm.partition(batch_of(rows=50), weighting="eq6")
    t, one = example.t.astype(float)[:, None], example.groups
    np.testing.assert_allclose(example.weights, np.where(one, 1 / (1 - t), 1 / t), rtol=1e-5)  # Eq. 6
    # Its mean grows with ln(1/eps), where that of the bound is 2.
    many = batch_of(rows=4000, length=256)
    mean = {
        (weighting, eps): float(pgm.partition(many, weighting=weighting, eps=eps).weights.mean(dtype=float))
        for weighting in ("eq6", "bound")
        for eps in (1e-4, 1e-2)
    }
    assert abs(mean["bound", 1e-4] - 2) < 0.03 and abs(mean["bound", 1e-2] - 2) < 0.03
    assert mean["eq6", 1e-2] > 6 and mean["eq6", 1e-4] > mean["eq6", 1e-2] + 4
    with pytest.raises(ViewError, match="got 'x', valid: 'eq6', 'bound'"):
        pgm.partition(many, weighting="x")


def test_pgm_sorts_by_group():
    batch = batch_of(rows=30, lengths=[16] * 20 + [5] * 9 + [0])
    for example in (pgm.partition(batch), pgm.partition(batch.torch())):
        for row in range(30):
            g, valid = np.asarray(example.groups[row]), batch["attention_mask"][row]
            expected = [*np.flatnonzero(valid & ~g), *np.flatnonzero(g), *np.flatnonzero(~valid)]
            assert np.asarray(example.permutation[row]).tolist() == expected
            assert np.asarray(example.sorted_ids[row]).tolist() == batch["input_ids"][row, expected].tolist()
            assert np.asarray(example.sizes[row]).tolist() == [(valid & ~g).sum(), g.sum()]
            weights = np.asarray(example.weights)[row, expected]
            assert np.asarray(example.sorted(example.weights)[row]).tolist() == weights.tolist()
        assert example.sorted(np.asarray(batch["input_ids"])[..., None]).shape == (30, 16, 1)


def test_pgm_attention_is_block_diagonal():
    batch = batch_of(rows=8, length=10, lengths=[10] * 5 + [6, 1, 0])
    for example in (pgm.partition(batch), pgm.partition(batch.torch())):
        own, swap = np.asarray(example.attention()), np.asarray(example.attention("swap"))
        by_position = np.asarray(example.attention("swap", order="position"))
        for row in range(8):
            a, b = (int(n) for n in example.sizes[row])
            expected = np.zeros((10, 10), bool)
            expected[:a, :a] = expected[a : a + b, a : a + b] = True
            np.testing.assert_array_equal(own[row], expected)
            expected = np.zeros((10, 10), bool)
            expected[:a, a : a + b] = expected[a : a + b, :a] = True
            np.testing.assert_array_equal(swap[row], expected)
            for i in range(10):
                for j in range(10):
                    valid = batch["attention_mask"][row, [i, j]].all()
                    assert by_position[row, i, j] == (valid and bool(example.groups[row, i] != example.groups[row, j]))


def test_pgm_reads_stored_views_and_draws_what_the_operator_draws():
    batch = batch_of(rows=40, lengths=[16] * 30 + [7] * 10)
    batch["partition"], batch["partition_t"] = pgm.draw_partitions(
        batch["sequence_id"], batch["attention_mask"], views=3, seed=42
    )
    for view in range(3):
        example = pgm.partition(batch, view=view, seed=9, epoch=3)
        np.testing.assert_array_equal(example.groups, batch["partition"][:, view])
        np.testing.assert_array_equal(example.t, batch["partition_t"][:, view])
        np.testing.assert_array_equal(mdlm.complementary(batch, view=view)[0].targets, batch["partition"][:, view])
        np.testing.assert_array_equal(pgm.partition(batch.torch(), view=view).groups.numpy(), example.groups)
    assert len({example.t.tobytes() for example in (pgm.partition(batch, view=v) for v in range(3))}) == 3
    # One view drawn for each sequence at epoch 0 is `views: 1` of a job with that seed.
    one, t = pgm.draw_partitions(batch["sequence_id"], batch["attention_mask"], seed=42)
    drawn = pgm.partition(batch, seed=42, sampling="sequence")
    np.testing.assert_array_equal(drawn.groups, one[:, 0])
    np.testing.assert_array_equal(drawn.t, t[:, 0])
    with pytest.raises(ViewError, match="view: got 3, valid: 0 to 2"):
        pgm.partition(batch, view=3)
    with pytest.raises(ColumnError, match=r"no column 'partition'.*`partitions: \{views: 2\}`.*leave out `view`"):
        pgm.partition(batch_of(), view=0)


def test_no_group_is_empty_and_repairs_are_fair():
    ids, filled = np.arange(6000, dtype=np.uint64), np.zeros(3, int)
    for length in (2, 3, 9):
        valid = np.tile(np.arange(length + 3) < length, (6000, 1))
        groups, _ = pgm.draw_partitions(ids, valid, views=2, eps=0.0, stratified=False)
        ones = groups.sum(axis=2)
        assert ones.min() == 1 and ones.max() == length - 1 and not groups[:, :, length:].any()
        if length == 3:
            filled = groups[ones == 1].sum(axis=0)[:3]
    assert stats.chisquare(filled).pvalue > 1e-3
    assert not pgm.draw_partitions(ids[:9], np.zeros((9, 4), bool))[0].any()


def test_strata_hold_one_t_each_in_every_epoch():
    for epoch in (0, 5):
        _, t = pgm.draw_partitions(np.arange(500, dtype=np.uint64), np.ones((500, 2), bool), views=4, epoch=epoch)
        strata = np.floor((t.astype(float) - 1e-3) / 0.998 * 4).astype(int)
        assert (np.sort(strata, axis=1) == np.arange(4)).all()
        assert stats.chisquare(np.bincount(strata[:, 0])).pvalue > 1e-3


def test_group_shares():
    for power in (1.0, 3.0):
        groups, t = pgm.draw_partitions(
            np.arange(3000, dtype=np.uint64), np.ones((3000, 256), bool), schedule=Schedule(power)
        )
        share = 1 - (1 - t[:, 0].astype(float)) ** power
        repaired = (1 - share) ** 256 - share**256
        excess = groups[:, 0].sum(axis=1) - 256 * share - repaired
        assert abs(excess.sum()) < 4 * np.sqrt((256 * share * (1 - share)).sum())
