"""A trainer for the tests: ranks that step together, write down what they got, save, and die when told.

trainer.py JSON        the keys are the names below
"""

from __future__ import annotations

import json
import os
import pathlib
import signal
import sys
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.data import DataLoader

import stillhouse.torch as st

EPOCHS = 2
SAVE_EVERY = 3


def loader_of(ds: Any, kind: str, workers: int) -> Any:
    if kind == "ours":
        return st.DataLoader(ds, num_workers=workers, persistent_workers=workers > 1)
    if isinstance(ds, st.ShardDataset):
        return DataLoader(ds, batch_sampler=ds.batch_sampler, collate_fn=ds.collate, num_workers=workers)
    return DataLoader(ds, batch_size=None, num_workers=workers)


def save(path: pathlib.Path, state: Any) -> None:
    path.with_suffix(".new").write_text(json.dumps(state))
    path.with_suffix(".new").replace(path)


def main(dataset: str, folder: str, run: int, rank: int, world: int, workers: int, batch_size: int, style: str, kind: str, die_at: int, victim: int) -> None:  # fmt: skip
    dist.init_process_group("gloo", init_method=f"file://{folder}/rendezvous-{run}", rank=rank, world_size=world)
    cls = st.ShardDataset if style == "map" else st.StreamingShardDataset
    ds = cls(dataset, batch_size=batch_size, seed=7, columns=["sequence_id"])
    checkpoint = pathlib.Path(folder) / "checkpoint.json"
    step = 0
    if checkpoint.exists():
        saved = json.loads(checkpoint.read_text())
        ds.load_state_dict(saved["data"])
        step = saved["step"]
    loader = loader_of(ds, kind, workers)
    log = os.open(f"{folder}/log-{run}-{rank}", os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for epoch in range(ds.epoch, EPOCHS):
        ds.set_epoch(epoch)
        batches = iter(loader)
        while True:
            batch = next(batches, None)
            there = torch.tensor(int(batch is not None))
            dist.all_reduce(there)
            if not there:
                break
            step += 1
            if batch is not None:
                os.write(log, (json.dumps([step, epoch, batch["sequence_id"].tolist()]) + "\n").encode())
            if step == die_at and rank == victim:
                os.kill(os.getpid(), signal.SIGKILL)
            dist.barrier()  # everybody has got and written down this step
            if rank == 0 and step % SAVE_EVERY == 0:
                save(checkpoint, {"step": step, "data": loader.state_dict() if kind == "ours" else batch.state})
        dist.barrier()
    if rank == 0:
        save(checkpoint, {"step": step, "data": ds.state_dict(), "done": True})


if __name__ == "__main__":
    main(**json.loads(sys.argv[1]))
