"""The training loops that `benchmarks.snapshot` measures: torch pipelines of two ranks with a known amount of state."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.pipelining import Schedule1F1B, ScheduleInterleaved1F1B

from benchmarks.report import MIB
from ucformat.snapshot.copyplan.plan import Mode
from ucformat.snapshot.snapshotter import Snapshotter

MICROBATCHES = 4
BYTES = 12  # per parameter: itself and two moments, as Adam has them


@dataclass(frozen=True, slots=True)
class Setting:
    """What is trained, and how."""

    schedule: Literal["1f1b", "interleaved"]
    compute: Literal["timed", "matmul"]
    mib: float
    """State per rank."""
    forward_s: float = 0.0
    """Of one microbatch on one rank; its backward takes twice as long. Timed compute only."""
    mode: Mode = "auto"
    hash_every: int = 1
    """Of how many snapshots the keeper computes checksums, see `Snapshotter`."""
    whole_update: bool = False
    """Timed compute: the update changes every element, not a few of each tensor."""


class _Wait(torch.autograd.Function):
    """Seconds of forward and of backward in which the processor is free, as while a device computes."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds)
        return grads[0].clone(), None


class Timed(nn.Module):
    """Waits; its weights are state alone."""

    def __init__(self, width: int, count: int, seconds: float) -> None:
        super().__init__()
        self.weights = nn.ParameterList([torch.rand(width, width) for _ in range(count)])
        self.mix = nn.Linear(16, 16)
        self.seconds = seconds

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, _Wait.apply(torch.tanh(self.mix(x)), self.seconds))  # type: ignore[no-untyped-call]


class Sweep(torch.optim.Optimizer):
    """Has Adam's state. The update is cheap, since on a device it would not cost the host anything."""

    def __init__(self, parameters: Iterable[nn.Parameter], *, whole: bool) -> None:
        super().__init__(parameters, {"whole": whole})
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter] = {key: torch.rand_like(parameter) for key in ("exp_avg", "exp_avg_sq")}

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        for group in self.param_groups:
            for parameter in group["params"]:
                for at, tensor in enumerate((parameter, *self.state[parameter].values())):
                    (tensor if group["whole"] else tensor[:1]).add_(1e-3 * (at + 1))


def _matmuls(width: int, count: int) -> nn.Module:
    layers: list[nn.Module] = []
    for _ in range(count):
        layers += [nn.Linear(width, width, bias=False), nn.Tanh()]
    return nn.Sequential(*layers)


class Loop:
    """One rank of a pipeline, with its engine."""

    def __init__(self, setting: Setting, directory: str) -> None:
        torch.manual_seed(dist.get_rank())
        rank, ranks = dist.get_rank(), dist.get_world_size()
        each = 1 if setting.schedule == "1f1b" else 2
        self.setting, self.done = setting, 0
        width = 2048 if setting.mib >= 256 else 512
        count = max(1, -(-round(setting.mib * MIB) // (width * width * BYTES * each)))
        timed = setting.compute == "timed"
        self.inputs = torch.rand(16 * MICROBATCHES, 16 if timed else width)
        self.modules = {
            str(rank + ranks * i): Timed(width, count, setting.forward_s / each) if timed else _matmuls(width, count)
            for i in range(each)
        }
        parameters = [p for module in self.modules.values() for p in module.parameters()]
        self.optimizer: torch.optim.Optimizer = (
            Sweep(parameters, whole=setting.whole_update) if timed else torch.optim.Adam(parameters, lr=1e-5)
        )
        # one module with the stages' global numbers: parameters of two stages must not have one name
        self.state: dict[str, object] = {"model": nn.ModuleDict(self.modules), "optimizer": self.optimizer, "step": 0}
        self.snap = Snapshotter(self.state, directory=directory, mode=setting.mode, hash_every=setting.hash_every)
        device = torch.device("cpu")
        stages = [self.snap.stage(module, int(i), ranks * each, device) for i, module in self.modules.items()]
        self.first, self.last = rank == 0, rank == ranks - 1
        self.schedule: Schedule1F1B | ScheduleInterleaved1F1B
        if setting.schedule == "1f1b":
            self.schedule = Schedule1F1B(stages[0], MICROBATCHES, loss_fn=nn.functional.mse_loss)
        else:
            self.schedule = ScheduleInterleaved1F1B(list(stages), MICROBATCHES, loss_fn=nn.functional.mse_loss)
        self.snap.schedule = self.schedule

    def compute(self) -> None:
        """Forward and backward of a batch."""
        self.optimizer.zero_grad()
        self.schedule.step(*((self.inputs,) if self.first else ()), target=self.inputs if self.last else None)

    def update(self) -> None:
        self.optimizer.step()
        self.done += 1
        self.state["step"] = self.done

    def step(self, *, snapshots: bool = True) -> float:
        """A whole step; its seconds."""
        began = time.perf_counter()
        self.compute()
        self.update()
        self.snap.enabled = snapshots
        self.snap.take(self.done)
        return time.perf_counter() - began

    def tensors(self) -> dict[str, Tensor]:
        """Parameters and moments of this rank by canonical name."""
        found: dict[str, Tensor] = {}
        for stage, module in self.modules.items():
            for name, parameter in module.named_parameters():
                found[f"model/{stage}.{name}"] = parameter.detach()
                for key, value in self.optimizer.state[parameter].items():
                    if value.dim():
                        found[f"optimizer/{stage}.{name}/{key}"] = value
        return found

    @property
    def nbytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.tensors().values())

    def close(self) -> None:
        self.snap.close(remove=True)
