"""docs/PROOF.md: what was to be proven, a line for each experiment, the plot of the maze, and the index of pages."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Callable, Mapping

from page_parts import Claim, Page, document, table

Link = Callable[[str, str], str]
"""A link to a page, by its name and the words of the link."""
COMMANDS = {
    "maze": "`make maze`, then with `RUN=maze-constant` and `RUN=maze-small`",
    "text": "`make text`",
    "tolerance": "`make methods METHODS='tolerance-28 tolerance-512'`",
    "methods": "`make methods METHODS='pgm prime armd bd3lm medusa distill'`",
    "official": "`make official THEIRS=FOLDER`",
    "agreement": "",
    "noise-bytes": "`make noise-bytes`",
}
"""What repeats each page."""


def summary(pages: Mapping[str, Page], results: pathlib.Path, where: pathlib.Path) -> str:
    """The first page, of the pages of details by name."""
    folder = pathlib.PurePath(os.path.relpath(results, where.parent))

    def link(name: str, title: str) -> str:
        return f"[{title}]({(folder / f'{name}.md').as_posix()})"

    claims = []
    for name, page in pages.items():
        claim = page.claim or Claim(page.title, "no result", "missing", COMMANDS[name])
        claims.append([f"{claim.claim} {link(name, 'Details')}", claim.evidence, f"**{claim.verdict}**", claim.caveat])
    parts = [
        "# Proof: what students trained from shards learn",
        (
            "Stillhouse stores a teacher's noise, targets, masks and orders in shards. These experiments test "
            "whether students trained from shards learn what the papers' students learn. They are for readers who "
            "decide whether to train from stored data instead of a live teacher."
        ),
        "## Results",
        table(["claim (source)", "evidence", "verdict", "caveat"], claims),
        (
            "± and interval mean the 95 % interval over seeds. NFE is the number of passes of a student per sample. "
            "Where figures have intervals, *supported* means that the whole interval is on the side of the claim. "
            "*Open* means that it contains the limit, *contradicted* that it is on the other side."
        ),
    ]
    if "maze.png" in pages["maze"].plots:
        parts += [
            (
                "![valid paths of the maze by passes, with 95 % intervals and both "
                f"ceilings]({(folder / 'maze.png').as_posix()})"
            ),
            (
                f"The plot has the valid paths of the {link('maze', 'maze')} by passes. Grey lines are the two "
                "ceilings: of students without noise a perfect one, of students with noise the teacher."
            ),
        ]
    told = [f"- {line} {link(name, 'Details')}" for name, page in pages.items() for line in page.contradictions]
    missing = [
        f"- Missing: {page.title}. {link(name, 'Details')}" for name, page in pages.items() if page.claim is None
    ]
    if told or missing:
        parts += [
            "## Contradictions",
            (
                "These results contradict a paper or our claim beyond their interval, or are missing. Each page "
                "lists the open ones, too, and possible reasons."
            ),
            "\n".join([*told, *missing]),
        ]
    parts += [*repeat(pages), "## Pages", index(pages, link)]
    return document(parts)


def repeat(pages: Mapping[str, Page]) -> list[str]:
    """How to run everything again."""
    rows = []
    for name, page in pages.items():
        seconds = sum(float(run[3].removesuffix(" s").replace(",", "")) for run in page.runs)
        if COMMANDS[name] and page.runs:
            machines = dict.fromkeys(run[4] for run in page.runs)
            rows.append([COMMANDS[name], f"{seconds:,.0f} s", "; ".join(machines)])
    return [
        "## Repeat it",
        (
            "```sh\n"
            "make maze             # trains everything anew in demo-out/proof, and compares the figures with "
            "docs/proof\n"
            "make maze PUBLISH=1   # then replaces docs/proof/maze.json, and makes these pages\n"
            "make proof            # makes these pages from docs/proof/*.json\n"
            "```"
        ),
        (
            "`make text`, `make methods` and `make noise-bytes` work alike. A run that was stopped continues in "
            "demo-out/proof. All commands and their measured time:"
        ),
        table(["command", "time", "machine"], rows),
    ]


def index(pages: Mapping[str, Page], link: Link) -> str:
    return table(["page", "contents"], [[link(name, page.title), page.about] for name, page in pages.items()])
