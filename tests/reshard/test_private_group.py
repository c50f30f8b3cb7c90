"""Ranks that write beside training: what they exchange is what a process group exchanges, and outlives it."""

from __future__ import annotations

import signal
import time
import weakref
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist

import ucformat
from tests.reshard.ranks import on_ranks
from tests.scripts import Script
from ucformat.errors import StorageError
from ucformat.group import Group, current
from ucformat.reshard.private_group import private


def _said_by(group: Group) -> list[object]:
    item = {"rank": group.rank, "more": "x" * group.rank * 1000}
    told: list[object] = [
        group.all_gather(item), group.gather(item), group.broadcast(item),
        group.gather_from(item, [2, 0]), group.gather_from(item, [1]), group.distinct(group.rank // 2),
        group.numbers([group.rank, -(1 << 62)]).tolist(), group.any_rank(group.rank == 1),
        group.maximum(np.array([group.rank, -group.rank])).tolist(), group.maximum(np.array([group.rank], np.uint8)).tolist(),
    ]  # fmt: skip
    try:
        with group.together("trying"):
            if group.rank == 1:
                raise StorageError("shard", "no space left")
    except StorageError as error:
        told.append(str(error))
    return told


def _both() -> bool:
    own = private(current())
    assert type(own) is not Group
    assert _said_by(own) == _said_by(current())
    gloo = weakref.ref(own.gloo)  # type: ignore[attr-defined]
    assert private(current()).gloo is gloo()  # type: ignore[attr-defined]  # connected once
    return True


def test_ranks_exchange_what_they_would_over_their_process_group() -> None:
    assert on_ranks(3, _both) == [True] * 3


def _after_the_group(path: str) -> None:
    state = {"w": torch.ones(1000)}

    def on_bytes(_: int) -> None:
        while dist.is_initialized():
            time.sleep(0.001)

    ucformat.save(path, state, step=1, wait=False, on_bytes=on_bytes)
    state["w"].zero_()  # and then `on_ranks` destroys the process group, and the process ends


def test_a_save_is_committed_although_its_process_group_was_destroyed_meanwhile(tmp_path: Path) -> None:
    on_ranks(2, _after_the_group, str(tmp_path))
    assert ucformat.steps(str(tmp_path)) == [1]
    assert torch.equal(ucformat.load(str(tmp_path))["w"], torch.ones(1000))  # type: ignore[arg-type]


DIES = """
import os, signal, sys, time, torch, torch.distributed as dist, ucformat
from ucformat.errors import UcformatError
rank, path = int(sys.argv[1]), sys.argv[2]
dist.init_process_group("gloo", init_method=f"file://{path}.store", rank=rank, world_size=2)
state = {"w": ucformat.Shard(torch.full((500_000,), 1.0), (1_000_000,), (rank * 500_000,))}
ucformat.save(path, state, step=1)
def on_bytes(_):
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)
save = ucformat.save(path, state, step=2, wait=False, on_bytes=on_bytes)
dist.destroy_process_group()
try:
    save.wait()
except UcformatError as error:
    print(type(error).__name__)
"""


def test_a_rank_that_dies_while_it_writes_is_an_error_on_the_others_and_the_step_before_stays(tmp_path: Path) -> None:
    path = tmp_path / "run"
    first, second = (Script(DIES, rank, path) for rank in range(2))
    assert second.wait() == -signal.SIGKILL
    assert first.end() == (0, "RankFailedError")
    assert ucformat.steps(str(path)) == [1]
    assert torch.equal(ucformat.load(str(path))["w"], torch.ones(1_000_000))  # type: ignore[arg-type]
