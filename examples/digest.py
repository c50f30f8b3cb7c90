"""Digests of a training state taken without ucformat: what the demo holds checkpoints against.

Every parameter and every optimizer state tensor is gathered whole with torch's own collectives and hashed, under its
parameter's name. Two runs of different layouts have equal digests exactly when their states are equal bit for bit.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.tensor import DTensor


def state_digests(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """SHA-256 of all full tensors by name, `<fqn>` and `<fqn>/<state>`; every rank calls, all get the same."""
    mine = {name: _digest(tensor) for name, tensor in _tensors(model, optimizer)}
    gathered: list[dict[str, str]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, mine)
    merged: dict[str, str] = {}
    for digests in gathered:
        for name, digest in digests.items():
            if merged.setdefault(name, digest) != digest:
                raise RuntimeError(f"ranks hold different values of {name}")
    return dict(sorted(merged.items()))


def _tensors(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Tensor]]:
    for name, parameter in model.named_parameters():
        yield name, parameter
        for key, value in sorted(optimizer.state[parameter].items()):
            yield f"{name}/{key}", value


def _digest(tensor: Tensor) -> str:
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    whole = whole.detach().contiguous()
    head = f"{whole.dtype} {tuple(whole.shape)} ".encode()
    return hashlib.sha256(head + whole.reshape(-1).view(torch.uint8).numpy().tobytes()).hexdigest()
