"""The engine in the loops that people have: FSDP2, FSDP1, DDP, several optimizers, schedulers, averaged weights."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.nn.parallel import DistributedDataParallel

import ucformat
from tests.reshard.ranks import on_ranks, same

STEPS = 6
Optimizers = list[torch.optim.Optimizer]


class Net(nn.Module):
    """Uneven shards, a tied weight, and buffers that every forward changes, on each rank in another way."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(24, 37)
        self.norm = nn.BatchNorm1d(37)
        self.out = nn.Linear(37, 24, bias=False)
        self.tied = nn.Linear(37, 24, bias=False)
        self.tied.weight = self.out.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.tied(torch.relu(self.norm(self.inner(x)))) + self.out(self.inner(x))
        return found


def fsdp2() -> nn.Module:
    model = Net()
    fully_shard(model, mesh=init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)))
    return model


def fsdp1() -> nn.Module:
    return FullyShardedDataParallel(Net(), use_orig_params=True, device_id=torch.device("cpu"))


def ddp() -> nn.Module:
    return DistributedDataParallel(Net())


def one(model: nn.Module) -> Optimizers:
    return [torch.optim.AdamW(model.parameters(), lr=1e-2)]


def two(model: nn.Module) -> Optimizers:
    named = list(model.named_parameters())
    return [
        torch.optim.AdamW([p for name, p in named if "inner" in name], lr=1e-2, foreach=True),
        torch.optim.SGD([p for name, p in named if "inner" not in name], lr=1e-2, momentum=0.9),
    ]


def weights(model: nn.Module) -> dict[str, torch.Tensor]:
    """Full tensors by name, as torch gathers them on the first rank."""
    if isinstance(model, FullyShardedDataParallel):  # torch's full state dict of tied weights crashes on the CPU
        with FullyShardedDataParallel.summon_full_params(model, writeback=False):
            found = {name: tensor.detach() for name, tensor in (*model.named_parameters(), *model.named_buffers())}
            return {name.replace("_fsdp_wrapped_module.", ""): tensor.clone() for name, tensor in found.items()}
    full: dict[str, Any] = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True, cpu_offload=True))
    return {name: tensor.clone() for name, tensor in full.items()}


class Training:
    """A model on two ranks, with a scheduler per optimizer and an average that the loop keeps itself."""

    def __init__(self, make: Callable[[], nn.Module], optimizers: Callable[[nn.Module], Optimizers], directory: str) -> None:
        torch.manual_seed(0)
        self.model = make()
        self.optimizers = optimizers(self.model)
        self.schedulers = [torch.optim.lr_scheduler.StepLR(item, 2, 0.5) for item in self.optimizers]
        self.average: dict[str, Any] = {"w": torch.zeros(1000), "n": 0}
        self.state: dict[str, Any] = {
            "model": self.model,
            "optimizer": {str(i): item for i, item in enumerate(self.optimizers)},
            "scheduler": self.schedulers,
            "average": self.average,
        }
        self.directory = directory
        self.snap = ucformat.Snapshotter(self.state, directory=directory, on_error="raise", hash_every=2)

    def update(self, step: int) -> None:
        self.average["n"] = -1
        with self.snap.compute():
            torch.manual_seed(100 * step + dist.get_rank())
            loss = self.model(torch.randn(8, 24)).square().mean()
            for item in self.optimizers:
                item.zero_grad()
            loss.backward()
        for item in self.optimizers:
            item.step()
        for scheduler in self.schedulers:
            scheduler.step()
        self.average["w"] = self.average["w"] * 0.9 + step
        self.average["n"] = step

    def wrong(self, step: int, truth: dict[str, torch.Tensor], average: torch.Tensor, rates: list[float]) -> list[str]:
        """What differs between the version in memory and the state after `step`."""
        found, values = ucformat.open(self.directory), ucformat.load(self.directory)
        kept: Any = values
        out = [name for name, tensor in truth.items() if not same(found[f"model/{name}"][...], tensor)]
        told = [kept["optimizer"][str(i)]["param_groups"][0]["lr"] for i in range(len(self.optimizers))]
        if (found.step, kept["average"]["n"], told) != (step, step, rates) or not same(kept["average"]["w"], average):
            out.append(f"values of step {found.step}")
        return out


def run(make: Callable[[], nn.Module], optimizers: Callable[[nn.Module], Optimizers], directory: str) -> list[str]:
    """What is wrong with the versions of a run; every optimizer step after one is taken is its deadline."""
    training = Training(make, optimizers, directory)
    training.update(1)
    wrong: list[str] = []
    for step in range(1, STEPS + 1):
        training.snap.take(step)
        truth = weights(training.model)
        average, rates = training.average["w"].clone(), [item.param_groups[0]["lr"] for item in training.optimizers]
        training.update(step + 1)
        dist.barrier()
        if dist.get_rank() == 0:
            wrong += [f"step {step}: {name}" for name in training.wrong(step, truth, average, rates)]
        dist.barrier()
    training.snap.close()
    report = training.snap.report()
    if (report.taken, report.failed, report.skipped) != (STEPS, 0, 0):
        wrong.append(f"{report.taken} taken, {report.failed} failed, {report.skipped} skipped: {report.failures}")
    return wrong


@pytest.mark.parametrize("optimizers", [one, two])
@pytest.mark.parametrize("make", [fsdp2, fsdp1, ddp])
def test_every_snapshot_is_the_state_that_torch_gathers(make: Any, optimizers: Any, tmp_path: Path) -> None:
    assert on_ranks(2, run, make, optimizers, str(tmp_path / "slots")) == [[], []]
