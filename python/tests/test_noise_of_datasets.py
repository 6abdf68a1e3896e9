"""Noise and views of data sets that the program wrote: the journey from a job file to a triplet."""

from __future__ import annotations

import pathlib
from typing import Any

import numpy as np
import pytest
import torch
from shared_fixtures import ROOT, WORDS, Maker, merged, run, words

import stillhouse
from stillhouse import views

REPLAY: dict[str, Any] = {"extract": {"topk": WORDS, "noise": {"draws": 2, "tolerance": 1e-3}}}
DENSE: dict[str, Any] = {"extract": {"topk": 0, "noise": {"codec": "dense", "precision": "f32", "draws": 2}}}


@pytest.fixture(scope="module")
def batch(small: Maker) -> stillhouse.Batch:
    return stillhouse.open(small("noise-replay", REPLAY))[:]


@pytest.fixture(scope="module")
def dense(small: Maker) -> stillhouse.Batch:
    return stillhouse.open(small("noise-dense", DENSE))[:]


def test_replayed_noise_is_within_the_tolerance_of_dense_noise(
    batch: stillhouse.Batch, dense: stillhouse.Batch
) -> None:
    np.testing.assert_array_equal(batch["input_ids"], dense["input_ids"])
    worst = 0.0
    for draw in range(2):
        exact = stillhouse.noise.replay(dense, draw=draw, out="softmax").astype(np.float64)
        replayed = stillhouse.noise.replay(batch, draw=draw, out="softmax").astype(np.float64)
        variation = np.abs(exact - replayed).sum(axis=-1) / 2
        worst = max(worst, float(variation.max()))
        assert variation.max() <= 1e-3
        xi = stillhouse.noise.replay(dense, draw=draw, out="gumbel")
        np.testing.assert_array_equal(xi, dense["noise"][:, draw])
    assert worst > 1e-4  # the tolerance is used, so the corrections are what keeps it
    with pytest.raises(ValueError, match="draw"):
        stillhouse.noise.replay(batch, draw=2)


@pytest.mark.parametrize("backend", ["rust", "torch"])
@pytest.mark.parametrize(
    "noise",
    [
        {"tolerance": 1e-3},
        {"tolerance": 1e-1},
        {"tolerance": 2e-5, "precision": "f16"},
        {"tolerance": 2e-5},
        {"codec": "dense", "precision": "f16"},
        {"codec": "dense", "precision": "f32"},
    ],
    ids=str,
)
def test_the_observed_token_wins(small: Maker, noise: dict[str, Any], backend: str) -> None:
    """argmax_k (l_k + ξ_k) = x with the teacher's whole distribution, of all noise as it is stored and replayed in f32."""
    name = "wins-" + "-".join(map(str, noise.values()))
    batch = stillhouse.open(small(name, {"extract": {"topk": WORDS, "noise": {"draws": 8, **noise}}}))[:]
    assert batch.info is not None and batch.info.noise is not None and batch.info.noise.condition
    logprob = np.full((*batch["input_ids"].shape, WORDS), -np.inf, np.float32)
    np.put_along_axis(logprob, batch["topk_index"].astype(np.int64), batch["topk_logprob"], axis=-1)
    for draw in range(8):
        if backend == "rust":
            winner = (logprob + stillhouse.noise.replay(batch, draw=draw, out="gumbel")).argmax(axis=-1)
        else:
            xi = stillhouse.noise.replay(batch.torch(), draw=draw, out="gumbel", backend="torch")
            winner = (torch.from_numpy(logprob) + xi).argmax(dim=-1).numpy()
        np.testing.assert_array_equal(winner, batch["input_ids"])


def test_without_the_condition_it_may_lose(small: Maker) -> None:
    """What the test above would find."""
    loose = {"extract": {"topk": WORDS, "noise": {"condition": False, "tolerance": 1e-1}}}
    batch = stillhouse.open(small("loose", loose))[:]
    assert batch.info is not None and batch.info.noise is not None and not batch.info.noise.condition
    logprob = np.full((*batch["input_ids"].shape, WORDS), -np.inf)
    np.put_along_axis(logprob, batch["topk_index"].astype(np.int64), batch["topk_logprob"], axis=-1)
    winner = (logprob + stillhouse.noise.replay(batch, out="gumbel")).argmax(axis=-1)
    assert (winner != batch["input_ids"]).any()


