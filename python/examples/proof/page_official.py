"""The part of the page on the authors' own code."""

from __future__ import annotations

from collections import Counter

from page_parts import Page, counted, of_students, table


def official(page: Page) -> None:
    page.say(
        "## Against the official code",
        "`make official THEIRS=FOLDER`. One batch through the authors' code and through ours: masks, weights, losses, filter tables, orders. `explained`: equal once the named line of theirs is taken "
        "account of.",
    )
    found = page.read("official.json")
    if found is None:
        page.say("**Missing:** there is no docs/proof/official.json yet.")
        page.warn("The comparison with official code has not been run.")
        return
    by = of_students(found["comparisons"], "paper")
    rows = []
    for paper, those in by.items():
        verdicts = Counter(of["verdict"] for of in those)
        code = dict.fromkeys(f"{of['repository']} at {of['commit'][:10]}" for of in those if of["repository"])
        rows.append(
            [
                paper,
                ", ".join(code) or "no public code",
                str(len(those)),
                *(str(verdicts[of]) for of in ("equal", "explained", "contradiction")),
            ]
        )
    page.say(table(["paper", "code", "comparisons", "equal", "explained", "contradictions"], rows))
    told = [[of["name"], of["why"]["line"], of["why"]["words"]] for of in found["comparisons"] if "why" in of]
    if told:
        page.say("What differs, and the line of theirs that makes it:", table(["comparison", "line", "why"], told))
    for of in found["comparisons"]:
        if of["verdict"] == "contradiction":
            page.warn(
                f"Official code: {of['name']}: ours differs from theirs ({of['theirs']}) and no line explains it."
            )
    for of in found.get("without_code", []):
        page.warn(f"Official code: none is public for {of['paper']} ({of['looked']}).")
    unseen = [of["mistake"] for of in found.get("mistakes", []) if not of["seen_by"]]
    page.say(
        f"{counted(len(found.get('mistakes', [])), 'mistake')} of ours were made on purpose to try the comparisons; not seen: {', '.join(unseen) or 'none'}."
    )
