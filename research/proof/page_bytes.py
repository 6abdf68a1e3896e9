"""The page on what another coding of the corrections would save."""

from __future__ import annotations

import json
import re
from typing import Any

from page_parts import ROOT, Claim, Page, machine_of, made_of, table

GOAL = 6.0
"""Bytes per token with `logprob` that another coding should reach with SmolLM2."""
SECTION = "What the condition costs"
PATTERNS = {
    "smollm2": r"noise with `logprob` [0-9.]+ → ([0-9.]+) bytes",
    "nano-gpt2": r"\| noise with `logprob` \| [0-9.]+ \| ([0-9.]+) ",
}
"""How this section of BENCHMARKS.md names the bytes per token of noise with `logprob`, at tolerance 1e-3."""


def benchmarked() -> dict[str, str]:
    """Bytes per token of each teacher in BENCHMARKS.md."""
    section = (ROOT / "BENCHMARKS.md").read_text().partition(f"\n## {SECTION}\n")[2].partition("\n## ")[0]
    words = " ".join(section.split())
    made = {}
    for teacher, pattern in PATTERNS.items():
        found = re.search(pattern, words)
        if found is None:
            raise SystemExit(
                f"BENCHMARKS.md, {SECTION}: no text matches `{pattern}`, valid: the bytes per token of {teacher}. "
                f"Restore the text, or change PATTERNS in {__file__}"
            )
        made[teacher] = found.group(1)
    return made


def noise_bytes(page: Page) -> None:
    page.begin(
        "Bytes per token of another noise coding",
        "a simulation of a smaller coding of the noise columns, beside the goal for SmolLM2",
        "This simulation asks how many bytes per token the noise columns would need with another coding. The goal is "
        f"{GOAL:g} bytes with `logprob` for SmolLM2. Nothing of it is in the format.",
        "The coding combines three changes:",
        "- ids of corrections in the order that the seed gives;\n- values of fewer bits;\n- a `logprob` of fewer bits.",
        "```sh\nmake noise-bytes\n```",
    )
    files = sorted(page.results.glob("noise_bytes-*.json"))
    if not files:
        page.missing("noise_bytes-*.json", "make noise-bytes")
        return
    page.say(
        "## Method",
        "- Every token is encoded anew against the dense noise of the same seed. The total variation of each, "
        "rounding included, is within the tolerance, as the encoder requires.\n"
        "- A token *escapes* if no corrections do that. It keeps the f16 values of the shards.\n"
        "- Bytes are held-out code lengths, flags of escapes included: the table of one half of the rows codes the "
        "other half. A real coder needs slightly more.\n"
        "- `search` is the simulated search with the f16 of the format, beside what the shards hold. Their "
        "difference shows how far to trust the simulation.",
    )
    head = [
        "teacher",
        "V",
        "tolerance",
        "tokens",
        "corrections per token: stored, search",
        "bytes per token today",
        "of these `logprob`",
    ]
    rows, found_by = [], {}
    for file in files:
        found = found_by[file.stem.removeprefix("noise_bytes-")] = json.loads(file.read_text())
        machine, commit = machine_of(found), made_of(found) or "not recorded"
        page.runs.append([f"`{file.name}`", "`make noise-bytes`", "", f"{found['seconds']:,} s", machine, commit])
        for of in found["data_sets"]:
            rows.append([found["teacher"], *_row(of)])
            if of["largest_variation_as_stored"] > 1.01 * of["tolerance"]:
                page.warn(
                    f"`{file.name}`: a total variation of {of['largest_variation_as_stored']:.2e} at tolerance "
                    f"{named(of['tolerance'])}, above the bound."
                )
    bits = list(next(iter(found_by.values()))["data_sets"][0]["values"])
    page.say(
        "## Bytes per token",
        "Columns of values hold two figures in bytes per token of noise: with `logprob` as it is stored, then with a "
        "coarser one. Brackets hold corrections per token, and the tokens that escape.",
        table([*head, *(f"values of {n} bits" for n in bits), "coarser `logprob`"], rows),
    )
    _verdict(page, found_by)


def named(tolerance: float) -> str:
    """A tolerance as jobs and students name it: 1e-3."""
    return f"{tolerance:.0e}".replace("e-0", "e-")


