"""The build backend of `pip install ./python` (PEP 517): maturin's, which first says what it is going to do and looks whether it can.

pip shows nothing of a build that succeeds, and this one takes minutes. So the line goes to the terminal itself, and where there is none to
stderr, which `pip install -v` and a build that failed show.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import subprocess
import sys
import time
from typing import Any

import maturin
from maturin import build_sdist  # noqa: F401  (a hook)

HERE = pathlib.Path(__file__).resolve().parent
DURATION = "about 5 minutes on two cores"


def needed_rust() -> tuple[int, int]:
    """The oldest Rust that compiles the core: `rust-version` of the workspace, in a clone and in a source distribution."""
    for folder in HERE.parents:
        manifest = folder / "Cargo.toml"
        found = manifest.exists() and re.search(
            r'^rust-version = "(\d+)\.(\d+)', manifest.read_text("utf-8"), re.MULTILINE
        )
        if found:
            return int(found[1]), int(found[2])
    sys.exit(f"{HERE}: no Cargo.toml above it names a rust-version; build from a whole clone or a source distribution")


def found_rust() -> str:
    """What builds here, as `rustc 1.95.0`; ends the build where it cannot, with what to do."""
    major, minor = needed_rust()
    install = f"install Rust {major}.{minor} or newer (rustup.rs, or the system's packages), or use a prebuilt wheel (make python-wheel builds one)"
    rustc = os.environ.get("RUSTC") or shutil.which("rustc")
    missing = [
        name
        for name, path in (("cargo", os.environ.get("CARGO") or shutil.which("cargo")), ("rustc", rustc))
        if not path
    ]
    if missing or not rustc:
        sys.exit(f"stillhouse has a core in Rust, and there is no {' and no '.join(missing)} in PATH: {install}")
    told = subprocess.run([rustc, "--version"], cwd=HERE, capture_output=True, text=True, check=False)
    version = re.match(r"rustc (\d+)\.(\d+)\S*", told.stdout)
    if not version:
        sys.exit(
            f"stillhouse has a core in Rust, and {rustc} --version says {(told.stdout + told.stderr).strip()!r}: {install}"
        )
    if (int(version[1]), int(version[2])) < (major, minor):
        sys.exit(f"stillhouse has a core in Rust, and {rustc} is {version[0]}: {install}; with rustup: rustup update")
    if os.name == "posix" and not shutil.which(os.environ.get("CC", "cc").split()[0]):
        sys.exit(
            f"stillhouse's core contains C code (zstd, ring), and there is no {os.environ.get('CC', 'cc')} in PATH: install gcc or clang, or name a compiler in CC"
        )
    return version[0]


def say(line: str) -> None:
    try:
        with open("/dev/tty", "w") as terminal:
            terminal.write(f"\n{line}\n")
    except OSError:
        print(line, file=sys.stderr, flush=True)


def build(hook: Any, *arguments: Any) -> str:
    rust = found_rust()
    say(
        f"stillhouse: compiling its core with {rust}: {DURATION}, less if it was compiled before; pip install -v shows every step"
    )
    begun = time.monotonic()
    wheel: str = hook(*arguments)
    say(f"stillhouse: compiled in {time.monotonic() - begun:.0f} s")
    return wheel


def build_wheel(folder: str, settings: Any = None, metadata: str | None = None) -> str:
    return build(maturin.build_wheel, folder, settings, metadata)


def build_editable(folder: str, settings: Any = None, metadata: str | None = None) -> str:
    return build(maturin.build_editable, folder, settings, metadata)


def prepare_metadata_for_build_wheel(folder: str, settings: Any = None) -> str:
    found_rust()
    return str(maturin.prepare_metadata_for_build_wheel(folder, settings))


prepare_metadata_for_build_editable = prepare_metadata_for_build_wheel


def get_requires_for_build_wheel(settings: Any = None) -> list[str]:
    """Nothing more: maturin would download a Rust of its own where there is none, unasked."""
    return []


get_requires_for_build_editable = get_requires_for_build_wheel
get_requires_for_build_sdist = get_requires_for_build_wheel
