"""
Whole jobs from jsonl to packed tokens: the program beside `datasets.map`, datatrove and Megatron-style preprocessing, with the same tokenizer.

Every document is followed by the end-of-text token, and nothing is dropped, so all sides make one and the same stream of ids, cut into 1,024
by those that cut. Its length and its sha256 are compared. What a side is asked to write is what it writes by itself: Parquet the program and
`datasets`, bare uint16 the others.
"""

from __future__ import annotations

import gzip
import hashlib
import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq

from .processes import Outcome, run, script
from .rounds import Side

LENGTH = 1024
PARTS = 4
END_OF_TEXT = "<|endoftext|>"


def corpus(speeches: Path, cache: Path, megabytes: float) -> Path:
    """The speeches again and again, in PARTS files of equal size: a folder, made once."""
    folder = cache / f"{speeches.name.split('.')[0]}-{megabytes:g}"
    if folder.exists():
        return folder
    documents = gzip.decompress(speeches.read_bytes()).splitlines(keepends=True)
    made = folder.with_suffix(".part")
    shutil.rmtree(made, ignore_errors=True)
    made.mkdir(parents=True)
    next_document = 0
    for part in range(PARTS):
        with (made / f"part-{part}.jsonl").open("wb") as file:
            while file.tell() < megabytes * 1e6 / PARTS:
                file.write(documents[next_document % len(documents)])
                next_document += 1
    made.rename(folder)
    return folder


def of_parquet(folder: Path) -> Iterator[np.ndarray]:
    """Ids of the column `input_ids`, file by file."""
    for path in sorted(folder.glob("*.parquet")):
        for batch in pq.ParquetFile(path).iter_batches(columns=["input_ids"]):
            yield batch.column("input_ids").flatten().to_numpy()


def of_words(folder: Path, pattern: str) -> Iterator[np.ndarray]:
    """Ids of files that are nothing but uint16."""
    for path in sorted(folder.glob(pattern)):
        yield np.fromfile(path, np.uint16)


def stream(parts: Iterator[np.ndarray]) -> dict[str, Any]:
    """What two equal streams of ids have in common."""
    digest, tokens = hashlib.sha256(), 0
    for part in parts:
        digest.update(part.astype("<i4").tobytes())
        tokens += part.size
    return {"tokens": tokens, "sha256": digest.hexdigest()}


def sides(program: Path, assets: Path, corpus: Path, work: Path, cores: int) -> list[Side]:
    """The program and its peers, all on so many cores."""
    tokenizer = assets / "teacher-nano-gpt2" / "tokenizer.json"
    files = sorted(corpus.glob("*.jsonl"))
    text_bytes = sum(path.stat().st_size for path in files)
    for path in files:
        path.read_bytes()  # into the page cache
    job: dict[str, Any] = {
        "version": 1,
        "name": "peers",
        "input": {"format": "jsonl", "paths": [str(path) for path in files], "text": "text"},
        "tokenizer": {"path": str(tokenizer.parent), "eos": END_OF_TEXT},
        "pack": {"mode": "wrap", "length": LENGTH, "separator": "eos", "boundary": "none", "remainder": "keep"},
    }

    def figures(done: Outcome, work_seconds: float, ids: dict[str, Any]) -> dict[str, Any]:
        return {
            **ids,
            "seconds": done.seconds,
            "tokens_per_second": ids["tokens"] / done.seconds,
            "at_work_tokens_per_second": ids["tokens"] / work_seconds,
            "megabytes_per_second": text_bytes / work_seconds / 1e6,
            "peak_megabytes": done.peak_bytes / 1e6,
            "others_cores": done.others_cores,
        }

    def ours() -> dict[str, Any]:
        out = work / "stillhouse"
        shutil.rmtree(out, ignore_errors=True)
        # as many shards as there are files, as the peers have them
        whole = job | {"output": {"path": str(out), "shard_megabytes": 500}}
        whole["input"] = whole["input"] | {"split_megabytes": text_bytes / PARTS / 1e6}
        path = work / "tokenize.json"
        path.write_text(json.dumps(whole))
        done = run("stillhouse", [str(program), "run", str(path), "--quiet", "--threads", str(cores)], cores)
        made = figures(done, done.seconds, stream(of_parquet(out / "data")))
        shutil.rmtree(out)
        return made

    def peer(module: str) -> dict[str, Any]:
        out = work / module
        shutil.rmtree(out, ignore_errors=True)
        spec = {
            "files": [str(path) for path in files],
            "tokenizer": str(tokenizer),
            "end_of_text": END_OF_TEXT,
            "length": LENGTH,
            "out": str(out),
            "processes": cores,
        }
        done = script(module, module, spec, cores)
        ids = {
            "hf_datasets": lambda: of_parquet(out),
            "datatrove_tokens": lambda: of_words(out, "*.ds"),
            "megatron": lambda: of_words(out, "*.bin"),
        }[module]()
        made = figures(done, done.result()["work_seconds"], stream(ids))
        shutil.rmtree(out)
        return made

    return [
        Side("stillhouse", ours, ours=True),
        Side("datasets.map", partial(peer, "hf_datasets"), packages=("datasets", "tokenizers")),
        Side("datatrove", partial(peer, "datatrove_tokens"), packages=("datatrove", "tokenizers", "orjson")),
        Side("Megatron-style", partial(peer, "megatron"), packages=("tokenizers", "numpy")),
    ]


def unequal(sides: list[Side]) -> str | None:
    """What is wrong with the ids of the sides, where something is."""
    streams = {(side.name, result["tokens"], result["sha256"]) for side in sides for result in side.results}
    if len({(tokens, digest) for _, tokens, digest in streams}) <= 1:
        return None
    return "tokens differ: " + "; ".join(
        f"{name} {tokens:,} with sha256 {digest[:12]}" for name, tokens, digest in sorted(streams)
    )


FIGURES = {
    "at_work_tokens_per_second": "tokens/s",
    "megabytes_per_second": "MB/s of jsonl",
    "tokens_per_second": "tokens/s with its start",
    "seconds": "s with its start",
    "peak_megabytes": "peak MB",
    "others_cores": "cores of others",
}
RATE = "at_work_tokens_per_second"
NOTE = (
    "The program's rate is of its whole run; that of a peer leaves out the start of Python and its imports. Every document and the token after it "
    "are in all outputs."
)
