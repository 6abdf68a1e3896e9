"""Prime: the paper's published values, filter tables against brute force, and partial masks."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from scipy import stats
from test_views_keyed import batch_of

from stillhouse import Batch, Info, SubtokenInfo
from stillhouse.views import Schedule, ViewError, keyed, prime
from stillhouse.views.prime import (
    base_of,
    decode,
    encode,
    filter_table,
    idle_step_ratio,
    intermediate_states,
    shipped_permutation,
    valid_set,
)

M = 2  # the mask, where b = 2


@pytest.mark.parametrize(
    ("vocab", "length", "base"),
    [(50257, 2, 225), (50257, 3, 37), (50257, 4, 15), (50257, 6, 7), (50257, 8, 4)]
    + [(256, 2, 16), (256, 3, 7), (256, 4, 4)],
)
def test_bases_of_the_paper(vocab, length, base):
    assert base_of(vocab, length) == base


def test_bases_at_exact_powers():
    for base, length in ((256, 2), (16, 4), (2, 16), (65536, 2), (3, 10), (10, 6), (3, 20), (2, 62)):
        power = base**length
        assert base_of(power, length) == base == base_of(power - 1, length) and base_of(power + 1, length) == base + 1
    assert (base_of(7, 1), base_of(1, 4), base_of(2**64 - 1, 64)) == (7, 1, 2)
    with pytest.raises(ViewError, match="got 0, 4"):
        base_of(0, 4)


def test_digits_are_most_significant_first_and_come_back():
    assert encode(np.array([50256]), 15, 4).tolist() == [[14, 13, 5, 6]]
    for vocab, length in ((50257, 4), (256, 2), (7, 3), (50257, 8)):
        base, ids = base_of(vocab, length), np.arange(vocab)
        digits = encode(ids, base, length)
        assert digits.dtype == np.int32 and digits.min() >= 0 and digits.max() < base
        np.testing.assert_array_equal(decode(digits, base, vocab), ids)
        np.testing.assert_array_equal(decode(torch.from_numpy(digits), base, vocab), ids)
    assert decode(np.array([[1, 1, 1], [1, 1, 0], [0, 2, 0], [0, -1, 0]]), 2, 7).tolist() == [-1, 6, -1, -1]
    assert decode(np.array([[1, 0, 0, 0, 5]]), 65536, 7).tolist() == [-1]  # 2^64 + 5: no overflow


def test_intermediate_states_of_the_paper():
    assert [intermediate_states(256, length) for length in (2, 4, 8)] == [32, 368, 6304]


@pytest.mark.parametrize(("length", "percent"), [(1, 36.77), (2, 13.52), (3, 4.97), (4, 1.83), (6, 0.25), (8, 0.03)])
def test_idle_step_ratios_of_the_paper(length, percent):
    assert round(100 * idle_step_ratio(length), 2) == percent


def test_idle_step_ratio_by_simulation():
    # MDLM's reverse process unmasks a digit at a time that is distributed as 1 − α.
    random, steps, digits, schedule = np.random.default_rng(1), 16, 12, Schedule(3.0)
    times = schedule.time_of(random.random((20_000, digits)))
    at = np.minimum((times * steps).astype(int), steps - 1)
    busy = np.zeros((20_000, steps), bool)
    np.put_along_axis(busy, at, True, axis=1)
    assert abs((~busy).mean() - idle_step_ratio(4, steps=steps, positions=3, schedule=schedule)) < 2e-3


def strings(table, digits):
    return [tuple(encode(np.array(k), 2, 3).tolist()) for k in np.flatnonzero(valid_set(np.array(digits), table))]


def test_valid_sets_of_the_paper():
    table = filter_table(7, 3)
    assert table.shape == (3, 3, 7) and table.dtype == bool
    everything = strings(table, (M, M, M))
    assert len(everything) == 7 and (1, 1, 1) not in everything
    assert strings(table, (0, M, M)) == [(0, 0, 0), (0, 0, 1), (0, 1, 0), (0, 1, 1)]
    assert strings(table, (0, 0, M)) == [(0, 0, 0), (0, 0, 1)]
    assert strings(table, (1, M, 0)) == [(1, 0, 0), (1, 1, 0)]  # appendix A.2.3
    assert strings(table, (1, 1, 1)) == []


@pytest.mark.parametrize(("vocab", "length"), [(7, 3), (10, 2), (27, 3), (5, 1), (17, 5)])
def test_valid_sets_by_brute_force(vocab, length):
    base = base_of(vocab, length)
    table = filter_table(vocab, length)
    assert table.shape == (length, base + 1, vocab)
    states = list(itertools.product(range(base + 1), repeat=length))
    got = valid_set(np.array(states), table)
    same = valid_set(torch.tensor(states, dtype=torch.int32), torch.from_numpy(table))
    np.testing.assert_array_equal(same.numpy(), got)
    tokens = [tuple(k // base ** (length - 1 - j) % base for j in range(length)) for k in range(vocab)]
    for state, row in zip(states, got):
        expected = [all(s in (base, d) for s, d in zip(state, token)) for token in tokens]
        assert row.tolist() == expected
    whole = sum(base not in state and row.any() for state, row in zip(states, got))
    assert whole == vocab
    assert intermediate_states(vocab, length) == len(states) - vocab - 1


def test_masked_digits_by_the_definition():
    batch = batch_of(rows=5, length=12, epoch=3)
    example = prime.mask(batch, seed=6)
    u = keyed.uniforms(keyed.epoch_seed(6, 3), "prime_mask", batch["sequence_id"], 48).reshape(5, 12, 4)
    t = example.t.astype(float)[:, None]
    np.testing.assert_array_equal(example.digit_mask, u < t[..., None])
    np.testing.assert_array_equal(example.targets, (u < t[..., None]).any(axis=2))
    np.testing.assert_array_equal(example.digits, encode(batch["input_ids"], 15, 4))
    np.testing.assert_array_equal(example.input_ids, np.where(u < t[..., None], 15, example.digits))
    np.testing.assert_allclose(example.weights, np.where(example.targets, 1 / t, 0), rtol=1e-6)
    assert example.input_ids.dtype == np.int32 and (example.base, example.length) == (15, 4)


def test_the_truth_is_always_valid():
    batch = batch_of(rows=4, length=32, vocab=300, info=Info(300, 32, subtokens=SubtokenInfo(7, 3)))
    for columns in (batch, batch.torch()):
        example, table = prime.mask(columns), filter_table(300, 3)
        if columns is not batch:
            table = torch.from_numpy(table)
        allowed = valid_set(example.input_ids[example.targets], table)
        truth = example.target_ids()
        assert allowed[np.arange(len(truth)), truth].all()
        carried = valid_set(example.input_ids[~example.targets], table)
        assert (carried.sum(1) == 1).all()  # without a masked digit the token is known


@pytest.mark.parametrize("power", [1.0, 3.0])
def test_shares_of_masked_digits(power):
    batch, schedule = batch_of(rows=500, length=32), Schedule(power)
    for t in (0.1, 0.5):
        example = prime.mask(batch, t=t, schedule=schedule)
        share = 1 - (1 - float(np.float32(t))) ** power
        assert stats.binomtest(int(example.digit_mask.sum()), 500 * 32 * 4, share).pvalue > 1e-3
        assert stats.binomtest(int(example.targets.sum()), 500 * 32, 1 - (1 - share) ** 4).pvalue > 1e-3
    digits = prime.mask(batch, t=0.3).digit_mask.reshape(-1, 4).astype(float)
    assert np.abs(np.corrcoef(digits.T) - np.eye(4)).max() < 0.04


def test_without_carry_over_whole_tokens_are_targets_too():
    """As in the authors' code: the same masks, −w(t) · log p of every token, p over all C."""
    batch = batch_of(rows=6, lengths=[16, 16, 9, 3, 1, 0])
    never = np.arange(16) == 0
    for columns in (batch, batch.torch()):
        known, free = (prime.mask(columns, seed=4, never=never, carry_over=carry) for carry in (True, False))
        for name in ("input_ids", "digit_mask", "digits", "t", "valid"):
            np.testing.assert_array_equal(getattr(free, name), getattr(known, name), err_msg=name)
        np.testing.assert_array_equal(free.targets, batch["attention_mask"] & ~never)
        w = 1 / np.asarray(free.t, float)[:, None]
        np.testing.assert_allclose(free.weights, np.where(np.asarray(free.targets), w, 0), rtol=1e-6)
        assert not (np.asarray(known.targets) & ~np.asarray(free.targets)).any()
        assert np.asarray(free.targets).sum() > np.asarray(known.targets).sum()
        assert (known.carry_over, free.carry_over) == (True, False)
        assert len(free.target_ids()) == int(free.targets.sum())


