"""A small GPT in plain torch, and the three ways to spread it: tensor parallel, data parallel, pipeline stages.

Parameters keep their names whatever the layout: a pipeline stage holds `layers.2.…`, never a renumbered `layers.0.…`.
That is all ucformat asks of a model so that any layout can load what any other saved.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Replicate
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module


@dataclass(frozen=True, slots=True)
class GPTConfig:
    """Sizes; the defaults make 3.3 million parameters."""

    vocab: int = 256
    """Bytes are tokens."""
    context: int = 64
    width: int = 256
    heads: int = 4
    layers: int = 4

    @property
    def head_width(self) -> int:
        return self.width // self.heads


class Attention(nn.Module):
    """Causal self-attention over (batch, time, width); under tensor parallelism each rank has a part of the heads."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.head_width = config.head_width
        self.wq = nn.Linear(config.width, config.width, bias=False)
        self.wk = nn.Linear(config.width, config.width, bias=False)
        self.wv = nn.Linear(config.width, config.width, bias=False)
        self.wo = nn.Linear(config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        batch, time, _ = x.shape
        q, k, v = (w(x).view(batch, time, -1, self.head_width).transpose(1, 2) for w in (self.wq, self.wk, self.wv))
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return cast(Tensor, self.wo(mixed.transpose(1, 2).reshape(batch, time, -1)))


class Block(nn.Module):
    """One transformer layer, norms first."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.norm1 = nn.LayerNorm(config.width)
        self.attn = Attention(config)
        self.norm2 = nn.LayerNorm(config.width)
        self.up = nn.Linear(config.width, 4 * config.width, bias=False)
        self.down = nn.Linear(4 * config.width, config.width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attn(self.norm1(x))
        return x + cast(Tensor, self.down(F.gelu(self.up(self.norm2(x)))))


class GPT(nn.Module):
    """Tokens (batch, time) to logits (batch, time, vocab); a pipeline stage lacks what the other stages hold."""

    embed: nn.Embedding | None
    position: nn.Embedding | None
    norm: nn.LayerNorm | None
    head: nn.Linear | None

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.config = config
        self.embed = nn.Embedding(config.vocab, config.width)
        self.position = nn.Embedding(config.context, config.width)
        # A dict, not a list: its keys are the global layer numbers, which survive the cut into stages.
        self.layers = nn.ModuleDict({str(i): Block(config) for i in range(config.layers)})
        self.norm = nn.LayerNorm(config.width)
        self.head = nn.Linear(config.width, config.vocab, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.embed is not None and self.position is not None:
            x = self.embed(x) + self.position(torch.arange(x.shape[1], device=x.device))
        for layer in self.layers.values():
            x = layer(x)
        if self.norm is not None and self.head is not None:
            x = self.head(self.norm(x))
        return x


def loss_of(logits: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy of logits (batch, time, vocab) for targets (batch, time)."""
    return F.cross_entropy(logits.flatten(0, 1), targets.flatten())


def keep_stage(model: GPT, stage: int, stages: int) -> None:
    """Drop all but the layers of pipeline stage `stage`; the first keeps the embeddings, the last the head."""
    count = model.config.layers
    mine = range(count * stage // stages, count * (stage + 1) // stages)
    for i in range(count):
        if i not in mine:
            del model.layers[str(i)]
    if stage > 0:
        model.embed = model.position = None
    if stage < stages - 1:
        model.norm = model.head = None


def apply_tensor_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Split every matrix over the 1-d `mesh`; norms and position embeddings stay whole on each rank."""
    split: dict[str, ParallelStyle] = {name: ColwiseParallel() for name in ("attn.wq", "attn.wk", "attn.wv", "up")}
    split |= {"attn.wo": RowwiseParallel(), "down": RowwiseParallel()}
    for layer in model.layers.values():
        parallelize_module(layer, mesh, split)
    if model.embed is not None:
        parallelize_module(model.embed, mesh, RowwiseParallel(input_layouts=Replicate()))
    if model.head is not None:
        parallelize_module(model.head, mesh, ColwiseParallel(output_layouts=Replicate()))


def apply_data_parallel(model: GPT, mesh: DeviceMesh) -> None:
    """Shard parameters, gradients and optimizer state over the 1-d `mesh` (FSDP2), layer by layer."""
    for layer in model.layers.values():
        fully_shard(layer, mesh=mesh)
    fully_shard(model, mesh=mesh)
