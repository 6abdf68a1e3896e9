"""The page on two runs: whether their figures agree."""

from __future__ import annotations

import json
from typing import Any

from agree import disagrees
from page_parts import Claim, Page, counted, machine_of, made_of, table

COUNTS = ("figures", "equal", "within", "outside", "unknown")


def agreement(page: Page) -> None:
    page.begin(
        "Agreement of two runs",
        "whether a second run in a new folder gives the figures of the first",
        "The experiments ran twice, in two folders. This page shows whether the second run gives the figures of the "
        "first within their intervals.",
        "```sh\npython research/proof/agree.py docs/proof docs/proof/second --json docs/proof/agreement.json\n```",
        "- *equal*: the same to the last digit for the seeds that both runs have.\n"
        "- *within*: the means lie within the 95 % interval of their difference over seeds (Welch's t, wide with two "
        "seeds on a side).\n"
        "- *outside*: they do not.\n"
        "- *one seed alone*: a run has one seed, so there is no interval.",
        "Where both runs have the same seeds, all figures should be equal. Where they have others, the interval "
        "decides.",
    )
    found = page.read("agreement.json")
    if found is None:
        page.missing("agreement.json", "python research/proof/agree.py")
        page.warn("The experiments were not run twice: nothing shows that their tables agree.")
        return
    rows = [
        [name, *(_run(of, i) for i in (0, 1)), *(str(of[kind]) for kind in COUNTS)]
        for name, of in found["files"].items()
    ]
    page.say(
        "## Figures by result",
        table(
            ["results", "run of these pages", "other run", "figures", "equal", "within", "outside", "one seed alone"],
            rows,
        ),
    )
    before = [name for name, of in found["files"].items() if of.get("before")]
    if before:
        page.say(
            f"The second run of {', '.join(before)} was made at an earlier commit and is not kept. Seeds that were "
            "added since were run once."
        )
    machines = dict.fromkeys(
        machine_of(run) for of in found["files"].values() for run in of.get("runs", []) if run.get("machine")
    )
    page.say(f"Machines: {'; '.join(machines) or 'not recorded'}.")
    for name, of in found["files"].items():
        warnings(page, name, of)
    once = []
    for file in sorted(page.results.glob("*.json")):
        held = json.loads(file.read_text())
        if held.get("students") and file.stem not in found["files"]:
            why = found.get("not_compared", {}).get(file.stem, "")
            once.append(file.stem)
            page.warn(f"{file.name} was run once: that a second run agrees is not shown.{f' ({why})' if why else ''}")
    page.claim = claim_of(found["files"], once)


def warnings(page: Page, name: str, of: Any) -> None:
    """Where two runs of a result do not agree, or do not hold the same figures."""
    if of["which"]:
        judged = of["within"] + of["outside"]
        chance = "more than chance explains" if disagrees(of) else "one of twenty is to be expected"
        page.warn(
            f"Two runs of {name}: {counted(of['outside'], 'figure')} of {judged} "
            f"{'lies' if of['outside'] == 1 else 'lie'} outside the interval ({chance}): {', '.join(of['which'][:8])}."
        )
    if of.get("shared_differ"):
        page.warn(
            f"Two runs of {name}: of the seeds that both have, {counted(of['shared_differ'], 'figure')} of "
            f"{of['figures']} {'differs' if of['shared_differ'] == 1 else 'differ'}. {_why(of)}"
        )
    for lacking, whose in zip(of.get("lacking", []), ("this page's", "the other")):
        if lacking:
            page.warn(
                f"Two runs of {name}: {whose} run lacks {counted(len(lacking), 'figure')} of the "
                f"{'other' if whose.startswith('this') else 'first'} "
                f"({', '.join(lacking[:3])}{', …' * (len(lacking) > 3)})."
            )


def claim_of(files: dict[str, Any], once: list[str]) -> Claim | None:
    """The line of the first table: all figures of all results."""
    if not files:
        return None
    figures, equal, within, outside, unknown = (sum(of[kind] for of in files.values()) for kind in COUNTS)
    differ = [name for name, of in files.items() if of.get("shared_differ")]
    caveats = [f"the runs of {', '.join(differ)} have other teachers" if differ else ""]
    caveats += [f"run once: {', '.join(once)}" if once else "", f"one seed alone: {unknown} figures" if unknown else ""]
    return Claim(
        "A second run in a new folder gives the figures of the first within 95 % intervals",
        f"of {figures:,} figures {equal} are equal to the last digit, {within} lie within the interval, {outside} "
        "outside; one of twenty outside is expected by chance",
        "contradicted" if any(disagrees(of) for of in files.values()) else "supported",
        "; ".join(caveat for caveat in caveats if caveat) or "none",
    )


def _why(of: Any) -> str:
    """Why the same seeds gave other figures, as far as the results tell."""
    teachers = [run.get("teachers") or {} for run in of["runs"]]
    if any(not run.get("made") for run in of["runs"]):
        return (
            "The other run is of an earlier program, which recorded neither its commit nor how its teacher was "
            "trained. Students with noise had another teacher."
        )
    if teachers[0].keys() != teachers[1].keys():
        return f"Their teachers differ ({', '.join(teachers[0])}; {', '.join(teachers[1])})."
    return "The reason is unknown."


def _run(of: Any, i: int) -> str:
    """The seeds of a run, and where it was made."""
    seeds = of["seeds"][i]
    if isinstance(seeds, int):  # comparisons from before runs were recorded
        return f"{counted(seeds, 'seed')}; not recorded"
    run = of["runs"][i]
    told = [f"seed{'s' * (len(seeds) != 1)} {', '.join(str(seed) for seed in seeds)}"]
    told += [f"{what.replace('_', ' ')} {run[what]}" for what in ("teacher_seed", "noise_seed") if run.get(what)]
    return "; ".join([*told, made_of(run) or "commit not recorded"])
