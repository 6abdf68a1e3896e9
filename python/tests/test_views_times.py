"""Times over the global batch: MDLM's strata, uniform for every row, the same however many ranks share the rows."""

from __future__ import annotations

import copy
import pathlib
import pickle
from dataclasses import replace

import numpy as np
import pytest
import torch
from scipy import stats
from test_views_keyed import batch_of
from test_views_masks import EVERY, arrays

import stillhouse
import stillhouse.torch as st
from stillhouse import Batch, GlobalBatch
from stillhouse.views import Schedule, ViewError, armd, bd3lm, keyed, mdlm, pgm, prime
from stillhouse.views.armd import strided_order
from stillhouse.views.times import stride

TIMED = {
    "mdlm": lambda b, **k: mdlm.mask(b, **k).t,
    "halves": lambda b, **k: mdlm.complementary(b, **k)[0].t,
    "pgm": lambda b, **k: pgm.partition(b, **k).t,
    "prime": lambda b, **k: prime.mask(b, **k).t,
    "bd3lm": lambda b, **k: bd3lm.mask(b, block_size=4, **k).t,
}


def part(whole, rows, place):
    return Batch({name: value[rows] for name, value in whole.items()}, whole.info, None, place)


def placed(rows, begin=0, epoch=0, **options):
    """The rows of a whole global batch, on one rank."""
    batch = batch_of(rows=rows, first_id=begin, **options)
    batch.global_batch = GlobalBatch(epoch, begin, rows)
    return batch


def test_a_global_batch_knows_its_rows():
    for rows, world in ((32, 1), (32, 4), (10, 4), (3, 5)):
        ranks = [GlobalBatch(0, 100, rows, rank, world) for rank in range(world)]
        dealt = [place.indices() for place in ranks]
        assert sorted(np.concatenate(dealt).tolist()) == list(range(rows))
        for rank, (place, indices) in enumerate(zip(ranks, dealt)):
            assert indices.dtype == np.uint64 and indices.tolist() == list(range(rank, rows, world))
            assert place.local_rows == len(indices)
    place = GlobalBatch(epoch=1, begin=2, rows=10, rank=1, world_size=4)
    assert place.indices(2).tolist() == [1, 5] and place.indices(0).tolist() == []
    assert pickle.loads(pickle.dumps(place)) == place == GlobalBatch(np.int64(1), np.uint64(2), 10, np.int32(1), 4)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"epoch": -1}, "epoch: got -1, valid: 0 or more"),
        ({"begin": -5}, "begin: got -5"),
        ({"rows": 0}, "rows: got 0, valid: 1 or more"),
        ({"world_size": 0}, "world_size: got 0"),
        ({"rank": -1}, "rank: got -1"),
        ({"rank": 4}, "rank: got 4, valid: 0 to 3"),
    ],
)
def test_no_global_batch_is_impossible(wrong, message):
    with pytest.raises(ValueError, match=message):
        GlobalBatch(**{"epoch": 0, "begin": 0, "rows": 8, "rank": 0, "world_size": 4, **wrong})
    with pytest.raises(ValueError, match="count: got 4, valid: 0 to 3, the rows of rank 1"):
        GlobalBatch(0, 0, 10, 1, 4).indices(4)
    with pytest.raises(TypeError):
        GlobalBatch(0, 0, 1.5)


def test_a_batch_keeps_its_global_batch():
    batch = placed(4, begin=8, epoch=3)
    place = batch.global_batch
    copies = [copy.copy(batch), pickle.loads(pickle.dumps(batch)), batch.torch(), batch.torch().numpy(), batch.padded()]
    copies.append(batch.torch().to(torch.int32))
    assert all(made.global_batch == place for made in copies) and Batch({}).global_batch is None
    assert mdlm.mask(batch).t.tolist() == mdlm.mask(batch, epoch=3).t.tolist() != mdlm.mask(batch, epoch=0).t.tolist()


