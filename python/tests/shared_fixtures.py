"""Data sets and an object store for the tests of python/ and research/. The `stillhouse` program writes each data set, as a user would.

STILLHOUSE_BIN names the program; otherwise it is the repository's target/debug/stillhouse (`make python-test` builds it).
"""

from __future__ import annotations

import contextlib
import fcntl
import gzip
import json
import os
import pathlib
import socket
import subprocess
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from typing import Any

import pyarrow.fs
import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORDS = 199
"""Vocabulary of the teacher `llama-gqa`: three layers, random weights."""


def program() -> pathlib.Path:
    path = pathlib.Path(os.environ.get("STILLHOUSE_BIN") or ROOT / "target/debug/stillhouse")
    if not path.exists():
        pytest.exit(f"{path} is not there: run `make python-test`, or set STILLHOUSE_BIN")
    return path


def speeches(count: int, characters: int) -> list[str]:
    with gzip.open(ROOT / "assets/corpus/sotu-small.jsonl.gz", "rt") as lines:
        texts = [json.loads(line)["text"] for line in lines]
    return [text[:characters] for text in texts[:count]]


def merged(base: dict[str, Any], patch: dict[str, Any]) -> dict[str, Any]:
    both = dict(base)
    for key, value in patch.items():
        both[key] = merged(base[key], value) if isinstance(value, dict) and isinstance(base.get(key), dict) else value
    return both


