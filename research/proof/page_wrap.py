"""Wraps the prose of generated Markdown at 120 characters; tables, headings, code blocks and images stay."""

from __future__ import annotations

import re
import textwrap

WIDTH = 120
SPACE = "\0"
"""Stands for a space at which no line may end."""
UNBROKEN = re.compile(r"`[^`]*`|\[[^\]]*\]\([^)]*\)| [−=±×] |[\d.,]+ %|NFE \d+|(?:Eq\.|Tables?) \w+")
"""Code, links, operators, units, references to papers."""
MARKER = re.compile(r" (?=(?:\d{1,9}[.)]|[-+*>|]|#{1,6})(?: |$))")
"""The space before what would begin a list, a quotation, a table or a heading at the start of a line."""
VERBATIM = ("#", "|", "```", "![", "<!--")
"""How a part begins that is not prose."""


def wrapped(part: str) -> str:
    """A part of a page. Each line of prose is a paragraph or, with a leading `- `, an item of a list."""
    if part.startswith(VERBATIM):
        return part
    return "\n".join(_filled(line) for line in part.split("\n"))


def _filled(line: str) -> str:
    item = line.startswith("- ")
    words = line.removeprefix("- ")
    words = UNBROKEN.sub(lambda found: found[0].replace(" ", SPACE), words)
    words = MARKER.sub(SPACE, words)
    filled = textwrap.fill(
        words,
        WIDTH,
        initial_indent="- " if item else "",
        subsequent_indent="  " if item else "",
        break_long_words=False,
        break_on_hyphens=False,
    )
    return filled.replace(SPACE, " ")
