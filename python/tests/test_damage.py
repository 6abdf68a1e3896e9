"""A bit of a shard that has flipped is found when it is read, wherever it is: never another value."""

from __future__ import annotations

import hashlib
import json
import os
import pathlib
import shutil
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
from shared_fixtures import ROOT, program, run, speeches, write_corpus

import stillhouse

FLIPS = 20_000 if os.environ.get("STILLHOUSE_SOAK", "0") != "0" else 2000
READER = pathlib.Path(__file__).with_name("reader_of_damage.py")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """One shard with every column that a job makes, in row groups of several pages."""
    folder = tmp_path_factory.mktemp("whole")
    teacher = {"path": str(ROOT / "assets/teacher-nano-gpt2")}
    job = {
        "input": {"format": "jsonl", "paths": [write_corpus(folder, "corpus.jsonl", speeches(8, 10_000))], "text": "text"},
        "tokenizer": {**teacher, "pad": "<|endoftext|>"},
        "pack": {"mode": "wrap", "length": 256, "separator": "eos", "boundary": "bos_eos", "remainder": "pad"},
        "extract": {"teacher": teacher, "noise": {"codec": "replay", "tolerance": 1e-3}, "topk": 4},
        "subtokens": {"length": 4},
        "partitions": {"views": 2},
        "output": {"row_group_megabytes": 1},
    }  # fmt: skip
    return run(folder, job)


@pytest.fixture
def copy(whole: pathlib.Path, tmp_path: pathlib.Path) -> pathlib.Path:
    """The data set with its job, to be damaged."""
    return pathlib.Path(shutil.copytree(whole.parent, tmp_path / "copy")) / "out"


def shard_of(folder: pathlib.Path) -> pathlib.Path:
    (path,) = (folder / "data").iterdir()
    return path


def chunks(shard: pathlib.Path) -> dict[str, list[range]]:
    """The bytes of each column in each row group, as pyarrow has them."""
    metadata = pq.read_metadata(shard)
    found: dict[str, list[range]] = {}
    for group in range(metadata.num_row_groups):
        for number in range(metadata.num_columns):
            column = metadata.row_group(group).column(number)
            start = column.dictionary_page_offset if column.has_dictionary_page else column.data_page_offset
            name = column.path_in_schema.split(".")[0]
            found.setdefault(name, []).append(range(start, start + column.total_compressed_size))
    return found


def flip(shard: pathlib.Path, place: int, bit: int) -> None:
    with shard.open("r+b") as file:
        file.seek(place)
        byte = file.read(1)[0]
        file.seek(place)
        file.write(bytes([byte ^ (1 << bit)]))


def values(folder: pathlib.Path, whole_blocks: bool, columns: list[str] | None = None) -> dict[str, npt.NDArray[Any]]:
    """All rows: decoded in blocks, or through the pages of single rows, as a small cache makes it do."""
    ds = stillhouse.open(folder, columns=columns, cache_megabytes=512 if whole_blocks else 1)
    batch = ds.read(np.arange(len(ds)), whole_blocks)
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name, column in batch.items():
        if isinstance(column, stillhouse.Ragged):
            arrays[f"{name} offsets"] = column.offsets
            column = column.values
        arrays[name] = column
    return arrays


def same(a: dict[str, npt.NDArray[Any]], b: dict[str, npt.NDArray[Any]]) -> bool:
    return a.keys() == b.keys() and all(a[k].shape == b[k].shape and a[k].tobytes() == b[k].tobytes() for k in a)


def error(folder: pathlib.Path, whole_blocks: bool) -> str:
    with pytest.raises(stillhouse.DatasetError) as raised:
        values(folder, whole_blocks)
    text = str(raised.value)
    assert shard_of(folder).name in text and "stillhouse verify" in text and "stillhouse repair" in text, text
    assert "\n" not in text
    return text


def test_the_shard_is_worth_damaging(whole: pathlib.Path) -> None:
    shard = shard_of(whole)
    columns = chunks(shard)
    made = {"attention_mask", "logprob", "noise_count", "noise_index", "noise_logprob", "topk_index", "topk_logprob", "subtokens", "partition", "partition_t"}  # fmt: skip
    assert made | {"sequence_id", "input_ids", "document_offsets", "document_ids"} == set(columns)
    assert all(len(of_groups) > 1 for of_groups in columns.values())
    both = [values(whole, blocks) for blocks in (True, False)]
    assert same(*both)
    pages = pq.read_metadata(shard).metadata[b"stillhouse.pages"].split()
    assert len(pages) > 3 * len(columns)


def test_no_flipped_bit_is_silent(copy: pathlib.Path, capfd: pytest.CaptureFixture[str]) -> None:
    shard = shard_of(copy)
    size = shard.stat().st_size
    columns = chunks(shard)
    end = max(chunk.stop for of_groups in columns.values() for chunk in of_groups)
    regions = [*columns.items(), ("", [range(end, size)])]
    random = np.random.default_rng(11)
    told: Counter[str] = Counter()
    for trial in range(FLIPS):
        name, parts = regions[trial % len(regions)]
        group = int(random.integers(len(parts)))
        place = int(random.integers(parts[group].start, parts[group].stop))
        bit = int(random.integers(8))
        flip(shard, place, bit)
        for whole_blocks in (True, False):
            text = error(copy, whole_blocks)
            expected = f"row group {group}, column {name}, " if name else "its footer (bytes "
            assert expected in text, (place, bit, text)
            told[name] += 1
        flip(shard, place, bit)
    assert len(told) == len(regions)
    assert "panicked" not in capfd.readouterr().err


