"""Writes tests/golden.jsonl.gz: documents with the normalized texts, signatures, pairs and hits of datatrove.

    /tmp/dt/v/bin/python operators/dedup/tests/golden.py

Needs datatrove 0.10.1, spaCy 3.8.18, numpy and xxhash on CPython 3.11.7; the first line of the file states the versions.
Seeds are fixed, so the same versions write the same file. `--compare N SEED` writes one with N generated documents and another seed,
for a larger comparison that is not committed. `--time FILE` prints datatrove's rate on a file of documents, as
the example `rates` prints ours.

A document of the corpus is stored as [line, first character, characters, edit, parameter]; `edited` states the edits.
"""

import gzip
import importlib.util
import json
import pathlib
import platform
import random
import sys
import tempfile
import time
import types
import warnings

# The indexer imports lighteval to load benchmarks from the network. Those of the test come from its input.
for name in ("lighteval", "lighteval.tasks", "lighteval.tasks.lighteval_task", "lighteval.tasks.registry"):
    sys.modules[name] = types.ModuleType(name)
    sys.modules[name].__spec__ = importlib.util.spec_from_loader(name, None)
sys.modules["lighteval.tasks.lighteval_task"].LightevalTask = types.SimpleNamespace(load_datasets=lambda tasks: None)
sys.modules["lighteval.tasks.registry"].Registry = lambda **_: types.SimpleNamespace(get_task_dict=lambda tasks: {})

import numpy as np
import regex
import spacy
import xxhash
from datatrove.data import Document
from datatrove.pipeline.decont.n_grams import NGramsDecontConfig, NGramsDecontFilter, NGramsDecontIndexer
from datatrove.pipeline.dedup.minhash import MinhashConfig, MinhashDedupBuckets, MinhashDedupCluster, MinhashDedupSignature
from datatrove.utils.hashing import HashConfig
from datatrove.utils.logging import logger
from datatrove.utils.text import TextNormConfig, simplify_text

warnings.simplefilter("ignore")
logger.remove()
NGramsDecontIndexer._requires_dependencies = []
HERE = pathlib.Path(__file__).parent
CORPUS = HERE.parent.parent.parent / "assets" / "corpus" / "sotu-small.jsonl.gz"
FILTERS = HERE.parent.parent / "filters" / "tests" / "golden.py"

NAMES = {"lowercase": "lowercase", "whitespace": "norm_whitespace", "punctuation": "remove_punctuation", "diacritics": "norm_unicode_diacritics",
         "numbers": "norm_numbers", "weekdays": "norm_weekdays", "months": "norm_monthnames"}
NONE = dict.fromkeys(NAMES, False)
NORMALIZATIONS = {"default": {}, "all": {"weekdays": True, "months": True}, "none": NONE, "numbers": {"numbers": False},
                  **{f"only_{name}": {**NONE, name: True} for name in NAMES}, **{f"no_{name}": {name: False} for name in ("lowercase", "whitespace", "punctuation", "diacritics")}}
HASHES = {"xxh64": (64, "xxhash"), "xxh32": (32, "xxhash"), "sha1_64": (64, "sha1"), "sha1_32": (32, "sha1")}
MINHASHES = {"default": {}, "xxh32": {"hash": "xxh32", "seed": 2}, "sha1_64": {"hash": "sha1_64", "seed": 42}, "sha1_32": {"hash": "sha1_32", "seed": 0},
             "many": {"ngram_words": 3, "bands": 40, "band_hashes": 5, "seed": 1234567}, "words": {"ngram_words": 1, "bands": 3, "band_hashes": 1, "seed": 4294967295},
             "raw": {"ngram_words": 2, "bands": 9, "band_hashes": 13, "normalization": NONE}, "all": {"ngram_words": 13, "normalization": {"weekdays": True, "months": True}}}
CONTAMINATIONS = {"default": {}, "query": {"ngram_words": 6, "find_query_ngrams": True}, "label": {"ngram_words": 5, "find_overlap_ngrams": False},
                  "raw": {"ngram_words": 4, "find_query_ngrams": True, "normalization": NONE}, "one": {"ngram_words": 1, "find_overlap_ngrams": True}}


def normalization(options):
    return TextNormConfig(**{NAMES[name]: value for name, value in options.items()})


def minhash(options):
    precision, function = HASHES[options.get("hash", "xxh64")]
    return MinhashConfig(options.get("ngram_words", 5), options.get("bands", 14), options.get("band_hashes", 8), options.get("seed", 1),
                         normalization(options.get("normalization", {})), HashConfig(precision, function))


def contamination(options):
    return NGramsDecontConfig(options.get("ngram_words", 12), options.get("find_query_ngrams", False), options.get("find_overlap_ngrams", True),
                              normalization(options.get("normalization", {})))


def corpus():
    with gzip.open(CORPUS, "rt", encoding="utf-8") as file:
        return [json.loads(line)["text"] for line in file]


