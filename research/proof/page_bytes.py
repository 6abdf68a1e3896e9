"""The part of the page on what another coding of the corrections would save."""

from __future__ import annotations

import json
import re
from typing import Any

from page_parts import ROOT, Page, machine_of, made_of, table


def benchmarked() -> dict[str, str]:
    """Bytes per token of noise with `logprob` in BENCHMARKS.md, with the condition, at tolerance 1e-3: what README quotes."""
    words = (ROOT / "BENCHMARKS.md").read_text().split("## What the condition costs")[1]
    patterns = {
        "smollm2": r"noise with `logprob` [0-9.]+ → ([0-9.]+) bytes",
        "nano-gpt2": r"\| noise with `logprob` \| [0-9.]+ \| ([0-9.]+) ",
    }
    made = {}
    for teacher, pattern in patterns.items():
        found = re.search(pattern, words)
        if found is None:
            raise SystemExit(
                f"BENCHMARKS.md, What the condition costs: nothing is like {pattern}, valid: the figure of {teacher} that README quotes"
            )
        made[teacher] = found.group(1)
    return made


GOAL = 6.0
"""Bytes per token with `logprob` that another coding should reach with SmolLM2."""
LARGER = benchmarked()
"""README's bytes per token, read out of BENCHMARKS.md."""


def noise_bytes(page: Page) -> None:
    page.say(
        "## What another coding of the corrections would save",
        f"`make noise-bytes`. Claim: ids coded by the seeded order, coarser values and a coarser `logprob` together would need the bytes of the last columns, beside a goal of {GOAL:g} for SmolLM2. A simulation, "
        "nothing of it is in the format: every token is encoded anew against the dense noise of the same seed with values of so many bits, and the total variation of each, rounding included, is within the "
        "tolerance as the encoder asks for it; a token for which no corrections do that keeps the f16 values of the shards (it escapes). Bytes are held-out code lengths (the table of one half of the rows "
        "codes the other half), with the flags of escapes; a real coder needs a little more. `search` is the simulated search with the format's own f16, beside what the shards hold: how far the simulation is to be trusted.",
    )
    files = sorted(page.results.glob("noise_bytes-*.json"))
    if not files:
        page.say("**Missing:** there is no docs/proof/noise_bytes-*.json yet.")
        return
    head = [
        "teacher",
        "V",
        "tolerance",
        "tokens",
        "corrections per token: stored, search",
        "bytes per token today",
        "of these logprob",
    ]
    rows, ran = [], []
    for file in files:
        found = json.loads(file.read_text())
        ran.append(f"{found['teacher']}: {found['seconds']} s ({machine_of(found)}; commit {made_of(found)})")
        for of in found["data_sets"]:
            rows.append([found["teacher"], *_row(of)])
            if of["largest_variation_as_stored"] > 1.01 * of["tolerance"]:
                page.warn(
                    f"{file.name}: a total variation of {of['largest_variation_as_stored']:.2e} at tolerance {of['tolerance']:g}, above the bound."
                )
    bits = list(json.loads(files[0].read_text())["data_sets"][0]["values"])
    page.say(
        f"{'. '.join(ran)}. Columns of values: bytes per token of noise with `logprob` as it is stored, then with a coarser one; in brackets corrections per token, and the tokens that escape.",
        table([*head, *(f"values of {n} bits" for n in bits), "coarser logprob"], rows),
    )
    _verdict(page, {file.stem.removeprefix("noise_bytes-"): json.loads(file.read_text()) for file in files})


def _row(of: Any) -> list[str]:
    now, coarse = of["stored_bytes_per_token"], of["logprob"]
    cells = [
        f"{of['vocab_size']:,}", f"{of['tolerance']:g}", f"{of['tokens']:,}",
        f"{of['corrections_per_token']:.2f}, {of['corrections_per_token_of_the_search_in_f16']:.2f}", f"{sum(now.values()):.2f}", f"{now['logprob']:.2f}",
    ]  # fmt: skip
    for way in of["values"].values():
        noise = way["noise_bytes_per_token"]
        cells.append(
            f"{noise + now['logprob']:.2f}, {noise + coarse['bytes_per_token']:.2f} ({way['corrections_per_token']:.2f}, {100 * way['escaped_tokens']:.1f} %)"
        )
    return [*cells, f"{coarse['bits_wide']} bits, {coarse['bytes_per_token']:.2f} bytes"]


def best_of(of: Any) -> float:
    """The fewest bytes per token of all ways."""
    return float(min(way["noise_bytes_per_token"] for way in of["values"].values()) + of["logprob"]["bytes_per_token"])


def _verdict(page: Page, found: dict[str, Any]) -> None:
    if "smollm2" not in found:
        page.warn("Goal of 6 bytes per token for SmolLM2: not looked at.")
        return
    by = {of["tolerance"]: of for of in found["smollm2"]["data_sets"]}
    told = []
    for tolerance, of in by.items():
        today, best = sum(of["stored_bytes_per_token"].values()), best_of(of)
        far = best - GOAL
        goal = "met" if far <= 0 else "missed by a little" if far < 0.5 else "missed"
        told.append(f"{goal} at {tolerance:g} ({today:.2f} today, {best:.2f} by the simulation)")
        page.warn(
            f"Goal of {GOAL:g} bytes per token for SmolLM2 with `logprob`, tolerance {tolerance:g}: the format needs {today:.2f}; the simulation {best:.2f} with everything coarser, so the goal "
            f"would be {goal}."
        )
    for teacher, large in LARGER.items():
        for of in (of for of in found.get(teacher, {"data_sets": []})["data_sets"] if of["tolerance"] == 0.001):
            page.warn(
                f"Bytes per token depend on the data set: {found[teacher]['teacher']} at tolerance 1e-3 needs {sum(of['stored_bytes_per_token'].values()):.2f} in one shard of {of['stored_tokens']:,} tokens here, "
                f"{large} in BENCHMARKS.md, which README quotes."
            )
    loose = by.get(0.01)
    page.say(
        f"**The goal of {GOAL:g} bytes per token for SmolLM2 with `logprob` is {'; '.join(told)}.** **Whether that is worth a format version 2: not now.** "
        + (
            f"A tolerance of 1e-2 brings it to {sum(loose['stored_bytes_per_token'].values()):.2f} in the format that there is, and later, too, by `derive`. "
            if loose
            else ""
        )
        + "The price of version 2 is an entropy coder of our own in every reader (pyarrow, DuckDB and Polars read the columns today), pages that are decoded from their beginning, and ids in an order that "
        "a reader has to draw first. It becomes worth it where noise is the largest column of a store and 1e-2 too loose."
    )
