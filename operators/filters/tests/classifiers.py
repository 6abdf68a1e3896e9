"""Writes tests/classifiers/: small models of each kind that fastText writes, texts, and fastText's scores of all labels.

    python operators/filters/tests/classifiers.py

Needs fasttext 0.9.3 with numpy 1, whose scores they are. Models are trained on the speeches of assets/corpus with one thread, so they are equal every time,
by the program of the Debian package fasttext: training with the Python package stops with "Encountered NaN" here.
"""

import gzip
import json
import pathlib
import random
import re
import subprocess
import tempfile

import fasttext

HERE = pathlib.Path(__file__).resolve().parent
FOLDER = HERE / "classifiers"
CORPUS = HERE.parents[2] / "assets/corpus/sotu-small.jsonl.gz"
TRAINER = "fasttext"
BASE = {"thread": 1, "epoch": 2, "lr": 0.1, "minCount": 40, "seed": 1, "verbose": 0}
# name, labels, options of the training, options of the quantization
MODELS = [
    ("softmax-bigrams.bin", 2, {"dim": 6, "wordNgrams": 2, "bucket": 200, "loss": "softmax"}, None),
    ("hierarchical-parts.bin", 7, {"dim": 5, "minn": 2, "maxn": 4, "bucket": 200, "loss": "hs"}, None),
    ("one-vs-all.bin", 3, {"dim": 4, "minn": 3, "maxn": 3, "wordNgrams": 3, "bucket": 100, "loss": "ova"}, None),
    ("negative-sampling.bin", 4, {"dim": 4, "loss": "ns"}, None),
    ("quantized.ftz", 3, {"dim": 5, "wordNgrams": 2, "bucket": 500, "loss": "softmax"}, {"dsub": 2}),
    ("quantized-pruned.ftz", 3, {"dim": 6, "minn": 2, "maxn": 3, "bucket": 500, "loss": "hs"}, {"dsub": 2, "qnorm": True, "cutoff": 300}),
    ("quantized-output.ftz", 260, {"dim": 4, "minCount": 100, "minn": 2, "maxn": 2, "bucket": 300, "loss": "softmax"}, {"dsub": 2, "qnorm": True, "qout": True}),
]


def speeches() -> list[str]:
    with gzip.open(CORPUS, "rt", encoding="utf-8") as lines:
        return [json.loads(line)["text"] for line in lines]


def sentences() -> list[str]:
    return [part for text in speeches() for part in re.split(r"(?<=[.?!])\s+", text.replace("\n", " ")) if part]


def texts() -> list[str]:
    chosen = random.Random(7)
    all_sentences = sentences()
    made = [
        "", " ", "\n\n", "the", "of the people", "</s>", "the people </s> of the United States", "__label__1", "__label__none the people",
        "a\tb\x0bc\x0cd\re", "the\x00people", "\u00a0the people\u00a0", "the\u00a0people", "caf\u00e9 na\u00efve", "\u4e2d\u6587 \u65e5\u672c",
        "\U0001f600 the", "x" * 2000, "<people>", "The PEOPLE, of; (the) \u2014 union.", "\u0301combining",
    ]
    made += chosen.sample(all_sentences, 60)
    made += ["\n".join(chosen.sample(all_sentences, 5)) for _ in range(20)]
    return made


def arguments(options: dict) -> list[str]:
    return [text for key, value in options.items() for text in (f"-{key}", *([] if value is True else [str(value)]))]


def train(labels: int, options: dict, quantization: dict | None, path: pathlib.Path) -> None:
    examples = sentences()
    lines = [f"__label__{index * labels // len(examples)} {text}" for index, text in enumerate(examples)]
    random.Random(1).shuffle(lines)
    with tempfile.TemporaryDirectory() as folder:
        data, model = pathlib.Path(folder) / "train.txt", pathlib.Path(folder) / "model"
        data.write_text("\n".join(lines) + "\n", encoding="utf-8")
        names = ["-input", str(data), "-output", str(model)]
        subprocess.run([TRAINER, "supervised", *names, *arguments({**BASE, **options})], check=True)
        if quantization is not None:
            subprocess.run([TRAINER, "quantize", *names, *arguments({"thread": 1, **quantization})], check=True)
        path.write_bytes(model.with_suffix(path.suffix).read_bytes())


def scores(model, text: str) -> dict[str, float] | None:
    # as datatrove's FastTextClassifierFilter with newline_replacement=" "
    labels, values = model.predict(text.strip().replace("\n", " "), k=-1)
    found = {label.removeprefix("__label__"): float(value) for label, value in zip(labels, values)}
    return found or None


def main() -> None:
    FOLDER.mkdir(exist_ok=True)
    all_texts, expected = texts(), {}
    for name, labels, options, quantization in MODELS:
        path = FOLDER / name
        train(labels, options, quantization, path)
        model = fasttext.load_model(str(path))
        expected[name] = [scores(model, text) for text in all_texts]
        if labels > 7:  # the file would be large
            expected[name] = [found and dict(sorted(found.items())[:5]) for found in expected[name]]
        path.with_name(name + ".gz").write_bytes(gzip.compress(path.read_bytes(), mtime=0))
        path.unlink()
    golden = json.dumps({"texts": all_texts, "scores": expected}, ensure_ascii=True)
    (FOLDER / "scores.json.gz").write_bytes(gzip.compress(golden.encode(), mtime=0))


if __name__ == "__main__":
    main()
