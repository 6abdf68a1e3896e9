"""`stillhouse export --format`: what DistillKit and Megatron-LM would read of it, decoded here from the facts of their formats.

Facts of DistillKit (distillkit/compression): a row has `compressed_logprobs` and `bytepacked_indices`, a list of bytes for each position; the configuration
says how many floats of which type come first, and in how many bits, high bit first, an id is; what is read at t is added to the student's logits at t.
Facts of Megatron-LM (megatron/training/distillation): tars `cp{C}_dp{D}__{last}.tar` whose first member `_meta.json` has a hash of the run, then
`{iteration}.pt.zst`, each zstd with its size of torch.save of lists of tensors [S, batch, K]; an id is 16 low bits and the 17th; −1000 is no entry.
"""

from __future__ import annotations

import hashlib
import io
import json
import math
import pathlib
import re
import shutil
import subprocess
import tarfile
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import pytest
import torch
import yaml
from shared_fixtures import WORDS, Maker, program

import stillhouse

NOTHING = -1000.0
LENGTH = 24
SIGNALS = {
    "topk": 8,
    "top_p": {"mass": 0.1, "most": 20},
    "samples": {"draws": 16, "power": 0.8},
    "candidates": [4, 9, 100],
}
Entries = dict[int, float]


def call(*arguments: Any, code: int = 0) -> str:
    done = subprocess.run([program(), "export", *map(str, arguments)], capture_output=True, text=True, check=False)
    assert done.returncode == code, done.stderr
    return done.stdout if code == 0 else done.stderr


@pytest.fixture(scope="module")
def teacher(small: Maker) -> pathlib.Path:
    """Three shards to train on, and one held out."""
    holdout = {"validation": {"last_documents": 9}}
    made = small("kd", {"extract": SIGNALS, "input": {"split_megabytes": 0.001, "holdout": holdout}})
    assert len(list((made / "data").glob("train-*.parquet"))) > 1
    return made


@pytest.fixture(scope="module")
def padded(small: Maker) -> pathlib.Path:
    """Rows with padding and documents of one token."""
    return small(
        "kd-padded", {"pack": {"mode": "pad", "boundary": "none", "separator": "none"}, "extract": {"topk": 5}}
    )


@pytest.fixture(scope="module")
def written(small: Maker) -> pathlib.Path:
    """Text that the teacher wrote behind prompts of three tokens."""
    extract = {"mode": "sequential", "noise": None, "topk": 6, "sequential": {"prompt_tokens": 3}}
    return small("kd-written", {"pack": {"mode": "pad"}, "extract": extract})


def truth(place: pathlib.Path, split: str = "train", signal: str = "topk") -> list[tuple[list[int], list[Entries]]]:
    """Of each row its ids without padding, and what the teacher said of each of them, by Stillhouse's own reader."""
    rows = []
    data = stillhouse.open(place, split=split)
    for start in range(0, len(data), 64):
        batch = data[start : start + 64]
        for row, ids in enumerate(batch["input_ids"]):
            length = int(batch["attention_mask"][row].sum()) if "attention_mask" in batch else len(ids)
            rows.append((ids[:length].tolist(), said(batch, row, length, signal)))
    return rows


def said(batch: Any, row: int, length: int, signal: str) -> list[Entries]:
    if signal == "topk":
        pairs = [(batch["topk_index"][row, i], batch["topk_logprob"][row, i]) for i in range(length)]
    elif signal == "candidates":
        pairs = [(np.array(SIGNALS["candidates"]), batch["candidate_logprob"][row, i]) for i in range(length)]
    else:
        names = {"top_p": ("top_p_count", "top_p_index"), "samples": ("sampled_count", "sampled_index")}[signal]
        ends = np.cumsum(batch[names[0]][row].astype(int))
        if signal == "top_p":
            logprobs = batch["top_p_logprob"][row]
        else:
            share = batch["sampled_times"][row].astype(np.float64) / SIGNALS["samples"]["draws"]
            logprobs = np.log(share * batch["sampled_ratio"][row].astype(np.float64)).astype(np.float32)
        cut = [slice(a, b) for a, b in zip([0, *ends[:-1]], ends)][:length]
        pairs = [(batch[names[1]][row][at], logprobs[at]) for at in cut]
    return [{int(id): max(float(p), NOTHING) for id, p in zip(ids, p)} for ids, p in pairs]


