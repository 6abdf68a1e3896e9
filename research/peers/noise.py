"""
End to end: a job with a teacher and noise (`replay`, 1e-3, with log-probabilities, written as Parquet) beside a plain PyTorch script that makes
dense noise of the same tokens in the same batches and throws it away.

Time without loading: of the job from its event `job_started`, which comes when the teacher is loaded, to `job_finished`, so tokenizing, packing,
encoding and committing are in it; of the script from the end of its first pass, which is made once more. Every run of the script takes
its tokens from the job's shards and compares the log-probabilities there with its own.
"""

from __future__ import annotations

import gzip
import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from .models import Model
from .processes import Outcome, SideFailed, run, script
from .rounds import Side

LENGTH = 256
BATCH = 8
SLICE = 6000
# mean |Δ log p| over the tokens
LARGEST_DIFFERENCE = {"float32": 0.02, "bfloat16": 0.2}


def text(speeches: Path, tokens: int, path: Path) -> None:
    """Documents of 6,000 characters, as long as that makes so many tokens and somewhat more."""
    documents = [json.loads(line)["text"] for line in gzip.decompress(speeches.read_bytes()).splitlines()]
    left = 6 * tokens
    with path.open("w", encoding="utf-8") as file:
        for at in range(0, max(map(len, documents)), SLICE):
            for document in documents:
                part = document[at : at + SLICE][:left]
                if part:
                    file.write(json.dumps({"text": part}) + "\n")
                left -= len(part)
                if left <= 0:
                    return
    raise SideFailed(f"{speeches} has no {tokens:,} tokens: ask for fewer with --tokens")


def sides(
    program: Path, model: Model, speeches: Path, work: Path, cores: int, tokens: int, dtypes: list[str]
) -> list[Side]:
    """The program in each of its types, and PyTorch's two."""
    assert model.job_teacher is not None
    source = work / "noise.jsonl"
    text(speeches, tokens, source)
    made_by_ours: list[Path] = []

    def ours(dtype: str) -> dict[str, Any]:
        out = work / f"noise-{dtype}"
        shutil.rmtree(out, ignore_errors=True)
        job = {
            "version": 1,
            "name": "peers",
            "seed": 42,
            "input": {"format": "jsonl", "paths": str(source), "text": "text"},
            "tokenizer": {"bos": "<|endoftext|>", "eos": "<|endoftext|>"},
            "pack": {"mode": "wrap", "length": LENGTH, "separator": "eos", "boundary": "bos_eos", "remainder": "drop"},
            "extract": {
                "teacher": {
                    "path": str(model.job_teacher),
                    "device": "cpu",
                    "dtype": dtype,
                    "batch_tokens": BATCH * LENGTH,
                },
                "noise": {"codec": "replay", "tolerance": 1e-3, "draws": 1},
            },
            "output": {"path": str(out)},
        }
        path = work / "noise.json"
        path.write_text(json.dumps(job))
        done = run(f"ours, {dtype}", [str(program), "run", str(path), "--json", "--threads", str(cores)], cores)
        at = {event["event"]: (second, event) for second, event in ((s, json.loads(line)) for s, line in done.lines)}
        made_by_ours[:] = made_by_ours or [out]
        (loaded, _), (finished, summary) = at["job_started"], at["job_finished"]
        return figures(done, summary["tokens"], finished - loaded)

    def figures(done: Outcome, tokens: int, work_seconds: float) -> dict[str, Any]:
        return {
            "tokens": tokens,
            "tokens_per_second": tokens / work_seconds,
            "milliseconds_per_token": 1e3 * work_seconds / tokens,
            "seconds": done.seconds,
            "peak_megabytes": done.peak_bytes / 1e6,
            "others_cores": done.others_cores,
        }

    def peer(dtype: str) -> dict[str, Any]:
        if not made_by_ours:
            raise SideFailed("there is no data set of ours to take the tokens from")
        spec = {
            "model": str(model.folder),
            "dataset": str(made_by_ours[0]),
            "dtype": dtype,
            "batch": BATCH,
            "threads": cores,
        }
        done = script(dtype, "torch_noise", spec, cores, cores)
        said = done.result()
        if not said["logprob_difference"] <= LARGEST_DIFFERENCE[dtype]:
            raise SideFailed(
                f"its log-probabilities differ from ours by {said['logprob_difference']:.3g} nat in the mean"
            )
        measured = figures(done, said["tokens"], said["work_seconds"])
        return measured | {"logprob_difference": said["logprob_difference"]}

    made = [Side(f"ours, {dtype}", partial(ours, dtype), ours=True) for dtype in dtypes]
    made += [
        Side(f"PyTorch, {short}, dense", partial(peer, dtype), packages=("torch", "transformers"))
        for short, dtype in (("f32", "float32"), ("bf16", "bfloat16"))
    ]
    return made


def unequal(sides: list[Side]) -> str | None:
    """What is wrong with the numbers of tokens, where something is."""
    counts = {side.name: {result["tokens"] for result in side.results} for side in sides if side.results}
    if len(set().union(*counts.values())) <= 1:
        return None
    return "tokens differ: " + "; ".join(f"{name} {sorted(count)}" for name, count in counts.items())


FIGURES = {
    "tokens_per_second": "tokens/s without loading",
    "milliseconds_per_token": "ms per token",
    "seconds": "s with loading",
    "peak_megabytes": "peak MB",
    "others_cores": "cores of others",
}
RATE = "tokens_per_second"
NOTE = (
    "The program's time, without loading the teacher, has reading, tokenizing, encoding and writing in it; PyTorch begins with tokens and throws "
    "its noise away."
)