def test_only_the_first_four_bytes_are_not_read(whole: pathlib.Path, copy: pathlib.Path) -> None:
    shard = shard_of(copy)
    starts = sorted(chunk.start for of_groups in chunks(shard).values() for chunk in of_groups)
    assert starts[0] == 4
    expected = values(whole, True)
    for place in range(4):
        flip(shard, place, place)
        assert same(values(copy, True), expected) and same(values(copy, False), expected)
        flip(shard, place, place)
    for place in (4, shard.stat().st_size - 1):
        flip(shard, place, 0)
        error(copy, True)
        flip(shard, place, 0)


def test_columns_that_are_not_read_may_be_damaged(whole: pathlib.Path, copy: pathlib.Path) -> None:
    shard = shard_of(copy)
    for chunk in chunks(shard)["noise_index"]:
        flip(shard, chunk.start + len(chunk) // 2, 3)
    for whole_blocks in (True, False):
        columns = ["input_ids", "logprob"]
        assert same(values(copy, whole_blocks, columns), values(whole, whole_blocks, columns))
        assert "column noise_index" in error(copy, whole_blocks)


def test_a_shard_that_is_longer_or_shorter(whole: pathlib.Path, copy: pathlib.Path) -> None:
    shard = shard_of(copy)
    bytes_of = shard.read_bytes()
    for cut in (1, 7, 1000, len(bytes_of) // 2, len(bytes_of) - 1, len(bytes_of)):
        shard.write_bytes(bytes_of[: len(bytes_of) - cut])
        with pytest.raises(stillhouse.DatasetError, match="train-00000-of-00001"):
            values(copy, True)
        shard.write_bytes(bytes(cut) + bytes_of[cut:])
        if cut > 4:
            error(copy, True)
    shard.write_bytes(bytes_of + b"more")
    assert same(values(copy, True), values(whole, True))


def write_manifest(folder: pathlib.Path, manifest: dict[str, Any]) -> None:
    text = json.dumps(manifest)
    (folder / "manifest.json").write_text(text)
    (folder / "_SUCCESS").write_text(f"{hashlib.sha256(text.encode()).hexdigest()}  manifest.json\n")


def test_a_flipped_bit_of_the_manifest(copy: pathlib.Path) -> None:
    manifest = copy / "manifest.json"
    random = np.random.default_rng(13)
    for _ in range(200):
        place, bit = int(random.integers(manifest.stat().st_size)), int(random.integers(8))
        flip(manifest, place, bit)
        with pytest.raises(stillhouse.DatasetError, match="manifest.json"):
            stillhouse.open(copy)
        flip(manifest, place, bit)
    (copy / "_SUCCESS").write_text("")  # of an older version, which did not know the sum
    assert len(stillhouse.open(copy)) > 0


def test_what_the_manifest_says_of_the_footer(copy: pathlib.Path) -> None:
    manifest = json.loads((copy / "manifest.json").read_text())
    right = dict(manifest["shards"][0]["footer"])
    for wrong in ({"bytes": right["bytes"] - 1}, {"bytes": 10**15}, {"bytes": 0}, {"sha256": "0" * 64}):
        manifest["shards"][0]["footer"] = {**right, **wrong}
        write_manifest(copy, manifest)
        assert "the manifest says" in error(copy, True)


def older(folder: pathlib.Path) -> None:
    """Makes of it what versions without checksums wrote: the manifest and the metadata have none."""
    manifest = json.loads((folder / "manifest.json").read_text())
    del manifest["shards"][0]["footer"]
    write_manifest(folder, manifest)
    shard = shard_of(folder)
    content = shard.read_bytes()
    assert content.count(b"stillhouse.pages") == 1
    shard.write_bytes(content.replace(b"stillhouse.pages", b"stillhouse.other"))


def test_older_data_sets_stay_readable(whole: pathlib.Path, copy: pathlib.Path) -> None:
    older(copy)
    for whole_blocks in (True, False):
        assert same(values(copy, whole_blocks), values(whole, whole_blocks))


@pytest.mark.parametrize("version", ["this", "older"])
def test_no_panic_is_told(copy: pathlib.Path, version: str) -> None:
    """Of some damage the decoders panic: that is an error as well, and nothing on stderr."""
    if version == "older":
        older(copy)
    shard = shard_of(copy)
    done = subprocess.run([sys.executable, READER, copy, shard, str(FLIPS // 10)], capture_output=True, text=True, check=False)  # fmt: skip
    assert done.returncode == 0 and done.stderr == "", done.stderr
    outcomes = json.loads(done.stdout)
    assert sum(outcomes.values()) == FLIPS // 10
    if version == "this":
        assert outcomes.get("other values", 0) == 0 and outcomes.get("equal values", 0) <= 1, outcomes
    assert outcomes["DatasetError"] > FLIPS // 100, outcomes


def test_verify_repair_and_export(copy: pathlib.Path, whole: pathlib.Path) -> None:
    def call(*arguments: str | pathlib.Path) -> subprocess.CompletedProcess[str]:
        return subprocess.run([program(), *arguments], cwd=copy.parent, capture_output=True, text=True, check=False)

    shard = shard_of(copy)
    right = shard.read_bytes()
    flip(shard, chunks(shard)["logprob"][1].start + 77, 5)
    assert "row group 1, column logprob" in error(copy, True)
    found = call("verify", "out")
    assert found.returncode == 1 and "stillhouse repair out job.yaml" in found.stdout + found.stderr, found
    mended = call("repair", "out", "job.yaml")
    assert mended.returncode == 0, mended.stderr
    assert shard.read_bytes() == right
    assert same(values(copy, True), values(whole, True))

    exported = call("export", "out", "exported")
    assert exported.returncode == 0, exported.stderr
    there = copy.parent / "exported"
    assert shard_of(there).read_bytes() == right
    flip(shard_of(there), chunks(shard)["logprob"][0].start + 77, 5)
    assert "row group 0, column logprob" in error(there, False)
