"""The maze of Gumbel distillation (appendix E.1): a map of 5 × 4 fields, walks from (3, 1) to (3, 4) of at most 10 moves.

::

        0 1 2 3 4        a walk is a text of 10 words, moves first, then <eos>:
      0 . . . . .
      1 . . . . .             right up right down right <eos> <eos> <eos> <eos> <eos>
      2 . . . . .
      3 . S . . T        as a row: <bos> + 10 words + <eos>, 12 tokens of a vocabulary of 6

The paper names the map's size, the two fields, the longest path and the number of paths (2,000, found breadth-first), and no walls. On the open
map there are 2,118 walks of at most 10 moves that end at the target (they may pass it before), so that the first 2,000 of a breadth-first
search are the paper's number.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

HEIGHT, WIDTH = 4, 5
START, TARGET = (3, 1), (3, 4)
LONGEST = 10
PATHS = 2000
MOVES = {"up": (-1, 0), "down": (1, 0), "left": (0, -1), "right": (0, 1)}
VOCABULARY = ["<bos>", "<eos>", *MOVES]
LENGTH = LONGEST + 2
BOS, EOS = 0, 1
COSINE, CONSTANT = "warm-up of 40 steps, cosine to a tenth", "constant rate"


@dataclass(frozen=True)
class Training:
    """A model's size and how it is trained."""

    layers: int
    heads: int
    width: int = 128
    epochs: int = 100
    batch: int = 256
    lr: float = 1e-3
    schedule: str = COSINE
    """In words, as results name it: students of another one are not mixed with these."""

    def rate(self, step: int, steps_of_epoch: int) -> float:
        """The learning rate of a step."""
        if self.schedule == CONSTANT:
            return self.lr
        steps = self.epochs * steps_of_epoch
        return self.lr * min(1.0, (step + 1) / 40) * (0.55 + 0.45 * math.cos(math.pi * step / steps))


def moved(field: tuple[int, int], move: str) -> tuple[int, int] | None:
    """The field that a move leads to; None where it leads off the map."""
    row, column = field[0] + MOVES[move][0], field[1] + MOVES[move][1]
    return (row, column) if 0 <= row < HEIGHT and 0 <= column < WIDTH else None


def walks() -> list[list[str]]:
    """All walks, breadth-first: the shortest ones first."""
    found: list[list[str]] = []
    queue: deque[tuple[tuple[int, int], list[str]]] = deque([(START, [])])
    while queue:
        field, walk = queue.popleft()
        if field == TARGET:
            found.append(walk)
        if len(walk) < LONGEST:
            steps = ((move, moved(field, move)) for move in MOVES)
            queue.extend((there, [*walk, move]) for move, there in steps if there is not None)
    return found


def text_of(walk: list[str]) -> str:
    """A walk as a text of 10 words."""
    return " ".join(walk + ["<eos>"] * (LONGEST - len(walk)))


def is_valid(row: list[int]) -> bool:
    """Whether a row of 12 ids is <bos>, a walk that ends at the target, and <eos> to its end."""
    end = row.index(EOS) if EOS in row else len(row)
    if row[0] != BOS or end == len(row) or set(row[end:]) != {EOS} or BOS in row[1:end]:
        return False
    field: tuple[int, int] | None = START
    for token in row[1:end]:
        field = moved(field, VOCABULARY[token]) if field is not None else None
    return field == TARGET
