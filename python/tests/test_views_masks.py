"""Masks of every view, MDLM and BD3-LM: what is masked, with which weight, and what may be attended to."""

from __future__ import annotations

import pickle
import sys
import types
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats
from test_views_keyed import batch_of

import stillhouse
import stillhouse.torch as st
from stillhouse import Batch, Info, Ragged, views
from stillhouse.views import Schedule, ViewError, bd3lm, keyed, mdlm, pgm, prime

V = 11


@pytest.fixture
def noise(monkeypatch):
    """Stands for stillhouse.noise: the "noise" of a token tells its sequence, its position and the entry."""

    def replay(batch, positions=None, draw=0, scale=1.0):
        torch_like = isinstance(positions, torch.Tensor)
        positions = np.asarray(positions)
        ids = np.asarray(batch["sequence_id"]).astype(np.int64)
        if positions.dtype == bool:
            row, position = np.nonzero(positions)
            token = ids[row] * 1000 + position
        else:
            token = ids[:, None] * 1000 + positions
        out = scale * (token[..., None] + np.arange(V) / 100 + 0.5)
        return torch.from_numpy(out) if torch_like else out

    module = types.ModuleType("stillhouse.noise")
    module.replay = replay
    monkeypatch.setitem(sys.modules, "stillhouse.noise", module)
    monkeypatch.setattr(stillhouse, "noise", module, raising=False)
    return replay


EVERY = {
    "mdlm": lambda b, **k: mdlm.mask(b, **k),
    "first half": lambda b, **k: mdlm.complementary(b, **k)[0],
    "second half": lambda b, **k: mdlm.complementary(b, **k)[1],
    "bd3lm": lambda b, **k: bd3lm.mask(b, block_size=4, **k),
    "pgm": lambda b, **k: pgm.partition(b, **k),
    "prime": lambda b, **k: prime.mask(b, **k),
}


def arrays(example):
    found = {name: value for name, value in vars(example).items() if hasattr(value, "dtype")}
    assert {"input_ids", "targets", "t", "weights", "valid"} <= set(found)
    return {name: np.asarray(value) for name, value in found.items()}


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
def test_a_row_whose_time_is_its_own_is_the_same_in_any_batch(view):
    whole = batch_of(rows=9, lengths=[16, 16, 3, 1, 0, 16, 9, 2, 16], epoch=2)
    expected = arrays(view(whole, seed=5, sampling="sequence"))
    for rows in ([3], [8, 0, 5], [2, 2], list(range(9))[::-1]):
        part = Batch({name: value[rows] for name, value in whole.items()}, whole.info, whole.state)
        for name, value in arrays(view(part, seed=5, sampling="sequence")).items():
            np.testing.assert_array_equal(value, expected[name][rows], err_msg=name)


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
def test_seed_and_epoch_change_the_example(view):
    batch = batch_of()
    base = arrays(view(batch))
    assert {name: v.tolist() for name, v in arrays(view(batch, epoch=0, seed=0)).items()} == {
        name: v.tolist() for name, v in base.items()
    }
    for other in (view(batch, seed=1), view(batch, epoch=1), view(batch_of(epoch=1))):
        assert not np.array_equal(arrays(other)["t"], base["t"])
    np.testing.assert_array_equal(view(batch_of(epoch=1)).t, view(batch, epoch=1).t)
    np.testing.assert_array_equal(view(batch_of(epoch=1), epoch=0).t, base["t"])


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
def test_torch_gives_what_numpy_gives(view):
    batch = batch_of(rows=5, lengths=[16, 7, 2, 0, 16], first_id=2**63)  # ids that are negative as int64
    example, other = view(batch), view(batch.torch())
    for name, value in arrays(example).items():
        got = getattr(other, name)
        assert isinstance(got, torch.Tensor), name
        np.testing.assert_array_equal(got.numpy(), value, err_msg=name)
        # what goes into a loss is int64 in torch
        assert got.numpy().dtype == (np.int64 if name == "digits" else value.dtype), name
    assert other.target_ids().tolist() == example.target_ids().tolist()
    assert other.target_ids().dtype == torch.int64 and example.target_ids().dtype == np.int32
    np.testing.assert_array_equal(other.target_weights().numpy(), example.target_weights())


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
def test_padding_is_no_target_and_stays(view):
    batch = batch_of(rows=4, lengths=[16, 5, 1, 0])
    example = view(batch)
    assert example.targets.any() and not (example.targets & ~batch["attention_mask"]).any()
    assert (example.weights[~example.targets] == 0).all() and (example.weights[example.targets] > 0).all()
    np.testing.assert_array_equal(example.valid, batch["attention_mask"])


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
def test_triplets_hold_the_noise_of_the_targets(view, noise):
    batch = batch_of(rows=5, lengths=[16, 7, 2, 0, 16])
    for columns in (batch, batch.torch()):
        example = view(columns)
        context, xi, tokens = example.triplet(scale=2.0)
        assert context is example.input_ids
        row, position = np.nonzero(np.asarray(example.targets))
        assert xi.shape == (len(row), V) and len(tokens) == len(row)
        np.testing.assert_allclose(xi, 2 * ((row * 1000 + position)[:, None] + np.arange(V) / 100 + 0.5))
        assert tokens.tolist() == batch["input_ids"][row, position].tolist()


