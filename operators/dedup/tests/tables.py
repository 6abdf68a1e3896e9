"""Writes src/unicode_tables.rs: the character classes of datatrove's text normalization.

    /tmp/dt/v/bin/python operators/dedup/tests/tables.py

The classes are those of CPython 3.11 (Unicode 14.0.0), of the package `regex` for decimal digits, and of datatrove 0.10.1
for punctuation.
"""

import pathlib
import unicodedata

import regex
from datatrove.utils.text import PUNCTUATION

HERE = pathlib.Path(__file__).parent
CHARACTERS = [chr(code) for code in range(0x110000) if not 0xD800 <= code < 0xE000]


def ranges(characters):
    found = []
    for code in sorted(map(ord, characters)):
        # no range crosses the surrogates
        if found and found[-1][1] + 1 == code:
            found[-1][1] = code
        else:
            found.append([code, code])
    return found


def table(name, comment, characters):
    lines, line = [], "   "
    for first, last in ranges(characters):
        item = f" ({first:#x}, {last:#x}),"
        if len(line) + len(item) > 120:
            lines.append(line)
            line = "   "
        line += item
    lines.append(line)
    body = "\n".join(lines)
    return f"/// {comment}\n#[rustfmt::skip]\npub(crate) const {name}: &[(u32, u32)] = &[\n{body}\n];\n"


digit = regex.compile(r"\p{Nd}")
TABLES = [
    table("UNASSIGNED", "Characters that Unicode 14.0.0 does not assign.", (c for c in CHARACTERS if unicodedata.category(c) == "Cn")),
    table("NONSPACING_MARKS", "Characters of the category Mn of Unicode 14.0.0.", (c for c in CHARACTERS if unicodedata.category(c) == "Mn")),
    table("DIGITS", f"Decimal digits (Nd) of the Python package `regex` {regex.__version__}.", (c for c in CHARACTERS if digit.fullmatch(c))),
    table("PUNCTUATION", "Characters that datatrove replaces by a space.", set(PUNCTUATION)),
]
HEAD = "//! First and last characters of ranges, in ascending order. `tests/tables.py` writes this file.\n\n"
(HERE.parent / "src" / "unicode_tables.rs").write_text(HEAD + "\n".join(TABLES))