def test_torch_and_numpy_agree(batch: stillhouse.Batch) -> None:
    positions = batch["input_ids"] % 3 == 0
    expected = stillhouse.noise.replay(batch, positions)
    got = stillhouse.noise.replay(batch.torch(), torch.from_numpy(positions))
    assert expected.shape == (positions.sum(), WORDS)
    np.testing.assert_array_equal(got.numpy(), expected)
    on_torch = stillhouse.noise.replay(batch.torch(), torch.from_numpy(positions), backend="torch")
    np.testing.assert_allclose(on_torch.numpy(), expected, rtol=2e-5, atol=1e-26)


def test_rows_of_different_lengths(small: Maker) -> None:
    ds = stillhouse.open(
        small(
            "keep", {"pack": {"remainder": "keep", "separator": "none"}, "extract": {"noise": {"draws": 2}, "topk": 3}}
        )
    )
    with pytest.raises(stillhouse.StillhouseError, match="padded"):
        stillhouse.noise.replay(ds[:])
    padded = ds[:].padded()
    noise = stillhouse.noise.replay(padded, padded["attention_mask"], draw=1, out="gumbel")
    one = [stillhouse.noise.replay(ds[i : i + 1].padded(), draw=1, out="gumbel")[0] for i in range(len(ds))]
    np.testing.assert_array_equal(noise, np.concatenate(one))


@pytest.mark.parametrize("kind", ["numpy", "torch"])
def test_every_view_gives_its_triplet(demo: pathlib.Path, kind: str) -> None:
    ds = stillhouse.open(demo)
    batch = ds[:4] if kind == "numpy" else ds[:4].torch()
    ids = np.asarray(batch["input_ids"])
    everywhere = np.asarray(stillhouse.noise.replay(batch))
    made = {
        "mdlm": views.mdlm.mask(batch, mask_id=50_257),
        "first half": views.mdlm.complementary(batch, mask_id=50_257)[0],
        "second half": views.mdlm.complementary(batch, mask_id=50_257)[1],
        "pgm stored": views.pgm.partition(batch, view=1),
        "pgm drawn": views.pgm.partition(batch, epoch=3),
        "prime": views.prime.mask(batch),
        "bd3lm": views.bd3lm.mask(batch, mask_id=50_257, block_size=16),
    }
    for name, example in made.items():
        targets = np.asarray(example.targets)
        context, noise, tokens = example.triplet()
        assert targets.any(), name
        assert context.shape[:2] == ids.shape and type(noise) is type(batch["input_ids"]), name
        np.testing.assert_array_equal(np.asarray(noise), everywhere[targets], err_msg=name)
        np.testing.assert_array_equal(np.asarray(tokens), ids[targets], err_msg=name)
    heads = views.medusa.targets(batch, heads=3)
    noise = np.asarray(heads.noise())
    np.testing.assert_array_equal(noise[:, 5, 2], everywhere[:, 8])
    order = views.armd.strided(batch, streams=4)
    permuted = np.take_along_axis(everywhere, np.asarray(order.order)[:, :, None].astype(np.int64), axis=1)
    np.testing.assert_array_equal(np.asarray(order.noise()), permuted.reshape(-1, 50_257))


def test_stored_columns_are_what_the_views_draw(demo: pathlib.Path) -> None:
    """The operators in Rust and the views in numpy are two implementations of one definition."""
    batch = stillhouse.open(demo)[:]
    one, t = views.pgm.draw_partitions(batch["sequence_id"], np.ones(batch["input_ids"].shape, bool), views=2, seed=42)
    np.testing.assert_array_equal(batch["partition"], one)
    np.testing.assert_array_equal(batch["partition_t"], t)
    np.testing.assert_array_equal(batch["subtokens"], views.prime.encode(batch["input_ids"], 15, 4))
    np.testing.assert_array_equal(views.prime.decode(batch["subtokens"], 15, 50_257), batch["input_ids"])


