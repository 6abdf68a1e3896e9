"""Flips one bit of a shard after the other and reads the data set each time; prints how often what came of it.

    reader_of_damage.py DATASET SHARD FLIPS

A process of its own, so that what it writes to stderr, or its death, is seen.
"""

from __future__ import annotations

import json
import pathlib
import sys
from collections import Counter

import numpy as np
from test_damage import flip, same, values

import stillhouse


def main() -> None:
    folder, shard, flips = pathlib.Path(sys.argv[1]), pathlib.Path(sys.argv[2]), int(sys.argv[3])
    size = shard.stat().st_size
    random = np.random.default_rng(12)
    truth = values(folder, True)
    outcomes: Counter[str] = Counter()
    for trial in range(flips):
        # every fourth in the last 8 kB, where page indexes and footer are
        first = size - 8_000 if trial % 4 == 0 else 4
        place, bit = int(random.integers(first, size)), int(random.integers(8))
        flip(shard, place, bit)
        try:
            outcomes["equal values" if same(values(folder, trial % 2 == 0), truth) else "other values"] += 1
        except stillhouse.StillhouseError as error:
            outcomes[type(error).__name__] += 1
        flip(shard, place, bit)
    print(json.dumps(outcomes))


if __name__ == "__main__":
    main()
