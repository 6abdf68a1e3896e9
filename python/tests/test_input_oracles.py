"""CSV as Python's ``csv`` reads it, and queries as Python computes them: the tokens are those of a job over the texts that come out there."""

from __future__ import annotations

import csv
import io
import json
import os
import pathlib
from typing import Any

import numpy as np
import pytest
from shared_fixtures import ROOT, run

import stillhouse

ROUNDS = 40 if os.environ.get("STILLHOUSE_SOAK", "0") != "0" else 2
PARTS = ["a", "word", "é", "😀", '"', '""', ",", ";", "\n", "\r\n", " ", "'", "0", "-1"]


def tokens(folder: pathlib.Path, name: str, fields: dict[str, Any]) -> Any:
    """What a job makes of an input: every token in order."""
    job = {
        "input": {"split_megabytes": 0.01, **fields},
        "tokenizer": {"path": str(ROOT / "assets/teacher-nano-gpt2")},
        "pack": {"mode": "wrap", "length": 16},
        "output": {"path": name},
    }
    run(folder, job)
    return stillhouse.open(folder / name)[:]["input_ids"]


def of_texts(folder: pathlib.Path, name: str, texts: list[str]) -> Any:
    """What comes of texts as lines of JSON."""
    (folder / f"{name}.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return tokens(folder, name, {"format": "jsonl", "paths": [f"{name}.jsonl"]})


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_csv_is_read_as_by_python(seed: int, tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng(seed)

    def text() -> str:
        return "x" + "".join(random.choice(PARTS, int(random.integers(0, 12))))

    delimiter = str(random.choice([",", ";", "\t"]))
    out = io.StringIO()
    ends = str(random.choice(["\n", "\r\n"]))
    writer = csv.writer(out, delimiter=delimiter, lineterminator=ends, quoting=int(random.choice([csv.QUOTE_MINIMAL, csv.QUOTE_ALL, csv.QUOTE_NONNUMERIC])))  # fmt: skip
    writer.writerow(["id", "text", "more"])
    for i in range(200):
        if random.random() < 0.1:
            out.write(ends)  # a blank line is no record
        if random.random() < 0.1:
            out.write(f'{i}{delimiter}tall 6" and 7"{delimiter}{i}"{ends}')  # quotes inside of what is not quoted
        else:
            writer.writerow([i, text(), text()])
    content = ("\ufeff" if random.random() < 0.3 else "") + out.getvalue()
    if random.random() < 0.5:
        content = content.removesuffix(ends)
    with (tmp_path / "a.csv").open("w", newline="") as file:
        file.write(content)
    with (tmp_path / "a.csv").open(newline="", encoding="utf-8-sig") as file:
        expected = [row["text"] for row in csv.DictReader(file, delimiter=delimiter)]
    want = of_texts(tmp_path, "want", expected)
    fields = {"format": "csv", "paths": ["a.csv"], "csv_delimiter": delimiter}
    np.testing.assert_array_equal(tokens(tmp_path, "plain", fields), want)
    np.testing.assert_array_equal(tokens(tmp_path, "query", {**fields, "sql": "SELECT text FROM input"}), want)


def ids(random: np.random.Generator, count: int) -> list[int]:
    """Whole numbers where types go wrong: near 2^53, 2^63 and 2^64, with many that are twice there."""
    near = [2**53, 2**60, 2**63 - 9, 2**64 - 40][int(random.integers(0, 4))]  # numpy would make floats of them
    return [near + int(random.integers(0, 30)) for _ in range(count)]


@pytest.mark.parametrize("seed", range(ROUNDS))
def test_queries_are_computed_as_by_python(seed: int, tmp_path: pathlib.Path) -> None:
    random = np.random.default_rng(1000 + seed)
    keys = ids(random, 120)
    docs = [{"id": key, "k": int(random.integers(0, 5)), "text": f"document {i} {key}"} for i, key in enumerate(keys)]
    labels = [(key, f"label {i}") for i, key in enumerate(dict.fromkeys(ids(random, 20) + keys[:15]))]
    (tmp_path / "docs.jsonl").write_text("".join(json.dumps(doc) + "\n" for doc in docs))
    (tmp_path / "labels.csv").write_text("id,label\n" + "".join(f"{key},{label}\n" for key, label in labels))
    label_of = dict(labels)
    first = {doc["id"]: doc for doc in reversed(docs)}
    groups = list(dict.fromkeys(doc["id"] for doc in docs))
    by_k = sorted(docs, key=lambda doc: doc["k"])  # equal ones keep the order of the input
    queries = {
        "SELECT text FROM docs ORDER BY k": [doc["text"] for doc in by_k],
        "SELECT text FROM docs ORDER BY k DESC LIMIT 31": [doc["text"] for doc in sorted(docs, key=lambda doc: -doc["k"])][:31],
        "SELECT first_value(text) AS text FROM docs GROUP BY id": [first[key]["text"] for key in groups],
        "SELECT CAST(id AS VARCHAR) || ' ' || CAST(count(*) AS VARCHAR) AS text FROM docs GROUP BY id": [
            f"{key} {keys.count(key)}" for key in groups
        ],
        "SELECT d.text || ': ' || l.label AS text FROM docs d JOIN labels l ON d.id = l.id ORDER BY d.id": [
            f"{doc['text']}: {label_of[doc['id']]}" for doc in sorted(docs, key=lambda doc: doc["id"]) if doc["id"] in label_of
        ],
        "SELECT text FROM docs WHERE k < 2 UNION ALL SELECT label AS text FROM labels": [
            *(doc["text"] for doc in docs if doc["k"] < 2),
            *(label for _, label in labels),
        ],
    }  # fmt: skip
    tables = {
        "docs": {"format": "jsonl", "paths": ["docs.jsonl"]},
        "labels": {"format": "csv", "paths": ["labels.csv"]},
    }
    for number, (sql, expected) in enumerate(queries.items()):
        if not expected:
            continue
        want = of_texts(tmp_path, f"want{number}", expected)
        got = tokens(tmp_path, f"query{number}", {"tables": tables, "sql": sql})
        np.testing.assert_array_equal(got, want, err_msg=sql)