def _row(of: Any) -> list[str]:
    now, coarse = of["stored_bytes_per_token"], of["logprob"]
    cells = [
        f"{of['vocab_size']:,}",
        named(of["tolerance"]),
        f"{of['tokens']:,}",
        f"{of['corrections_per_token']:.2f}, {of['corrections_per_token_of_the_search_in_f16']:.2f}",
        f"{sum(now.values()):.2f}",
        f"{now['logprob']:.2f}",
    ]
    for way in of["values"].values():
        noise = way["noise_bytes_per_token"]
        cells.append(
            f"{noise + now['logprob']:.2f}, {noise + coarse['bytes_per_token']:.2f} "
            f"({way['corrections_per_token']:.2f}, {100 * way['escaped_tokens']:.1f} %)"
        )
    return [*cells, f"{coarse['bits_wide']} bits, {coarse['bytes_per_token']:.2f} bytes"]


def best_of(of: Any) -> float:
    """The fewest bytes per token of all ways."""
    return float(min(way["noise_bytes_per_token"] for way in of["values"].values()) + of["logprob"]["bytes_per_token"])


def goal_of(of: Any) -> tuple[float, float, str]:
    """Bytes per token today, by the simulation, and whether the goal is met."""
    today, best = sum(of["stored_bytes_per_token"].values()), best_of(of)
    far = best - GOAL
    return today, best, "met" if far <= 0 else "missed by a little" if far < 0.5 else "missed"


def _verdict(page: Page, found: dict[str, Any]) -> None:
    if "smollm2" not in found:
        page.warn(f"The goal of {GOAL:g} bytes per token for SmolLM2 was not looked at.")
        return
    by = {of["tolerance"]: of for of in found["smollm2"]["data_sets"]}
    goals = {tolerance: goal_of(of) for tolerance, of in by.items()}
    for tolerance, (today, best, goal) in goals.items():
        page.warn(
            f"Goal of {GOAL:g} bytes per token for SmolLM2 with `logprob`, tolerance {named(tolerance)}: the format "
            f"needs {today:.2f}. The simulation with everything coarser needs {best:.2f}, so the goal would be {goal}."
        )
    for teacher, large in benchmarked().items():
        for of in (of for of in found.get(teacher, {"data_sets": []})["data_sets"] if of["tolerance"] == 0.001):
            page.warn(
                f"Bytes per token depend on the data set: {found[teacher]['teacher']} at tolerance 1e-3 needs "
                f"{sum(of['stored_bytes_per_token'].values()):.2f} in one shard of {of['stored_tokens']:,} tokens "
                f"here, {large} in BENCHMARKS.md."
            )
    rows = [[named(tolerance), f"{today:.2f}", f"{best:.2f}", goal] for tolerance, (today, best, goal) in goals.items()]
    loose = by.get(0.01)
    page.say(
        "## Whether this is worth a format version 2: not now",
        f"The goal of {GOAL:g} bytes per token for SmolLM2 with `logprob`:",
        table(["tolerance", "bytes today", "bytes, simulated", "goal"], rows),
    )
    if loose:
        page.say(
            f"A tolerance of 1e-2 brings the present format to {sum(loose['stored_bytes_per_token'].values()):.2f} "
            "bytes. `stillhouse derive` does that later, too."
        )
    page.say(
        "Version 2 would cost:",
        "- an entropy coder of our own in every reader (pyarrow, DuckDB and Polars read the columns today);\n"
        "- pages that decode only from their beginning;\n"
        "- ids in an order that a reader has to draw first.",
        "It becomes worth it where noise is the largest column of a store and 1e-2 is too loose.",
    )
    verdicts = dict.fromkeys(f"{goal} at {named(tolerance)}" for tolerance, (_, _, goal) in goals.items())
    page.claim = Claim(
        f"Another coding of the corrections reaches {GOAL:g} bytes per token for SmolLM2 with `logprob` (our goal; no "
        "paper measures it)",
        "; ".join(
            f"tolerance {named(tolerance)}: {today:.2f} today, {best:.2f} simulated"
            for tolerance, (today, best, _) in goals.items()
        ),
        ", ".join(verdicts),
        "a simulation without intervals; the format does not change",
    )
