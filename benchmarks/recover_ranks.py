"""One rank of `benchmarks.recover`: a version in memory with parity, the same state on disk, and the rounds."""

from __future__ import annotations

import json
import random
import time
from collections import defaultdict
from collections.abc import Callable
from dataclasses import replace
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

import ucformat
from benchmarks import disk
from benchmarks.save_load_ranks import Dcp, Layouts, Ours, State, digest, fill, locals_of, on_first_rank, timed
from ucformat.group import current
from ucformat.snapshot.parity.lost_slot import LostSlotStore, xor_into
from ucformat.snapshot.recovery.catalog import open_version
from ucformat.snapshot.recovery.hosts import meet
from ucformat.snapshot.recovery.inventory import scan
from ucformat.snapshot.recovery.versions import by_step, versions
from ucformat.storage.local import LocalStore

STEP = 1
PROTECTED_S = 120.0
CHUNK = 4 << 20  # of a slot, computed at once


def keep(state: State, directory: str) -> None:
    """A version in memory, and its parity."""
    snap = ucformat.Snapshotter(dict[str, object](state), directory=directory, protect="xor", interface="lo")
    snap.take(STEP)
    snap.deadline()
    limit = time.monotonic() + PROTECTED_S
    while snap.report().restorable != STEP:
        if time.monotonic() > limit:
            raise RuntimeError(f"not protected: {snap.report()}")
        time.sleep(0.05)
    snap.close()


def restore(state: State, directory: str, *, computed: bool) -> None:
    snap = ucformat.Snapshotter(dict[str, object](state), directory=directory, interface="lo")
    restored = snap.restore()
    snap.close()
    if restored is None or restored.source != "memory" or bool(restored.computed) != computed:
        raise RuntimeError(f"not restored as expected: {restored}")


def lost_slot(slots: Path, directory: str) -> LostSlotStore:
    """The slot of the last rank, computed of what the other hosts have, whose directories this rank reads itself."""
    group = current()
    with meet(directory, group, "lo") as hosts:
        found = by_step(versions(group.all_gather(scan(hosts.own))))
        near = replace(hosts, stores={rank: LocalStore(str(slots / f"host{rank}")) for rank in range(group.size)})
        catalog = open_version(found[STEP], near, group)
    return next(file.store for file in catalog.files if isinstance(file.store, LostSlotStore))


def rebuild(lost: LostSlotStore) -> None:
    path = f"rank-{lost.lost.record.rank:05d}/{lost.lost.record.file}"
    out = np.empty(CHUNK, dtype=np.uint8)
    for at in range(0, lost.lost.record.size, CHUNK):
        count = min(CHUNK, lost.lost.record.size - at)
        lost.read_into(path, at, out[:count])


def xor(sources: list[np.ndarray[tuple[int], np.dtype[np.uint8]]], size: int) -> None:
    out = np.empty(CHUNK, dtype=np.uint8)
    for at in range(0, size, CHUNK):
        count = min(CHUNK, size - at)
        np.copyto(out[:count], sources[0][at : at + count])
        for source in sources[1:]:
            xor_into(out[:count], source[at : at + count])


def alone(work: Callable[[], None]) -> float:
    """Seconds on rank 0, while the others wait."""
    took = 0.0
    if dist.get_rank() == 0:
        began = time.perf_counter()
        work()
        took = time.perf_counter() - began
    dist.barrier()
    return took


def measure(size: float, rounds: int, directory: Path, slots: Path) -> None:
    """Called on every rank under torchrun; rank 0 prints seconds by what was done as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    rank, ranks = dist.get_rank(), dist.get_world_size()
    layouts = Layouts(size, init_device_mesh("cpu", (ranks,)))
    state = layouts.rows
    fill(state, rank)
    truth = digest(state)
    own = str(slots / f"host{rank}")
    spare = str(slots / "spare") if rank == ranks - 1 else own  # an empty host in place of the last one
    keep(state, own)
    peers = {"disk": Ours(), "dcp": Dcp()}
    for name, peer in peers.items():
        on_first_rank(lambda path: path.mkdir(), directory / name)
        peer.save(directory / name, state)
    lost = lost_slot(slots, spare)
    memory = [disk.touched_buffer(lost.lost.record.size) for _ in range(ranks - 1 if rank == 0 else 0)]
    work: dict[str, Callable[[], None]] = {
        "memory": lambda: restore(state, own, computed=False),
        "rebuilt": lambda: restore(state, spare, computed=True),
        **{name: lambda name=name, peer=peer: peer.load(directory / name, state) for name, peer in peers.items()},  # type: ignore[misc]
    }
    for name, act in work.items():  # not counted: warms up, and shows that what is timed is the state
        for tensor in locals_of(state).values():
            tensor.zero_()
        act()
        if digest(state) != truth:
            raise RuntimeError(f"{name}: another state")
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        for name in random.Random(number).sample(list(work), len(work)):
            if name in peers:
                on_first_rank(disk.make_cold, directory / name)
            times[name].append(timed(work[name])["s"])
        times["rebuild"].append(alone(lambda: rebuild(lost)))
        times["xor"].append(alone(lambda: xor(memory, lost.lost.record.size)))
    if rank == 0:
        print(json.dumps({"nbytes": [layouts.nbytes], "slot_nbytes": [lost.lost.record.size], **times}), flush=True)
    dist.destroy_process_group()
