"""What installing the package takes: what its core is compiled from, and what its build backend says."""

from __future__ import annotations

import email
import os
import pathlib
import re
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
PYTHON = ROOT / "python"
MOST_CRATES = 200
NEEDLESS = {
    "arrow", "arrow-arith", "arrow-cast", "arrow-ord", "arrow-row", "arrow-string", "brotli", "candle-core", "clap", "datafusion", "flate2",
    "jsonschema", "regex", "saphyr-parser", "schemars", "snap", "stillhouse-operators", "stillhouse-pipeline", "struson", "tokenizers",
}  # fmt: skip
"""Not in a reader: engines, the job file's checks, codecs that shards do not use, arithmetic on columns."""


def rust_version() -> tuple[int, int]:
    found = re.search(r'^rust-version = "(\d+)\.(\d+)"', (ROOT / "Cargo.toml").read_text(), re.MULTILINE)
    assert found
    return int(found[1]), int(found[2])


def test_the_core_is_compiled_from_what_a_reader_needs() -> None:
    tree = [
        "cargo", "tree", "--locked", "--offline", "--package=stillhouse-python", "--edges=normal,build", "--prefix=none", "--format={p}",
        "--target=x86_64-unknown-linux-gnu",
    ]  # fmt: skip
    listed = subprocess.run(tree, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    crates = {line.removesuffix(" (*)") for line in listed.splitlines() if line}
    assert {"parquet", "object_store", "reqwest"} <= {crate.split()[0] for crate in crates}
    assert not NEEDLESS & {crate.split()[0] for crate in crates}
    assert len(crates) <= MOST_CRATES, f"{len(crates)} crates: `make python-tree` tells what brings them"


def backend(call: str, path: str) -> subprocess.CompletedProcess[str]:
    """Calls a hook as pip does: in a process of its own, in the folder of the package."""
    environment = {name: value for name, value in os.environ.items() if name not in ("RUSTC", "CARGO", "CC")}
    environment |= {"PATH": path, "PYTHONPATH": str(PYTHON / "backend")}
    script = f"import stillhouse_build as b; print(b.{call})"
    # a session of its own has no terminal, so what the backend says goes to stderr
    return subprocess.run(
        [sys.executable, "-c", script],
        cwd=PYTHON,
        env=environment,
        capture_output=True,
        text=True,
        check=False,
        start_new_session=True,
    )


def tools(folder: pathlib.Path, **scripts: str) -> str:
    """A folder for PATH with these programs alone."""
    for name, text in scripts.items():
        (folder / name).write_text(f"#!/bin/sh\n{text}\n")
        (folder / name).chmod(0o755)
    return str(folder)


def test_without_rust_the_build_says_what_to_install(tmp_path: pathlib.Path) -> None:
    major, minor = rust_version()
    done = backend("found_rust()", tools(tmp_path))
    assert done.returncode == 1
    assert "no cargo and no rustc in PATH" in done.stderr and f"install Rust {major}.{minor} or newer" in done.stderr


def test_a_rust_that_is_too_old_is_named(tmp_path: pathlib.Path) -> None:
    major, minor = rust_version()
    path = tools(
        tmp_path, cargo="exit 9", cc="exit 9", rustc=f"echo 'rustc {major}.{minor - 1}.3 (59807616e 2026-01-01)'"
    )
    done = backend("found_rust()", path)
    assert done.returncode == 1
    assert f"rustc is rustc {major}.{minor - 1}.3: install Rust {major}.{minor} or newer" in done.stderr
    tools(tmp_path, rustc=f"echo 'rustc {major}.{minor}.0 (59807616e 2026-01-01)'")
    assert backend("found_rust()", path).stdout == f"rustc {major}.{minor}.0\n"


def test_a_rustc_that_does_not_start_is_quoted(tmp_path: pathlib.Path) -> None:
    done = backend("found_rust()", tools(tmp_path, cargo="exit 9", cc="exit 9", rustc="echo broken >&2; exit 1"))
    assert done.returncode == 1 and "--version says 'broken'" in done.stderr


def test_without_a_c_compiler_the_build_says_so(tmp_path: pathlib.Path) -> None:
    path = tools(tmp_path, cargo="exit 9", rustc="echo 'rustc 99.0.0'")
    done = backend("found_rust()", path)
    assert done.returncode == 1 and "there is no cc in PATH: install gcc or clang" in done.stderr


def test_a_build_says_that_it_takes_minutes(tmp_path: pathlib.Path) -> None:
    path = tools(tmp_path, cargo="exit 9", cc="exit 9", rustc="echo 'rustc 99.0.0'")
    done = backend("build(lambda: 'x.whl')", path)
    assert done.stdout == "x.whl\n"
    first, last = done.stderr.splitlines()
    assert "compiling its core with rustc 99.0.0: about " in first and "pip install -v" in first
    assert re.fullmatch(r"stillhouse: compiled in \d+ s", last)


def test_the_metadata_of_a_wheel(tmp_path: pathlib.Path) -> None:
    path = f"{pathlib.Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
    done = backend(f"prepare_metadata_for_build_wheel({str(tmp_path)!r})", path)
    assert done.returncode == 0, done.stderr
    folder = tmp_path / done.stdout.splitlines()[-1]
    metadata = email.message_from_string((folder / "METADATA").read_text())
    assert (metadata["Name"], metadata["Requires-Python"]) == ("stillhouse", ">=3.10")
    assert [needed for needed in metadata.get_all("Requires-Dist", []) if "extra" not in needed] == ["numpy>=1.26"]
    assert "\nTag: cp310-abi3-linux_" in (folder / "WHEEL").read_text()
