"""The part of the page on the authors' own code."""

from __future__ import annotations

from collections import Counter
from typing import Any

from page_parts import Page, counted, machine_of, of_students, table


def official(page: Page) -> None:
    page.say(
        "## Against the official code",
        "`make official THEIRS=FOLDER` (`python -m official --list` in research/proof says which commits the folder needs). One batch that our program made goes through functions of the authors' code, cut out of "
        "their files when it runs, and through ours: masks, weights, losses, filter tables, orders, noise, and what their readers make of our exports. Theirs draws the very uniforms that ours draws. *explained*: they differ, and "
        "are equal once the named line of theirs is taken account of, which is computed too. Nothing of theirs is kept here but names, numbers of lines and differences.",
    )
    found = page.read("official.json")
    if found is None:
        page.say("**Missing:** there is no docs/proof/official.json yet.")
        page.warn("The comparison with official code has not been run.")
        return
    page.say(f"{counted(len(found['comparisons']), 'comparison')} in {found['seconds']} s ({machine_of(found)}).")
    by = of_students(found["comparisons"], "paper")
    rows = []
    for paper, those in by.items():
        verdicts = Counter(of["verdict"] for of in those)
        code = dict.fromkeys(f"{of['repository']} at {of['commit'][:10]}" for of in those if of["repository"])
        counts = (str(verdicts[of]) for of in ("equal", "explained", "contradiction"))
        rows.append([paper, ", ".join(code) or "none public: numbers that the paper prints", str(len(those)), *counts])
    page.say(table(["paper", "code", "comparisons", "equal", "explained", "contradictions"], rows))
    for of in found["comparisons"]:
        if of["verdict"] == "contradiction":
            page.warn(f"Official code: {of['name']}: ours is not theirs ({of['theirs']}), and no line explains it.")
        elif of.get("why", {}).get("first"):
            page.warn(f"Official code, {of['name']} ({of['repository']}, {of['why']['line']}): {of['why']['words']}")
    told = [
        [of["name"], of["repository"], of["why"]["line"], of["why"]["words"]]
        for of in found["comparisons"]
        if "why" in of
    ]
    if told:
        page.say(
            "What differs, and the line of theirs that makes it:",
            table(["comparison", "repository", "line", "why"], told),
        )
    page.say(
        "All of them. Differences are the largest over all entries, of explained ones once the line is taken account of:",
        table(
            ["comparison", "what", "theirs", "ours", "entries", "bound", "difference", "verdict"],
            [_row(of) for of in found["comparisons"]],
        ),
    )
    for of in found["without_code"]:
        page.warn(f"Official code: none is public for {of['paper']}. {of['looked']}")
    mistakes = [[of["mistake"], str(len(of["seen_by"]))] for of in found["mistakes"]]
    unseen = [of["mistake"] for of in found["mistakes"] if not of["seen_by"]]
    page.say(
        f"{counted(len(mistakes), 'mistake')} of ours {'was' if len(mistakes) == 1 else 'were'} made on purpose to try the comparisons; not seen: {', '.join(unseen) or 'none'}. Of every comparison one wrong entry of "
        f"ours is seen, too: {'yes' if all(of['one_wrong_entry_seen'] for of in found['comparisons']) else 'no'}.",
        table(["mistake", "comparisons that see it"], mistakes),
    )
    if unseen:
        page.warn(f"Official code: mistakes of ours that no comparison sees: {', '.join(unseen)}.")


def _row(of: Any) -> list[str]:
    """A comparison as a line."""
    ((kind, bound),) = of["bound"].items()
    after = of.get("why", of)
    far = after["difference" if kind == "absolute" else "relative"]
    entries = 1
    for size in of["shape"]:
        entries *= size
    return [
        of["name"],
        of["what"],
        of["theirs"],
        f"`{of['ours']}`",
        f"{entries:,}",
        f"{kind} {bound:g}" if bound else "exact",
        "not comparable" if far is None else f"{far:.1e}" if far else "0",
        of["verdict"],
    ]
