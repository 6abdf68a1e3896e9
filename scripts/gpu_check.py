"""The part of scripts/gpu-check that is PyTorch's: the same work as gpu_check's throughput, in turn with it, and our Triton replay.

    python3 scripts/gpu_check.py --program gpu_check --json gpu-check.json [--seconds N] [--tiny]

Per shape: a net of random bf16 weights (scaled_dot_product_attention, blocks and noise through torch.compile, eager where that fails),
logits in slices, dense posterior noise of one draw in f16 that stays on the device. gpu_check makes corrections and brings them to
the host. Turns alternate, ours first; figures are medians. Rows are added to the JSON that gpu_check wrote. --tiny: on the CPU, with
Triton's interpreter and gpu_check's host emulation; its figures mean nothing.

Ends with 0; with 1 where something of ours is wrong; with 3 where there was no time to check the replay. What PyTorch cannot do is said.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

TURNS = 3
TURN_SECONDS = 1.5
SLICE_BYTES = 512 << 20


@dataclass(frozen=True)
class Shape:
    name: str
    gpt2: bool
    vocab: int
    width: int
    layers: int
    heads: int
    kv_heads: int
    dim: int
    inner: int
    positions: int
    tied: bool
    seconds: float  # that loading and compiling may take


SHAPES = [
    Shape("GPT-2 Large 774M", True, 50_257, 1280, 36, 20, 20, 64, 5120, 4096, True, 35),
    Shape("Llama 3.1 8B", False, 128_256, 4096, 32, 32, 8, 128, 14_336, 4096, False, 60),
    Shape("GPT-2 124M", True, 50_257, 768, 12, 12, 12, 64, 3072, 4096, True, 25),
    Shape("Llama 3.2 1B", False, 128_256, 2048, 16, 32, 8, 64, 8192, 4096, True, 35),
]
GOALS = ("GPT-2 Large 774M", "Llama 3.1 8B")
"""The shapes that goals are set for, at L = 1,024: they come first, and at that length alone."""
TINY = [Shape("tiny Llama", False, 517, 64, 2, 4, 2, 32, 96, 1024, False, 0)]


class Report:
    """Adds rows to the table and to the file."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.all: dict[str, Any] = json.loads(path.read_text()) if path.exists() else {"rows": []}
        self.part = ""
        self.right = True
        self.checked = True

    def row(self, what: str, shown: str, unit: str, note: str, fields: dict[str, Any]) -> None:
        print(f"{self.part:<12} {what:<52} {shown:>12} {unit:<9} {note}".rstrip(), flush=True)
        self.all["rows"].append({"part": self.part, "what": what, "note": note, **fields})
        self.path.write_text(json.dumps(self.all, indent=1, ensure_ascii=False))

    def figure(self, what: str, value: float, unit: str, note: str = "") -> None:
        shown = f"{value:.0f}" if abs(value) >= 1000 else f"{value:.4g}"
        self.row(what, shown, unit, note, {"value": value, "unit": unit})

    def verdict(self, what: str, right: bool, note: str) -> None:
        self.right = self.right and right
        self.all["right"] = bool(self.all.get("right", True) and right)
        self.row(what, "right" if right else "WRONG", "", note, {"right": right})

    def skipped(self, what: str, why: str) -> None:
        self.row(what, "skipped", "", why, {"skipped": why})

    def unchecked(self, what: str, why: str) -> None:
        """What was to be checked, and was not."""
        self.checked = self.all["checked"] = False
        self.skipped(what, why)


class OursFailed(RuntimeError):
    """gpu_check failed, and not PyTorch."""


def first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:160]