@pytest.mark.parametrize("length", [1, 2, 4, 8])
def test_weights_sum_to_harmonic_numbers_of_the_length(length):
    eps, rows, info = 1e-3, 6000, Info(300, 32)
    batch = batch_of(rows=rows, length=32, vocab=300, info=info)
    sums = prime.mask(batch, length=length, eps=eps).weights.sum(axis=1, dtype=float) / 32
    t = np.linspace(eps, 1, 200_001)
    exact = float(np.mean((1 - (1 - t) ** length) / t))
    assert abs(exact - sum(1 / k for k in range(1, length + 1))) < 1e-3 * length  # H_ℓ
    assert abs(sums.mean() - exact) < 4 * sums.std() / rows**0.5
    every = prime.mask(batch, length=length, eps=eps, carry_over=False).weights.sum(axis=1, dtype=float) / 32
    assert abs(every.mean() / (np.log(1 / eps) / (1 - eps)) - 1) < 0.01


def test_stored_digits_are_used_and_others_are_made():
    batch = batch_of(rows=3)
    made = prime.mask(batch)
    batch["subtokens"] = encode(batch["input_ids"], 15, 4).astype(np.uint8)
    np.testing.assert_array_equal(prime.mask(batch).input_ids, made.input_ids)
    np.testing.assert_array_equal(prime.mask(batch.torch()).input_ids.numpy(), made.input_ids)
    batch["subtokens"][:] = 3
    assert (prime.mask(batch).digits == 3).all()  # the column, not the ids
    two = prime.mask(batch, length=2)
    assert (two.base, two.length, two.digits.shape) == (225, 2, (3, 16, 2))
    np.testing.assert_array_equal(decode(two.digits, 225, 50257), batch["input_ids"])
    bare = batch_of(info=Info(256, 16), vocab=256)
    with pytest.raises(ViewError, match=r"stores no sub-tokens.*`subtokens: \{length: 4\}`"):
        prime.mask(bare)
    # A base of 256 has digits of one byte, and a mask that is none.
    wide = prime.mask(batch_of(info=Info(65536, 16), vocab=65536), length=2, t=1.0)
    assert wide.base == 256 and (wide.input_ids == 256).all()
    with pytest.raises(ViewError, match="no info"):
        prime.mask(Batch(bare, state={"epoch": 0}), length=2)


