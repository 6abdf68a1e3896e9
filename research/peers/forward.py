"""
The forward pass alone, in tokens per second: hidden states, and hidden states with the logits of all tokens, beside transformers on PyTorch and
llama.cpp. Each figure of a run is the best of three passes after one that is not timed; ids are the same everywhere.

Ours, PyTorch's and llama.cpp's logits are made of the same weights; those of PyTorch in f32 are what the logits of the other peers are held to
(how they correlate over the vocabulary, at the last token). For ours `noise` does that, with log-probabilities. llama.cpp has no hidden states
without a head: its "hidden" has the logits of one token.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from .models import Model
from .processes import Outcome, SideFailed, run, script
from .rounds import Side

PASSES = 3
SAME = 0.99
"""The least correlation of two sides' logits: bf16 has 0.9996, Q8_0 0.9988."""
# its default; everything at once made no difference
UBATCH = 512


def memory_and_others(done: Outcome) -> dict[str, float]:
    return {"peak_megabytes": done.peak_bytes / 1e6, "others_cores": done.others_cores}


def sides(prefill: Path, model: Model, shape: tuple[int, int], threads: int, dtypes: list[str]) -> list[Side]:
    """The program in each of its types, and the peers."""
    batch, length = shape
    spec: dict[str, Any] = {
        "batch": batch,
        "length": length,
        "threads": threads,
        "passes": PASSES,
        "vocabulary": model.vocabulary,
    }
    probes: dict[str, np.ndarray] = {}

    def ours(dtype: str) -> dict[str, Any]:
        command = [str(prefill), str(model.folder), dtype, "--shape", f"{batch}x{length}"]
        done = run(dtype, command, threads, {"RAYON_NUM_THREADS": str(threads)})
        words = done.lines[-1][1].split() if done.lines else []
        if words[:2] != [str(length), str(batch)]:
            raise SideFailed(f"prefill said {done.lines[-1:]}, not the speeds of {batch} × {length}")
        # each with its share of the peak, then the peak
        hidden, share, with_logits, share_with_logits, peak = words[2:7]
        said: dict[str, Any] = {"hidden": float(hidden), "with_logits": float(with_logits)}
        said |= {"share_percent": float(share.rstrip("%")), "peak_gflops": float(peak)}
        said["share_with_logits_percent"] = float(share_with_logits.rstrip("%"))
        said["arithmetic"] = done.lines[0][1]
        return said | memory_and_others(done)

    def peer(name: str, module: str, more: dict[str, Any]) -> dict[str, Any]:
        done = script(name, module, spec | more, threads, threads)
        said = done.result()
        logits = np.array(said.pop("probe"))
        same = float(np.corrcoef(logits, probes.setdefault("first", logits))[0, 1])
        if not same >= SAME:
            raise SideFailed(f"its logits are not those of PyTorch in f32: they correlate by {same:.3f}")
        return said | {"correlation": same} | memory_and_others(done)

    def torch_side(dtype: str) -> dict[str, Any]:
        return peer(dtype, "torch_forward", {"model": str(model.folder), "dtype": dtype})

    def llama_side(path: Path) -> dict[str, Any]:
        return peer(path.name, "llama_forward", {"model": str(path), "ubatch": UBATCH})

    made = [Side(f"ours, {dtype}", partial(ours, dtype), ours=True) for dtype in dtypes]
    made += [
        Side(f"PyTorch, {short}", partial(torch_side, dtype), packages=("torch", "transformers"))
        for short, dtype in (("f32", "float32"), ("bf16", "bfloat16"))
    ]
    made += [
        Side(f"llama.cpp, {kind}", partial(llama_side, path), packages=("llama-cpp-python",))
        for kind, path in model.gguf.items()
    ]
    return made


FIGURES = {
    "hidden": "tokens/s, hidden",
    "with_logits": "tokens/s with logits",
    "peak_gflops": "peak of its instructions, GFLOP/s",
    "share_with_logits_percent": "share of it with logits, %",
    "peak_megabytes": "peak MB",
    "others_cores": "cores of others",
}
RATE = "with_logits"
NOTE = "Best of three passes in each run. llama.cpp has no hidden states without a head: there its first column has the logits of one token."