def run(folder: pathlib.Path, job: dict[str, Any]) -> pathlib.Path:
    """Runs a job in a folder; gives the data set."""
    output = folder / "out"
    file = folder / "job.yaml"
    file.write_text(json.dumps(merged({"version": 1, "name": "test", "seed": 42, "output": {"path": "out"}}, job)))
    done = subprocess.run([program(), "run", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return output


def write_corpus(folder: pathlib.Path, name: str, texts: list[str]) -> str:
    (folder / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return name


def words(folder: pathlib.Path) -> None:
    """A tokenizer where the word `w17` is token 17, and documents of such words, the last longer than a row."""
    names = ["<unk>", "<s>", "</s>", "<pad>", *(f"w{i}" for i in range(4, WORDS))]
    special = [
        {"id": i, "content": names[i], "single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}
        for i in range(4)
    ]  # fmt: skip
    tokenizer = {
        "version": "1.0", "truncation": None, "padding": None, "added_tokens": special, "normalizer": None,
        "pre_tokenizer": {"type": "WhitespaceSplit"}, "post_processor": None, "decoder": None,
        "model": {"type": "WordLevel", "vocab": {name: i for i, name in enumerate(names)}, "unk_token": "<unk>"},
    }  # fmt: skip
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    texts = []
    for document, length in enumerate([5, 17, 1, 30, 3, 9, 24, 40] * 6):
        texts.append(" ".join(f"w{4 + (document * 31 + i * i * 7) % (WORDS - 4)}" for i in range(length)))
    write_corpus(folder, "corpus.jsonl", texts)


Maker = Callable[[str, dict[str, Any]], pathlib.Path]


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Maker:
    """Makes a data set over words with the teacher `llama-gqa`, with changes to the job; each once."""
    made: dict[str, pathlib.Path] = {}

    def make(name: str, patch: dict[str, Any]) -> pathlib.Path:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            words(folder)
            job = {
                "input": {"format": "jsonl", "paths": ["corpus.jsonl"], "text": "text"},
                "tokenizer": {"path": "tokenizer.json", "bos": "<s>", "eos": "</s>", "pad": "<pad>"},
                "pack": {"mode": "wrap", "length": 24},
                "extract": {"teacher": {"path": str(ROOT / "operators/teacher/testdata/llama-gqa")}, "noise": {"codec": "replay"}},
                "subtokens": {"length": 3},
                "partitions": {"views": 2},
            }  # fmt: skip
            made[name] = run(folder, merged(job, patch))
        return made[name]

    return make


@pytest.fixture(scope="session")
def demo(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Speeches with the real vocabulary of 50,257 and the small GPT-2: everything that a job makes, in four shards and two splits."""
    folder = tmp_path_factory.mktemp("demo")
    texts = speeches(12, 14_000)
    paths = [write_corpus(folder, f"part-{i}.jsonl", texts[i::3]) for i in range(3)]
    teacher = {"path": str(ROOT / "assets/teacher-nano-gpt2")}
    return run(
        folder,
        {
            "input": {
                "format": "jsonl",
                "paths": paths,
                "text": "text",
                "split_megabytes": 0.05,
                "holdout": {"validation": {"last_documents": 1}},
            },
            "tokenizer": teacher,
            "pack": {"mode": "wrap", "length": 256, "separator": "eos", "boundary": "bos_eos"},
            "extract": {"teacher": teacher, "noise": {"codec": "replay", "tolerance": 1e-3}, "topk": 4},
            "subtokens": {"length": 4},
            "partitions": {"views": 2},
        },
    )


@pytest.fixture(scope="session")
def plain(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Tokens only, in eight shards of different lengths: about 5,000 rows of 32 positions."""
    folder = tmp_path_factory.mktemp("plain")
    texts = speeches(33, 60_000)
    paths = [write_corpus(folder, f"part-{i}.jsonl", texts[i::4]) for i in range(4)]
    return run(
        folder,
        {
            "input": {"format": "jsonl", "paths": paths, "text": "text", "split_megabytes": 0.2},
            "tokenizer": {"path": str(ROOT / "assets/teacher-nano-gpt2")},
            "pack": {"mode": "wrap", "length": 32},
        },
    )


@contextlib.contextmanager
def free_ports(count: int) -> Iterator[list[int]]:
    """Ports in a row, by the same locks as those of the Rust tests (tests/src/server.rs).

    They lie below the range from which the kernel takes the ports of outgoing connections: one of those may be taken at any moment.
    """
    folder = pathlib.Path(tempfile.gettempdir()) / "stillhouse-ports"
    folder.mkdir(exist_ok=True)
    for block in range(1000):
        number = (os.getpid() + block) % 1000
        ports = [12_000 + number * 16 + i for i in range(count)]
        with (folder / str(number)).open("w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                for port in ports:
                    with socket.socket() as free:
                        free.bind(("127.0.0.1", port))
            except OSError:
                continue
            yield ports
            return
    raise OSError("no free ports")


@pytest.fixture(scope="session")
def long(tmp_path_factory: pytest.TempPathFactory) -> pathlib.Path:
    """Over 9 million tokens (the speeches again and again), so that an epoch has several windows of 64 lanes."""
    folder = tmp_path_factory.mktemp("long")
    texts = speeches(33, 10**9)
    paths = [write_corpus(folder, f"part-{i}.jsonl", texts * 7) for i in range(4)]
    return run(
        folder,
        {
            "input": {"format": "jsonl", "paths": paths, "text": "text", "split_megabytes": 5},
            "tokenizer": {"path": str(ROOT / "assets/teacher-nano-gpt2")},
            "pack": {"mode": "wrap", "length": 1024},
        },
    )


@pytest.fixture(scope="session")
def store(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """A real S3 (SeaweedFS) with a bucket named `bucket`: the environment to use it."""
    folder = tmp_path_factory.mktemp("seaweed")
    keys = [{"accessKey": "KEY", "secretKey": "SECRET"}]
    identity = {"name": "admin", "credentials": keys, "actions": ["Admin", "Read", "Write", "List", "Tagging"]}
    (folder / "s3.json").write_text(json.dumps({"identities": [identity]}))
    (folder / "data").mkdir()
    fixed = ["-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-dir=data", "-s3", "-s3.config=s3.json", "-s3.port.iceberg=0", "-s3.port.lance=0", "-s3.iam=false", "-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.max=50", "-volume.preStopSeconds=0"]  # fmt: skip
    log = (folder / "log").open("w")
    with free_ports(8) as ports:
        named = [
            f"-{part}.port{kind}={ports.pop()}"
            for part in ("s3", "master", "volume", "filer")
            for kind in ("", ".grpc")
        ]
        port = named[0].partition("=")[2]
        with subprocess.Popen(
            [ROOT / ".venv/bin/weed", "server", *fixed, *named], cwd=folder, stdout=log, stderr=log
        ) as server:
            try:
                for _ in range(600):
                    try:
                        urllib.request.urlopen(f"http://127.0.0.1:{port}/", timeout=2).close()
                    except urllib.error.HTTPError:
                        break  # it refuses strangers, so it is there
                    except OSError:
                        assert server.poll() is None, (folder / "log").read_text()[-2000:]
                    time.sleep(0.1)
                s3 = pyarrow.fs.S3FileSystem(
                    access_key="KEY",
                    secret_key="SECRET",
                    endpoint_override=f"http://127.0.0.1:{port}",
                    allow_bucket_creation=True,
                )
                s3.create_dir("bucket")
                yield {
                    "AWS_ENDPOINT_URL": f"http://127.0.0.1:{port}",
                    "AWS_ACCESS_KEY_ID": "KEY",
                    "AWS_SECRET_ACCESS_KEY": "SECRET",
                    "AWS_REGION": "us-east-1",
                }
            finally:
                server.kill()