class Ours:
    """gpu_check, which loads a shape and measures when it is told to."""

    def __init__(self, program: str, shape: Shape, host: bool, limit: float) -> None:
        command = [program, "--turns", shape.name, *(["--host"] if host else [])]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        self.timer = threading.Timer(limit, self.process.kill)
        self.timer.start()
        self.answer()

    def answer(self) -> dict[str, Any]:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.timer.cancel()
            raise OursFailed(f"gpu_check --turns ended with {self.process.wait()}; -9: when its time was over")
        found: dict[str, Any] = json.loads(line)
        return found

    def turn(self, length: int, batches: int) -> tuple[float, float]:
        """Tokens and seconds."""
        assert self.process.stdin is not None
        self.process.stdin.write(f"{length} {batches}\n")
        self.process.stdin.flush()
        answer = self.answer()
        return answer["tokens"], answer["seconds"]

    def end(self) -> None:
        self.timer.cancel()
        self.process.kill()
        self.process.wait()


def build(shape: Shape, device: str, blocks: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """A net of random weights: ids [B, L] to normalised hidden states [B·L, H], and the head [V, H]."""
    import torch
    from torch import nn
    from torch.nn import functional

    made = {"device": device, "dtype": torch.bfloat16}
    bias = shape.gpt2
    kv = shape.kv_heads * shape.dim

    def norm() -> nn.Module:
        return (nn.LayerNorm if shape.gpt2 else nn.RMSNorm)(shape.width, eps=1e-5, **made)

    def turn(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        a, b = x.float().chunk(2, -1)
        return torch.cat((a * cos - b * sin, b * cos + a * sin), -1).to(x.dtype)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = norm(), norm()
            self.qkv = nn.Linear(shape.width, shape.heads * shape.dim + 2 * kv, bias=bias, **made)
            self.out = nn.Linear(shape.heads * shape.dim, shape.width, bias=bias, **made)
            self.up = nn.Linear(shape.width, shape.inner * (1 if shape.gpt2 else 2), bias=bias, **made)
            self.down = nn.Linear(shape.inner, shape.width, bias=bias, **made)

        def forward(self, x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
            rows, length, _ = x.shape
            parts = self.qkv(self.first(x)).split([shape.heads * shape.dim, kv, kv], -1)
            q, k, v = (part.view(rows, length, -1, shape.dim).transpose(1, 2) for part in parts)
            if not shape.gpt2:
                q, k = turn(q, cos, sin), turn(k, cos, sin)
            grouped = {"enable_gqa": True} if shape.heads != shape.kv_heads else {}
            out = functional.scaled_dot_product_attention(q, k, v, is_causal=True, **grouped)
            x = x + self.out(out.transpose(1, 2).reshape(rows, length, -1))
            inner = self.up(self.second(x))
            if shape.gpt2:
                return x + self.down(functional.gelu(inner, approximate="tanh"))
            gate, up = inner.chunk(2, -1)
            return x + self.down(functional.silu(gate) * up)

    layers = [blocks(Block()) for _ in range(shape.layers)]
    last = norm()
    table = nn.Embedding(shape.vocab, shape.width, **made)
    places = nn.Embedding(shape.positions, shape.width, **made) if shape.gpt2 else None
    head = table.weight if shape.tied else torch.randn(shape.vocab, shape.width, **made)
    angle = torch.arange(shape.positions, device=device)[:, None] / 500_000 ** (
        torch.arange(shape.dim // 2, device=device) / (shape.dim // 2)
    )
    cos, sin = angle.cos(), angle.sin()

    def states(ids: torch.Tensor) -> torch.Tensor:
        length = ids.shape[1]
        x = table(ids)
        if places is not None:
            x = x + places.weight[:length]
        for layer in layers:
            x = layer(x, cos[:length], sin[:length])
        return last(x).view(-1, shape.width)

    states.head = head  # type: ignore[attr-defined]
    return states


def posterior(hidden: Any, head: Any, observed: Any) -> Any:
    """Dense posterior noise [n, V] in f16: E = e + p·e_0, E_x = p_x·e_0, ξ = −ln E."""
    import torch

    p = (hidden @ head.t()).float().softmax(-1)
    e = -torch.log1p(-torch.rand_like(p))
    e0 = -torch.log1p(-torch.rand(len(p), 1, device=p.device))
    entry = torch.arange(p.shape[1], device=p.device)
    total = torch.where(entry == observed[:, None], p * e0, e + p * e0)
    return (-torch.log(total)).to(torch.float16)


class Theirs:
    """The same work in PyTorch."""

    def __init__(self, shape: Shape, device: str, tokens: int, compiled: bool) -> None:
        import torch

        self.torch, self.shape, self.device, self.tokens = torch, shape, device, tokens

        def through(what: Any) -> Any:
            return torch.compile(what, dynamic=False) if compiled else what

        torch.manual_seed(1)
        self.states = build(shape, device, through)
        self.noise = through(posterior)
        rows = SLICE_BYTES // (shape.vocab * 4)
        self.rows = min(tokens, rows // 256 * 256 if rows > 256 else max(rows, 1))

    def wait(self) -> None:
        if self.device != "cpu":
            self.torch.cuda.synchronize()

    def turn(self, length: int, batches: int) -> tuple[float, float]:
        """Tokens and seconds."""
        torch = self.torch
        ids = torch.randint(0, self.shape.vocab, (max(1, self.tokens // length), length), device=self.device)
        observed = ids.view(-1).roll(-1)
        with torch.inference_mode():
            self.wait()
            begin = time.perf_counter()
            for _ in range(batches):
                hidden = self.states(ids)
                for first in range(0, len(hidden), self.rows):
                    rows = slice(first, first + self.rows)
                    self.noise(hidden[rows], self.states.head, observed[rows])  # type: ignore[attr-defined]
            self.wait()
            return batches * ids.numel(), time.perf_counter() - begin


def of_shape(report: Report, shape: Shape, options: argparse.Namespace, until: float) -> None:
    device, tokens = ("cpu", 48) if options.tiny else ("cuda", 16_384)
    lengths = (16, 24) if options.tiny else (1024,) if shape.name in GOALS else (1024, 4096)
    ours = Ours(options.program, shape, options.tiny, max(until - time.monotonic(), 1))
    try:
        theirs, way = None, "eager, as --tiny is" if options.tiny else "compiled"
        for length in lengths:
            what = f"{shape.name}, bf16, L = {length}"
            if length > shape.positions:
                continue
            if time.monotonic() + 4 * TURNS * TURN_SECONDS > until:
                report.skipped(what, "out of time")
                continue
            try:
                if theirs is None:
                    # compiling for the CPU takes longer than all the rest, and says nothing of a GPU
                    theirs = Theirs(shape, device, tokens, compiled=not options.tiny)
                theirs.turn(length, 1)
            except Exception as error:  # whatever a compiler fails with
                if way != "compiled":
                    raise
                way, theirs = f"eager, since compiling failed: {first_line(error)}", None
                theirs = Theirs(shape, device, tokens, compiled=False)
                theirs.turn(length, 1)
            sides: list[tuple[Any, list[float], int]] = []
            for side in (ours, theirs):
                _, seconds = side.turn(length, 1)
                batches = 1 if options.tiny else max(1, round(TURN_SECONDS / seconds))
                sides.append((side, [], batches))
            for _ in range(TURNS):
                for side, rates, batches in sides:
                    done, seconds = side.turn(length, batches)
                    rates.append(done / seconds)
            mine, others = (statistics.median(rates) for _, rates, _ in sides)
            spread = [f"{min(rates):.0f} to {max(rates):.0f}" for _, rates, _ in sides]
            report.figure(f"{what}: ours, in turn", mine, "tokens/s", f"corrections on the host; {spread[0]}")
            report.figure(
                f"{what}: PyTorch, in turn", others, "tokens/s", f"dense noise, kept there; {spread[1]}; {way}"
            )
            report.figure(f"{what}: ours to PyTorch", mine / others, "", "")
    finally:
        ours.end()


def nets(report: Report, options: argparse.Namespace, until: float) -> None:
    import torch

    report.part = "pytorch"
    for shape in TINY if options.tiny else SHAPES:
        if time.monotonic() + shape.seconds > until:
            report.skipped(shape.name, "out of time")
            continue
        try:
            of_shape(report, shape, options, until)
        except OursFailed as error:
            if time.monotonic() < until:
                report.verdict(shape.name, False, first_line(error))
            else:
                report.skipped(shape.name, "out of time")
        except Exception as error:  # noqa: BLE001  # of PyTorch in one shape: the others are still measured
            report.skipped(shape.name, first_line(error))
        torch.compiler.reset()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
    there = [str(row["what"]) for row in report.all["rows"] if row["part"] == "pytorch" and "value" in row]
    lacking = [goal for goal in GOALS if not options.tiny and not any(what.startswith(goal) for what in there)]
    if lacking:
        report.all["not_measured"] = lacking
        report.row("goals beside PyTorch", "missing", "", ", ".join(lacking), {"skipped": "not measured"})


def batch_of(vocab: int, tokens: int, corrections: int) -> Any:
    """A row of made-up columns."""
    import numpy as np
    import stillhouse

    rng = np.random.default_rng(0)
    index = np.sort(rng.integers(0, vocab, (tokens, corrections)), 1).reshape(-1)
    columns = {
        "sequence_id": np.array([7], np.uint64),
        "input_ids": rng.integers(0, vocab, (1, tokens), dtype=np.int32),
        "logprob": -rng.exponential(3, (1, tokens)).astype(np.float32),
        "noise_count": np.full((1, tokens), corrections, np.uint16),
        "noise_index": stillhouse.Ragged(
            index.astype(np.uint16 if vocab <= 65536 else np.uint32), np.array([0, tokens * corrections])
        ),
        "noise_logprob": stillhouse.Ragged(
            -rng.exponential(4, len(index)).astype(np.float16) - np.float16(1), np.array([0, tokens * corrections])
        ),
    }
    return stillhouse.Batch(columns, stillhouse.Info(vocab, tokens, stillhouse.NoiseInfo("replay", 42)))


def triton_replay(report: Report, options: argparse.Namespace, until: float) -> None:
    report.part = "replay"
    if options.tiny:
        os.environ["TRITON_INTERPRET"] = "1"
    try:
        import torch
        import triton  # noqa: F401
        from stillhouse.noise import replay
    except ImportError as error:
        report.skipped("Triton", first_line(error))
        return
    device = "cpu" if options.tiny else "cuda"
    for vocab, tokens in ((1000, 8),) if options.tiny else ((50_257, 8192), (128_256, 4096)):
        what = f"Triton, softmax(ξ), V = {vocab}"
        if time.monotonic() + 15 > until:
            report.unchecked(what, "out of time")
            continue
        few = batch_of(vocab, min(tokens, 32), 6)
        right = replay(few.torch(), backend="rust")
        got = replay(few.torch().to(device), backend="triton").cpu()
        far = ((got - right).abs() / right.clamp(min=1e-20)).max().item()
        report.verdict(what, far <= 2e-5, f"relative distance to the CPU's up to {far:.1e}, valid: 2e-5")
        batch = batch_of(vocab, tokens, 6).torch().to(device)
        for dtype in ("float32", "bfloat16"):
            times = []
            for _ in range(2 if options.tiny else 12):
                begin = time.perf_counter()
                replay(batch, backend="triton", dtype=dtype)
                if device == "cuda":
                    torch.cuda.synchronize()
                times.append(time.perf_counter() - begin)
            seconds = statistics.median(times[1:])
            written = tokens * vocab * (4 if dtype == "float32" else 2) / seconds / 1e9
            report.figure(f"{what}, {dtype}", tokens / seconds, "tokens/s", f"{written:.0f} GB/s written")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--program", required=True)
    parser.add_argument("--json", required=True, type=Path)
    parser.add_argument("--seconds", type=float, default=180)
    parser.add_argument("--tiny", action="store_true")
    options = parser.parse_args()
    until = time.monotonic() + options.seconds
    report = Report(options.json)
    for part in (triton_replay, nets):
        try:
            part(report, options, until)
        except Exception as error:  # noqa: BLE001  # the other part is still of use
            report.verdict("error", False, first_line(error))
    return 0 if report.right and report.checked else 1 if not report.right else 3


if __name__ == "__main__":
    sys.exit(main())
