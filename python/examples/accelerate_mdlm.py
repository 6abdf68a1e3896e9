"""Trains train_mdlm.py's student with Hugging Face's accelerate.

    accelerate launch --num-processes 8 accelerate_mdlm.py s3://shards/owt-noise --steps 20000 --checkpoint folder

``prepare`` leaves the loader as it is: its rows are dealt to the processes already. ``save_state`` and ``load_state`` save and restore its place,
so that neither skip_first_batches nor register_for_checkpointing is needed. Batches keep what they know of their data set.
"""

from __future__ import annotations

import argparse
import os

import torch
import train_mdlm
from accelerate import Accelerator

import stillhouse.torch as st


class Progress:
    """Counted in optimizer steps."""

    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


def train(args: argparse.Namespace) -> torch.nn.Module:
    accelerator = Accelerator(gradient_accumulation_steps=args.accumulate, cpu=args.device == "cpu")
    kind = st.ShardDataset if args.map else st.StreamingShardDataset
    loader = st.DataLoader(train_mdlm.data_of(args, kind), num_workers=args.workers)
    student = train_mdlm.student_of(loader.dataset.dataset.info, args)
    model, optimizer, loader = accelerator.prepare(student, train_mdlm.optimizer_of(student, args), loader)
    progress = Progress()
    accelerator.register_for_checkpointing(progress)
    saved = sorted(int(name) for name in os.listdir(args.checkpoint)) if os.path.isdir(args.checkpoint or "") else []
    if saved:
        accelerator.load_state(os.path.join(args.checkpoint, str(saved[-1])))

    while progress.step < args.steps:
        for batch in loader:  # the rest of an epoch, or a whole one
            with accelerator.accumulate(model):  # the last step of an epoch may be of fewer batches
                loss = train_mdlm.loss_of(model, batch, args)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
            if not accelerator.sync_gradients:
                continue
            progress.step += 1
            if progress.step % args.log_every == 0:
                accelerator.print(
                    f"epoch {batch.state['epoch']}  step {progress.step}  loss {loss.item():.3f} nats/token"
                )
            if args.checkpoint and (progress.step % args.save_every == 0 or progress.step == args.steps):
                accelerator.save_state(os.path.join(args.checkpoint, str(progress.step)))
            if progress.step == args.steps:
                break
    accelerator.end_training()
    return student


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = train_mdlm.parser_of(__doc__)
    parser.add_argument("--map", action="store_true", help="the map-style data set")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that run the data set's transform, if it has one"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(arguments())
