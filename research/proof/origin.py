"""Where results come from: machine, commit, day. Every program of the proofs writes it into its file, and the page tells it."""

from __future__ import annotations

import os
import pathlib
import platform
import subprocess
from datetime import datetime, timezone
from typing import Any

import torch

HERE = pathlib.Path(__file__).resolve().parent


def machine(threads: int) -> dict[str, Any]:
    """What computed, and on how many threads of it."""
    model = next((name for name in _models() if name), platform.machine())
    return {
        "processor": platform.machine(), "model": model, "cores": os.cpu_count(), "threads": threads, "torch": torch.__version__,
    }  # fmt: skip


def _models() -> list[str]:
    """Names of the processors, as Linux tells them."""
    cpuinfo = pathlib.Path("/proc/cpuinfo")
    lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
    return [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]


def made() -> dict[str, str]:
    """The commit, with a + where files of python/ or research/ differ from it, and the day."""
    commit = _git("rev-parse", "--short=10", "HEAD")
    code = [str(HERE.parents[1] / folder) for folder in ("python", "research")]
    changed = "+" if commit and _git("status", "--porcelain", "--untracked-files=no", "--", *code) else ""
    return {"commit": f"{commit or 'unknown'}{changed}", "date": datetime.now(timezone.utc).strftime("%Y-%m-%d")}


def _git(*words: str) -> str:
    """What git says; nothing where there is no git or no repository."""
    try:
        done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True, check=False)
    except OSError:
        return ""
    return done.stdout.strip() if done.returncode == 0 else ""


def marked(found: dict[str, Any]) -> None:
    """Writes commit and day into results; results that were gone on with have several."""
    now = made()
    if "made" not in found and found.get("students"):
        found["made"] = [{"commit": "earlier ones, not recorded", "date": ""}]
    if now not in found.setdefault("made", []):
        found["made"].append(now)
