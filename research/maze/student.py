"""The student: MDLM (4 layers, 4 heads, width 128) with and without Gumbel distillation, where its noise comes from, and its sampler."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from grid import BOS, LENGTH, VOCABULARY, Training
from torch import Tensor, nn

import stillhouse
import stillhouse.torch as st
from stillhouse.views import mdlm

MASK = len(VOCABULARY)
TEMPERATURE = 0.85
"""τ of the noise at generation (the paper's appendix C.1)."""


class Student(nn.Module):
    """Tokens at the targets, from the other tokens and the noise at the targets, whose blueprint W·softmax(ξ) stands for [MASK]."""

    def __init__(self, noise: bool, how: Training) -> None:
        super().__init__()
        width = how.width
        self.tokens = nn.Embedding(MASK + 1, width)
        self.positions = nn.Embedding(LENGTH, width)
        self.blueprint = nn.Linear(MASK, width, bias=False) if noise else None
        layer = nn.TransformerEncoderLayer(width, how.heads, 4 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, how.layers, enable_nested_tensor=False)
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, MASK)

    def forward(self, context: Tensor, targets: Tensor, noise: Tensor | None) -> Tensor:
        """Logits [n, V] at the n targets (bool [B, 12]); noise: softmax(ξ) [n, V]."""
        x = self.tokens(context)
        if self.blueprint is not None:
            x[targets] = self.blueprint(noise)
        return self.head(self.norm(self.blocks(x + self.positions.weight)[targets]))


Noise = Callable[[Any], Tensor]
"""softmax(ξ) [n, V] at the targets of an example."""


def stored(draws: int, seed: int) -> Noise:
    """The data set's noise; each step takes one of its draws."""
    generator = torch.Generator().manual_seed(seed)
    return lambda example: example.noise(out="softmax", draw=int(torch.randint(draws, (), generator=generator)))


def fresh(p: Tensor, place: dict[int, int], seed: int) -> Noise:
    """Dense noise out of the live teacher's p [N, 12, V], drawn anew in every step (Algorithm 1)."""
    generator = torch.Generator().manual_seed(seed)

    def draw(example: Any) -> Tensor:
        rows = torch.tensor([place[int(number)] for number in example.batch["sequence_id"]])
        targets = example.targets
        here, truth = p[rows][targets], example.target_ids()[:, None]
        e = torch.empty(len(here), MASK + 1, dtype=torch.float64).exponential_(generator=generator)
        own = e[:, MASK:]
        large = (e[:, :MASK] + here * own).scatter(1, truth, here.gather(1, truth) * own)
        return (1 / large / (1 / large).sum(1, keepdim=True)).float()

    return draw


def train(dataset: str, noise: Noise | None, how: Training, seed: int) -> tuple[Student, list[float]]:
    """A trained student, and the mean loss of each epoch in nats per token (MDLM's bound)."""
    torch.manual_seed(seed)
    columns = ["sequence_id", "input_ids"]
    if noise is not None:
        columns += ["logprob", "noise_count", "noise_index", "noise_logprob"]
    loader: Any = st.DataLoader(
        st.StreamingShardDataset(dataset, columns=columns, batch_size=how.batch, seed=seed, drop_last=False)
    )
    model = Student(noise is not None, how)
    optimizer = torch.optim.AdamW(model.parameters(), lr=how.lr, fused=True)
    step = 0
    first = torch.arange(LENGTH) == 0
    curve = []
    for _ in range(how.epochs):
        losses = []
        for batch in loader:
            example = mdlm.mask(batch, seed=seed, mask_id=MASK, never=first)
            blueprint = noise(example) if noise is not None else None
            logits = model(example.input_ids.long(), example.targets, blueprint)
            each = F.cross_entropy(logits, example.target_ids(), reduction="none")
            loss = (example.target_weights() * each).sum() / (len(example.input_ids) * (LENGTH - 1))
            for group in optimizer.param_groups:
                group["lr"] = how.rate(step, len(loader))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            step += 1
            losses.append(loss.item())
        curve.append(sum(losses) / len(losses))
    return model.eval(), curve


@torch.no_grad()
def generate(model: Student, count: int, passes: int, seed: int) -> Tensor:
    """Rows [count, 12] in so many passes: each leaves a masked token masked with probability 1 − 1/(passes that are left) (ancestral
    sampling of MDLM, linear schedule). Noise is the prior's, the same in each pass."""
    torch.manual_seed(seed)
    tokens = torch.full((count, LENGTH), MASK)
    tokens[:, 0] = BOS
    noise = None
    if model.blueprint is not None:
        ids = torch.arange(count)
        noise = stillhouse.noise.prior(seed, ids, torch.arange(LENGTH), MASK, temperature=TEMPERATURE)
    for left in range(passes, 0, -1):
        targets = tokens == MASK
        if not targets.any():
            break
        logits = model(tokens, targets, noise[targets] if noise is not None else None)
        drawn = tokens.masked_scatter(targets, torch.multinomial(logits.softmax(-1), 1)[:, 0])
        now = targets & (torch.rand(tokens.shape) < 1 / left)
        tokens = torch.where(now, drawn, tokens)
    return tokens
