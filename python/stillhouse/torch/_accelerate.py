"""What accelerate, where a program uses it, must know of a loader that is being iterated."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any


@contextmanager
def under_way(loader: Any) -> Iterator[None]:
    """Names the loader to accelerate while it is iterated.

    ``accelerator.accumulate`` makes a step at the end of an epoch, however many batches were accumulated, and ``gather_for_metrics``
    looks there for rows that were added to fill the last batch (none). Both ask ``loader.end_of_dataloader`` and ``loader.remainder``.
    """
    loader.end_of_dataloader, loader.remainder = False, 0
    module = sys.modules.get("accelerate.state")
    if module is None or not module.GradientState._shared_state:  # nobody made an Accelerator
        yield
        return
    loaders = module.GradientState()
    loaders._add_dataloader(loader)
    try:
        yield
    finally:
        loaders._remove_dataloader(loader)