def test_permuted_digits_come_back():
    numbers = np.array([5, 0, 4, 6, 1, 2, 3], np.int32)
    digits = encode(np.arange(7), 2, 3, numbers)
    assert digits[0].tolist() == [1, 0, 1] and digits[6].tolist() == [0, 1, 1]
    assert decode(digits, 2, 7, numbers).tolist() == list(range(7))
    assert decode(np.array([[1, 1, 1], [1, M, 0], [1, 0, 1]]), 2, 7, numbers).tolist() == [-1, -1, 0]
    tensor = torch.from_numpy(digits)
    assert decode(tensor, 2, 7, torch.from_numpy(numbers)).tolist() == list(range(7))
    table = filter_table(7, 3, numbers)
    sets = {
        y: np.flatnonzero(valid_set(np.array(y), table)).tolist() for y in [(M, M, M), (0, M, M), (0, 0, M), (1, 1, 1)]
    }
    assert sets == {(M, M, M): list(range(7)), (0, M, M): [1, 4, 5, 6], (0, 0, M): [1, 4], (1, 1, 1): []}


def test_masks_of_a_permuted_data_set_are_of_its_digits():
    numbers = shipped_permutation(300)
    batch = batch_of(rows=4, length=32, vocab=300, info=Info(300, 32, subtokens=SubtokenInfo(7, 3, "its sum", numbers)))
    example = prime.mask(batch)
    np.testing.assert_array_equal(example.digits, encode(numbers[batch["input_ids"]], 7, 3))
    allowed = valid_set(example.input_ids[example.targets], filter_table(300, 3, numbers))
    assert allowed[np.arange(len(allowed)), example.target_ids()].all()
    # another length is of the same numbers
    np.testing.assert_array_equal(prime.mask(batch, length=2).digits, encode(numbers[batch["input_ids"]], 18, 2))
    lost = batch_of(rows=4, length=32, vocab=300, info=Info(300, 32, subtokens=SubtokenInfo(7, 3, "its sum")))
    with pytest.raises(ViewError, match="has a permutation.npy, but its info was made without it"):
        prime.mask(lost)


def test_the_shipped_permutation_is_that_of_the_program():
    # operators/src/subtokens/tests.rs has the same numbers
    assert shipped_permutation(8).tolist() == [0, 5, 7, 6, 1, 4, 3, 2]
    assert shipped_permutation(50257)[:6].tolist() == [42549, 43130, 17803, 32943, 8641, 47974]
    assert sorted(shipped_permutation(1000).tolist()) == list(range(1000))
