"""stillhouse.noise against the house's reference values, against float64, and every backend against the others."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import noise_f64
import numpy as np
import pytest
from noise_f64 import batch, error_of, expected
from scipy import stats

import stillhouse
from stillhouse import ColumnError, Info, NoiseInfo, Ragged, StillhouseError
from stillhouse.noise import prior, replay

torch = pytest.importorskip("torch")

HERE = Path(__file__).parent
VECTORS = HERE.parents[1] / "operators" / "noise" / "testdata" / "noise_vectors.json"
OUTS = ("softmax", "gumbel", "gaussian", "uniform")
BACKENDS = ("rust", "torch")


def temperatures(out):
    return (1.0,) if out == "uniform" else (1.0, 0.85, 0.2, 3.0)


def reference_tokens():
    return json.loads(VECTORS.read_text())["tokens"]


def reference_batch(token):
    """A batch whose only token of interest is that of the vectors, at its position."""
    length, draws = token["position"] + 1, token["draw"] + 1
    count = np.zeros((1, draws, length), np.uint16)
    count[0, token["draw"], token["position"]] = len(token["corrections"])
    index, values = zip(*token["corrections"])
    offsets = np.array([0, len(index)])
    columns = {
        "sequence_id": np.array([token["sequence_id"]], np.uint64),
        "input_ids": np.full((1, length), token["token"], np.int32),
        "logprob": np.full((1, length), token["logprob"], np.float32),
        "noise_count": count,
        "noise_index": Ragged(np.array(index, np.uint16), offsets),
        "noise_logprob": Ragged(np.array(values, np.float16), offsets),
    }
    return stillhouse.Batch(columns, Info(token["vocab"], length, NoiseInfo("replay", token["noise_seed"], draws)))


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("token", reference_tokens(), ids=lambda t: f"V{t['vocab']}")
def test_reference_values(token, backend):
    columns = reference_batch(token)
    at = np.array([[token["position"]]])
    for form in (columns, columns.torch()):
        xi = np.asarray(replay(form, at, token["draw"], "gumbel", backend=backend))[0, 0]
        exact = np.array(token["decoded_xi"])
        assert np.abs(xi[token["entries"]] - exact).max() < 2e-6 * max(1, np.abs(exact).max())


def test_the_tests_reference_is_the_houses():
    for token in reference_tokens():
        index, values = zip(*token["corrections"])
        xi = noise_f64.gumbel(
            token["noise_seed"], token["draw"], token["sequence_id"], token["position"], token["vocab"],
            token["token"], np.float32(token["logprob"]), index, values,
        )  # fmt: skip
        assert np.abs(xi[token["entries"]] - token["decoded_xi"]).max() < 1e-9


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out", OUTS)
@pytest.mark.parametrize(
    ("vocab", "draws", "narrow"), [(1, 1, True), (7, 2, False), (1023, 1, True), (5003, 2, True), (70_001, 1, True)]
)
def test_every_output_against_float64(vocab, draws, narrow, out, backend):
    columns = batch(vocab, draws=draws, narrow=narrow, data_seed=vocab)
    for temperature in temperatures(out):
        exact = expected(columns, out, temperature, draws - 1)
        got = replay(columns, None, draws - 1, out, temperature, backend=backend)
        assert got.shape == exact.shape and got.dtype == np.float32
        assert error_of(got, exact, out, temperature) < 1


@pytest.mark.parametrize("backend", BACKENDS)
def test_unlikely_tokens_stay_finite(backend):
    """p_x = e^−300 and beyond: E_x underflows every float, ξ_x does not."""
    for surest in (-80.0, -300.0, -5000.0):
        columns = batch(300, surest=surest)
        for out in OUTS:
            for temperature in temperatures(out):
                exact = expected(columns, out, temperature)
                got = replay(columns, out=out, temperature=temperature, backend=backend)
                assert error_of(got, exact, out, temperature) < 1, (surest, out, temperature)


@pytest.mark.parametrize("backend", BACKENDS)
def test_positions_in_every_form(backend):
    columns = batch(501, rows=4, length=6, draws=2)
    full = replay(columns, None, 1, "gumbel", backend=backend)
    assert full.shape == (4, 6, 501)
    rng = np.random.default_rng(0)
    mask = rng.random((4, 6)) < 0.4
    some = rng.integers(0, 6, (4, 3))
    for form in (columns, columns.torch()):
        for kind in (np.asarray, torch.as_tensor):
            masked = replay(form, kind(mask), 1, "gumbel", backend=backend)
            picked = replay(form, kind(some), 1, "gumbel", backend=backend)
            assert np.array_equal(np.asarray(masked), full[mask])
            assert np.array_equal(np.asarray(picked), np.take_along_axis(full, some[:, :, None], 1))
            assert type(masked) is (np.ndarray if form is columns else torch.Tensor)
    narrow = replay(columns, some.astype(np.uint8), 1, "gumbel", backend=backend)
    assert np.array_equal(narrow, np.take_along_axis(full, some[:, :, None], 1))
    assert replay(columns, np.zeros((4, 6), bool), backend=backend).shape == (0, 501)
    assert replay(columns, np.zeros((4, 0), int), backend=backend).shape == (4, 0, 501)
    empty = replay(batch(501, rows=0), backend=backend)
    assert empty.shape == (0, 5, 501)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("out", OUTS)
def test_types_are_the_rounded_single_precision(out, backend):
    columns = batch(2050, surest=-200.0)
    single = torch.from_numpy(replay(columns, out=out, backend=backend))
    half = replay(columns, out=out, dtype=np.float16, backend=backend)
    assert half.dtype == np.float16 and np.array_equal(half, single.half().numpy())
    assert np.array_equal(half, replay(columns, out=out, dtype="float16", backend=backend))
    for dtype in (torch.float32, torch.float16, torch.bfloat16):
        got = replay(columns.torch(), out=out, dtype=dtype, backend=backend)
        assert got.dtype == dtype and torch.equal(got, single.to(dtype))


def test_types_of_columns_make_no_difference():
    columns = batch(400, draws=2)
    plain = replay(columns, draw=1)
    wider = dict(columns)
    wider["input_ids"] = columns["input_ids"].astype(np.int64)
    wider["sequence_id"] = columns["sequence_id"].view(np.int64)
    wider["noise_count"] = columns["noise_count"].astype(np.uint8)
    wider["noise_index"] = Ragged(columns["noise_index"].values.astype(np.int64), columns["noise_index"].offsets)
    values = columns["noise_logprob"]
    wider["noise_logprob"] = Ragged(values.values.astype(np.float32), values.offsets.astype(np.int32))
    assert np.array_equal(plain, replay(wider, draw=1, info=columns.info))
    wider["noise_count"] = columns["noise_count"].astype(np.uint32)
    assert np.array_equal(plain, replay(wider, draw=1, info=columns.info))
    tensors = stillhouse.Batch(wider, columns.info).torch()
    assert np.allclose(plain, replay(tensors, draw=1, backend="torch").numpy(), rtol=2e-5, atol=1e-26)
    strided = dict(columns)
    strided["logprob"] = np.asfortranarray(columns["logprob"])
    assert np.array_equal(plain, replay(strided, draw=1, info=columns.info))
    assert np.array_equal(plain, replay(columns.torch(), draw=1).numpy())
    assert isinstance(replay(columns, device="cpu"), torch.Tensor)


def test_threads_make_no_difference():
    columns = batch(3001, rows=8, length=40)
    one = replay(columns, threads=1)
    for threads in (2, 3, None):
        assert np.array_equal(one, replay(columns, threads=threads))


@pytest.mark.parametrize("draws", [1, 2])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_dense_codec(draws, dtype):
    rng = np.random.default_rng(3)
    noise = rng.gumbel(size=(2, draws, 3, 130)).astype(dtype)
    noise[0, 0, 0, 5] = 250.0  # an unlikely token's
    noise[0, 0, 0, 6] = 30.0
    info = Info(130, 3, NoiseInfo("dense", 1, draws))
    columns = stillhouse.Batch({"noise": noise if draws > 1 else noise[:, 0]}, info)
    xi = noise[:, draws - 1].astype(np.float64)
    for backend in BACKENDS:
        for out in OUTS:
            for temperature in temperatures(out):
                exact = np.stack([[noise_f64.output(token, out, temperature) for token in row] for row in xi])
                got = replay(columns, None, draws - 1, out, temperature, backend=backend)
                assert error_of(got, exact, out, temperature) < 1, (backend, out, temperature)
        some = replay(columns.torch(), [[2, 0], [1, 1]], draws - 1, "gumbel", backend=backend)
        assert np.array_equal(some.numpy(), np.take_along_axis(xi, np.array([[2, 0], [1, 1]])[:, :, None], 1))


def test_prior():
    for backend in BACKENDS:
        for out in OUTS:
            got = prior(5, [2**63 + 1, 4], [0, 7, 1000], 777, draw=1, out=out, backend=backend)
            for b, sequence in enumerate((2**63 + 1, 4)):
                for p, position in enumerate((0, 7, 1000)):
                    exact = noise_f64.output(noise_f64.gumbel(5, 1, sequence, position, 777), out)
                    assert error_of(got[b, p], exact, out) < 1
        assert prior(5, 4, 7, 777, backend=backend).shape == (777,)
        assert prior(5, 4, [7, 8], 777, backend=backend).shape == (2, 777)
        assert prior(5, [4, 5], 7, 777, backend=backend).shape == (2, 777)
        each = prior(5, torch.tensor([4, 5]), torch.tensor([[7], [8]]), 777, backend=backend, temperature=0.85)
        assert each.shape == (2, 1, 777) and isinstance(each, torch.Tensor)
        assert np.array_equal(each[1, 0], prior(5, 5, 8, 777, backend=backend, temperature=0.85))
    for wrong in ({"seed": -1}, {"positions": -1}, {"vocab_size": 0}, {"sequence_id": 0.5}, {"draw": -1}):
        with pytest.raises(ValueError, match=next(iter(wrong)).split("_")[0].rstrip("s")):
            prior(**{"seed": 1, "sequence_id": 1, "positions": 1, "vocab_size": 8, **wrong})


def test_a_certain_position_is_prior_noise():
    columns = batch(300)
    columns["logprob"][:] = 0
    columns["noise_count"][:] = 0
    columns["noise_index"] = Ragged(np.zeros(0, np.uint16), np.zeros(4, np.int64))
    columns["noise_logprob"] = Ragged(np.zeros(0, np.float16), np.zeros(4, np.int64))
    got = replay(columns, out="gumbel")
    plain = prior(11, columns["sequence_id"], np.arange(5), 300, out="gumbel")
    differ = got != plain
    assert (np.argwhere(differ)[:, 2] == columns["input_ids"][tuple(np.argwhere(differ)[:, :2].T)]).all()
    assert differ.sum() == 15


def teacher_batch(tokens, vocab, seed):
    """Tokens drawn from a random teacher, with all of its log-probabilities stored."""
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, 2.0, (1, tokens, vocab))
    logp = logits - np.log(np.exp(logits).sum(2, keepdims=True))
    x = (rng.random((1, tokens, 1)) > np.exp(logp).cumsum(2)).sum(2).astype(np.int32).clip(0, vocab - 1)
    keep = np.arange(vocab) != x[:, :, None]
    offsets = np.array([0, tokens * (vocab - 1)])
    columns = {
        "sequence_id": np.array([99], np.uint64),
        "input_ids": x,
        "logprob": np.take_along_axis(logp, x[:, :, None], 2)[:, :, 0].astype(np.float32),
        "noise_count": np.full((1, tokens), vocab - 1, np.uint16),
        "noise_index": Ragged(np.broadcast_to(np.arange(vocab, dtype=np.uint16), keep.shape)[keep], offsets),
        "noise_logprob": Ragged(logp[keep].astype(np.float32), offsets),
    }
    return stillhouse.Batch(columns, Info(vocab, tokens, NoiseInfo("replay", 5))), logits


@pytest.mark.parametrize("backend", BACKENDS)
def test_the_observed_token_wins_and_marginals_are_standard(backend):
    """The two properties of posterior noise (Theorem 4.1): argmax(l + ξ) = x, and ξ_k ~ Gumbel(0, 1) over x ~ softmax(l)."""
    columns, logits = teacher_batch(20_000, 6, 1)
    xi = replay(columns, out="gumbel", backend=backend)
    assert ((logits + xi).argmax(2) == columns["input_ids"]).all()
    gaussian = replay(columns, out="gaussian", backend=backend)
    uniform = replay(columns, out="uniform", backend=backend)
    for k in range(6):
        assert stats.kstest(xi[0, :, k], "gumbel_r").pvalue > 1e-3
        assert stats.kstest(gaussian[0, :, k], "norm").pvalue > 1e-3
        assert stats.kstest(uniform[0, :, k], "uniform").pvalue > 1e-3


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"logprob": None}, ColumnError, r"needs the column 'logprob' .*`extract:`.*the batch has sequence_id"),
        ({"noise_index": None}, ColumnError, r"extract: \{noise: \{codec: replay\}\}"),
        ({"input_ids": np.zeros(4, np.int32)}, ColumnError, r"'input_ids' has shape \[4\], expected \[B, L\]"),
        ({"input_ids": np.zeros((3, 5), np.float32)}, ColumnError, "'input_ids' is of float32, expected an integer"),
        (
            {"logprob": np.zeros((3, 4), np.float32)},
            ColumnError,
            r"'logprob' has shape \[3, 4\], expected .* = \[3, 5\]",
        ),
        ({"sequence_id": np.zeros(3, np.int32)}, ColumnError, "'sequence_id' is of int32, expected uint64"),
        ({"noise_count": np.zeros((3, 2, 5), np.uint16)}, ColumnError, "with D = 1 draws"),
        ({"noise_count": np.zeros((3, 5), np.uint16)}, ColumnError, "noise_count .*add"),
        ({"noise_index": np.zeros(4, np.uint16)}, ColumnError, "expected a Ragged"),
        ({"input_ids": Ragged(np.zeros(4, np.int32), np.array([0, 1, 2, 4]))}, ColumnError, "differ in length"),
        ({"input_ids": np.full((3, 5), 400, np.int32)}, ColumnError, "token"),
        ({"input_ids": np.full((3, 5), 2**32 + 1)}, ColumnError, "token"),
        ({"logprob": np.full((3, 5), np.nan, np.float32)}, ColumnError, "logprob"),
    ],
)
def test_columns_that_do_not_fit(change, error, message):
    columns = batch(400)
    for name, value in change.items():
        columns[name] = value
        if value is None:
            del columns[name]
    for backend in BACKENDS:
        with pytest.raises(error, match=message):
            replay(columns, backend=backend)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"draw": 2}, r"draw is 2, expected 0 to 1: the data set has 2 draw\(s\)"),
        ({"draw": -1}, "draw is -1"),
        ({"out": "logits"}, "out is 'logits', expected one of softmax, gumbel, gaussian, uniform"),
        ({"temperature": 0}, "temperature is 0.0"),
        ({"temperature": float("inf")}, "temperature is inf"),
        ({"out": "uniform", "temperature": 0.85}, "no scale"),
        ({"dtype": "int8"}, "dtype is 'int8', expected one of float32, float16 for a numpy output"),
        ({"dtype": torch.bfloat16}, "for a numpy output"),
        ({"backend": "cuda"}, "expected one of rust, torch, triton"),
        ({"backend": "triton"}, "needs a CUDA device"),
        ({"threads": 0}, "threads is 0"),
        ({"positions": np.zeros((2, 5), bool)}, r"mask of shape \[2, 5\], expected \[B, L\] = \[3, 5\]"),
        ({"positions": np.zeros((2, 5), int)}, r"shape \[2, 5\], expected \[B, P\] with B = 3"),
        ({"positions": np.zeros((3, 5))}, "of float64, expected bool"),
        ({"positions": np.full((3, 1), 5)}, r"position 5 is out of range \(0 to 4\)"),
        ({"positions": torch.full((3, 1), -1)}, "out of range"),
    ],
)
def test_arguments_out_of_range(arguments, message, monkeypatch):
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    columns = batch(400, draws=2)
    for backend in BACKENDS:
        with pytest.raises(ValueError, match=message):
            replay(columns, **{"backend": backend, **arguments})


def test_facts_that_are_missing():
    columns = batch(400)
    with pytest.raises(StillhouseError, match="info=stillhouse.Info"):
        replay(dict(columns))
    columns.info = Info(400, 5)
    with pytest.raises(StillhouseError, match="extract: {noise: ...}"):
        replay(columns)
    columns = batch(400)
    columns["noise_index"].values[:] = 399
    columns["noise_index"].values[-1] = 500
    for backend in BACKENDS:
        with pytest.raises(ColumnError, match="correction of token 500|a token of noise_index"):
            replay(columns, backend=backend)


def test_a_forked_worker_replays_with_threads_of_its_own():
    """The parent's pool is there, with threads that the child has not; and the child's own fork again."""
    columns = batch(2000, rows=4, length=20)
    parent = replay(columns, threads=2)
    read, write = os.pipe()
    child = os.fork()
    if child == 0:  # nothing of pytest may run here
        good = False
        try:
            same = np.array_equal(parent, replay(columns, threads=2))
            grandchild = os.fork()
            if grandchild == 0:
                os._exit(0 if np.array_equal(parent, replay(columns, threads=2)) else 1)
            good = same and os.waitpid(grandchild, 0)[1] == 0
        finally:
            os.write(write, b"y" if good else b"n")
            os._exit(0)
    os.close(write)
    assert os.read(read, 1) == b"y"
    os.close(read)
    os.waitpid(child, 0)
    assert np.array_equal(parent, replay(columns, threads=2))


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, i):
        from stillhouse.noise import _rust

        return replay(batch(700, data_seed=i)).sum(), _rust.default_threads()


def test_data_loader_workers_use_one_thread():
    replay(batch(700), threads=2)
    loader = torch.utils.data.DataLoader(Rows(), num_workers=2, multiprocessing_context="fork")
    for total, threads in loader:
        assert abs(float(total) - 15) < 1e-4 and int(threads) == 1


def run_triton_cases(what, environment):
    """In a process of its own: Triton chooses its interpreter at import."""
    pytest.importorskip("triton")
    command = [sys.executable, HERE / "triton_cases.py", what]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_triton_in_its_interpreter():
    """The Triton kernel on the CPU."""
    run_triton_cases("interpret", {**os.environ, "TRITON_INTERPRET": "1"})


def test_triton_compiles_for_a_gpu():
    """To machine code of an H100, without one: the interpreter takes what the compiler would not."""
    run_triton_cases("compile", {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})


@pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")
@pytest.mark.parametrize("backend", ["torch", "triton"])
@pytest.mark.parametrize("out", OUTS)
def test_on_a_gpu(out, backend):
    for vocab in (7, 5003, 70_001):
        columns = batch(vocab, draws=2)
        for temperature in temperatures(out):
            exact = expected(columns, out, temperature, 1)
            got = replay(columns.torch().to("cuda"), None, 1, out, temperature, backend=backend)
            assert got.is_cuda and error_of(got.cpu(), exact, out, temperature) < 1
            half = replay(columns, None, 1, out, temperature, device="cuda", dtype=torch.bfloat16, backend=backend)
            assert torch.allclose(half.float(), got, rtol=8e-3)
