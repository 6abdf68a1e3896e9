"""Runs what the pages for users show: commands, job files and Python, in the order of each page, in a folder laid out as
a clone of the repository is. A block that cannot run here says why behind its language: ```sh norun: REASON.
"""

from __future__ import annotations

import json
import os
import pathlib
import re
import shutil
import subprocess
from typing import Any, NamedTuple

import pytest
import yaml
from shared_fixtures import ROOT, program

# the others, of benchmarks and experiments, have commands that measure for minutes or days
DOCS = [*(ROOT / "docs").glob("*.md"), *(ROOT / "docs/design").glob("*.md")]
PAGES = [
    "README.md",
    "python/README.md",
    *sorted(str(path.relative_to(ROOT)) for path in DOCS if path.name != "PROOF.md"),
]
FENCE = re.compile(r"^```(\w+)([^\n]*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
RUN = {"sh", "yaml", "python"}


class Block(NamedTuple):
    """A fenced block: its language, what follows the language, its text."""

    language: str
    about: str
    text: str


def blocks(page: str) -> list[Block]:
    return [Block(language, about.strip(), text) for language, about, text in FENCE.findall((ROOT / page).read_text())]


@pytest.fixture(scope="module")
def clone(tmp_path_factory: pytest.TempPathFactory, demo: pathlib.Path) -> pathlib.Path:
    """What the pages read of a clone, after `make build`, `make demo` and `stillhouse demo`."""
    folder = tmp_path_factory.mktemp("clone")
    shutil.copytree(ROOT / "jobs", folder / "jobs")
    for name in ["assets", "docs"]:
        (folder / name).symlink_to(ROOT / name)
    links = {
        "target/debug/stillhouse": program(),
        "demo-out/demo": demo,
        "stillhouse-demo/data-set": demo,
        "stillhouse-demo/corpus.jsonl.gz": ROOT / "assets/corpus/sotu-small.jsonl.gz",
        "stillhouse-demo/teacher": ROOT / "assets/teacher-nano-gpt2",
    }
    for link, target in links.items():
        (folder / link).parent.mkdir(parents=True, exist_ok=True)
        (folder / link).symlink_to(target)
    return folder


def command(folder: pathlib.Path, args: list[str], shown: str) -> None:
    done = subprocess.run(args, cwd=folder, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{shown}\n{done.stdout}{done.stderr}"


@pytest.mark.parametrize("page", PAGES)
def test_what_a_page_shows_runs(page: str, clone: pathlib.Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(clone)
    monkeypatch.setenv("PATH", f"{clone / 'target/debug'}:{os.environ['PATH']}")
    names: dict[str, Any] = {}
    for number, block in enumerate(blocks(page)):
        match block:
            case Block("sh", "", text):
                command(clone, ["bash", "-euo", "pipefail", "-c", text], text)
            case Block("yaml", "", text):
                job = clone / f"{page.replace('/', '-')}-{number}.yaml"
                job.write_text(text)
                command(clone, [str(program()), "plan", str(job)], text)
            case Block("python", "", text):
                exec(compile(text, f"{page}, block {number}", "exec"), names)  # noqa: S102 (the pages are ours)


@pytest.mark.parametrize("page", PAGES)
def test_a_block_that_does_not_run_says_why(page: str) -> None:
    sections = json.loads((ROOT / "jobs/job.schema.json").read_text())["properties"]
    for language, about, text in blocks(page):
        if language not in RUN or not about:
            continue
        assert about == "fragment" or re.match(r"norun: \w", about), f"{page}: ```{language} {about}"
        if about == "fragment":
            assert set(yaml.safe_load(text)) <= set(sections), text


def test_the_pages_have_something_to_run() -> None:
    runs = [page for page in PAGES if any(block.language in RUN and not block.about for block in blocks(page))]
    assert {"README.md", "docs/quickstart.md", "docs/command-line.md", "docs/job-file.md", "docs/python.md"} <= set(
        runs
    )
