"""Makes docs/PROOF.md and its plots out of the raw results in docs/proof: every figure of the page comes from there.

    python page.py                     # or: --results docs/proof --page docs/PROOF.md

======================== ================================== ==========================================
result                   made by                            plots
======================== ================================== ==========================================
maze.json                ../maze/run.py                     maze.png, maze-loss.png
maze-NAME.json           the same, of other settings        maze-NAME.png, maze-NAME-loss.png
text.json                text.py                            text-loss.png
tolerance-V.json         methods/tolerance.py               tolerance-V.png
agreement.json           agree.py, of two runs
methods-NAME.json        methods/NAME.py                    methods-NAME.png
noise_bytes-TEACHER.json noise_bytes.py
official.json            official/
======================== ================================== ==========================================

A result that is not there is said on the page to be missing. Plots are PNG, drawn by matplotlib (scripts/pins/proof.txt).
"""

from __future__ import annotations

import argparse
import pathlib

from page_agreement import agreement
from page_bytes import noise_bytes
from page_maze import maze
from page_methods import methods
from page_official import official
from page_parts import ROOT, Page, Plot
from page_text import text
from page_tolerance import tolerance


def made(results: pathlib.Path, where: pathlib.Path) -> tuple[str, dict[str, Plot]]:
    """The page and its plots by name."""
    page = Page(results, where)
    for part in (maze, text, tolerance, methods, agreement, official, noise_bytes):
        part(page)
    page.warn(
        "The paper names no walls of the maze. On the open map there are 2,118 walks of at most 10 moves; the first 2,000 of a breadth-first search are used."
    )
    head = [
        "# Proof: what students trained from our shards do",
        "Made by `python research/proof/page.py` out of the JSON files in [proof](proof); no figure is typed by hand, and a change by hand is lost.",
        "## What contradicts a paper or our own words, and what is missing",
        "\n".join(f"- {line}" for line in page.first),
    ]
    return "\n\n".join([*head, *page.parts]) + "\n", page.plots


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "docs/proof")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/PROOF.md")
    args = parser.parse_args(argv)
    words, plots = made(args.results, args.page)
    args.page.write_text(words)
    for name, plot in plots.items():
        plot.draw(args.results / name)


if __name__ == "__main__":
    main()