def test_mdlm_masks_by_the_definition():
    batch = batch_of(rows=7)
    example = mdlm.mask(batch, seed=3, epoch=4)
    u = keyed.uniforms(keyed.epoch_seed(3, 4), "mdlm_mask", batch["sequence_id"], 16)
    expected = u < example.t.astype(float)[:, None]
    np.testing.assert_array_equal(example.targets, expected)
    np.testing.assert_array_equal(example.input_ids, np.where(expected, 50257, batch["input_ids"]))
    np.testing.assert_allclose(example.weights, np.where(expected, 1 / example.t[:, None], 0), rtol=1e-6)
    assert example.input_ids.dtype == np.int32 and example.weights.dtype == example.t.dtype == np.float32


@pytest.mark.parametrize("power", [1.0, 3.0, 0.5])
def test_the_masked_share_is_one_minus_alpha(power):
    schedule, batch = Schedule(power), batch_of(rows=2000, length=64)
    for t in (0.02, 0.3, 0.9, 1.0)[: 3 if power < 1 else 4]:  # below power 1, the weight at t = 1 is infinite
        masked = int(mdlm.mask(batch, t=t, schedule=schedule).targets.sum())
        share = 1 - (1 - float(np.float32(t))) ** power
        assert stats.binomtest(masked, 2000 * 64, min(share, 1.0)).pvalue > 1e-3
    assert (mdlm.mask(batch, t=np.linspace(0.1, 1, 2000)).t == np.linspace(0.1, 1, 2000, dtype=np.float32)).all()


def test_weights_of_mdlm_sum_to_the_length():
    # E_t[w(t) · share(t)] = E[−α'] = 1 for any schedule; eps cuts a thousandth off.
    for power in (1.0, 3.0):
        example = mdlm.mask(batch_of(rows=8000, length=64), schedule=Schedule(power))
        sums = example.weights.sum(axis=1, dtype=float) / 64
        assert abs(sums.mean() - 1) < 4 * sums.std() / 8000**0.5 + 2e-3 * power


def test_never_and_mask_id():
    batch = batch_of(info=Info(50257, 16))
    with pytest.raises(ViewError, match=r"no mask token.*vocab_size, 50257 here"):
        mdlm.mask(batch)
    example = mdlm.mask(batch, mask_id=7, t=1.0, never=np.arange(16) < 3)
    assert (example.input_ids[:, 3:] == 7).all() and not example.targets[:, :3].any() and example.targets[:, 3:].all()
    rows = np.zeros((6, 16), bool)
    rows[2] = True
    assert mdlm.mask(batch.torch(), mask_id=7, t=1.0, never=torch.from_numpy(rows)).targets.sum() == 5 * 16
    padded = mdlm.mask(batch_of(lengths=[16, 5, 1, 0, 16, 9]), t=1.0, never=np.arange(16) < 3)
    np.testing.assert_array_equal(padded.targets, padded.valid & (np.arange(16) >= 3))
    with pytest.raises(ViewError, match=r"never: got shape \[5\], valid: \[6, 16\]"):
        mdlm.mask(batch, mask_id=7, never=np.zeros(5, bool))
    for t, message in ((0.0, "more than 0"), (1.5, "at most 1"), (np.ones(3), r"valid: a number or \[6\]")):
        with pytest.raises(ViewError, match=message):
            mdlm.mask(batch, mask_id=7, t=t)


def test_rows_of_different_lengths_are_padded():
    batch = batch_of(rows=3, lengths=[16, 4, 9])
    flat = batch["input_ids"][batch["attention_mask"]]
    ragged = Batch(
        {"sequence_id": batch["sequence_id"], "input_ids": Ragged(flat, np.array([0, 16, 20, 29]))}, batch.info
    )
    for other in (ragged, ragged.torch()):
        with pytest.raises(ViewError, match=r"rows differ in length.*batch\.padded\(\)"):
            mdlm.mask(other)
        padded = other.padded()
        np.testing.assert_array_equal(mdlm.mask(padded).input_ids, mdlm.mask(batch).input_ids)
        np.testing.assert_array_equal(pgm.partition(padded).groups, pgm.partition(batch).groups)