def test_every_stratum_of_the_global_batch_has_one_time_by_the_definition():
    batch = placed(32, begin=640, epoch=2)
    t = mdlm.mask(batch, seed=7).t.astype(float)
    key = keyed.epoch_seed(7, 2)
    turn = int(keyed.below(key, "mdlm_t_turn", np.array([640]), 32, 1)[0])
    u = keyed.uniforms(key, "mdlm_t_row", np.arange(640, 672, dtype=np.uint64), 1, 1)[:, 0]
    stratum = (19 * np.arange(32) + turn) % 32  # 19 is next to 32/φ = 19.8 and has no divisor in common with 32
    np.testing.assert_allclose(t, 1e-3 + 0.999 * (stratum + u) / 32, atol=1e-7)
    assert sorted(np.floor((t - 1e-3) / 0.999 * 32).astype(int).tolist()) == list(range(32))


@pytest.mark.parametrize("view", TIMED.values(), ids=TIMED)
@pytest.mark.parametrize("where", ["global batch", "no global batch"])
def test_the_mean_of_32_times_is_as_exact_as_that_of_mdlm(view, where):
    """Its standard deviation: 32^{−3/2}/√12 = 0.0016 for MDLM's code, 32^{−1/2}/√12 = 0.0510 for independent times."""
    means, independent = [], []
    for n in range(400):
        batch = placed(32, begin=32 * n)
        if where == "no global batch":
            batch.global_batch = None
        means.append(view(batch).astype(float).mean())
        independent.append(view(batch, sampling="sequence").astype(float).mean())
    count = 32 * view(batch).size // 32
    assert np.std(means) < 1.15 * count**-1.5 / 12**0.5
    assert np.std(independent) > 0.85 * count**-0.5 / 12**0.5
    middle = 0.5 if view in (TIMED["halves"], TIMED["pgm"]) else 0.5005
    assert abs(np.mean(means) - middle) < 4 * np.std(means) / 20


def test_mdlms_own_formula_has_that_deviation():
    random = np.random.default_rng(1)
    t = (random.random((4000, 32)) / 32 + np.arange(32) / 32) % 1
    assert abs(t.mean(axis=1).std() - 0.0016) < 5e-5


@pytest.mark.parametrize("view", EVERY.values(), ids=EVERY)
def test_examples_are_the_same_however_many_ranks_share_the_rows(view):
    for rows in (32, 13, 3):  # 13 and 3: the last global batch, which is not full
        whole = placed(rows, begin=96, epoch=1, lengths=[16, 9, 3, 16, 2, 1, 16, 0] * 4 if rows == 32 else None)
        expected = arrays(view(whole, seed=3))
        for world in (2, 4, 8):
            for rank in range(min(world, rows)):
                place = GlobalBatch(1, 96, rows, rank, world)
                mine = part(whole, place.indices().astype(int), place)
                for name, value in arrays(view(mine, seed=3)).items():
                    np.testing.assert_array_equal(value, expected[name][rank::world], err_msg=f"{name} {world}")


@pytest.mark.parametrize("view", TIMED.values(), ids=TIMED)
def test_times_are_uniform_for_each_row_and_change_with_seed_epoch_and_place(view):
    base = placed(8, begin=800)
    t = view(base, seed=1)
    places = [(1, GlobalBatch(0, 808, 8)), (1, GlobalBatch(1, 800, 8)), (2, GlobalBatch(0, 800, 8))]
    for seed, place in places:
        other = view(part(base, slice(None), place), seed=seed)
        assert not np.isclose(other, t).any()
    # The same index, and the same sequence, in many global batches: uniform, which MDLM's own order leaves to the shuffle.
    for row in (0, 5):
        drawn = [view(part(base, slice(None), GlobalBatch(0, 8 * n, 8)))[row].ravel()[0] for n in range(300)]
        assert stats.kstest(drawn, stats.uniform(1e-3, 0.999).cdf).pvalue > 1e-3
    epochs = [view(part(base, slice(None), GlobalBatch(e, 0, 8)))[3].ravel()[0] for e in range(300)]
    assert stats.kstest(epochs, stats.uniform(1e-3, 0.999).cdf).pvalue > 1e-3


