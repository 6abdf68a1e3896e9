"""A user's program in which nothing is Any: mypy checks it strictly (test_batch.py), and it runs on a data set.

``assert_type`` fails the check where an expression has another type than the package promises.
"""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from typing_extensions import assert_type

import stillhouse
from stillhouse import Batch, Ragged, documents
from stillhouse.views import Example, armd, bd3lm, mdlm, medusa, pgm, prime

Numpy = npt.NDArray[Any]


def look(path: str) -> None:
    ds = stillhouse.open(path)
    batch = ds[:4]
    assert_type(batch, Batch[Numpy])
    assert_type(batch["input_ids"], Numpy)
    assert_type(batch["document_offsets"], Ragged[Numpy])
    assert_type(batch["document_offsets"][0], Numpy)
    assert_type(batch["document_offsets"][1:], Ragged[Numpy])
    assert_type(batch[1:3], Batch[Numpy])
    assert_type(batch.split(2), list[Batch[Numpy]])
    assert_type(batch.padded(), Batch[Numpy])
    assert_type(batch.torch(), Batch[torch.Tensor])
    assert_type(batch.to("cpu"), Batch[torch.Tensor])
    assert_type(batch.torch().numpy(), Batch[Numpy])
    assert_type(Batch.concat([batch, batch]), Batch[Numpy])
    assert_type(mdlm.mask(batch, mask_id=0), Example[Numpy])
    assert_type(mdlm.mask(batch, mask_id=0).noise(out="gumbel"), Numpy)
    assert_type(mdlm.mask(batch, mask_id=0).noise(device="cpu"), torch.Tensor)
    assert_type(stillhouse.noise.replay(batch, np.array([[0]] * 4), out="gumbel"), Numpy)
    assert_type(stillhouse.noise.replay(batch.torch(), torch.tensor([[0]] * 4)), torch.Tensor)
    assert_type(stillhouse.noise.replay(batch[:1], device="cpu", dtype="bfloat16"), torch.Tensor)
    assert_type(documents.cu_seqlens(batch).cu_seqlens, Numpy)
    print(batch["input_ids"].shape, ds.info.vocab_size)


def loss_of(batch: Batch[torch.Tensor]) -> torch.Tensor:
    example = mdlm.mask(batch, mask_id=0)
    assert_type(example, Example[torch.Tensor])
    context, noise, truth = example.triplet(out="softmax", dtype=torch.bfloat16)
    assert_type(noise, torch.Tensor)
    total = torch.zeros(())
    for part in example.split(2):
        assert_type(part, Example[torch.Tensor])
        assert_type(part.weights, torch.Tensor)
        logits = torch.zeros(len(part.target_ids()), 60_000)
        each = F.cross_entropy(logits, part.target_ids(), reduction="none")
        total = total + (part.target_weights() * each).sum()
    return total / context.numel() + 0 * (noise.sum() + truth.sum())


def every_view(batch: Batch[torch.Tensor]) -> None:
    assert_type(bd3lm.mask(batch, block_size=4, mask_id=0), bd3lm.BlockExample[torch.Tensor])
    assert_type(bd3lm.mask(batch, block_size=4, mask_id=0)[:2].noised_and_clean(), torch.Tensor)
    assert_type(pgm.partition(batch).groups, torch.Tensor)
    assert_type(pgm.partition(batch).attention("swap"), torch.Tensor)
    assert_type(prime.mask(batch, length=2).digits, torch.Tensor)
    assert_type(medusa.targets(batch).to("cpu"), medusa.HeadExample[torch.Tensor])
    assert_type(armd.strided(batch).causal(), torch.Tensor)
    assert_type(documents.position_ids(batch), torch.Tensor)
    assert_type(documents.document_mask(batch), torch.Tensor)


def iterate(path: str) -> None:
    epochs = stillhouse.Epochs(path, batch_size=8, seed=1)
    for batch in epochs:
        assert_type(batch, Batch[Numpy])
        break
    ids = stillhouse.Epochs(path, batch_size=8, transform=lambda batch: np.asarray(batch["input_ids"], np.int64))
    for array in ids:
        assert_type(array, npt.NDArray[np.int64])
        break


if __name__ == "__main__":
    look(sys.argv[1])
    tensors = stillhouse.open(sys.argv[1])[:4].torch()
    print(loss_of(tensors))
    every_view(tensors)
    iterate(sys.argv[1])
