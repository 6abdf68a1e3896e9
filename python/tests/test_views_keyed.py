"""Keyed uniforms, schedules and times: bits of the Rust side, distributions, and independence of the batch."""

from __future__ import annotations

import numpy as np
import pytest
from scipy import stats

from stillhouse import Batch, Info, SubtokenInfo
from stillhouse.views import LINEAR, Schedule, ViewError, keyed, mdlm, pgm
from stillhouse.views.times import LAST_TIME, stored_time, times

IDS = (np.arange(4000, dtype=np.uint64) % 1000) + (np.arange(4000, dtype=np.uint64) // 1000 << np.uint64(32))


def batch_of(rows=6, length=16, lengths=None, vocab=50257, first_id=0, info=None, seed=1, epoch=None, **columns):
    """A batch of random tokens; with `lengths`, rows are padded at the end with id 0."""
    random = np.random.default_rng(seed)
    ids = random.integers(1, vocab, (rows, length)).astype(np.int32)
    out = {"sequence_id": np.arange(first_id, first_id + rows).astype(np.uint64), "input_ids": ids}
    if lengths is not None:
        out["attention_mask"] = np.arange(length) < np.asarray(lengths)[:, None]
        ids[~out["attention_mask"]] = 0
    info = info or Info(vocab, length, subtokens=SubtokenInfo(15, 4), special_tokens={"mask": vocab})
    return Batch({**out, **columns}, info, None if epoch is None else {"epoch": epoch})


def slow_words(seed, purpose, sequence_id, count, stream):
    """Philox written again with Python's integers, one block at a time."""
    fnv = 0xCBF29CE484222325
    for byte in purpose.encode():
        fnv = ((fnv ^ byte) * 0x100000001B3) % 2**64
    z = ((seed ^ fnv) + 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    s = z ^ (z >> 31)
    out = []
    for block in range((count + 3) // 4):
        c, k = [block, stream, sequence_id % 2**32, sequence_id >> 32], [s % 2**32, s >> 32]
        for _ in range(10):
            p, q = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
            c = [(q >> 32) ^ c[1] ^ k[0], q % 2**32, (p >> 32) ^ c[3] ^ k[1], p % 2**32]
            k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
        out += c
    return out[:count]


def test_key_derivation_is_the_published_one():
    assert keyed.fnv1a64("") == 0xCBF29CE484222325
    assert keyed.fnv1a64("a") == 0xAF63DC4C8601EC8C
    assert keyed.splitmix64(0) == 0xE220A8397B1DCDAF


def test_philox_known_answers():
    # Random123's kat_vectors; the first is in the Rust doc as well.
    zero = keyed.philox4x32_10((0, 0, 0, 0), (0, 0))
    assert [int(word) for word in zero] == [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]
    ones = keyed.philox4x32_10((2**32 - 1,) * 4, (2**32 - 1,) * 2)
    assert [int(word) for word in ones] == [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]
    pi = keyed.philox4x32_10((0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344), (0xA4093822, 0x299F31D0))
    assert [int(word) for word in pi] == [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1]


@pytest.mark.parametrize("count", [0, 1, 4, 7, 33])
def test_words_are_those_of_a_slow_generator(count):
    ids = np.array([0, 7, 3 << 32 | 5, 2**64 - 1], np.uint64)
    got = keyed.words(42, "partitions", ids, count, 3)
    assert got.tolist() == [slow_words(42, "partitions", int(i), count, 3) for i in ids]
    pairs = keyed.integers(42, "partitions", ids, count, 3)
    for row, i in zip(pairs.tolist(), ids):
        word = slow_words(42, "partitions", int(i), 2 * count, 3)
        assert row == [word[2 * j] | word[2 * j + 1] << 32 for j in range(count)]


def slow_below(words, n):
    product = next(words) * n
    while product % 2**32 < (2**32 - n) % n:
        product = next(words) * n
    return product >> 32


def test_below_and_shuffles_follow_the_rust_algorithm():
    big = 3 << 30  # a quarter of all words is rejected
    for n in (0, 1, 6, big, 2**32 - 1):
        got = keyed.below(9, "test", IDS[:50], n)
        expected = [slow_below(iter(slow_words(9, "test", int(i), 400, 0)), n) if n else 0 for i in IDS[:50]]
        assert got.tolist() == expected
    for n in (0, 1, 2, 13):
        for row, i in zip(keyed.shuffles(9, "test", IDS[:20], n), IDS[:20]):
            words, order = iter(slow_words(9, "test", int(i), 400, 0)), list(range(n))
            for last in range(n - 1, 0, -1):
                j = slow_below(words, last + 1)
                order[last], order[j] = order[j], order[last]
            assert row.tolist() == order
            assert row.tolist() == keyed._shuffle_one(9, "test", np.array([i]), n, 0).tolist()


def test_a_rejected_word_sends_the_row_to_the_slow_shuffle(monkeypatch):
    true_words, calls = keyed.words, []

    def with_zero(seed, purpose, ids, count, stream=0):
        out = true_words(seed, purpose, ids, count, stream).copy()
        out[:, :1] = 0  # 0 · 7 = 0 < 2^32 mod 7: rejected
        calls.append(count)
        return out

    monkeypatch.setattr(keyed, "words", with_zero)
    rows = keyed.shuffles(1, "test", IDS[:3], 7)
    assert len(calls) == 4 and all(sorted(row) == list(range(7)) for row in rows.tolist())


def test_partitions_are_those_that_rust_stores():
    # operators/src/partitions/tests.rs, known_values_do_not_change.
    ids = np.array([3 << 32 | 5], np.uint64)
    groups, t = pgm.draw_partitions(ids, np.ones((1, 12), bool), views=2, seed=42)
    assert ["".join(str(int(g)) for g in view) for view in groups[0]] == ["011011100101", "110000100000"]
    assert t.tolist() == [[np.float32(0.5515568), np.float32(0.34423107)]]


def test_uniforms_are_uniform_and_streams_independent():
    drawn = keyed.uniforms(5, "test", IDS, 8)
    assert drawn.min() >= 0 and drawn.max() < 1
    for column in range(8):
        assert stats.kstest(drawn[:, column], "uniform").pvalue > 1e-3
    for seed, purpose, stream in ((5, "test", 1), (5, "other", 0), (6, "test", 0)):
        other = keyed.uniforms(seed, purpose, IDS, 8, stream)
        assert abs(np.corrcoef(drawn.ravel(), other.ravel())[0, 1]) < 0.02


def test_epochs_change_the_seed_as_documented():
    assert keyed.epoch_seed(42, 0) == 42
    assert keyed.epoch_seed(2**64 - 1, 1) == 0x9E3779B97F4A7C14
    for seed, epoch, name in ((-1, 0, "seed"), (2**64, 0, "seed"), (0, -1, "epoch")):
        with pytest.raises(ViewError, match=name):
            keyed.epoch_seed(seed, epoch)


@pytest.mark.parametrize("epoch", [0, 1, 59])
def test_t_is_uniform_in_every_epoch(epoch):
    t = times(IDS, 2, seed=3, epoch=epoch, purpose="mdlm_t", low=1e-3, high=1.0)
    assert t.dtype == np.float32 and t.min() >= 1e-3 and t.max() < 1
    for column in range(2):
        assert stats.kstest(t[:, column], stats.uniform(1e-3, 0.999).cdf).pvalue > 1e-3
    assert abs(np.corrcoef(t.T)[0, 1]) < 0.06


def test_epochs_of_one_sequence_spread_over_the_interval():
    t = np.stack([times(IDS[:100], 1, seed=3, epoch=e, purpose="mdlm_t", low=0, high=1.0)[:, 0] for e in range(60)])
    discrepancy = [stats.kstest(t[:, row], "uniform").statistic for row in range(100)]
    assert max(discrepancy) < 0.05  # 60 independent numbers have 0.11 on average


def test_t_is_not_rounded_out_of_its_bounds():
    for eps in (0.0, 1e-3, 0.1, 0.3, 0.49):
        for t in (eps, 1 - eps):
            got = float(stored_time(np.array([t]), eps, 1 - eps)[0])
            assert eps <= got <= 1 - eps and abs(got - t) < 1e-7
    assert stored_time(np.array([1.0]), 0.0, 1.0)[0] == LAST_TIME < 1
    with pytest.raises(ViewError, match="0.6 to 0.4"):
        times(IDS, 1, seed=0, epoch=0, purpose="x", low=0.6, high=0.4)


@pytest.mark.parametrize("power", [0.5, 1.0, 2.0, 3.0])
def test_schedules(power):
    schedule, t, h = Schedule(power), np.linspace(0.05, 0.95, 19), 1e-6
    alpha = (1 - t) ** power
    slope = (schedule.alpha(t + h) - schedule.alpha(t - h)) / (2 * h)
    np.testing.assert_allclose(schedule.alpha(t), alpha)
    np.testing.assert_allclose(schedule.share(t), 1 - alpha)
    np.testing.assert_allclose(schedule.derivative(t), slope, rtol=1e-6)
    np.testing.assert_allclose(schedule.weight(t), -slope / (1 - alpha), rtol=1e-6)
    np.testing.assert_allclose(schedule.complement_weight(t), -slope / alpha, rtol=1e-6)
    np.testing.assert_allclose(schedule.time_of(schedule.share(t)), t)


def test_the_linear_schedule_has_the_published_weights():
    t = np.array([0.25, 0.5, 1.0])
    assert LINEAR.weight(t).tolist() == [4, 2, 1]
    np.testing.assert_allclose(LINEAR.complement_weight(t[:2]), LINEAR.weight(1 - t[:2]))


def test_the_schedule_is_the_data_sets_and_errors_say_what_is_valid():
    batch = batch_of(vocab=100, info=Info(100, 16, schedule_power=3.0, special_tokens={"mask": 100}))
    cubic, linear = mdlm.mask(batch, schedule=Schedule(3.0)), mdlm.mask(batch, schedule="linear")
    np.testing.assert_array_equal(mdlm.mask(batch).weights, cubic.weights)
    assert not np.array_equal(cubic.weights, linear.weights)
    with pytest.raises(ViewError, match="got 'cosine', valid: 'linear'"):
        mdlm.mask(batch_of(), schedule="cosine")
    with pytest.raises(ViewError, match="power: got 0"):
        Schedule(0)
