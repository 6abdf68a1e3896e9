"""Trains train_mdlm.py's student with Hugging Face's Trainer.

    torchrun --nproc-per-node 8 hf_trainer.py s3://shards/owt-noise --steps 20000 --checkpoint folder

Two ways to give it the data:

- ``get_train_dataloader`` returns our loader (the default here): our order, rows dealt to the processes, every row once. A run that is started again goes
  on at the row where it was saved; the Trainer counts batches for that, so use as many processes and rows per batch as before.
- ``--map``: ``train_dataset=ShardDataset`` with ``data_collator=collate``: the Trainer's own random order and dealing, which drops the last global batch
  (``dataloader_drop_last``; without, it fills that batch with rows that were there already).

The examples are made in the loader's transform: the Trainer rebuilds every dictionary that it moves to a device, so that a Batch would no longer know its
data set.
"""

from __future__ import annotations

import argparse
import functools
import os
from typing import Any

import torch
import train_mdlm
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

import stillhouse.torch as st


class Mdlm(Trainer):
    def __init__(self, ours: argparse.Namespace, **options: Any) -> None:
        self.ours = ours
        super().__init__(**options)

    def get_train_dataloader(self) -> Any:
        if self.ours.map:
            return super().get_train_dataloader()
        return st.DataLoader(self.train_dataset, num_workers=self.ours.workers)

    def num_examples(self, dataloader: Any) -> int:
        return len(self.train_dataset.dataset)  # rows: a stream's own length is in batches

    def compute_loss(self, model: Any, inputs: Any, return_outputs: bool = False, **_: Any) -> Any:
        loss = train_mdlm.loss_at(model, inputs, self.ours)
        return (loss, {}) if return_outputs else loss


def train(args: argparse.Namespace) -> torch.nn.Module:
    # plain tensors, made in the worker processes; on the CPU, since workers have no device
    transform = functools.partial(train_mdlm.example_of, args=argparse.Namespace(**{**vars(args), "device": "cpu"}))
    dataset = train_mdlm.data_of(args, st.ShardDataset if args.map else st.StreamingShardDataset, transform=transform)
    model = train_mdlm.student_of(dataset.dataset.info, args)
    trainer = Mdlm(
        args,
        model=model,
        train_dataset=dataset,
        data_collator=st.collate,
        args=TrainingArguments(
            output_dir=args.checkpoint or "checkpoints",
            max_steps=args.steps,
            save_steps=args.save_every,
            save_strategy="steps" if args.checkpoint else "no",
            per_device_train_batch_size=args.batch_size,
            gradient_accumulation_steps=args.accumulate,
            learning_rate=args.lr,
            lr_scheduler_type="constant",
            adam_beta2=0.98,
            max_grad_norm=0.0,
            logging_steps=args.log_every,
            seed=args.seed,
            remove_unused_columns=False,  # our columns are not arguments of the model
            dataloader_num_workers=args.workers,
            dataloader_drop_last=args.map,
            ddp_find_unused_parameters=False,
            use_cpu=args.device == "cpu",
            report_to=[],
            disable_tqdm=True,
        ),
    )
    last = get_last_checkpoint(args.checkpoint) if os.path.isdir(args.checkpoint or "") else None
    trainer.train(resume_from_checkpoint=last)
    return model


def arguments(argv: list[str] | None = None) -> argparse.Namespace:
    parser = train_mdlm.parser_of(__doc__)
    parser.add_argument("--map", action="store_true", help="the map-style data set, in the Trainer's own order")
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step")
    parser.add_argument("--workers", type=int, default=0, help="processes that make the examples")
    return parser.parse_args(argv)


if __name__ == "__main__":
    train(arguments())
