"""One rank of `benchmarks.save_load`: the state in its layouts, the peers, and the rounds."""

from __future__ import annotations

import gc
import json
import math
import random
import time
from abc import ABC, abstractmethod
from collections import defaultdict
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

import ucformat
from benchmarks import disk
from benchmarks.report import GB
from benchmarks.transformer import BYTES, sized

DTYPES = {"model": torch.bfloat16, "exp_avg": torch.float32, "exp_avg_sq": torch.float32}
UNEVEN = 0.375  # of the rows on the first of two ranks
State = dict[str, dict[str, object]]


class Layouts:
    """The same state as this rank holds it: rows (what is saved), columns, and uneven rows."""

    def __init__(self, size: float, mesh: DeviceMesh) -> None:
        self.parameters = sized(size * GB, sum(BYTES.values()))
        self.mesh = mesh
        self.nbytes = sum(math.prod(shape) for _, shape in self.parameters) * sum(BYTES.values())
        self.rows = self._state(lambda shape, dtype: self._spread(shape, dtype, Shard(0)))
        self.columns = self._state(lambda shape, dtype: self._spread(shape, dtype, Shard(1) if len(shape) > 1 else Replicate()))
        self.uneven = self._state(self._uneven)

    def _state(self, make: Callable[[tuple[int, ...], torch.dtype], object]) -> State:
        return {kind: {name: make(shape, dtype) for name, shape in self.parameters} for kind, dtype in DTYPES.items()}

    def _spread(self, shape: tuple[int, ...], dtype: torch.dtype, placement: Placement) -> DTensor:
        local = list(shape)
        if isinstance(placement, Shard):
            local[placement.dim] //= self.mesh.size()
        return DTensor.from_local(_touched(tuple(local), dtype), self.mesh, [placement], run_check=False)

    def _uneven(self, shape: tuple[int, ...], dtype: torch.dtype) -> ucformat.Shard:
        cut = round(shape[0] * UNEVEN)
        first, rows = (0, cut) if self.mesh.get_local_rank() == 0 else (cut, shape[0] - cut)
        return ucformat.Shard(_touched((rows, *shape[1:]), dtype), shape, (first, *(0 for _ in shape[1:])))


