"""`datasets`: load jsonl, map in processes (tokenize batches, join documents, cut), write Parquet. Its caches lie beside its output."""

from __future__ import annotations

import json
import os
import sys
import time
from itertools import chain
from pathlib import Path
from typing import Any


def main() -> None:
    spec = json.loads(sys.argv[1])
    # its processes are as many as the cores, so the tokenizer of each takes one
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["HF_HOME"] = f"{spec['out']}/home"
    import datasets
    from tokenizers import Tokenizer

    datasets.disable_progress_bars()
    tokenizer = Tokenizer.from_file(spec["tokenizer"])
    end: Any = tokenizer.token_to_id(spec["end_of_text"])
    length = spec["length"]
    start = time.perf_counter()

    def tokenize_and_cut(batch: dict[str, list[Any]]) -> dict[str, list[list[int]]]:
        encodings = tokenizer.encode_batch_fast(batch["text"], add_special_tokens=False)
        ids = list(chain.from_iterable([*encoding.ids, end] for encoding in encodings))
        return {"input_ids": [ids[at : at + length] for at in range(0, len(ids), length)]}

    cache = f"{spec['out']}/cache"
    documents = datasets.load_dataset("json", data_files=spec["files"], split="train", cache_dir=cache)
    features = datasets.Features({"input_ids": datasets.List(datasets.Value("int32"))})
    rows = documents.map(
        tokenize_and_cut,
        batched=True,
        num_proc=spec["processes"],
        remove_columns=documents.column_names,
        features=features,
    )
    rows.to_parquet(str(Path(spec["out"]) / "train.parquet"))
    print(json.dumps({"work_seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
