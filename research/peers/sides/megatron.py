"""
Preprocessing as Megatron-LM does it: a pool of processes, each takes lines and gives back ids with the end of the document, and the process
above them writes one file of uint16 and one index (lengths and places of the sequences, and where documents begin).
"""

from __future__ import annotations

import json
import multiprocessing
import os
import struct
import sys
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

CHUNK = 32
UINT16 = 8
"""The index's number for this type."""


class Encoder:
    """Lines of jsonl to ids; its tokenizer is made in each process."""

    def __init__(self, spec: dict[str, Any]) -> None:
        self.spec = spec

    def begin(self) -> None:
        global tokenizer, end
        tokenizer = Tokenizer.from_file(self.spec["tokenizer"])
        end = tokenizer.token_to_id(self.spec["end_of_text"])

    def encode(self, line: str) -> list[int]:
        return [*tokenizer.encode(json.loads(line)["text"], add_special_tokens=False).ids, end]


tokenizer: Tokenizer
end: Any


def lines_of(files: list[str]) -> Iterator[str]:
    return chain.from_iterable(Path(path).open(encoding="utf-8") for path in files)


def write_index(path: Path, lengths: list[int]) -> None:
    """One sequence per document."""
    sizes = np.array(lengths, np.int32)
    places = np.zeros(len(lengths), np.int64)
    np.cumsum(sizes[:-1] * np.dtype(np.uint16).itemsize, out=places[1:])
    with path.open("wb") as file:
        file.write(b"MMIDIDX\x00\x00" + struct.pack("<QBQQ", 1, UINT16, len(lengths), len(lengths) + 1))
        for array in (sizes, places, np.arange(len(lengths) + 1, dtype=np.int64)):
            file.write(array.tobytes())


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    out = Path(spec["out"])
    out.mkdir(parents=True)
    encoder, lengths = Encoder(spec), []
    start = time.perf_counter()
    with (
        multiprocessing.Pool(spec["processes"], initializer=encoder.begin) as pool,
        (out / "text_document.bin").open("wb") as file,
    ):
        for ids in pool.imap(encoder.encode, lines_of(spec["files"]), CHUNK):
            file.write(np.array(ids, np.uint16).tobytes())
            lengths.append(len(ids))
    write_index(out / "text_document.idx", lengths)
    print(json.dumps({"work_seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
