"""Real torch pipelines on two gloo ranks: what ran, in which order, and what the analyser says of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import pipelining
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage

from tests.reshard.ranks import on_ranks
from ucformat.errors import LayoutError
from ucformat.snapshot.schedule.from_torch import CLASSES, SINGLE, of_schedule, rank_of
from ucformat.snapshot.schedule.strategy import derive

RANKS, MICROBATCHES = 2, 4
WIDTH = 4


@dataclass(frozen=True, slots=True)
class Seen:
    """One rank's run of one schedule."""

    ran: list[str]
    """Calls of the stages' public methods, as actions in torch's text form."""
    lists: list[list[str]]
    strategy: str
    stages: tuple[int, ...]
    rank: int
    clash: str
    """What is said of a mesh that does not fit."""


class Spy(PipelineStage):
    """Writes down what the schedule calls."""

    ran: list[str]

    def _note(self, kind: str, at: int | None = None) -> None:
        self.ran.append(f"{self.stage_index}{kind}{'' if at is None else at}")

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._note("F", fwd_chunk_id)
        return super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._note("B" if kwargs.get("full_backward", True) else "I", bwd_chunk_id)
        return super().backward_one_chunk(bwd_chunk_id, *args, **kwargs)

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._note("W", bwd_chunk_id)
        return super().backward_weight_one_chunk(bwd_chunk_id, *args, **kwargs)

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> Any:
        self._note("REDUCE_GRAD")
        return super().perform_reduce_grad(*args, **kwargs)


def loss(output: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
    return ((output - target) ** 2).mean()


def run_one(name: str) -> Seen:
    """One step of the schedule on this rank."""
    rank, each = dist.get_rank(), 1 if name in SINGLE else 2
    total = RANKS * each
    v_shaped = name in ("zbvzerobubble", "dualpipev")
    mine = [rank] if each == 1 else [rank, total - 1 - rank if v_shaped else rank + RANKS]
    ran: list[str] = []
    stages = []
    for index in mine:
        stage = Spy(nn.Linear(WIDTH, WIDTH), index, total, torch.device("cpu"))
        stage.ran = ran
        stages.append(stage)
    made: Callable[..., Any] = getattr(pipelining, CLASSES[name])
    schedule = made(stages[0] if each == 1 else stages, MICROBATCHES, loss_fn=loss)
    given = (torch.rand(2 * MICROBATCHES, WIDTH),) if any(stage.is_first for stage in stages) else ()
    schedule.step(*given, target=torch.rand(2 * MICROBATCHES, WIDTH) if any(stage.is_last for stage in stages) else None)
    mesh = init_device_mesh("cpu", (RANKS, 1, 1), mesh_dim_names=("pp", "dp_shard", "tp"))
    found = derive(mesh, schedule)
    assert derive(None, schedule).stages == found.stages
    try:
        clash = str(derive(init_device_mesh("cpu", (1, RANKS), mesh_dim_names=("pp", "dp")), schedule))
    except LayoutError as error:
        clash = str(error)
    return Seen(ran, of_schedule(schedule).lists(), str(found), found.stages, rank_of(schedule), clash)


def run_all() -> dict[str, Seen]:
    return {name: run_one(name) for name in CLASSES}


@cache
def live() -> list[dict[str, Seen]]:
    """What each of the two ranks saw, by schedule."""
    return on_ranks(RANKS, run_all)
