"""Makes docs/PROOF.md, docs/proof/*.md and their plots from the raw results in docs/proof: no figure is typed by hand.

    python page.py                     # or: --results docs/proof --page docs/PROOF.md

======================== ================================== ============== ==========================================
result                   made by                            page           plots
======================== ================================== ============== ==========================================
maze.json                ../maze/run.py                     maze.md        maze.png, maze-loss.png
maze-NAME.json           the same, with other settings      maze.md        maze-NAME.png, maze-NAME-loss.png
text.json                text.py                            text.md        text-loss.png
tolerance-V.json         methods/tolerance.py               tolerance.md   tolerance-V.png
methods-NAME.json        methods/NAME.py                    methods.md     methods-NAME.png
official.json            official/                          official.md
agreement.json           agree.py, of two runs              agreement.md
noise_bytes-TEACHER.json noise_bytes.py                     noise-bytes.md
======================== ================================== ============== ==========================================

Pages and plots lie beside the results. A page names each result that is missing. Plots are PNG, drawn by matplotlib
(scripts/pins/proof.txt).
"""

from __future__ import annotations

import argparse
import pathlib
from collections.abc import Callable

from page_agreement import agreement
from page_bytes import noise_bytes
from page_maze import maze
from page_methods import methods
from page_official import official
from page_parts import ROOT, Page
from page_plot import Plot
from page_summary import summary
from page_text import text
from page_tolerance import tolerance

PAGES: dict[str, Callable[[Page], None]] = {
    "maze": maze,
    "text": text,
    "tolerance": tolerance,
    "methods": methods,
    "official": official,
    "agreement": agreement,
    "noise-bytes": noise_bytes,
}
"""The pages of details by the name of their file."""


def made(results: pathlib.Path, where: pathlib.Path) -> tuple[dict[pathlib.Path, str], dict[str, Plot]]:
    """The pages by file, the first page ``where`` among them, and the plots by name."""
    pages = {name: Page(results, where) for name in PAGES}
    for name, fill in PAGES.items():
        fill(pages[name])
    texts = {where: summary(pages, results, where)}
    texts.update({results / f"{name}.md": page.text() for name, page in pages.items()})
    return texts, {name: plot for page in pages.values() for name, plot in page.plots.items()}


def main(argv: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--results", type=pathlib.Path, default=ROOT / "docs/proof")
    parser.add_argument("--page", type=pathlib.Path, default=ROOT / "docs/PROOF.md")
    args = parser.parse_args(argv)
    texts, plots = made(args.results, args.page)
    for file, words in texts.items():
        file.write_text(words)
    for name, plot in plots.items():
        plot.draw(args.results / name)


if __name__ == "__main__":
    main()
