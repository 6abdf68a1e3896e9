"""Trains train_mdlm.py's student in several processes, with PyTorch's own DistributedDataParallel.

    torchrun --nproc-per-node 8 ddp.py s3://shards/owt-noise --steps 20000 --device cuda --checkpoint run.pt

Started again with the same checkpoint, with as many processes as you like, it goes on at the row where that was saved: rows are dealt to the
processes anew. (--batch-size is that of one process; the steps of 8 × 32 rows are those of 4 × 64.)
"""

from __future__ import annotations

import argparse
import os
from itertools import chain, repeat

import torch
import torch.distributed as dist
import train_mdlm
from torch.nn.parallel import DistributedDataParallel

import stillhouse.torch as st


def train(args: argparse.Namespace) -> torch.nn.Module:
    # Before the first batch: the data set takes rank and world size from there.
    dist.init_process_group("nccl" if args.device == "cuda" else "gloo")
    if args.device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    kind = st.ShardDataset if args.map else st.StreamingShardDataset
    loader = st.DataLoader(train_mdlm.data_of(args, kind), num_workers=args.workers)
    student = train_mdlm.student_of(loader.dataset.dataset.info, args).to(args.device)
    model = DistributedDataParallel(student)
    optimizer = train_mdlm.optimizer_of(student, args)
    begun = 0
    if args.checkpoint and os.path.exists(args.checkpoint):
        saved = torch.load(args.checkpoint, map_location=args.device, weights_only=True)
        student.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        loader.load_state_dict(saved["data"])
        begun = saved["step"]

    # All ranks take equally many batches of an epoch: fewer than world_size rows at its end are left out for that. (With
    # drop_last=False none is, ranks may differ by one batch, and the loop over an epoch belongs into `with model.join():`.)
    for step, batch in zip(range(begun + 1, args.steps + 1), chain.from_iterable(repeat(loader))):
        loss = train_mdlm.loss_of(model, batch, args)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        if step % args.log_every == 0 and dist.get_rank() == 0:
            print(f"epoch {batch.state['epoch']}  step {step}  loss {loss.item():.3f} nats/token", flush=True)
        if args.checkpoint and (step % args.save_every == 0 or step == args.steps) and dist.get_rank() == 0:
            saved = {"model": student.state_dict(), "optimizer": optimizer.state_dict(), "step": step}
            torch.save(
                {**saved, "data": loader.state_dict()}, args.checkpoint + ".new"
            )  # every rank has the same state
            os.replace(args.checkpoint + ".new", args.checkpoint)
    dist.destroy_process_group()
    return student


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = train_mdlm.parser_of(__doc__)
    parser.add_argument("--map", action="store_true", help="the map-style data set")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that run the data set's transform, if it has one"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(arguments())
