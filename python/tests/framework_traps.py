"""What a loader must refuse, or do right, in the hands of accelerate and Hugging Face's Trainer; run by framework_runs.py as if it were a recipe."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Callable
from typing import Any

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.state import GradientState
from torch.utils.data import DataLoader
from torchdata.stateful_dataloader import StatefulDataLoader
from transformers import Trainer, TrainingArguments

import stillhouse.torch as st


def arguments(argv: list[str]) -> list[str]:
    return argv


def ids(batch: Any) -> list[int]:
    found: list[int] = batch["sequence_id"].tolist()
    return found


def found_out(act: Callable[[], Any]) -> dict[str, Any]:
    try:
        return {"got": act(), "error": ""}
    except Exception as error:  # noqa: BLE001  # it is the result
        return {"got": None, "error": f"{type(error).__name__}: {error}"}


def dataset(kind: Any, folder: str, **options: Any) -> Any:
    return kind(folder, **{"batch_size": 4, "seed": 1, "columns": ["sequence_id", "input_ids"], **options})


def epochs(loader: Any) -> list[list[list[int]]]:
    return [[ids(batch) for batch in loader] for _ in range(2)]


def of_torch(folder: str, kind: Any, cls: Any = DataLoader, **options: Any) -> Any:
    ds = dataset(kind, folder)
    if kind is st.ShardDataset:
        return cls(ds, batch_sampler=ds.batch_sampler, **options)
    return cls(ds, batch_size=None, **options)


class Rows(torch.nn.Module):
    """A model of one weight, that writes down what it is trained on."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = torch.nn.Parameter(torch.zeros(1))
        self.rows: list[list[int]] = []

    def forward(self, input_ids: Any, sequence_id: Any, **_: Any) -> Any:
        self.rows.append(sequence_id.tolist())
        return {"loss": (self.weight * input_ids.float().mean()).sum()}


def trainer_on(data: Any, **options: Any) -> list[list[int]]:
    model = Rows()
    fixed = {"per_device_train_batch_size": 4, "save_strategy": "no", "use_cpu": True, "report_to": [], "disable_tqdm": True, "remove_unused_columns": False}  # fmt: skip
    args = TrainingArguments(output_dir=tempfile.mkdtemp(), **{**fixed, "num_train_epochs": 2, **options})
    Trainer(model=model, args=args, train_dataset=data, data_collator=st.collate).train()
    return model.rows


def accumulated(loader: Any) -> list[list[int]]:
    """After which batches of two epochs accelerate makes a step, four batches each."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=4)
    model, _, loader = accelerator.prepare(Rows(), torch.optim.SGD([torch.zeros(1)]), loader)
    steps = []
    for _ in range(2):
        for number, _ in enumerate(loader, start=1):
            with accelerator.accumulate(model):
                if accelerator.sync_gradients:
                    steps.append(number)
        assert all(known is not loader for known in GradientState().dataloader_references)
    return [steps]


def counted_anew(folder: str, kind: Any) -> list[list[int]]:
    """Exactly as many batches as an epoch has, twice, from a loader of accelerate's that counts epochs when asked for one more."""
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    loader = accelerator.prepare(of_torch(folder, kind))
    got = []
    for _ in range(2):
        iterator = iter(loader)
        got.append([ids(next(iterator)) for _ in range(len(loader))])
    return flat(got)


def flat(nested: list[list[Any]]) -> list[Any]:
    return [one for some in nested for one in some]


def gone_on(folder: str, kind: Any) -> list[list[int]]:
    """A state of epoch 1 in a new loader of accelerate's."""
    first = of_torch(folder, kind)
    for _ in range(2):
        for batch in first:
            state = batch.state
            if state["epoch"] == 1 and state["position"] > 8:
                break
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(dispatch_batches=False))
    second = of_torch(folder, kind)
    second.dataset.load_state_dict(state)
    prepared = accelerator.prepare(second)
    refused = found_out(lambda: next(iter(prepared)))["error"]
    prepared.set_epoch(1)
    return [refused, [ids(batch) for batch in prepared]]  # type: ignore[list-item]


def joined(folder: str) -> list[list[int]]:
    """An epoch of which one rank has a batch more, under DDP's join."""
    ds = dataset(st.StreamingShardDataset, folder, batch_size=6, drop_last=False)
    model = torch.nn.parallel.DistributedDataParallel(Rows())
    with model.join():
        for batch in st.DataLoader(ds):
            model(**batch)["loss"].backward()
    rows: list[list[int]] = model.module.rows
    return rows


def train(argv: list[str]) -> torch.nn.Module:
    folder, out = argv
    rank = os.environ["RANK"]
    results: dict[str, Any] = {}
    for name, config in (
        ("", {}),
        ("stateful ", {"use_stateful_dataloader": True}),
        ("undispatched ", {"dispatch_batches": False}),
    ):
        for kind in (st.StreamingShardDataset, st.ShardDataset):
            for count in (0, 2):
                accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(**config))
                loader = of_torch(
                    folder, kind, StatefulDataLoader if name == "stateful " else DataLoader, num_workers=count
                )
                results[f"{name}{kind.__name__} {count}"] = found_out(
                    lambda a=accelerator, of=loader: epochs(a.prepare(of))
                )
    for kind in (st.StreamingShardDataset, st.ShardDataset):
        ours = st.DataLoader(dataset(kind, folder))
        assert Accelerator(cpu=True).prepare(ours) is ours
        results[f"ours {kind.__name__}"] = found_out(lambda o=ours: [[ids(b) for b in o] for _ in range(2)])
        results[f"accumulate {kind.__name__}"] = found_out(
            lambda k=kind: accumulated(st.DataLoader(dataset(k, folder)))
        )
        results[f"skip {kind.__name__}"] = found_out(lambda o=ours: [ids(b) for b in skip_first_batches(o, 2)])
        results[f"counted {kind.__name__}"] = found_out(lambda k=kind: counted_anew(folder, k))
        results[f"gone on {kind.__name__}"] = found_out(lambda k=kind: gone_on(folder, k))
    results["joined"] = found_out(lambda: joined(folder))
    results["Trainer stream"] = found_out(lambda: trainer_on(dataset(st.StreamingShardDataset, folder)))
    results["Trainer stream undispatched"] = found_out(
        lambda: trainer_on(dataset(st.StreamingShardDataset, folder), accelerator_config={"dispatch_batches": False})
    )
    results["Trainer map"] = found_out(lambda: trainer_on(dataset(st.ShardDataset, folder), dataloader_drop_last=True))
    with open(f"{out}-{rank}", "w") as file:
        json.dump(results, file)
    return torch.nn.Module()
