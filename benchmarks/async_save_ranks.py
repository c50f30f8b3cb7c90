"""One rank of `benchmarks.async_save`: the peers, and what each round takes."""

from __future__ import annotations

import gc
import json
import os
import random
import threading
import time
from collections import defaultdict
from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import state_dict_saver
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh

import ucformat
from benchmarks import disk
from benchmarks.report import MIB
from benchmarks.save_load_ranks import Layouts, State, digest, fill, locals_of, on_first_rank

LOOK_S = 0.05
Pending = Callable[[], object]
"""Waits until the checkpoint is committed."""


def ours(place: Path, state: State) -> Pending:
    return ucformat.save(str(place / "run"), dict[str, object](state), wait=False).wait


def dcp(kind: AsyncCheckpointerType, group: dist.ProcessGroup) -> Callable[[Path, State], Pending]:
    def save(place: Path, state: State) -> Pending:
        saving: Any = state_dict_saver.async_save(
            dict[str, Any](state), checkpoint_id=place, process_group=group, async_checkpointer_type=kind
        )
        wait: Pending = saving.result
        return wait

    return save


class Memory(threading.Thread):
    """The highest that this process and its children take, beyond what they took `before`."""

    def __init__(self, before: int) -> None:
        super().__init__(daemon=True)
        self._before, self.most, self._ended = before, 0, threading.Event()

    def run(self) -> None:
        while not self._ended.wait(LOOK_S):
            self.most = max(self.most, _taken() - self._before)

    def end(self) -> float:
        self._ended.set()
        self.join()
        return self.most / MIB


def _taken() -> int:
    """Bytes, pages that several have shared out among them."""
    return sum(_share_of(pid) for pid in _family(os.getpid()))


def _family(pid: int) -> list[int]:
    children: list[int] = []
    with suppress(OSError):
        for task in Path(f"/proc/{pid}/task").iterdir():
            children += map(int, (task / "children").read_text().split())
    return [pid, *(other for child in children for other in _family(child))]


def _share_of(pid: int) -> int:
    with suppress(OSError):
        for line in Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines():
            if line.startswith("Pss:"):
                return int(line.split()[1]) << 10
    return 0


def one_round(save: Callable[[Path, State], Pending], place: Path, state: State, before: int) -> dict[str, float]:
    """Figures of all ranks together; `before` is what was taken before the first round."""
    on_first_rank(lambda path: path.mkdir(), place)
    gc.collect()
    memory = Memory(before)
    memory.start()
    dist.barrier()
    began = time.perf_counter()
    wait = save(place, state)
    stall = time.perf_counter() - began
    wait()
    total = time.perf_counter() - began
    slowest = torch.tensor([stall, total], dtype=torch.float64)
    together = torch.tensor(memory.end(), dtype=torch.float64)
    dist.all_reduce(slowest, op=dist.ReduceOp.MAX)
    dist.all_reduce(together)
    return {"stall_s": float(slowest[0]), "total_s": float(slowest[1]), "memory_mb": float(together)}


def measure(size: float, rounds: int, directory: Path, only: str) -> None:
    """Called on every rank under torchrun; rank 0 prints figures by `<peer>/<what>` as JSON, of all peers or `only` one."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    layouts = Layouts(size, init_device_mesh("cpu", (dist.get_world_size(),)))
    state = layouts.rows
    fill(state, dist.get_rank())
    truth = digest(state)
    group = dist.new_group(backend="gloo")  # as its documentation says: apart from that of training
    assert isinstance(group, dist.ProcessGroup)
    peers = {
        "ucformat": ours,
        "dcp_thread": dcp(AsyncCheckpointerType.THREAD, group),
        "dcp_process": dcp(AsyncCheckpointerType.PROCESS, group),
    }
    peers = {name: peer for name, peer in peers.items() if only in ("", name)}
    before = _taken()
    figures: dict[str, list[float]] = defaultdict(list)
    for number in range(-1, rounds):  # the first is not counted: it starts processes, and takes memory that is kept
        for name in random.Random(number).sample(list(peers), len(peers)):
            for what, figure in one_round(peers[name], directory / name, state, before).items():
                if number >= 0:
                    figures[f"{name}/{what}"].append(figure)
            if number < 0 and name == "ucformat":
                prove(directory / name, state, truth)
            on_first_rank(disk.clear, directory / name)
    if dist.get_rank() == 0:
        print(json.dumps({"nbytes": [layouts.nbytes], **figures}), flush=True)
    dist.destroy_process_group()


def prove(place: Path, state: State, truth: dict[str, int]) -> None:
    for tensor in locals_of(state).values():
        tensor.zero_()
    ucformat.load(str(place / "run"), into=dict[str, object](state))
    if digest(state) != truth:
        raise RuntimeError("what was loaded is not what was saved")