def edited(texts, document):
    line, start, length, edit, parameter = document
    text = texts[line][start : start + length]
    if edit == "none":
        return text
    if edit == "words":  # replaces every n-th word, from the n-th on
        return " ".join(f"other{index}" if index % parameter == parameter - 1 else word for index, word in enumerate(text.split(" ")))
    if edit == "sentences":  # removes every n-th sentence, from the n-th on
        return ". ".join(sentence for index, sentence in enumerate(text.split(". ")) if index % parameter != parameter - 1)
    if edit == "case":
        return text.upper()
    if edit == "punctuation":
        return text.replace(",", ";").replace(".", " ! ").replace("-", "")
    if edit == "prefix":  # a header, as of web pages
        return "home about contact " * parameter + text
    raise ValueError(edit)


def signature(step, text):
    shingles = step.get_shingles(text)
    return [value for band in step.get_signature(shingles) for value in band] if shingles.size else None


def digest(values):
    return "none" if values is None else short(np.array(values, dtype="<u8").tobytes())


def text_digest(text):
    return short(text.encode())


def short(data):
    """32 bits keep the file small."""
    return f"{xxhash.xxh64_intdigest(data) & 0xFFFFFFFF:08x}"


def every_character():
    """Each character, between letters and around a capital sigma, whose lower case depends on what is beside it. Planes without
    letters are left out. Characters that Unicode 14 does not assign are in it: later versions give some of them a lower case."""
    codes = [code for code in [*range(0x33480), *range(0xE0000, 0xE0200)] if not 0xD800 <= code < 0xE000]
    return "".join(f"a{c}Σ{c}b{c}{c} 1{c}2 " for c in map(chr, codes))


def pairs(documents, texts, options):
    """The pairs of the bucket step and the documents that the cluster step removes."""
    config = minhash(options)
    with tempfile.TemporaryDirectory() as folder:
        MinhashDedupSignature(f"{folder}/signatures", config).run((Document(text=edited(texts, d), id=str(i)) for i, d in enumerate(documents)))
        for band in range(config.num_buckets):
            MinhashDedupBuckets(f"{folder}/signatures", f"{folder}/pairs", config=config).run(None, band, config.num_buckets)
        MinhashDedupCluster(f"{folder}/pairs", f"{folder}/removed", config, save_cluster_id=True).run()
        found = set()
        for path in pathlib.Path(folder, "pairs").glob("*.dups"):
            found.update((int(a), int(b)) for _, a, _, b in np.fromfile(path, dtype="<u4").reshape(-1, 4))
        removed = np.fromfile(f"{folder}/removed/000000.remove", dtype="<u4").tolist()
        clusters = np.fromfile(f"{folder}/removed/000000.clusters", dtype="<u4").reshape(-1, 2).tolist()
    return {"pairs": sorted(found), "removed": removed, "clusters": clusters}


def pair_documents(rng, texts):
    documents = []
    while len(documents) < 2000:
        line = rng.randrange(len(texts))
        length = rng.randrange(60, 900)
        start = rng.randrange(len(texts[line]) - length)
        documents.append((line, start, length, "none", 0))
        for _ in range(rng.randrange(4)):
            edit = rng.choice(["words", "words", "words", "sentences", "sentences", "case", "punctuation", "prefix", "shift"])
            parameter = {"words": rng.choice([5, 9, 15, 25, 40, 70]), "sentences": rng.choice([2, 3, 5]), "prefix": rng.choice([1, 2, 4])}.get(edit, 0)
            if edit == "shift":
                documents.append((line, max(0, start - rng.randrange(100)), length, "none", 0))
            else:
                documents.append((line, start, length, edit, parameter))
    rng.shuffle(documents)
    return documents[:2000]


def hits(rng, texts, words, options):
    def excerpt(most):
        text = rng.choice(texts)
        start = rng.randrange(len(text) - most)
        return text[start : start + rng.randrange(1, most)]

    benchmarks = []
    for _ in range(48):
        query = rng.choice([excerpt(300), excerpt(40), words(rng, 12), ""])
        label = rng.choice([excerpt(300), excerpt(60), excerpt(10), words(rng, 12), ""])
        benchmarks.append((rng.choice(["mmlu:law", "gsm8k", "a task", "a-b", "a", "z"]), query, label))
    # an n-gram of several benchmarks
    benchmarks += [(name, query, label) for name, (_, query, label) in zip(["gsm8k", "a-b", "a", "z"], rng.sample(benchmarks, 4))]
    documents = []
    for _, query, label in benchmarks:
        both = rng.choice([query + " " + label, label, query, (query + " " + label).upper(), label.replace(" ", "\n"), label + " " + query])
        documents.append(rng.choice([both, excerpt(200) + " " + both + " " + excerpt(100)]))
    documents += [excerpt(400) for _ in range(20)] + ["", " ", "word"]
    with tempfile.TemporaryDirectory() as folder:
        config = contamination(options)
        data = [Document(text=label, id="", metadata={"query": query, "task": name}) for name, query, label in benchmarks]
        NGramsDecontIndexer(folder, config=config).run(iter(data))
        step = NGramsDecontFilter(folder, config=config)
        found = []
        for text in documents:
            document = Document(text=text, id="")
            kept = step.filter(document) is True
            found.append(None if kept else [document.metadata["contaminated_task"], document.metadata["contaminated_ngram"]])
    return {"benchmarks": benchmarks, "documents": documents, "hits": found}


