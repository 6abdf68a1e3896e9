"""Writes src/unicode_ranges.rs and src/english/special_case_table.rs from CPython, spaCy and datatrove.

    /tmp/dt/v/bin/python operators/filters/tests/tables.py

Needs spaCy 3.8.18 and datatrove 0.10.1 on CPython 3.11 (Unicode 14.0.0), the versions of tests/golden.jsonl.gz.
"""

import pathlib
import re
import sys
import unicodedata

import spacy
from datatrove.utils.text import PUNCTUATION_SET, TERMINAL_PUNCTUATION
from spacy.lang.char_classes import ALPHA, ALPHA_LOWER, ALPHA_UPPER, CONCAT_QUOTES, CURRENCY, LIST_ICONS, PUNCT, UNITS
from spacy.pipeline import Sentencizer

SOURCE = pathlib.Path(__file__).parent.parent / "src"
tokenizer = spacy.blank("en").tokenizer
CHARACTERS = [chr(c) for c in range(0x110000) if not 0xD800 <= c < 0xE000]


def in_class(body):
    pattern = re.compile(f"[{body}]")
    return lambda c: pattern.match(c) is not None


def prefix_length(text):
    return tokenizer.find_prefix(text)


CLASSES = {
    "SPACE": ("`str.isspace`, also `\\s`", str.isspace),
    "ALPHABETIC": ("`str.isalpha`", str.isalpha),
    "NUMERIC": ("`str.isalnum`, but not `str.isalpha`", lambda c: c.isalnum() and not c.isalpha()),
    "DECIMAL": ("`str.isdecimal`, also `\\d`", str.isdecimal),
    "PUNCTUATION": ("the general categories P*", lambda c: unicodedata.category(c).startswith("P")),
    "GOPHER_SYMBOL": ("datatrove's `PUNCTUATION_SET`", lambda c: c in PUNCTUATION_SET),
    "TERMINAL": ("datatrove's `TERMINAL_PUNCTUATION`", lambda c: c in TERMINAL_PUNCTUATION),
    "SENTENCE_END": ("`punct_chars` of spaCy's sentencizer", lambda c: c in Sentencizer.default_punct_chars),
    "LETTER": ("spaCy's `ALPHA`", in_class(ALPHA)),
    "LOWER": ("spaCy's `ALPHA_LOWER`", in_class(ALPHA_LOWER)),
    "UPPER": ("spaCy's `ALPHA_UPPER`", in_class(ALPHA_UPPER)),
    "QUOTE": ("spaCy's `CONCAT_QUOTES`", in_class(CONCAT_QUOTES)),
    "PREFIX": ("characters that are a prefix whatever follows", lambda c: prefix_length(c + "0") == 1 and prefix_length(c) == 1),
    "SUFFIX": ("characters that are a suffix whatever precedes", lambda c: tokenizer.find_suffix(c) == 1),
    "INFIX": ("characters that are an infix between any two", lambda c: [m.span() for m in tokenizer.infix_finditer("$" + c + "$")] == [(1, 2)]),
    "BEFORE_FINAL_DOT": (
        "characters after which spaCy splits a final full stop",
        in_class("0-9{al}{e}{p}(?:{q})".format(al=ALPHA_LOWER, e=r"%²\-\+", q=CONCAT_QUOTES, p=PUNCT)),
    ),
}


def boundaries(test):
    inside, found = False, []
    for c in [*CHARACTERS, None]:
        if (c is not None and test(c)) != inside:
            inside = not inside
            found.append(ord(c) if c is not None else 0x110000)
    return found


def wrap(items, separator, indent):
    lines, line = [], ""
    for item in items:
        if line and len(indent) + len(line) + len(separator) + len(item) > 117:
            lines.append(line)
            line = item
        else:
            line = line + separator + item if line else item
    return [indent + line for line in [*lines, line]]


def write_ranges():
    out = [
        "//! Sets of characters, written by `tests/tables.py` from CPython 3.11 (Unicode 14.0.0), spaCy 3.8.18 (MIT) and",
        "//! datatrove 0.10.1 (Apache-2.0). A set is a list of code points at which membership changes, first from out to in.",
        "",
    ]
    for name, (meaning, test) in CLASSES.items():
        out += [f"/// {meaning[0].upper()}{meaning[1:]}." if meaning[0] != "`" else f"/// {meaning}."]
        out += ["#[rustfmt::skip]", f"pub(crate) const {name}: &[u32] = &["]
        out += [line + "," for line in wrap([hex(c) for c in boundaries(test)], ", ", "    ")]
        out += ["];", ""]
    (SOURCE / "unicode_ranges.rs").write_text("\n".join(out[:-1]) + "\n")


def write_special_cases():
    rules = {}
    for text, tokens in tokenizer.rules.items():
        forms = [token[65] if 65 in token else token["ORTH"] if "ORTH" in token else next(iter(token.values())) for token in tokens]
        assert "".join(forms) == text, (text, forms)
        if text.isspace():
            # one token with and without the rule
            assert forms == [text]
            continue
        assert not any(c.isspace() for c in text)
        rules[text] = forms
    out = [
        "//! What spaCy's English tokenizer splits by table, written by `tests/tables.py` from spaCy 3.8.18 (MIT).",
        "",
        "/// The special cases, two spaces apart; one space separates the tokens of a case. Cases of white space are left out:",
        "/// they are one token with and without the rule.",
        'pub(super) const SPECIAL_CASES: &str = r##"',
    ]
    out += wrap([" ".join(rules[text]) for text in sorted(rules)], "  ", "")
    out += ['"##;', "", "/// Units, currencies and the sign that are a suffix directly after an ASCII digit.", 'pub(super) const SUFFIXES_AFTER_DIGIT: &str = "\\']
    after_digit = [unit for unit in UNITS.split("|")] + [re.sub(r"\\(.)", r"\1", sign) for sign in CURRENCY.split("|")] + ["+"]
    for text in after_digit:
        assert tokenizer.find_suffix("5" + text) == len(text), text
        assert not re.search("[0-9]", text)
    out += [line + " \\" for line in wrap(sorted(set(after_digit)), " ", "    ")]
    out += ['    ";']
    (SOURCE / "english" / "special_case_table.rs").write_text("\n".join(out) + "\n")


for c in CHARACTERS:
    if c.isspace():
        assert not prefix_length(c) and not tokenizer.find_suffix(c) and not tokenizer.find_infix(c)
write_ranges()
write_special_cases()
print("Unicode", unicodedata.unidata_version, "CPython", sys.version.split()[0], "spaCy", spacy.__version__)
