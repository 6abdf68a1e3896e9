"""Trains train_mdlm.py's student with Lightning.

    python lightning_mdlm.py s3://shards/owt-noise --steps 20000 --devices 8 --checkpoint folder

Lightning gives the loader its epochs, puts its state into every checkpoint, and ``fit(ckpt_path=...)`` goes on there in mid-epoch, with as many
devices as you like. Rows are dealt to the devices already; Lightning sees that and adds no sampler.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import lightning as L
import torch
import train_mdlm
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

import stillhouse
import stillhouse.torch as st


class Mdlm(L.LightningModule):
    def __init__(self, info: stillhouse.Info, args: argparse.Namespace) -> None:
        super().__init__()
        self.student, self.args = train_mdlm.student_of(info, args), args

    def training_step(self, batch: stillhouse.Batch, _: int) -> Tensor:
        loss = train_mdlm.loss_of(self.student, batch, self.args)
        self.log("loss", loss.detach(), prog_bar=True, batch_size=batch.rows)
        return loss

    def validation_step(self, batch: stillhouse.Batch, _: int) -> None:
        # over devices with equally many batches each; the masks are the same in every pass
        self.log(
            "validation", train_mdlm.loss_of(self.student, batch, self.args), batch_size=batch.rows, sync_dist=True
        )

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return train_mdlm.optimizer_of(self.student, self.args)


def train(args: argparse.Namespace, **options: Any) -> torch.nn.Module:
    """``options`` are more of Lightning's own."""
    kind = st.ShardDataset if args.map else st.StreamingShardDataset
    loader = st.DataLoader(train_mdlm.data_of(args, kind), num_workers=args.workers)
    held_out = None
    if args.validation:
        held_out = st.DataLoader(train_mdlm.data_of(args, split=args.validation, shuffle=False, evaluation=True))
    model = Mdlm(loader.dataset.dataset.info, args)
    callbacks = []
    if args.checkpoint:
        callbacks = [
            ModelCheckpoint(args.checkpoint, every_n_train_steps=args.save_every, save_top_k=-1, save_last=True)
        ]
    trainer = L.Trainer(
        max_steps=args.steps,
        max_epochs=-1,
        accelerator="gpu" if args.device == "cuda" else "cpu",
        devices=args.devices,
        accumulate_grad_batches=args.accumulate,
        log_every_n_steps=args.log_every,
        callbacks=callbacks,
        enable_checkpointing=bool(callbacks),
        **options,
    )
    last = os.path.join(args.checkpoint or "", "last.ckpt")
    trainer.fit(model, loader, held_out, ckpt_path=last if os.path.exists(last) else None)
    return model.student


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = train_mdlm.parser_of(__doc__)
    parser.add_argument("--map", action="store_true", help="the map-style data set")
    parser.add_argument("--devices", type=int, default=1)
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--validation", help="a split to validate on after each epoch")
    parser.add_argument(
        "--workers", type=int, default=0, help="processes that run the data set's transform, if it has one"
    )
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(arguments())
