"""datatrove: a task per file, each reads jsonl, tokenizes and writes uint16 in the order of the documents."""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path


def main() -> None:
    spec = json.loads(sys.argv[1])
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    from datatrove.executor import LocalPipelineExecutor
    from datatrove.pipeline.readers import JsonlReader
    from datatrove.pipeline.tokens import DocumentTokenizer

    start = time.perf_counter()
    executor = LocalPipelineExecutor(
        pipeline=[
            JsonlReader(str(Path(spec["files"][0]).parent), glob_pattern="*.jsonl"),
            DocumentTokenizer(
                spec["out"],
                tokenizer_name_or_path=spec["tokenizer"],
                eos_token=spec["end_of_text"],
                shuffle_documents=False,
            ),
        ],
        tasks=len(spec["files"]),
        workers=spec["processes"],
        logging_dir=f"{spec['out']}/logs",
    )
    executor.run()
    print(json.dumps({"work_seconds": time.perf_counter() - start}))


if __name__ == "__main__":
    main()