def test_ranks_micro_batches_and_blocks_are_spread_over_the_interval():
    for rows, world in ((32, 4), (512, 8), (256, 2)):
        t = mdlm.mask(placed(rows, length=4)).t
        for rank in range(world):
            mine = np.sort(t[rank::world])
            assert np.diff(mine).max() < 2.1 * world / rows
    for rows in (32, 256, 512):  # micro-batches of 8; in MDLM's order the first would have t < 8/rows
        for micro in mdlm.mask(placed(rows, length=4)).t.reshape(-1, 8):
            assert abs(micro.mean() - 0.5) < 0.15 and np.ptp(micro) > 0.8
    blocks = bd3lm.mask(placed(16, length=64), block_size=4).t  # 16 blocks in each row
    assert np.abs(blocks.mean(axis=1) - 0.5).max() < 0.1


@pytest.mark.parametrize("cells", [1, 2, 3, 4, 5, 6, 12, 30, 32, 512, 30030, 2**31])
def test_strides_go_through_all_strata(cells):
    a = stride(cells)
    assert np.gcd(a, cells) == 1 and 1 <= a <= max(cells, 1)
    assert abs(a - cells / 1.6180339887498949) < 10
    if cells < 1000:
        assert sorted(i * a % cells for i in range(cells)) == list(range(cells))


def test_a_part_of_a_global_batch_is_refused():
    whole = placed(8)
    some = part(whole, slice(0, 4), whole.global_batch)
    for view in TIMED.values():
        with pytest.raises(
            ViewError, match=r"got 4 rows, but its global batch of 8 rows has 8 for rank 0 of 1;.*sampling='sequence'"
        ):
            view(some)
        assert len(view(some, sampling="sequence")) == 4
    assert mdlm.mask(some, t=0.5).targets.any()
    some.global_batch = None
    assert sorted(np.floor((mdlm.mask(some).t - 1e-3) / 0.999 * 4).tolist()) == [0, 1, 2, 3]


def test_parts_of_a_batch_have_the_times_of_the_whole():
    for columns in (placed(8), placed(8).torch()):
        for view in TIMED.values():
            whole = view(columns)
            for rows in (slice(2, 5), [3, 1], [5, 5], np.arange(8) % 3 == 0, slice(None, None, -1)):
                np.testing.assert_array_equal(
                    view(columns[rows]), whole[list(range(8))[rows] if isinstance(rows, slice) else rows]
                )
            np.testing.assert_array_equal(view(columns[2:7][1:3]), whole[3:5])
            np.testing.assert_array_equal(view(Batch.concat(columns.split(3))), whole)
        place = columns.global_batch
        assert columns[2:5].global_batch == replace(place, part=(2, 3, 4)) and columns[:].global_batch == place
        assert Batch.concat(columns.split(3)).global_batch == place
        other = placed(8, begin=8) if columns["input_ids"].dtype == np.int32 else placed(8, begin=8).torch()
        assert Batch.concat([columns, other]).global_batch is None
    with pytest.raises(ValueError, match="part: got row 3, valid: 0 to 2, the rows of rank 1"):
        GlobalBatch(0, 0, 10, 1, 4, part=(0, 3))
    tensors = placed(8, epoch=5).torch()
    again = Batch(dict(tensors))  # as transformers' Trainer does
    assert again.global_batch == tensors.global_batch == GlobalBatch(5, 0, 8)