def matches(ids: Any, values: Any, expected: Entries, tolerance: float = 0.0) -> None:
    """Entries as read: those expected, and others that are none."""
    assert len(set(ids)) == len(ids)
    got = dict(zip(ids, values))
    for id, value in expected.items():
        assert abs(got[id] - value) <= tolerance * abs(value), (id, got[id], value)
    assert all(value == NOTHING for id, value in got.items() if id not in expected)


# ---- DistillKit


FLOATS = {"float32": torch.float32, "float16": torch.float16, "bfloat16": torch.bfloat16}


def compressor(place: pathlib.Path) -> dict[str, Any]:
    config: dict[str, Any] = yaml.safe_load((place / "compression_config.yaml").read_text())
    # all k exact, nothing approximated, nothing quantized, no differences
    assert config["exact_k"] == config["k"] and config["polynomial_terms"] is None and config["residual_bins"] == []
    assert config["delta_encoding"] is False
    return config


def decompressed(config: dict[str, Any], row: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
    """Ids and log-probabilities [T, k] of a row, as the compressor of the configuration would give them."""
    # as the trainer's collator makes tensors of lists
    packed = torch.tensor(row["bytepacked_indices"]).to(torch.uint8)
    values = torch.tensor(row["compressed_logprobs"]).to(torch.uint8).view(FLOATS[config["exact_dtype"]])
    bits = math.ceil(math.log2(config["d"]))
    stream = np.unpackbits(packed.numpy(), axis=-1)[:, : config["k"] * bits]
    ids = stream.reshape(len(packed), config["k"], bits) @ (1 << np.arange(bits)[::-1])
    assert values.shape == (len(row["input_ids"]), config["k"])
    return torch.from_numpy(ids), values


def loaded(place: pathlib.Path, cache: pathlib.Path, split: str = "train") -> Any:
    """The rows as the trainer loads them, from the folder in place of a repository."""
    return datasets.load_dataset(str(place), split=split, cache_dir=str(cache))


@pytest.mark.parametrize("signal", ["topk", "top_p", "samples", "candidates"])
def test_distillkit_reads_what_the_teacher_said_of_the_next_token(
    teacher: pathlib.Path, tmp_path: pathlib.Path, signal: str
) -> None:
    call(teacher, tmp_path / "kd", "--format", "distillkit", "--signal", signal)
    config = compressor(tmp_path / "kd")
    assert config["d"] == WORDS and config["exact_dtype"] == "float32"
    for split in ["train", "validation"]:
        rows, expected = loaded(tmp_path / "kd", tmp_path / "cache", split), truth(teacher, split, signal)
        assert len(rows) == len(expected) > 5
        for row, (ids, entries) in zip(rows, expected):
            assert row["input_ids"] == ids[:-1]
            for t, (got, values) in enumerate(zip(*decompressed(config, row))):
                assert (values.diff() <= 0).all()
                matches(got.tolist(), values.tolist(), entries[t + 1], 1e-6 if signal == "samples" else 0.0)


def test_what_distillkit_reads_agrees_with_the_column_of_the_tokens(
    teacher: pathlib.Path, tmp_path: pathlib.Path
) -> None:
    call(teacher, tmp_path / "kd", "--format", "distillkit")
    config = compressor(tmp_path / "kd")
    batch = stillhouse.open(teacher)[:]
    there = 0
    for row, logprob, ids in zip(loaded(tmp_path / "kd", tmp_path / "cache"), batch["logprob"], batch["input_ids"]):
        got, values = decompressed(config, row)
        at, entry = (got == torch.tensor(ids[1:].astype(np.int64))[:, None]).nonzero(as_tuple=True)
        assert torch.equal(
            values[at, entry][values[at, entry] > NOTHING], torch.tensor(logprob[1:])[at][values[at, entry] > NOTHING]
        )
        there += len(at)
    assert there > 15


@pytest.mark.parametrize(("dtype", "error"), [("float16", 2.0**-11), ("bfloat16", 2.0**-8)])
def test_shorter_floats_are_within_what_help_says(
    teacher: pathlib.Path, tmp_path: pathlib.Path, dtype: str, error: float
) -> None:
    call(teacher, tmp_path / "kd", "--format", "distillkit", "--dtype", dtype)
    config = compressor(tmp_path / "kd")
    assert config["exact_dtype"] == dtype
    for row, (_, entries) in zip(loaded(tmp_path / "kd", tmp_path / "cache"), truth(teacher)):
        for t, (got, values) in enumerate(zip(*decompressed(config, row))):
            matches(got.tolist(), values.float().tolist(), entries[t + 1], error)


def test_the_loss_of_distillkit_is_a_number(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
    """Its KL against a student, from its entries and from the teacher's own: the missing ones have no probability, renormalized."""
    call(teacher, tmp_path / "kd", "--format", "distillkit", "--signal", "top_p")
    config, expected = compressor(tmp_path / "kd"), truth(teacher, signal="top_p")
    student = torch.log_softmax(torch.randn(LENGTH - 1, WORDS, generator=torch.Generator().manual_seed(3)), -1)
    for row, (_, entries) in list(zip(loaded(tmp_path / "kd", tmp_path / "cache"), expected))[:8]:
        ids, values = decompressed(config, row)
        target = values - values.logsumexp(-1, keepdim=True)
        kl = (target.exp() * (target - student.gather(-1, ids))).sum(-1)
        for t, got in enumerate(kl.tolist()):
            p = {id: math.exp(value) for id, value in entries[t + 1].items()}
            total = sum(p.values())
            want = sum(q / total * (math.log(q / total) - student[t, id].item()) for id, q in p.items() if q > 0)
            assert got == pytest.approx(want, abs=1e-5)


def test_distillkit_has_rows_as_long_as_their_text(padded: pathlib.Path, tmp_path: pathlib.Path) -> None:
    said = call(padded, tmp_path / "kd", "--format", "distillkit", "--json")
    config, expected = compressor(tmp_path / "kd"), truth(padded)
    short = [ids for ids, _ in expected if len(ids) < 2]
    left_out = json.loads(said.splitlines()[-1])["export"]["left_out"]
    assert left_out["rows_of_one_token"] == len(short) > 0
    # an export that goes on has counted them, too
    whole = files(tmp_path / "kd")
    (tmp_path / "kd/export.json").rename(tmp_path / "record.json")
    (tmp_path / "kd/_SUCCESS").unlink()
    mark = {"manifest_sha256": json.loads(whole["export.json"])["source"]["export_sha256"]}
    (tmp_path / "kd/_stillhouse/export.json").write_text(json.dumps(mark))
    call(padded, tmp_path / "kd", "--format", "distillkit")
    assert files(tmp_path / "kd") == whole
    rows, expected = loaded(tmp_path / "kd", tmp_path / "cache"), [row for row in expected if len(row[0]) > 1]
    assert len(rows) == len(expected) and len({len(ids) for ids, _ in expected}) > 3
    for row, (ids, entries) in zip(rows, expected):
        assert row["input_ids"] == ids[:-1] and "labels" not in row
        for t, (got, values) in enumerate(zip(*decompressed(config, row))):
            matches(got.tolist(), values.tolist(), entries[t + 1])


def test_distillkit_masks_what_was_given(written: pathlib.Path, tmp_path: pathlib.Path) -> None:
    call(written, tmp_path / "kd", "--format", "distillkit")
    rows = loaded(tmp_path / "kd", tmp_path / "cache")
    given = stillhouse.open(written)[:]["given"]
    assert len(rows) == len(given) and set(given.tolist()) <= {2, 3, 4} and 4 in given
    for row, n in zip(rows, given.tolist()):
        # at n − 1 stands what the teacher said of the first token that it wrote
        assert row["labels"] == [-100] * (n - 1) + row["input_ids"][n - 1 :]


# ---- Megatron-LM


def decompress(frame: bytes) -> bytes:
    """As zstandard's ZstdDecompressor: it needs the size in the header of the frame."""
    assert frame[:4] == b"\x28\xb5\x2f\xfd"
    flag, single = frame[4] >> 6, frame[4] >> 5 & 1
    at = 5 + (0 if single else 1) + [0, 1, 2, 4][frame[4] & 3]
    width = {0: 1 if single else 0, 1: 2, 2: 4, 3: 8}[flag]
    assert width > 0, "no size in the frame"
    size = int.from_bytes(frame[at : at + width], "little") + (256 if flag == 1 else 0)
    return bytes(pa.Codec("zstd").decompress(frame, decompressed_size=size, asbytes=True))


Micro = tuple[torch.Tensor, torch.Tensor]


def iterations(place: pathlib.Path, rank: int, expected_hash: str) -> dict[int, list[Micro]]:
    """The micro-batches of a rank, by iteration, in the order of files and members."""
    named = re.compile(r"^cp(\d+)_dp(\d+)__(\d+)\.tar$")
    files = [
        (int(found[3]), file) for file in place.iterdir() if (found := named.match(file.name)) and int(found[2]) == rank
    ]
    read: dict[int, list[Micro]] = {}
    for last, file in sorted(files):
        verified = False
        with open(file, "rb") as stream, tarfile.open(fileobj=stream, mode="r|*") as tar:
            for member in tar:
                assert member.isreg()
                content = tar.extractfile(member)
                assert content is not None
                if member.name == "_meta.json":
                    assert json.loads(content.read())["hash"] == expected_hash
                    verified = True
                    continue
                found = re.match(r"^(\d+)\.pt\.zst$", member.name)
                assert verified and found
                tensors = torch.load(io.BytesIO(decompress(content.read())), weights_only=True)
                micro = []
                for values, low, high in zip(tensors["values"], tensors["indices_low"], tensors["bit_17"]):
                    assert (
                        low.dtype == torch.uint16
                        and high.dtype == torch.bool
                        and values.shape == low.shape == high.shape
                    )
                    micro.append((values, high.long() << 16 | low.long()))
                assert int(found[1]) not in read
                read[int(found[1])] = micro
        assert max(read) == last
    return read


def run_hash(sequence_length: int, samples: int, seed: int = 1234) -> str:
    blend = {"kind": "blend", "blend": [[0.7, "owt_text_document"], [0.3, "c4"]]}
    what = {"seed": seed, "sequence_length": sequence_length, "train_samples": samples, "blend": blend}
    return hashlib.md5(json.dumps(what, separators=(",", ":")).encode()).hexdigest()


BLEND = ["--blend", "/data/owt_text_document=0.7", "--blend", "c4.bin=0.3"]
MEGATRON = ["--format", "megatron-kd", *BLEND]


@pytest.mark.parametrize("signal", ["topk", "top_p", "samples", "candidates"])
def test_megatron_reads_what_the_teacher_said_of_the_next_token(
    teacher: pathlib.Path, tmp_path: pathlib.Path, signal: str
) -> None:
    batch, micro, ranks, length = 8, 2, 2, LENGTH - 1
    sizes = ["--global-batch", batch, "--micro-batch", micro, "--data-parallel", ranks, "--iterations-per-file", 2]
    said = call(teacher, tmp_path / "kd", *MEGATRON, *sizes, "--signal", signal, "--json")
    expected = truth(teacher, "train", signal)
    count = len(expected) // batch
    left_out = json.loads(said.splitlines()[-1])["export"]["left_out"]["rows_of_no_iteration"]
    assert left_out == len(expected) % batch + len(truth(teacher, "validation", signal)) % batch
    read = [iterations(tmp_path / "kd/data/train", rank, run_hash(length, count * batch)) for rank in range(ranks)]
    assert all(sorted(rank) == list(range(count)) for rank in read) and count > 2
    widths = set()
    for iteration in range(count):
        # as the reader of one rank puts two together: round robin, and so the order of the rows
        merged = [read[rank][iteration][m] for m in range(batch // micro // ranks) for rank in range(ranks)]
        for m, (values, ids) in enumerate(merged):
            rows = expected[iteration * batch + m * micro :][:micro]
            # as wide as the fullest position of the micro-batch
            width = max(len(said) for _, entries in rows for said in entries[1:])
            assert values.dtype == torch.float32 and values.shape == (length, micro, width)
            widths.add(width)
            for place, (_, entries) in enumerate(rows):
                for t in range(length):
                    tolerance = 1e-6 if signal == "samples" else 0.0
                    matches(ids[t, place].tolist(), values[t, place].tolist(), entries[t + 1], tolerance)
    assert len(widths) > 1 or signal != "top_p"


def ghost_loss(student: torch.Tensor, values: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The reader's loss [S]: KL over the entries, and over what is left of both as one token more."""
    mask = values != NOTHING
    chosen = torch.log_softmax(student, -1).gather(-1, ids)
    rest = torch.log((1 - (chosen.exp() * mask).sum(-1, keepdim=True)).clamp(min=1e-8))
    rest_of_teacher = torch.log((1 - values.exp().sum(-1, keepdim=True)).clamp(min=1e-8))
    both, others = torch.cat([values, rest_of_teacher], -1), torch.cat([chosen, rest], -1)
    mask = torch.cat([mask, torch.ones_like(mask[..., :1])], -1)
    return (mask * both.exp() * (both - others)).sum(-1)


def test_megatron_has_no_loss_where_nothing_is_known(padded: pathlib.Path, tmp_path: pathlib.Path) -> None:
    call(padded, tmp_path / "kd", *MEGATRON, "--global-batch", 4, "--sequence-length", LENGTH, "--dtype", "float16")
    expected = truth(padded)
    read = iterations(tmp_path / "kd/data/train", 0, run_hash(LENGTH, len(expected) // 4 * 4))
    student = torch.randn(LENGTH, WORDS, generator=torch.Generator().manual_seed(5))
    masked = 0
    for number, (ids, entries) in enumerate(expected[: len(read) * 4]):
        values, indices = (tensor[:, 0] for tensor in read[number // 4][number % 4])
        assert values.dtype == torch.float16
        loss = ghost_loss(student, values.float(), indices)
        assert loss.isfinite().all()
        known = len(ids) - 1
        assert (loss[known:] == 0).all() and (loss[:known] > 0).all() and known < LENGTH
        masked += LENGTH - known
        for t in range(known):
            matches(indices[t].tolist(), values[t].tolist(), entries[t + 1], 2.0**-11)
    assert masked > len(expected)


def test_megatron_has_nothing_of_text_that_was_given(written: pathlib.Path, tmp_path: pathlib.Path) -> None:
    call(written, tmp_path / "kd", *MEGATRON, "--global-batch", 2, "--seed", 7, "--train-samples", 100)
    read = iterations(tmp_path / "kd/data/train", 0, run_hash(LENGTH - 1, 100, seed=7))
    given = stillhouse.open(written)[:]["given"].tolist()
    for number, (ids, entries) in enumerate(truth(written)[: len(read) * 2]):
        values, indices = (tensor[:, 0] for tensor in read[number // 2][number % 2])
        for t in range(LENGTH - 1):
            known = given[number] <= t + 1 < len(ids)
            matches(indices[t].tolist(), values[t].tolist(), entries[t + 1] if known else {})


def test_a_hash_that_the_reader_has_said_is_taken(teacher: pathlib.Path, tmp_path: pathlib.Path) -> None:
    said = "0123456789abcdef0123456789abcdef"
    call(teacher, tmp_path / "kd", "--format", "megatron-kd", "--hash", said, "--global-batch", 8)
    assert iterations(tmp_path / "kd/data/train", 0, said)


# ---- places, errors


def files(place: pathlib.Path) -> dict[str, bytes]:
    shown = [file for file in place.rglob("*") if file.is_file() and "_stillhouse" not in file.parts]
    return {file.relative_to(place).as_posix(): file.read_bytes() for file in shown}


@pytest.mark.parametrize(
    "how", [["--format", "distillkit"], [*MEGATRON, "--global-batch", 8, "--iterations-per-file", 3]]
)
def test_an_export_goes_on_with_what_is_missing(teacher: pathlib.Path, tmp_path: pathlib.Path, how: list[Any]) -> None:
    place = tmp_path / "kd"
    assert "would be made" in call(teacher, place, *how, "--dry-run") and not place.exists()
    call(teacher, place, *how)
    whole = files(place)
    assert {"README.md", "export.json", "_SUCCESS"} < set(whole)
    record = json.loads(whole["export.json"])
    assert whole["_SUCCESS"].decode() == f"{hashlib.sha256(whole['export.json']).hexdigest()}  export.json\n"
    for name, file in record["files"].items():
        assert hashlib.sha256(whole[name]).hexdigest() == file["sha256"] and len(whole[name]) == file["bytes"]
    # once more: nothing; without a file: that file; by two at once or one: the same
    assert "0 files" in call(teacher, place, *how).splitlines()[0]
    lost = min(name for name in whole if name.startswith("data/"))
    (place / lost).unlink()
    (place / "_SUCCESS").unlink()
    call(teacher, place, *how, "--parallel", "1")
    assert files(place) == whole
    # another one is not mixed with it, and what is there with other content is said
    assert "another export" in call(teacher, place, *how, "--dtype", "float16", code=2)
    (place / lost).write_bytes(b"other")
    assert "other content" in call(teacher, place, *how, code=1)


def test_what_cannot_be_exported_is_named(teacher: pathlib.Path, small: Maker, tmp_path: pathlib.Path) -> None:
    place = tmp_path / "kd"
    without = small("kd-without", {})
    assert "extract.topk" in call(without, place, "--format", "distillkit", code=2)
    only = small("kd-only", {"extract": {"topk": 2}})
    missing = call(only, place, "--format", "distillkit", "--signal", "samples", code=2)
    assert "sampled_times" in missing and "valid: topk" in missing
    for options, said in [
        (["--micro-batch", 2, "--data-parallel", 3, "--global-batch", 8], "a multiple of --micro-batch 2"),
        (["--global-batch", 4, "--sequence-length", 30], "valid: 23"),
        (["--global-batch", 100_000], "fill no iteration"),
        (["--global-batch", 4, "--blend", "a=x"], "NAME=WEIGHT"),
        ([], "needs --global-batch"),
    ]:
        assert said in call(teacher, place, *MEGATRON, *options, code=2)
    megatron = ["--format", "megatron-kd", "--global-batch", 4]
    assert "--hash" in call(teacher, place, *megatron, code=2)
    assert "32 hexadecimal" in call(teacher, place, *megatron, "--hash", "abc", code=2)
    assert "megatron-kd" in call(teacher, place, "--format", "distillkit", "--global-batch", 4, code=2)
    assert "megatron-kd" in call(teacher, place, "--micro-batch", 4, code=2)
    assert "distillkit, megatron-kd" in call(teacher, place, "--format", "tar", code=2)
    assert not place.exists()
    # a place that has something else stays as it is
    place.mkdir()
    (place / "mine.txt").write_text("mine")
    assert "not of this export" in call(teacher, place, "--format", "distillkit", code=2)
    assert files(place) == {"mine.txt": b"mine"}
    assert "a data set" in call(teacher, only, "--format", "distillkit", code=2)


@pytest.mark.parametrize("how", [["--format", "distillkit"], [*MEGATRON, "--global-batch", 4]])
def test_a_damaged_shard_ends_it(teacher: pathlib.Path, tmp_path: pathlib.Path, how: list[Any]) -> None:
    copy = tmp_path / "copy"
    shutil.copytree(teacher, copy)
    shard = min((copy / "data").glob("train-*.parquet"))
    content = bytearray(shard.read_bytes())
    for at in range(1000, len(content), 997):
        content[at] ^= 1
    shard.write_bytes(content)
    assert shard.name in call(copy, tmp_path / "kd", *how, code=1)
    assert not (tmp_path / "kd").exists() or "_SUCCESS" not in files(tmp_path / "kd")
