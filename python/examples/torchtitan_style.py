"""Trains train_mdlm.py's student as torchtitan does: FSDP, and checkpoints of torch.distributed.checkpoint in which the loader takes part.

    torchrun --nproc-per-node 8 torchtitan_style.py s3://shards/owt-noise --steps 20000 --device cuda --checkpoint folder

The loader of stillhouse.torch has one state for all ranks, so that a run goes on at any number of them, as its model does. With --torchdata the
loader is torchdata's StatefulDataLoader, whose state is that of one rank: it goes on with as many ranks and workers as it had.
"""

from __future__ import annotations

import argparse
import os
import pickle
from itertools import chain, repeat
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import train_mdlm
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torchdata.stateful_dataloader import StatefulDataLoader

import stillhouse.torch as st


class Model:
    """Model and optimizer as one thing that dcp saves, with names that do not depend on the number of ranks."""

    def __init__(self, model: torch.nn.Module, optimizer: torch.optim.Optimizer) -> None:
        self.model, self.optimizer = model, optimizer

    def state_dict(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self.model, self.optimizer)
        return {"model": model, "optimizer": optimizer}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(self.model, self.optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])


class Loader:
    """A loader as dcp saves it: plain values under one name, of all ranks or of each (torchtitan's ParallelAwareDataloader)."""

    def __init__(self, loader: Any) -> None:
        self.loader = loader
        self.name = "all" if isinstance(loader, st.DataLoader) else f"rank_{dist.get_rank()}_of_{dist.get_world_size()}"

    def state_dict(self) -> dict[str, Any]:
        return {self.name: pickle.dumps(self.loader.state_dict())}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(pickle.loads(state[self.name]))


class Step:
    """The number of steps made."""

    done = 0

    def state_dict(self) -> dict[str, Any]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.done = state["done"]


def loader_of(args: argparse.Namespace) -> Any:
    if not args.torchdata:
        ds = train_mdlm.data_of(args, st.ShardDataset if args.map else st.StreamingShardDataset)
        return st.DataLoader(ds, num_workers=args.workers)
    if args.map:
        ds = train_mdlm.data_of(args, st.ShardDataset)
        return StatefulDataLoader(ds, batch_sampler=ds.batch_sampler, num_workers=args.workers)
    return StatefulDataLoader(train_mdlm.data_of(args), batch_size=None, num_workers=args.workers)


def train(args: argparse.Namespace) -> torch.nn.Module:
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    loader = loader_of(args)
    model = train_mdlm.student_of(loader.dataset.dataset.info, args).to(args.device)
    for block in model.blocks:
        fully_shard(block, mesh=init_device_mesh(args.device, (dist.get_world_size(),)))
    fully_shard(model, mesh=init_device_mesh(args.device, (dist.get_world_size(),)))
    optimizer = train_mdlm.optimizer_of(model, args)
    step = Step()
    everything = {"train": Model(model, optimizer), "loader": Loader(loader), "step": step}
    saved = sorted(int(name) for name in os.listdir(args.checkpoint)) if os.path.isdir(args.checkpoint or "") else []
    if saved:
        dcp.load(everything, checkpoint_id=os.path.join(args.checkpoint, str(saved[-1])))

    for number, batch in zip(range(step.done + 1, args.steps + 1), chain.from_iterable(repeat(loader))):
        loss = train_mdlm.loss_of(model, batch, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        step.done = number
        if number % args.log_every == 0 and dist.get_rank() == 0:
            print(f"epoch {batch.state['epoch']}  step {number}  loss {loss.item():.3f} nats/token", flush=True)
        if args.checkpoint and (number % args.save_every == 0 or number == args.steps):
            dcp.save(everything, checkpoint_id=os.path.join(args.checkpoint, str(number)))
    dist.destroy_process_group()
    return model


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = train_mdlm.parser_of(__doc__)
    parser.add_argument("--map", action="store_true", help="the map-style data set")
    parser.add_argument("--torchdata", action="store_true", help="torchdata's StatefulDataLoader")
    parser.add_argument("--workers", type=int, default=0, help="worker processes of the loader")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(arguments())
