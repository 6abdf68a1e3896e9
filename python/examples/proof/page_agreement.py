"""The part of the page on two runs: whether their figures agree."""

from __future__ import annotations

from page_parts import Page, counted, table

EXPECTED = 0.05
"""The share of figures outside of a 95 % interval where nothing but chance is at work."""


def agreement(page: Page) -> None:
    page.say(
        "## Two runs",
        "`python python/examples/proof/agree.py RESULTS OTHER --json docs/proof/agreement.json`: the experiments once more in new work folders (teachers, data sets and students made anew), figure by figure. "
        "*equal*: the same to the last digit for the same seeds; *within*: the means lie within the 95 % interval of their difference over seeds.",
    )
    found = page.read("agreement.json")
    if found is None:
        page.say("**Missing:** there is no docs/proof/agreement.json yet.")
        page.warn("The experiments were not run twice: that their tables agree is not shown.")
        return
    rows = [
        [name, f"{of['seeds'][0]}, {of['seeds'][1]}", *(str(of[kind]) for kind in ("figures", "equal", "within", "outside", "unknown"))]
        for name, of in found["files"].items()
    ]  # fmt: skip
    page.say(table(["results", "seeds", "figures", "equal", "within", "outside", "one seed alone"], rows))
    for name, of in found["files"].items():
        judged = of["within"] + of["outside"]
        if of["outside"] > max(1.0, 2 * EXPECTED * judged):
            page.warn(
                f"Two runs of {name} disagree in {counted(of['outside'], 'figure')} of {judged} beyond their intervals: {', '.join(of['which'][:8])}."
            )
