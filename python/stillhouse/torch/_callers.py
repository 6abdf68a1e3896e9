"""Refusals of loaders that would give wrong rows without a word: only who calls can be asked.

A loader that batches again (``DataLoader(stream, batch_size=8)``, which is also what Hugging Face's Trainer makes) stacks eight of our batches to
[8, 8, L]; accelerate deals among its processes what is dealt already, so that each gets a part of its part. Neither tells the
data set anything, and both end in training on the wrong thing. They can be told by the frame that asks for the iterator, or
for the epoch.
"""

from __future__ import annotations

import sys
from types import FrameType

_OURS = "stillhouse.torch.DataLoader(dataset)"


def _caller(name: str, frame: FrameType | None) -> FrameType | None:
    """The first frame outside this package, where it is of an object of a class of this name."""
    while frame is not None and frame.f_globals.get("__name__", "").startswith("stillhouse."):
        frame = frame.f_back
    found = None if frame is None else frame.f_locals.get("self")
    return frame if any(cls.__name__ == name for cls in type(found).__mro__) else None


def refuse_batching_again() -> None:
    """For ``__iter__`` of a data set that gives batches."""
    fetcher = _caller("_IterableDatasetFetcher", sys._getframe(1))
    if fetcher is not None and fetcher.f_locals.get("auto_collation"):
        raise TypeError(
            "StreamingShardDataset gives whole batches, but this loader would batch them again. Use "
            f"{_OURS}, or torch.utils.data.DataLoader(dataset, batch_size=None); with Hugging Face's Trainer, return the first from "
            "get_train_dataloader, or pass a ShardDataset"
        )
    if _caller("IterableDatasetShard", sys._getframe(1)) is not None:
        raise TypeError(
            f"StreamingShardDataset divides its rows among the ranks itself; accelerate would divide them again. Use accelerator.prepare({_OURS})"
        )


def refuse_dealing_again() -> None:
    """For ``__iter__`` of a sampler that gives the batches of one rank."""
    shard = _caller("BatchSamplerShard", sys._getframe(1))
    if shard is not None and shard.f_locals["self"].num_processes > 1:
        raise TypeError(
            f"ShardDataset.batch_sampler divides the rows among the ranks itself; accelerate would divide them again. Use accelerator.prepare({_OURS})"
        )


def refuse_accelerate() -> None:
    """For ``set_epoch``, which is what accelerate tells a data set before it reads in one process alone and cuts what it got, or deals that."""
    if _caller("IterableDatasetShard", sys._getframe(1)) is not None:
        raise TypeError(
            f"StreamingShardDataset divides its rows among the ranks itself; accelerate would divide them again. Use accelerator.prepare({_OURS})"
        )
    if _caller("DataLoaderDispatcher", sys._getframe(1)) is not None:
        raise TypeError(
            "accelerate would read only the rows of rank 0, split them among the processes, and drop the facts (info, state) of their "
            f"data set. Use accelerator.prepare({_OURS}); with Hugging Face's Trainer, return that loader from get_train_dataloader"
        )


def refuse_counting_anew(epoch: int, here: int) -> None:
    """For ``set_epoch``: accelerate's own loaders count epochs from 0, also where a state was loaded, and only those that were asked for one batch more."""
    shard = _caller("DataLoaderShard", sys._getframe(1))
    if shard is None or shard.f_back is None or shard.f_back.f_code.co_name != "__iter__" or epoch >= here:
        return
    sampler = shard.f_locals["self"].batch_sampler
    if sampler is None or type(sampler).__module__.startswith("stillhouse."):
        raise ValueError(
            f"accelerate would begin epoch {epoch}, but the data set is at epoch {here}: rows would repeat. Use accelerator.prepare({_OURS}), "
            f"or call set_epoch({here}) on the prepared loader before you iterate it"
        )


def refuse_other_shape(frame: FrameType | None) -> None:
    """For a loader that Hugging Face's Trainer goes on with: it counts batches, and those of a checkpoint of another number of processes are others.

    Its checkpoint says how far it came in epochs, which its steps must come to in this run, too.
    """
    local = {} if frame is None else frame.f_locals
    names = (
        "self",
        "epoch",
        "epochs_trained",
        "steps_in_epoch",
        "steps_trained_in_current_epoch",
        "resume_from_checkpoint",
    )
    if (
        frame is None
        or not frame.f_globals.get("__name__", "").startswith("transformers.")
        or any(n not in local for n in names)
    ):
        return
    trainer, steps = local["self"], local["steps_in_epoch"]
    resumes = local["resume_from_checkpoint"] is not None and local["epoch"] == local["epochs_trained"]
    saved = trainer.state.epoch
    if not resumes or trainer.args.ignore_data_skip or saved is None or not steps:
        return
    here = local["epochs_trained"] + local["steps_trained_in_current_epoch"] / steps
    if abs(saved - here) * steps > 0.5:
        raise ValueError(
            f"Hugging Face's Trainer would resume at epoch {here:.4f}, but its checkpoint was saved at epoch {saved:.4f}: rows would repeat or be left out. "
            "The checkpoint has another number of processes or batch size; valid: the same as in the checkpoint, or ignore_data_skip=True "
            "after loading the loader.state_dict() of the checkpoint into this loader"
        )


def passing_over() -> bool:
    """Whether Hugging Face's Trainer asks, to pass over the batches that it trained on before it was stopped.

    For the parts of a loader that ``accelerate.skip_first_batches`` puts together anew. Refused where another loop does so: that would not go on
    with the state which the loader has.
    """
    asks = sys._getframe(2)
    if asks.f_code.co_name != "skip_first_batches" or asks.f_globals.get("__name__") != "accelerate.data_loader":
        return False
    if asks.f_back is not None and asks.f_back.f_globals.get("__name__", "").startswith("transformers."):
        refuse_other_shape(asks.f_back)
    else:
        raise TypeError(
            "skip_first_batches would restart the epoch and lose its position. Remove the call: this loader continues from its state after "
            "accelerator.load_state(folder) or loader.load_state_dict(state)"
        )
    return True
