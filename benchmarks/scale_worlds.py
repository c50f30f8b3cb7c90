"""States of one rank of a large job, and what that rank does to save, to load and to set snapshots up.

In a simulated world: a rank of DDP or FSDP2 does what all others do, and stands for them. Of tensor and pipeline parallelism 64
ranks are real, and the replicas of each stand behind it.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import ucformat
from benchmarks.report import peak_mb
from tests.world import Member, World, run_in
from ucformat import formats
from ucformat.catalog import Catalog
from ucformat.reshard.restoring.accounting import NameRules, account
from ucformat.reshard.restoring.prepare import prepare
from ucformat.reshard.state.division import divide
from ucformat.reshard.state.walk import collect
from ucformat.snapshot.source import share

TP, PP = 8, 8
ROWS, COLUMNS = 16, 4  # of a rank's part of each tensor: agreement does not depend on it
State = dict[str, Any]


def ddp(rank: int, ranks: int, tensors: int) -> State:
    return {"model": {f"layer.{i}.weight": torch.full((ROWS, COLUMNS), float(i)) for i in range(tensors)}, "step": 1}


def fsdp2(rank: int, ranks: int, tensors: int) -> State:
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    model = {
        f"layer.{i}.weight": DTensor.from_local(
            torch.ones(1, 1), mesh, [Shard(0)], run_check=False, shape=torch.Size((ranks, 1)), stride=(1, 1)
        )
        for i in range(tensors)
    }
    return {"model": model, "step": 1}


def tp_pp(rank: int, ranks: int, tensors: int) -> State:
    """Of a stage's tensors three in four are cut over TP; the others, such as norms, are on all of its TP ranks."""
    tp, pp = rank % TP, rank // TP % PP
    model: State = {}
    for i in range(pp * tensors // PP, (pp + 1) * tensors // PP):
        whole = torch.full((ROWS, COLUMNS), float(i))
        model[f"layer.{i}.weight"] = ucformat.Shard(whole, (TP * ROWS, COLUMNS), (tp * ROWS, 0)) if i % 4 else whole
    return {"model": model, "step": 1}


LAYOUTS: dict[str, tuple[Callable[[int, int, int], State], int]] = {
    "ddp": (ddp, 1),
    "fsdp2": (fsdp2, 1),
    "tp_pp": (tp_pp, TP * PP),
}
"""How to make a rank's state, and how many ranks differ."""


def measure(layout: str, ranks: int, tensors: int, place: Path) -> dict[str, float]:
    """CPU seconds, megabytes sent and received of the busiest rank but rank 0, and memory per real rank."""
    catalog = _catalog(layout, ranks, tensors, place)
    if layout == "fsdp2":
        from torch.testing._internal.distributed.fake_pg import FakeStore

        dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    make, real = LAYOUTS[layout]
    states = [make(rank, ranks, tensors) for rank in range(real)]
    found: dict[str, float] = {}
    jobs: dict[str, Callable[[State, Member], object]] = {
        "save": lambda state, member: divide(collect(state, member), member, check_replicas=True),
        "second_save": lambda state, member: divide(collect(state, member), member, check_replicas=True),
        "load": lambda state, member: _load(state, catalog, member),
        "snapshot": share.agree,
    }
    world = World(real, ranks)
    spent: dict[str, list[tuple[float, int, int]]] = {what: [(0.0, 0, 0)] * real for what in jobs}
    memory: dict[str, float] = {}

    def rank(member: Member) -> None:
        for what, job in jobs.items():
            before = (world.sent[member.rank], world.received[member.rank])
            began, peak = time.thread_time(), peak_mb()
            job(states[member.rank], member)
            seconds = time.thread_time() - began
            memory[what] = max(memory.get(what, 0.0), peak_mb() - peak)
            spent[what][member.rank] = (seconds, world.sent[member.rank] - before[0], world.received[member.rank] - before[1])

    run_in(world, rank)  # type: ignore[arg-type]
    for what, ranks_spent in spent.items():
        others = ranks_spent[1:] or ranks_spent
        for name, column, unit in (("cpu_s", 0, 1.0), ("sent_mb", 1, 1e6), ("received_mb", 2, 1e6)):
            found[f"{what}_{name}"] = max(row[column] for row in others) / unit
        found[f"{what}_rank0_cpu_s"] = ranks_spent[0][0]
        found[f"{what}_mb"] = memory[what] / real
    return found


def _load(state: State, catalog: Catalog, member: Member) -> object:
    return account(prepare(state, catalog, member), catalog, NameRules(allow_missing=["*"], allow_unexpected=["*"]), member)


def _catalog(layout: str, ranks: int, tensors: int, place: Path) -> Catalog:
    """A checkpoint with the names and shapes of all ranks' states."""

    def shape(i: int) -> tuple[int, int]:
        if layout == "fsdp2":
            return (ranks, 1)
        return (TP * ROWS, COLUMNS) if layout == "tp_pp" and i % 4 else (ROWS, COLUMNS)

    path = str(place / "checkpoint")
    ucformat.save(path, {"model": {f"layer.{i}.weight": torch.zeros(shape(i)) for i in range(tensors)}, "step": 1})
    return formats.open_catalog(path)


def dcp_plan(layout: str, ranks: int, tensors: int) -> float:
    """CPU seconds in which DCP's coordinator makes the plan of a save of as many ranks."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner

    state = {f"layer.{i}.weight": torch.full((ROWS, COLUMNS), float(i)) for i in range(tensors)}
    planner = DefaultSavePlanner()
    planner.set_up_planner(state, is_coordinator=True)
    local = planner.create_local_plan()
    began = time.process_time()
    planner.create_global_plan([local] * ranks)
    return time.process_time() - began
