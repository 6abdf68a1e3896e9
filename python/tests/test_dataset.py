"""Opening data sets and reading rows: the values are those that pyarrow reads, by every way of asking."""

from __future__ import annotations

import multiprocessing
import pathlib
import pickle
import shutil
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import pytest
import truth
from shared_fixtures import Maker

import stillhouse
from stillhouse import Batch, Ragged

JOBS: dict[str, dict[str, Any]] = {
    "replay-draws-topk": {"extract": {"topk": 5, "noise": {"draws": 3}}},
    "dense": {"extract": {"noise": {"codec": "dense", "precision": "f32", "draws": 2}}},
    "dense-half": {"extract": {"noise": {"codec": "dense", "precision": "f16"}}},
    "pad": {"pack": {"mode": "pad"}},
    "keep": {"pack": {"remainder": "keep", "separator": "none"}, "extract": {"noise": {"draws": 2}, "topk": 3}},
}


@pytest.mark.parametrize("name", JOBS)
def test_every_column_of_every_kind(small: Maker, name: str) -> None:
    folder = small(name, JOBS[name])
    expected = truth.table(folder).to_pylist()
    ds = stillhouse.open(folder)
    assert len(ds) == len(expected) > 10
    for i, row in enumerate(ds):
        truth.same(row, expected[i])
    for column in ds.manifest["columns"]:
        info = ds.columns[column["name"]]
        shape = column.get("shape", "[]").strip("[]")
        wanted = None if "*" in shape else tuple(int(n) for n in shape.split(",") if n)
        assert info.shape == wanted, column
        value = ds[0][column["name"]]
        assert value.dtype == info.dtype and (wanted is None or value.shape == wanted)