def test_columns_that_a_job_did_not_make(plain: pathlib.Path) -> None:
    batch = stillhouse.open(plain)[:2]
    with pytest.raises(stillhouse.StillhouseError, match="noise"):
        stillhouse.noise.replay(batch)
    with pytest.raises(stillhouse.ColumnError, match=r"partitions: \{views"):
        views.pgm.partition(batch, view=0)
    assert views.pgm.partition(batch).groups.any()


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes a data set of texts that the teacher `llama-gqa` wrote, with the whole of its distribution."""

    def make(name: str, patch: dict[str, Any]) -> pathlib.Path:
        folder = tmp_path_factory.mktemp(name)
        words(folder)
        job = {
            "input": {"format": "none", "documents": 9},
            "tokenizer": {"path": "tokenizer.json", "bos": "<s>", "eos": "</s>", "pad": "<pad>"},
            "pack": {"mode": "pad", "length": 12},
            "extract": {
                "teacher": {"path": str(ROOT / "operators/teacher/testdata/llama-gqa"), "device": "cpu"},
                "mode": "sequential",
                "topk": WORDS,
            },
        }
        return run(folder, merged(job, patch))

    return make


@pytest.mark.parametrize("backend", ["rust", "torch"])
def test_the_noise_of_written_text_is_replayed_from_the_seed_alone(written: Maker, backend: str) -> None:
    """ξ = −ln e at every position, nothing is stored, and argmax_k(l_k + ξ_k) is every token that the teacher wrote."""
    batch = stillhouse.open(written("plain", {}))[:]
    assert batch.info is not None and batch.info.noise is not None
    assert (batch.info.noise.codec, batch.info.noise.draws, batch.info.noise.condition) == ("prior", 1, True)
    assert not any(name.startswith("noise") for name in batch)
    given, mask = batch["given"], batch["attention_mask"]
    at = (np.arange(batch["input_ids"].shape[1]) >= given[:, None]) & mask
    assert at.sum() > 50 and not at[:, 0].any()
    source = batch if backend == "rust" else batch.torch()
    xi = np.asarray(stillhouse.noise.replay(source, out="gumbel", backend=backend))
    prior = stillhouse.noise.prior(
        batch.info.noise.seed, batch["sequence_id"], np.arange(xi.shape[1]), WORDS, out="gumbel"
    )
    np.testing.assert_allclose(xi, prior, rtol=0, atol=0 if backend == "rust" else 4e-5)
    logprob = np.full(xi.shape, -np.inf, np.float32)
    np.put_along_axis(logprob, batch["topk_index"].astype(np.int64), batch["topk_logprob"], axis=-1)
    np.testing.assert_array_equal((logprob + xi).argmax(axis=-1)[at], batch["input_ids"][at])
    mask_of: Any = torch.from_numpy(at) if backend == "torch" else at
    some = np.asarray(stillhouse.noise.replay(source, mask_of, out="gumbel", backend=backend))
    np.testing.assert_array_equal(some, xi[at])
    places = np.array([[3, 1]] * len(xi))
    two = np.asarray(stillhouse.noise.replay(source, places, out="gumbel", backend=backend))
    np.testing.assert_array_equal(two, xi[:, [3, 1]])
    with pytest.raises(ValueError, match="out of range"):
        stillhouse.noise.replay(source, np.array([[12]] * len(xi)), backend=backend)
    with pytest.raises(ValueError, match="draw"):
        stillhouse.noise.replay(source, draw=1, backend=backend)


def test_text_of_a_truncated_teacher_promises_nothing_of_its_noise(written: Maker) -> None:
    dataset = stillhouse.open(written("cut", {"extract": {"sequential": {"temperature": 0.5, "top_k": 7}}}))
    assert dataset.info.noise is not None and dataset.info.noise.codec == "prior" and not dataset.info.noise.condition