def _touched(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.zeros(shape, dtype=dtype)


def locals_of(state: State) -> dict[str, Tensor]:
    """The tensors of this rank by name."""
    found: dict[str, Tensor] = {}
    for kind, tensors in state.items():
        for name, tensor in tensors.items():
            if isinstance(tensor, DTensor):
                found[f"{kind}/{name}"] = tensor.to_local()
            elif isinstance(tensor, ucformat.Shard):
                found[f"{kind}/{name}"] = tensor.tensor
    return found


def fill(state: State, rank: int) -> None:
    """Bytes that no compression or sparse file could make cheap."""
    random = np.random.default_rng(rank)
    noise = torch.from_numpy(random.integers(0, 255, 32 << 20, dtype=np.uint8))
    at = 0
    for tensor in locals_of(state).values():
        flat = tensor.reshape(-1).view(torch.uint8)
        for start in range(0, len(flat), len(noise) // 2):
            part = flat[start : start + len(noise) // 2]
            at = (at + 4099) % (len(noise) // 2)
            part.copy_(noise[at : at + len(part)])


def digest(state: State) -> dict[str, int]:
    """Sum of every tensor's bytes over all ranks, replicas counted once: equal for equal states of any layout."""
    sums = {}
    for name, tensor in locals_of(state).items():
        sums[name] = int(tensor.reshape(-1).view(torch.uint8).sum(dtype=torch.int64))
    for kind, tensors in state.items():
        for name, value in tensors.items():
            if isinstance(value, DTensor) and value.placements == (Replicate(),) and dist.get_rank() != 0:
                sums[f"{kind}/{name}"] = 0
    gathered: list[dict[str, int]] = [{} for _ in range(dist.get_world_size())]
    dist.all_gather_object(gathered, sums)
    return {name: sum(part[name] for part in gathered) for name in sums}


class Peer(ABC):
    """Someone who saves and loads; `place` is a directory that this round owns."""

    reshards = False

    @abstractmethod
    def save(self, place: Path, state: State) -> None: ...

    @abstractmethod
    def load(self, place: Path, state: State) -> None: ...


class Ours(Peer):
    """ucformat, as its users call it."""

    reshards = True

    def save(self, place: Path, state: State) -> None:
        ucformat.save(str(place / "run"), state, step=1)

    def load(self, place: Path, state: State) -> None:
        ucformat.load(str(place / "run"), into=dict[str, object](state))


class Dcp(Peer):
    """torch.distributed.checkpoint with its defaults."""

    reshards = True

    def save(self, place: Path, state: State) -> None:
        state_dict_saver.save(state, checkpoint_id=place)  # its files are fsynced by default

    def load(self, place: Path, state: State) -> None:
        state_dict_loader.load(state, checkpoint_id=place)


class Safetensors(Peer):
    """One file per rank; it knows no other layout."""

    def _file(self, place: Path) -> Path:
        return place / f"rank{dist.get_rank()}.safetensors"

    def save(self, place: Path, state: State) -> None:
        save_file(locals_of(state), self._file(place))
        disk.sync(self._file(place))

    def load(self, place: Path, state: State) -> None:
        found = load_file(self._file(place))
        for name, tensor in locals_of(state).items():
            tensor.copy_(found[name])


class Raw(Peer):
    """The limit: as many bytes from one aligned buffer."""

    def __init__(self, nbytes: int) -> None:
        self.buffer = disk.touched_buffer(nbytes)

    def _file(self, place: Path) -> Path:
        return place / f"rank{dist.get_rank()}.bin"

    def save(self, place: Path, state: State) -> None:
        disk.raw_write(self._file(place), self.buffer)

    def load(self, place: Path, state: State) -> None:
        disk.raw_read(self._file(place), self.buffer)


def timed(work: Callable[[], None]) -> dict[str, float]:
    """Seconds of the slowest rank, and seconds of processor time of all ranks together."""
    gc.collect()
    dist.barrier()
    began, used = time.perf_counter(), time.process_time()
    work()
    took = torch.tensor(time.perf_counter() - began, dtype=torch.float64)
    cpu = torch.tensor(time.process_time() - used, dtype=torch.float64)
    dist.all_reduce(took, op=dist.ReduceOp.MAX)
    dist.all_reduce(cpu)
    return {"s": float(took), "cpu_s": float(cpu)}


def on_first_rank(work: Callable[[Path], None], place: Path) -> None:
    if dist.get_rank() == 0:
        work(place)
    dist.barrier()


def one_round(peer: Peer, place: Path, layouts: Layouts) -> dict[str, dict[str, float]]:
    """Save, then load everything cold and warm, in the same and in other layouts."""
    on_first_rank(lambda path: path.mkdir(), place)
    took = {"save": timed(lambda: peer.save(place, layouts.rows))}
    targets = {"load": layouts.rows}
    if peer.reshards:
        targets["columns"] = layouts.columns
    if isinstance(peer, Ours):
        targets["uneven"] = layouts.uneven  # a DTensor can't say this
    for name, state in targets.items():
        for temperature, prepare in (("cold", disk.make_cold), ("warm", disk.make_warm)):
            if temperature == "warm" and isinstance(peer, Raw):
                continue  # direct I/O knows no cache
            on_first_rank(prepare, place)
            took[f"{name}_{temperature}"] = timed(lambda state=state: peer.load(place, state))  # type: ignore[misc]
    on_first_rank(disk.clear, place)
    return took


def prove(peer: Peer, place: Path, layouts: Layouts, truth: dict[str, int]) -> None:
    """A first round, not counted: warms up, and shows that what is timed does load what was saved."""
    on_first_rank(lambda path: path.mkdir(), place)
    peer.save(place, layouts.rows)
    dist.barrier()
    for state in (
        layouts.rows,
        *((layouts.columns,) if peer.reshards else ()),
        *((layouts.uneven,) if isinstance(peer, Ours) else ()),
    ):
        for tensor in locals_of(state).values():
            tensor.zero_()
        peer.load(place, state)
        if digest(state) != truth:
            raise RuntimeError(f"{type(peer).__name__} did not load what it saved")
    on_first_rank(disk.clear, place)


def measure(size: float, rounds: int, directory: Path) -> None:
    """Called on every rank under torchrun; rank 0 prints seconds by `<peer>/<what>/<s or cpu_s>` as JSON."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", timeout=timedelta(minutes=10))
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    layouts = Layouts(size, mesh)
    fill(layouts.rows, dist.get_rank())
    truth = digest(layouts.rows)
    peers: dict[str, Peer] = {
        "ucformat": Ours(),
        "dcp": Dcp(),
        "safetensors": Safetensors(),
        "raw": Raw(sum(tensor.nbytes for tensor in locals_of(layouts.rows).values())),
    }
    for name, peer in peers.items():
        if name != "raw":
            prove(peer, directory / name, layouts, truth)
    times: dict[str, list[float]] = defaultdict(list)
    for number in range(rounds):
        # nobody always comes after a certain other: what that one leaves behind (free memory, dirty pages) is not nothing
        for name in random.Random(number).sample(list(peers), len(peers)):
            for what, took in one_round(peers[name], directory / name, layouts).items():
                for unit, seconds in took.items():
                    times[f"{name}/{what}/{unit}"].append(seconds)
    if dist.get_rank() == 0:
        print(json.dumps({"nbytes": [layouts.nbytes], **times}), flush=True)
    dist.destroy_process_group()