def test_epochs_of_numpy_know_their_global_batch(plain: pathlib.Path) -> None:
    def times(world: int, begin: int) -> dict[int, float]:
        found = {}
        for rank in range(world):
            epochs = stillhouse.Epochs(plain, batch_size=96 // world, rank=rank, world_size=world, seed=3)
            epochs.load_state_dict({**epochs.state_dict(), "epoch": 1, "position": begin})
            for batch in epochs:
                place = batch.global_batch
                assert place.epoch == 1 and place.begin + place.rows == batch.state["position"]
                found |= dict(zip(batch["sequence_id"].tolist(), mdlm.mask(batch, mask_id=9).t.tolist(), strict=True))
        return found

    assert times(1, 960) == times(3, 960)


def test_without_a_global_batch_the_batch_is_keyed_by_its_sequences():
    batch = batch_of(rows=8)
    t = mdlm.mask(batch).t
    assert t.tolist() == mdlm.mask(batch_of(rows=8, seed=9)).t.tolist()  # the tokens do not matter
    assert not np.isclose(mdlm.mask(batch_of(rows=8, first_id=8)).t, t).any()
    assert not np.isclose(mdlm.mask(placed(8)).t, t).any()
    assert mdlm.mask(batch_of(rows=0)).t.shape == (0,)
    with pytest.raises(ViewError, match="sampling: got 'x', valid: 'antithetic', 'sequence'"):
        mdlm.mask(batch, sampling="x")


def test_the_deviation_of_the_loss_is_that_of_the_weights_and_not_of_the_times():
    """What it is for: Σ weights · loss of a batch, the loss of a token growing with t as that of a real model does."""

    def losses(sampling):
        made = (mdlm.mask(placed(32, begin=32 * n, length=256), sampling=sampling) for n in range(150))
        return [float((example.weights * example.t[:, None]).mean()) for example in made]

    assert np.std(losses("antithetic")) < 0.5 * np.std(losses("sequence"))


def test_one_number_of_streams_for_the_whole_step():
    whole = placed(12, begin=24, length=8)
    drawn = []
    for n in range(300):
        whole.global_batch = GlobalBatch(0, 12 * n, 12)
        order = armd.strided(whole, per="step").order
        assert (order == order[0]).all()
        drawn.append(next(s for s in (1, 2, 4) if (order[0] == strided_order(8, s)[0]).all()))
        for rank in range(3):
            place = GlobalBatch(0, 12 * n, 12, rank, 3)
            mine = armd.strided(part(whole, place.indices().astype(int), place), per="step")
            np.testing.assert_array_equal(mine.order, order[rank::3])
    assert stats.chisquare(np.bincount(drawn)[[1, 2, 4]]).pvalue > 1e-3
    assert len({armd.strided(whole, per="step", epoch=e).order.tobytes() for e in range(20)}) == 3
    several = {tuple(row) for row in armd.strided(whole).order.tolist()}
    assert len(several) > 1  # per sequence, the default
    bare = batch_of(rows=5, length=8)
    assert len({tuple(row) for row in armd.strided(bare, per="step").order.tolist()}) == 1
    assert armd.strided(batch_of(rows=0, length=8), per="step").order.shape == (0, 8)
    with pytest.raises(ViewError, match="per: got 'batch', valid: 'sequence', 'step'"):
        armd.strided(bare, per="batch")


def test_shares_of_the_schedule_hold_with_antithetic_times():
    schedule = Schedule(3.0)
    example = mdlm.mask(placed(3000, length=64), schedule=schedule)
    share = 1 - (1 - example.t.astype(float)) ** 3
    excess = example.targets.sum(axis=1) - 64 * share
    assert abs(excess.sum()) < 4 * np.sqrt((64 * share * (1 - share)).sum())


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("kind", [st.StreamingShardDataset, st.ShardDataset])
def test_loaders_of_1_and_3_ranks_make_the_same_examples(kind: type, workers: int, plain: pathlib.Path) -> None:
    def examples(world: int) -> dict[tuple[int, int], tuple[float, bytes]]:
        found, means = {}, []
        for rank in range(world):
            dataset = kind(
                plain, batch_size=96 // world, rank=rank, world_size=world, seed=3,
                transform=lambda batch: (batch.global_batch, batch["sequence_id"], mdlm.mask(batch, mask_id=50257)),
            )  # fmt: skip
            loader = st.DataLoader(dataset, num_workers=workers)
            for epoch in range(2):
                for place, ids, example in loader:
                    assert place.epoch == epoch
                    for sequence, t, targets in zip(
                        ids.tolist(), example.t.tolist(), example.targets.numpy(), strict=True
                    ):
                        found[epoch, sequence] = (t, targets.tobytes())
                    if place.rows == 96 and world == 1:
                        means.append(example.t.double().mean().item())
        if world == 1:
            assert np.std(means) < 0.0004  # 0.0003 = 96^{−3/2}/√12, and 0.03 for independent times
        return found

    one = examples(1)
    assert examples(3) == one
    first, second = ({key[1]: value for key, value in one.items() if key[0] == epoch} for epoch in (0, 1))
    assert first.keys() == second.keys() and not any(first[key] == second[key] for key in first)
