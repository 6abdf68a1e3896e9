"""What the figures were made on."""

from __future__ import annotations

import importlib.metadata
import os
from pathlib import Path
from typing import Any

PEERS = ("torch", "transformers", "tokenizers", "datasets", "datatrove", "llama-cpp-python", "pyarrow", "numpy")
FLAGS = (
    "avx2", "fma", "f16c", "avx_vnni", "avx512f", "avx512_vnni", "avx512_bf16", "avx512_fp16", "amx_bf16", "amx_int8", "amx_fp16",
    "asimd", "asimdhp", "asimddp", "bf16", "i8mm", "sve",
)  # fmt: skip


def version(package: str) -> str | None:
    """Of an installed package; None for one that is not."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def cpu() -> tuple[str, list[str]]:
    """Name of the first processor, and those of its instruction sets that decide here."""
    facts: dict[str, str] = {}
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        key, _, value = line.partition(":")
        facts.setdefault(key.strip(), value.strip())
    flags = set(facts.get("flags", facts.get("Features", "")).split())
    name = facts.get("model name") or facts.get("CPU part") or "unknown"
    return name, [flag for flag in FLAGS if flag in flags]


def load() -> list[float]:
    return [round(value, 2) for value in os.getloadavg()]


def describe() -> dict[str, Any]:
    """The machine and its packages at this moment."""
    name, flags = cpu()
    return {
        "cpu": name,
        "cores": len(os.sched_getaffinity(0)),
        "flags": flags,
        "load_at_start": load(),
        "versions": {package: version(package) or "not installed" for package in PEERS},
    }


def line(machine: dict[str, Any]) -> str:
    versions = ", ".join(f"{package} {number}" for package, number in machine["versions"].items())
    loads = f"load average {machine['load_at_start']} at the start, {machine['load_at_end']} at the end"
    return f"{machine['cores']} cores of {machine['cpu']} ({' '.join(machine['flags'])}); {loads}; {versions}"