@pytest.mark.parametrize("size", [1, 4, 5, 16, 99])
def test_blocks_have_their_own_time(size):
    batch = batch_of(rows=300)
    example = bd3lm.mask(batch, block_size=size)
    blocks = -(-16 // size)
    assert example.t.shape == (300, blocks) and example.blocks == blocks
    assert len(np.unique(example.t)) == 300 * blocks
    t = example.t[:, np.arange(16) // size].astype(float)
    u = keyed.uniforms(0, "bd3lm_mask", batch["sequence_id"], 16)
    np.testing.assert_array_equal(example.targets, u < t)
    np.testing.assert_allclose(example.weights, np.where(u < t, 1 / t, 0), rtol=1e-6)
    assert stats.kstest(example.t.ravel(), stats.uniform(1e-3, 0.999).cdf).pvalue > 1e-3
    narrow = bd3lm.mask(batch, block_size=size, t_range=(0.3, 0.8)).t
    assert stats.kstest(narrow.ravel(), stats.uniform(0.3, 0.5).cdf).pvalue > 1e-3


def test_one_block_at_a_time_sees_nothing_later():
    batch = batch_of(rows=20, length=18, lengths=[18] * 15 + [7] * 5)
    for columns in (batch, batch.torch()):
        example = bd3lm.mask(columns, block_size=4)
        targets = np.zeros((20, 18), bool)
        for block in range(5):
            one = example.block(block)
            start, stop = 4 * block, 4 * block + 4
            ids, clean = np.asarray(one.input_ids), batch["input_ids"]
            np.testing.assert_array_equal(ids[:, :start], clean[:, :start])
            np.testing.assert_array_equal(ids[:, start:stop], np.asarray(example.input_ids)[:, start:stop])
            assert (ids[:, stop:] == 50257).all()
            np.testing.assert_array_equal(np.asarray(one.weights) > 0, np.asarray(one.targets))
            targets |= np.asarray(one.targets)
            assert one.target_ids().tolist() == clean[np.asarray(one.targets)].tolist()
        np.testing.assert_array_equal(targets, np.asarray(example.targets))
        with pytest.raises(ViewError, match="block: got 5, valid: 0 to 4"):
            example.block(5)
    untouched = batch_of(rows=20, length=18, lengths=[18] * 15 + [7] * 5)
    np.testing.assert_array_equal(columns["input_ids"].numpy(), untouched["input_ids"])


def test_block_attention_by_the_papers_three_rules():
    length, size = 7, 3
    mask = bd3lm.block_attention(length, size)
    for q in range(2 * length):
        for k in range(2 * length):
            clean_q, clean_k = q >= length, k >= length
            bq, bk = q % length // size, k % length // size
            diagonal = bq == bk and clean_q == clean_k
            offset = bq > bk and clean_k and not clean_q
            causal = bq >= bk and clean_k and clean_q
            assert mask[q, k] == (diagonal or offset or causal)
    batch = batch_of(rows=3, length=7, lengths=[7, 4, 0])
    for columns in (batch, batch.torch()):
        example = bd3lm.mask(columns, block_size=3)
        both = np.asarray(example.noised_and_clean())
        np.testing.assert_array_equal(both, np.concatenate([example.input_ids, columns["input_ids"]], axis=1))
        allowed, valid = np.asarray(example.attention()), np.tile(batch["attention_mask"], 2)
        np.testing.assert_array_equal(allowed, mask & valid[:, :, None] & valid[:, None, :])
    with pytest.raises(ViewError, match="block_size: got 0"):
        bd3lm.mask(batch, block_size=0)


def test_views_stay_outside_of_a_compiled_step(small: Any) -> None:
    """torch.compile would trace their numpy, and fail on its unsigned numbers; around them it compiles as ever."""
    ds = st.StreamingShardDataset(small("words", {}), batch_size=4)
    batch = next(iter(ds))

    def step(batch: Any) -> Any:
        example = views.mdlm.mask(batch, mask_id=1)
        halves = views.mdlm.complementary(batch, mask_id=1)
        return (example.weights * 2).sum() + halves[0].weights.sum()

    compiled = torch.compile(step, backend="eager")
    assert torch.equal(compiled(batch), step(batch))
    assert pickle.loads(pickle.dumps(views.mdlm.mask)) is views.mdlm.mask


@pytest.mark.parametrize("kind", [st.StreamingShardDataset, st.ShardDataset])
def test_masks_of_an_evaluation_are_those_of_every_pass(kind: Any, small: Any) -> None:
    def passes(**options: Any) -> list[list[Any]]:
        loader = st.DataLoader(kind(small("words", {}), batch_size=4, shuffle=False, **options))
        return [[views.mdlm.mask(batch, mask_id=1).targets for batch in loader] for _ in range(3)]

    first, *others = passes(evaluation=True)
    assert all(torch.equal(a, b) for other in others for a, b in zip(first, other, strict=True))
    first, *others = passes()
    assert not any(all(torch.equal(a, b) for a, b in zip(first, other, strict=True)) for other in others)
