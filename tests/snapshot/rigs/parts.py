"""A state of one tensor that is dealt out over ranks in any way, whose every element tells its step and its place."""

from __future__ import annotations

from typing import Any

import torch

from tests.checkpoints import split_evenly
from ucformat import Shard
from ucformat.group import Group
from ucformat.snapshot.snapshotter import Snapshotter

SHAPE = (96, 640)


def whole(step: int) -> torch.Tensor:
    return torch.arange(SHAPE[0] * SHAPE[1], dtype=torch.float64).view(SHAPE) + step * 1e6


class Part:
    """One rank's part, cut along `dim`."""

    def __init__(self, group: Group, dim: int) -> None:
        self.box = split_evenly(SHAPE, dim, group.size)[group.rank]
        self.tensor = self.expected(0).clone()
        self.state: dict[str, Any] = {"model": {"w": Shard(self.tensor, SHAPE, self.box.offset)}, "step": 0}

    def expected(self, step: int) -> torch.Tensor:
        return whole(step)[self.box.slices]

    def is_of(self, step: int) -> bool:
        """Whether every bit is that of a step."""
        return self.state["step"] == step and torch.equal(self.tensor, self.expected(step))

    def train(self, snap: Snapshotter, *steps: int) -> None:
        for step in steps:
            snap.deadline()
            self.tensor.copy_(self.expected(step))
            self.state["step"] = step
            snap.take(step)


LAYERS = 6


class Layered(Part):
    """Beside the dealt out tensor, one that all ranks have, and layers of which each rank has some, as stages of a pipeline."""

    def __init__(self, group: Group, dim: int) -> None:
        super().__init__(group, dim)
        self.bias = torch.zeros(100)
        self.layers = {i: torch.zeros(50 + i, 64) for i in range(LAYERS) if i * group.size // LAYERS == group.rank}
        self.state["model"].update({"b": self.bias, **{f"l{i}": tensor for i, tensor in self.layers.items()}})
        self._fill(0)

    def _fill(self, step: int) -> None:
        self.bias.fill_(step)
        for i, tensor in self.layers.items():
            tensor.fill_(step * 10 + i)

    def is_of(self, step: int) -> bool:
        layers = all(bool((tensor == step * 10 + i).all()) for i, tensor in self.layers.items())
        return super().is_of(step) and layers and bool((self.bias == step).all())

    def train(self, snap: Snapshotter, *steps: int) -> None:
        for step in steps:
            snap.deadline()
            self._fill(step)
            super().train(snap, step)
