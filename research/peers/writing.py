"""
Text that the teacher writes: a job with `extract.mode: sequential` beside llama.cpp, as many sequences at once, as many texts of the full length,
every token sampled from the whole softmax.

Time without loading: of the job from its event `job_started`, which comes when the teacher is loaded, to `job_finished`, so the log-probabilities,
writing and committing are in it; of llama.cpp from its second pass, its samplers and nothing else in it.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

from .models import Model
from .processes import Outcome, SideFailed, run, script
from .rounds import Side

LENGTH = 256
BOS = 0
"""<|endoftext|> of SmolLM2."""


def sides(program: Path, model: Model, work: Path, cores: int, slots: int, texts: int, dtypes: list[str]) -> list[Side]:
    """The program in each of its types, and llama.cpp in each of its own."""
    assert model.job_teacher is not None

    def ours(dtype: str) -> dict[str, Any]:
        out = work / f"written-{dtype}"
        shutil.rmtree(out, ignore_errors=True)
        job = {
            "version": 1,
            "name": "peers",
            "seed": 42,
            "input": {"format": "none", "documents": texts},
            "tokenizer": {"bos": "<|endoftext|>", "eos": "<|endoftext|>", "pad": "<|endoftext|>"},
            "pack": {"mode": "pad", "length": LENGTH},
            "extract": {
                "mode": "sequential",
                "sequential": {"stop": "length", "slots": slots},
                "teacher": {"path": str(model.job_teacher), "device": "cpu", "dtype": dtype},
            },
            "output": {"path": str(out)},
        }
        path = work / "written.json"
        path.write_text(json.dumps(job))
        done = run(f"ours, {dtype}", [str(program), "run", str(path), "--json", "--threads", str(cores)], cores)
        at = {event["event"]: (second, event) for second, event in ((s, json.loads(line)) for s, line in done.lines)}
        (loaded, _), (finished, summary) = at["job_started"], at["job_finished"]
        # the first of a row is bos, which nobody writes
        return figures(done, summary["tokens"] - summary["rows"], finished - loaded)

    def figures(done: Outcome, tokens: int, work_seconds: float) -> dict[str, Any]:
        return {
            "tokens": tokens,
            "tokens_per_second": tokens / work_seconds,
            "seconds": done.seconds,
            "peak_megabytes": done.peak_bytes / 1e6,
            "others_cores": done.others_cores,
        }

    def peer(path: Path) -> dict[str, Any]:
        spec = {"model": str(path), "slots": slots, "texts": texts, "length": LENGTH, "threads": cores, "bos": BOS}
        done = script(path.name, "llama_write", spec, cores, cores)
        said = done.result()
        if said["tokens"] != texts * (LENGTH - 1):
            raise SideFailed(f"it wrote {said['tokens']} tokens, not {texts * (LENGTH - 1)}")
        return figures(done, said["tokens"], said["work_seconds"])

    made = [Side(f"ours, {dtype}", partial(ours, dtype), ours=True) for dtype in dtypes]
    made += [
        Side(f"llama.cpp, {kind}", partial(peer, path), packages=("llama-cpp-python",))
        for kind, path in model.gguf.items()
    ]
    return made


FIGURES = {
    "tokens_per_second": "tokens/s without loading",
    "seconds": "s with loading",
    "peak_megabytes": "peak MB",
    "others_cores": "cores of others",
}
RATE = "tokens_per_second"
NOTE = "The program's time has the log-probabilities, Parquet and the commit in it; llama.cpp keeps nothing but the tokens."
