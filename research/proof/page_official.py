"""The page on the authors' own code."""

from __future__ import annotations

from collections import Counter
from typing import Any

from page_parts import Claim, Page, counted, machine_of, made_of, of_students, table

VERDICTS = ("equal", "explained", "contradiction")


def official(page: Page) -> None:
    page.begin(
        "Comparison with the authors' code",
        "masks, weights, losses, filter tables, orders, noise and exports beside the authors' code",
        "One batch that our program made goes through functions of the authors' code and through ours. The "
        "comparison covers masks, weights, losses, filter tables, orders and noise, and what the authors' readers "
        "make of our exports.",
        "```sh\n"
        "make official THEIRS=FOLDER    # `python -m official --list` in research/proof names the commits that "
        "FOLDER needs\n"
        "```",
        "- The authors' functions are cut out of their files when the comparison runs. This repository keeps only "
        "names, line numbers and differences.\n"
        "- Both sides draw the same uniforms.\n"
        "- *equal*: no difference beyond the bound.\n"
        "- *explained*: the results differ, and are equal once the named line of the authors' code is accounted for. "
        "That is computed, too.",
    )
    found = page.read("official.json")
    if found is None:
        page.missing("official.json", "make official THEIRS=FOLDER")
        page.warn("The comparison with the authors' code has not been run.")
        return
    by = of_students(found["comparisons"], "paper")
    rows = []
    for paper, those in by.items():
        verdicts = Counter(of["verdict"] for of in those)
        code = dict.fromkeys(f"{of['repository']} at {of['commit'][:10]}" for of in those if of["repository"])
        counts = (str(verdicts[of]) for of in VERDICTS)
        rows.append([paper, ", ".join(code) or "none public: numbers that the paper prints", str(len(those)), *counts])
    page.say(
        "## Results by paper", table(["paper", "code", "comparisons", "equal", "explained", "contradictions"], rows)
    )
    warnings(page, found)
    explained(page, found)
    mistakes(page, found)
    page.say(
        "## All comparisons",
        "Differences are the largest over all entries; those of explained comparisons are what remains once the line "
        "is accounted for.",
        table(
            ["comparison", "what", "theirs", "ours", "entries", "bound", "difference", "verdict"],
            [_row(of) for of in found["comparisons"]],
        ),
    )
    command, commit = "`make official THEIRS=FOLDER`", made_of(found) or "not recorded"
    page.runs.append(["`official.json`", command, "", f"{found['seconds']:,} s", machine_of(found), commit])
    page.claim = claim_of(found)


def warnings(page: Page, found: Any) -> None:
    """Contradictions, differences that a paper or our documents do not lead one to expect, and papers without code."""
    for of in found["comparisons"]:
        if of["verdict"] == "contradiction":
            told = f"{of['name']}: our result is not the authors' ({of['theirs']}), and no line explains it."
            page.warn(told)
            page.contradict(f"Authors' code, {told}")
    first = [of["name"] for of in found["comparisons"] if of.get("why", {}).get("first")]
    if first:
        page.warn(f"{counted(len(first), 'explained difference')} against a paper or our defaults: {'; '.join(first)}.")
    without = [of["paper"] for of in found["without_code"]]
    if without:
        page.warn(f"No code is public for: {'; '.join(without)}.")
    unseen = [of["mistake"] for of in found["mistakes"] if not of["seen_by"]]
    if unseen:
        page.warn(f"No comparison detects these deliberate mistakes: {', '.join(unseen)}.")


def explained(page: Page, found: Any) -> None:
    """The lines of the authors' code that make a difference, and the papers without code."""
    head = ["comparison", "repository", "line", "why"]
    for title, first in (("against a paper or our defaults", True), ("of convention", False)):
        rows = [
            [of["name"], of["repository"], of["why"]["line"], of["why"]["words"]]
            for of in found["comparisons"]
            if "why" in of and of["why"].get("first", False) == first
        ]
        if rows:
            page.say(f"## Explained differences {title}", table(head, rows))
    if found["without_code"]:
        rows = [[of["paper"], of["looked"]] for of in found["without_code"]]
        page.say("## Papers without public code", table(["paper", "what was looked for"], rows))


def mistakes(page: Page, found: Any) -> None:
    """Deliberate mistakes, and how many comparisons detect each."""
    made = found["mistakes"]
    unseen = [of["mistake"] for of in made if not of["seen_by"]]
    entries = all(of["one_wrong_entry_seen"] for of in found["comparisons"])
    page.say(
        "## Deliberate mistakes",
        "Mistakes in our code test whether the comparisons detect them:",
        f"- {counted(len(made), 'mistake')}; not detected: {', '.join(unseen) or 'none'}.\n"
        f"- One wrong entry in our result is detected in every comparison: {'yes' if entries else 'no'}.",
        table(["mistake", "comparisons that detect it"], [[of["mistake"], str(len(of["seen_by"]))] for of in made]),
    )


def claim_of(found: Any) -> Claim:
    counts = Counter(of["verdict"] for of in found["comparisons"])
    wrong, seen = counts["contradiction"], sum(bool(of["seen_by"]) for of in found["mistakes"])
    first = sum(bool(of.get("why", {}).get("first")) for of in found["comparisons"])
    without = ", ".join(of["paper"] for of in found["without_code"])
    return Claim(
        "Masks, weights, losses, orders, noise and exports equal those of the authors' code (all papers with public "
        "code)",
        f"of {counted(len(found['comparisons']), 'comparison')} {counts['equal']} are equal, {counts['explained']} "
        f"explained by a line of theirs, {wrong} contradict; {seen} of {len(found['mistakes'])} deliberate mistakes "
        "are detected",
        "contradicted" if wrong else "supported",
        f"{first} of the differences go against a paper or our defaults; no public code: {without or 'none'}",
    )


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