def write_golden(count=120, seed=20250202):
    spec = importlib.util.spec_from_file_location("filters_golden", FILTERS)
    generators = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(generators)
    rng, texts = random.Random(seed), corpus()
    versions = {"datatrove": "0.10.1", "spacy": spacy.__version__, "numpy": np.__version__, "regex": regex.__version__, "xxhash": xxhash.VERSION,
                "python": platform.python_version()}
    lines = [{"versions": versions, "normalizations": NORMALIZATIONS, "minhashes": MINHASHES, "contaminations": CONTAMINATIONS}]
    every = every_character()
    lines.append({"every_character": {name: text_digest(simplify_text(every, normalization(options))) for name, options in NORMALIZATIONS.items()}})
    steps = {name: MinhashDedupSignature("/tmp/unused", minhash(options)) for name, options in MINHASHES.items()}

    def line(document, text, index):
        normalized = {name: text_digest(simplify_text(text, normalization(options))) for name, options in NORMALIZATIONS.items()}
        signatures = {name: signature(step, text) for name, step in steps.items()}
        full = {"signature": signatures["default"]} if index % 60 == 0 else {}
        return {"document": document, "normalized": normalized, "signatures": {name: digest(s) for name, s in signatures.items()}, **full}

    tails = ["x ́ y", "́", " ́ ", "１,２ 3٫4 5.6.7 8,,9", "Ⅷ ½ ٣٤٥.٦", "Monday, January 5th; maybe on saturdayjune", "\u1680a\u3000b", "one two three four five",
             "one two three four", "ΑΣ ΣΑ Σ ΑΣ́ ΑΣ.", "가각힣 é Å Ω K", "שָׁלוֹם עֲלֵיכֶם", "a\x00b\x1cc\x85d", "na\u0308ive \u1e9b\u0323 q\u0307\u0323"]
    generated = generators.fixed() + tails + list(generators.generated(rng, count))
    lines += [line(text, text, index) for index, text in enumerate(generated)]
    edits = [("none", 0), ("words", 7), ("words", 40), ("sentences", 3), ("case", 0), ("punctuation", 0), ("prefix", 3)]
    specs = [(index, 0, 10**9, *edits[index % len(edits)]) for index in range(0, len(texts), 3)]
    for _ in range(20):
        number = rng.randrange(len(texts))
        start, length = rng.randrange(len(texts[number]) - 2000), rng.randrange(50, 2000)
        specs += [(number, start, length, *edit) for edit in edits]
    lines += [line(spec, edited(texts, spec), index) for index, spec in enumerate(specs)]
    for options in ({}, {"hash": "sha1_32", "ngram_words": 3, "bands": 20, "band_hashes": 4}):
        documents = pair_documents(rng, texts)
        lines.append({"options": options, "documents": documents, **pairs(documents, texts, options)})
    lines += [{"contamination": name, **hits(rng, texts, generators.random_words, options)} for name, options in CONTAMINATIONS.items()]
    with open(HERE / "golden.jsonl.gz", "wb") as raw, gzip.GzipFile(filename="", fileobj=raw, mode="wb", mtime=0, compresslevel=9) as file:
        for value in lines:
            file.write((json.dumps(value, ensure_ascii=False, separators=(",", ":")) + "\n").encode())


def measure(path):
    """Rates of one thread: signatures, exact keys and decontamination."""
    with open(path, encoding="utf-8") as file:
        texts = [json.loads(line) for line in file]
    size = sum(len(text.encode()) for text in texts)
    step = MinhashDedupSignature("/tmp/unused", MinhashConfig())
    step.get_signature(step.get_shingles(texts[0]))

    def rate(name, each):
        start = time.perf_counter()
        for text in texts:
            each(text)
        seconds = time.perf_counter() - start
        print(f"{name}: {len(texts) / seconds:.0f} documents/s, {size / 1e6 / seconds:.2f} MB/s, {len(texts)} documents, {size} bytes, {seconds:.3f} s")

    rate("minhash", lambda text: step.get_signature(step.get_shingles(text)))
    rate("exact document", lambda text: xxhash.xxh64_intdigest(text))
    with tempfile.TemporaryDirectory() as folder:
        NGramsDecontIndexer(folder).run(iter([Document(text=texts[0], id="", metadata={"query": texts[1], "task": "task"})]))
        decontamination = NGramsDecontFilter(folder)
        decontamination.load_index_hashes()
        rate("contamination", lambda text: decontamination.filter(Document(text=text, id="")))


if __name__ == "__main__":
    if sys.argv[1:2] == ["--time"]:
        measure(sys.argv[2])
    elif sys.argv[1:2] == ["--compare"]:
        write_golden(int(sys.argv[2]), int(sys.argv[3]))
    else:
        write_golden()
