"""The part of the page on two runs: whether their figures agree."""

from __future__ import annotations

import json
from typing import Any

from agree import disagrees
from page_parts import Page, counted, machine_of, made_of, table


def agreement(page: Page) -> None:
    page.say(
        "## Two runs",
        "`make maze`, `make text`, `make methods` in a fresh clone make everything anew in demo-out/proof and say whether it agrees with docs/proof (`PUBLISH=1` then puts it there and makes this page); the table below is "
        "`python research/proof/agree.py docs/proof docs/proof/second --json docs/proof/agreement.json`. Claim: a second run in a new folder gives the figures of the first within their intervals. "
        "*equal*: the same to the last digit for the seeds that both have; *within*: the means lie within the 95 % interval of their difference over seeds (Welch's t; with two seeds on a side "
        "it is wide). Where both runs have the same seeds all figures should be equal; where they have others the interval decides.",
    )
    found = page.read("agreement.json")
    if found is None:
        page.say("**Missing:** there is no docs/proof/agreement.json yet.")
        page.warn("The experiments were not run twice: that their tables agree is not shown.")
        return
    rows = [
        [name, *(_run(of, i) for i in (0, 1)), *(str(of[kind]) for kind in ("figures", "equal", "within", "outside", "unknown"))]
        for name, of in found["files"].items()
    ]  # fmt: skip
    page.say(
        table(
            ["results", "this page's run", "the other", "figures", "equal", "within", "outside", "one seed alone"], rows
        )
    )
    if any(of.get("before") for of in found["files"].values()):
        page.say(
            f"Of {', '.join(name for name, of in found['files'].items() if of.get('before'))} the second run was made at an earlier commit and is not kept; seeds that were added since were run once."
        )
    machines = dict.fromkeys(
        machine_of(run) for of in found["files"].values() for run in of.get("runs", []) if run.get("machine")
    )
    page.say(f"Machines: {'; '.join(machines) or 'not recorded'}.")
    for name, of in found["files"].items():
        if of["which"]:
            judged = of["within"] + of["outside"]
            chance = "more than chance explains" if disagrees(of) else "one of twenty is to be expected"
            page.warn(
                f"Two runs of {name}: {counted(of['outside'], 'figure')} of {judged} {'lies' if of['outside'] == 1 else 'lie'} outside of the interval ({chance}): {', '.join(of['which'][:8])}."
            )
        if of.get("shared_differ"):
            page.warn(
                f"Two runs of {name}: of the seeds that both have, {counted(of['shared_differ'], 'figure')} of {of['figures']} {'differs' if of['shared_differ'] == 1 else 'differ'}. {_why(of)}"
            )
        for lacking, whose in zip(of.get("lacking", []), ("this page's", "the other")):
            if lacking:
                page.warn(
                    f"Two runs of {name}: {whose} run lacks {counted(len(lacking), 'figure')} of the {'other' if whose.startswith('this') else 'first'} ({', '.join(lacking[:3])}{', …' * (len(lacking) > 3)})."
                )
    for file in sorted(page.results.glob("*.json")):
        held = json.loads(file.read_text())
        if held.get("students") and file.stem not in found["files"]:
            why = found.get("not_compared", {}).get(file.stem, "")
            page.warn(f"{file.name} was run once: that a second run agrees is not shown.{f' ({why})' if why else ''}")


def _why(of: Any) -> str:
    """Why the same seeds gave other figures, as far as the results tell."""
    teachers = [run.get("teachers") or {} for run in of["runs"]]
    if any(not run.get("made") for run in of["runs"]):
        return "The other run is of an earlier program, which kept neither its commit nor how its teacher was trained: students of noise had another teacher."
    if teachers[0].keys() != teachers[1].keys():
        return f"Their teachers are not the same ({', '.join(teachers[0])}; {', '.join(teachers[1])})."
    return "Why is not known."


def _run(of: Any, i: int) -> str:
    """The seeds of a run, and where it was made."""
    seeds = of["seeds"][i]
    if isinstance(seeds, int):  # comparisons from before runs were recorded
        return f"{counted(seeds, 'seed')}; not recorded"
    run = of["runs"][i]
    told = [f"seed{'s' * (len(seeds) != 1)} {', '.join(str(seed) for seed in seeds)}"]
    told += [f"{what.replace('_', ' ')} {run[what]}" for what in ("teacher_seed", "noise_seed") if run.get(what)]
    return "; ".join([*told, made_of(run) or "commit not recorded"])