def test_every_way_of_asking(demo: pathlib.Path) -> None:
    expected = truth.table(demo).to_pylist()
    ds = stillhouse.open(demo)
    n = len(ds)
    assert n == len(expected)
    truth.same(ds[0], expected[0])
    truth.same(ds[-1], expected[-1])
    truth.same(ds[np.int64(n // 2)], expected[n // 2])
    asked: list[Any] = [slice(3, 20), slice(None, None, -7), slice(n, n + 5), [5, 5, 0, n - 1, -2], np.arange(n)[::3]]
    for rows in asked:
        batch = ds[rows]
        numbers = np.arange(n)[rows]
        assert isinstance(batch, Batch) and batch.rows == len(numbers) and batch.info == ds.info
        for i, number in enumerate(numbers):
            truth.same({name: column[i] for name, column in batch.items()}, expected[number])
    assert batch["input_ids"].shape == (len(numbers), 256) and batch["subtokens"].shape == (len(numbers), 256, 4)
    assert isinstance(batch["noise_index"], Ragged) and batch["noise_index"].lengths.sum() == len(
        batch["noise_index"].values
    )
    together = [row for batch in ds.batches(17) for row in batch["sequence_id"]]
    assert together == [row["sequence_id"] for row in expected]


def test_rows_at_random_hit_and_miss_the_cache(plain: pathlib.Path) -> None:
    ids = truth.table(plain)["input_ids"].to_pylist()
    ds = stillhouse.open(plain, cache_megabytes=1)
    random = np.random.default_rng(0)
    for size in (1, 3, 64, 700) * 4:
        rows = random.integers(0, len(ds), size)
        np.testing.assert_array_equal(ds[rows]["input_ids"], [ids[i] for i in rows])


def test_splits_and_columns(demo: pathlib.Path) -> None:
    ds = stillhouse.open(demo, split="validation", columns=["logprob", "sequence_id"])
    expected = truth.table(demo, "validation")
    assert list(ds.columns) == list(ds[0]) == ["logprob", "sequence_id"]
    np.testing.assert_array_equal(ds[:]["logprob"], expected["logprob"].to_pylist())
    narrow = ds.select_columns(["sequence_id"])
    assert list(narrow[1]) == ["sequence_id"] and list(ds[1]) == ["logprob", "sequence_id"]
    assert "sequence_id" in repr(narrow) and narrow.split == "validation"


def test_facts(demo: pathlib.Path) -> None:
    ds = stillhouse.open(str(demo))
    assert ds.info.vocab_size == 50_257 and ds.info.length == 256
    assert ds.info.noise == stillhouse.NoiseInfo("replay", 42, 1, 1e-3, condition=True)
    assert ds.info.subtokens == stillhouse.SubtokenInfo(15, 4)
    assert ds.info.special_tokens["eos"] == 50_256
    assert ds.manifest["totals"]["train"]["rows"] == len(ds)
    ds.verify()


def test_rows_of_different_lengths_can_be_padded(small: Maker) -> None:
    ds = stillhouse.open(small("keep", JOBS["keep"]))
    batch = ds[:]
    padded = batch.padded()
    lengths = batch["input_ids"].lengths
    assert lengths.min() < lengths.max() == 24
    assert padded.padded() is padded
    np.testing.assert_array_equal(padded["attention_mask"].sum(axis=1), lengths)
    for i, row in enumerate(ds):
        n = lengths[i]
        for name in ("input_ids", "logprob"):
            np.testing.assert_array_equal(padded[name][i, :n], row[name])
        assert (padded["input_ids"][i, n:] == ds.info.special_tokens["pad"]).all()
        np.testing.assert_array_equal(padded["noise_count"][i, :, :n], row["noise_count"].reshape(2, n))
        assert not padded["noise_count"][i, :, n:].any()
        np.testing.assert_array_equal(padded["topk_logprob"][i, :n], row["topk_logprob"].reshape(n, 3))
        np.testing.assert_array_equal(padded["subtokens"][i, :n], row["subtokens"].reshape(n, 3))
        np.testing.assert_array_equal(padded["partition"][i, :, :n], row["partition"].reshape(2, n))
    assert batch.padded(30)["input_ids"].shape == (len(ds), 30)
    with pytest.raises(ValueError, match="length: got 7, valid: 24 or more"):
        batch.padded(7)
    as_torch = batch.torch().padded()
    np.testing.assert_array_equal(as_torch["noise_count"].numpy(), padded["noise_count"])


def test_torch_types(demo: pathlib.Path) -> None:
    import torch

    batch = stillhouse.open(demo)[:5]
    tensors = batch.torch()
    types = {name: (column.values if isinstance(column, Ragged) else column).dtype for name, column in tensors.items()}
    assert types["sequence_id"] == torch.int64 and types["noise_index"] == torch.int32 == types["noise_count"]
    assert types["noise_logprob"] == torch.float16 and types["partition"] == torch.bool
    for name, column in tensors.numpy().items():
        np.testing.assert_array_equal(truth.flat(column.values if isinstance(column, Ragged) else column).astype(batch_type(batch[name])), truth.flat(batch[name].values if isinstance(batch[name], Ragged) else batch[name]))  # fmt: skip
    high = Batch({"sequence_id": np.array([2**64 - 1], dtype=np.uint64)}).torch()
    assert high["sequence_id"].tolist() == [-1]
    again = pickle.loads(pickle.dumps(tensors))
    assert again.info == batch.info and torch.equal(again["input_ids"], tensors["input_ids"])


def batch_type(column: Any) -> Any:
    return column.values.dtype if isinstance(column, Ragged) else column.dtype


def _ids(ds: stillhouse.Dataset, queue: Any) -> None:
    queue.put([ds[i]["sequence_id"].item() for i in range(0, len(ds), 7)])


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
def test_other_processes(plain: pathlib.Path, method: str) -> None:
    ds = stillhouse.open(plain)
    expected = [ds[i]["sequence_id"].item() for i in range(0, len(ds), 7)]  # the parent's threads are at work before
    context = multiprocessing.get_context(method)
    queue = context.Queue()
    children = [context.Process(target=_ids, args=(ds, queue)) for _ in range(2)]
    for child in children:
        child.start()
    assert [queue.get(timeout=60) for _ in children] == [expected, expected]
    for child in children:
        child.join(30)
        assert child.exitcode == 0
    assert ds[3]["sequence_id"] == stillhouse.open(plain)[3]["sequence_id"]


def test_threads(plain: pathlib.Path) -> None:
    ds = stillhouse.open(plain, cache_megabytes=1)
    ids = ds[:]["input_ids"]
    with ThreadPoolExecutor(8) as threads:
        read = threads.map(lambda seed: _some(ds, seed), range(40))
    for rows, got in read:
        np.testing.assert_array_equal(got, ids[rows])


def _some(ds: stillhouse.Dataset, seed: int) -> tuple[Any, Any]:
    rows = np.random.default_rng(seed).integers(0, len(ds), 50)
    return rows, ds[rows]["input_ids"]


def test_pickles_hold_no_data(plain: pathlib.Path) -> None:
    ds = stillhouse.open(plain, columns=["input_ids"])
    pickled = pickle.dumps(ds)
    assert len(pickled) < 1000
    assert list(pickle.loads(pickled)[0]) == ["input_ids"]


def test_the_tokenizer_is_a_file_of_the_data_set(plain: pathlib.Path, tmp_path: pathlib.Path) -> None:
    assert stillhouse.open(plain).file("tokenizer.json") == (plain / "tokenizer.json").read_bytes()
    with pytest.raises(ValueError, match=r"got the file \"nothing\", valid: .*tokenizer\.json"):
        stillhouse.open(plain).file("nothing")
    copy = shutil.copytree(plain, tmp_path / "copy")
    damaged = bytearray((copy / "tokenizer.json").read_bytes())
    damaged[100] ^= 1
    (copy / "tokenizer.json").write_bytes(damaged)
    with pytest.raises(stillhouse.StillhouseError, match="is damaged"):
        stillhouse.open(copy).file("tokenizer.json")


def test_carried_columns_are_text_beside_the_numbers(small: Maker) -> None:
    folder = small("carried", {"input": {"carry": ["text", "_file"]}})
    rows = truth.table(folder).to_pylist()
    for row in rows:
        assert len(row["document_fields"]) == len(row["document_ids"])
        assert all(
            fields["_file"] == "corpus.jsonl" and fields["text"].startswith("w") for fields in row["document_fields"]
        )
    ds = stillhouse.open(folder)
    assert "document_fields" not in ds.columns and "document_fields" not in ds[0]
    assert [ds[i]["document_ids"].tolist() for i in range(3)] == [row["document_ids"] for row in rows[:3]]
    with pytest.raises(stillhouse.ColumnError, match="It is text; read it with pyarrow or DuckDB"):
        ds.select_columns(["document_fields"])
