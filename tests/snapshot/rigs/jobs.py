"""Jobs of several ranks that are stopped, killed and started again, and the truth about what they held after each step."""

from __future__ import annotations

import os
import random
import signal
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerProcess
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import ucformat
from tests.scripts import forked
from ucformat.containers.file_image import ByteRequest
from ucformat.formats.snapshot import rank_name
from ucformat.reshard.reading.fill import TensorFill
from ucformat.snapshot.copyplan.plan import Mode
from ucformat.snapshot.snapshotter import Snapshotter

PATIENCE_S = 120.0  # nothing here waits so long unless it is broken
Main = Callable[..., None]


class Job:
    """`main(rank, link, *args)` on some gloo ranks, until it ends or is killed. `said` is what each rank sent."""

    def __init__(self, world: int, main: Main, *args: object) -> None:
        context = forked()
        self._folder = tempfile.TemporaryDirectory()
        self._links: list[Connection] = []
        self.ranks: list[ForkServerProcess] = []
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_run, args=(rank, world, self._folder.name, there, main, args), daemon=True)
            process.start()
            there.close()
            self._links.append(here)
            self.ranks.append(process)

    def hear(self, rank: int) -> Any:
        """What a rank sends next."""
        assert self._links[rank].poll(PATIENCE_S), f"rank {rank} says nothing"
        return self._links[rank].recv()

    def latest(self, rank: int) -> Any:
        """What a rank has sent last, which is something."""
        said = self.hear(rank)
        while self._links[rank].poll():
            said = self._links[rank].recv()
        return said

    def signal(self, number: signal.Signals) -> None:
        for process in self.ranks:
            assert process.pid is not None
            os.kill(process.pid, number)

    def kill(self) -> None:
        for process in self.ranks:
            process.kill()
        self._end()

    def join(self) -> None:
        """Wait for all ranks to end well."""
        for process in self.ranks:
            process.join(PATIENCE_S)
        codes = [process.exitcode for process in self.ranks]
        assert codes == [0] * len(codes)
        self._end()

    def _end(self) -> None:
        for process, link in zip(self.ranks, self._links, strict=True):
            process.join()
            link.close()
        self._folder.cleanup()


def _run(rank: int, world: int, folder: str, link: Connection, main: Main, args: tuple[object, ...]) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=world)
    main(rank, link, *args)
    dist.barrier()
    dist.destroy_process_group()


def united(place: Path, hosts: list[Path], world: int) -> Path:
    """A directory in which the ranks of all hosts are seen side by side, as no process of the job sees them."""
    place.mkdir()
    for rank in range(world):
        (place / rank_name(rank)).symlink_to(host_of(hosts, rank, world) / rank_name(rank))
    return place


def host_of(hosts: list[Path], rank: int, world: int) -> Path:
    """Ranks fill one host after another."""
    return hosts[rank * len(hosts) // world]


class Training:
    """A model whose parameters are DTensors, dealt out along `dim` over all ranks, and what it held after each step."""

    def __init__(self, truths: Path, directory: Path, dim: int, seed: int, **options: Any) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        layers = [nn.Linear(24, 16, bias=False), nn.Linear(16, 8, bias=False)]
        self.model = nn.Sequential(*layers)
        for layer in layers:
            layer.weight = nn.Parameter(distribute_tensor(layer.weight.detach(), mesh, [Shard(dim)]))
        self.optimizer = torch.optim.Adam(self.model.parameters(), lr=1e-2)
        self.state: dict[str, Any] = {"model": self.model, "optimizer": self.optimizer, "step": 0}
        self.snap = Snapshotter(self.state, directory=str(directory), on_error="skip", **options)
        self.truths = truths

    def step(self, *, take: bool = True) -> int:
        """Any gradients will do: they differ from run to run, and are dealt out as the parameters are."""
        for parameter in self.model.parameters():
            assert isinstance(parameter, DTensor)
            local = torch.rand_like(parameter.to_local())
            parameter.grad = DTensor.from_local(local, parameter.device_mesh, parameter.placements, run_check=False)
        self.optimizer.step()
        self.state["step"] += 1
        step = int(self.state["step"])
        tensors = self.tensors()
        if dist.get_rank() == 0:  # before the engine can keep this step
            torch.save(tensors, self.truths / "part")
            (self.truths / "part").rename(self.truths / f"step-{step}")
        dist.barrier()
        if take:
            self.snap.take(step)
        return step

    def tensors(self) -> dict[str, torch.Tensor]:
        """Everything by canonical name, whole."""
        found: dict[str, Any] = {f"model/{name}": tensor.detach() for name, tensor in self.model.named_parameters()}
        for name, parameter in self.model.named_parameters():
            found.update((f"optimizer/{name}/{key}", value) for key, value in self.optimizer.state[parameter].items())
        return {name: (x.full_tensor() if isinstance(x, DTensor) else x).clone() for name, x in found.items()}


def truth(truths: Path, step: int) -> dict[str, torch.Tensor]:
    return dict(torch.load(truths / f"step-{step}"))


def dawdle(rank: int, link: Connection, hosts: list[Path], seed: int, from_where: str | None) -> None:
    """Train for ever, ranks at odds with one another: late, and now and then one of them fails to keep a version."""
    chance = random.Random(f"{seed} {rank}")
    weight = nn.Parameter(torch.zeros(64, 1024))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    state: dict[str, Any] = {"model": {f"w{rank}": weight}, "optimizer": optimizer, "step": 0}
    step = 0
    mode: Mode = "blocking" if chance.random() < 0.5 else "auto"
    if from_where is not None:
        ucformat.load(from_where, into=state)
        step = int(state["step"])
        assert bool((weight == -step).all())
    directory = host_of(hosts, rank, dist.get_world_size())
    snap = Snapshotter(state, directory=str(directory), hash_every=0, mode=mode)
    copy = TensorFill.__call__

    def unreliable(self: TensorFill, parts: Sequence[ByteRequest]) -> None:
        if chance.random() < 0.03:
            raise OSError("this copy fails")
        copy(self, parts)

    TensorFill.__call__ = unreliable  # type: ignore[method-assign]
    while True:
        with snap.compute():
            time.sleep(chance.choice([0.0, 0.0, 0.001, 0.01]))
            dist.all_reduce(torch.zeros(1))  # ranks are coupled by their steps, as everywhere
        step += 1
        weight.grad = torch.ones_like(weight)
        optimizer.step()
        state["step"] = step
        snap.take(step)
        link.send((step, snap.report().taken))
