"""Many optimizers: what is loaded into a fresh one goes on exactly as torch's `load_state_dict(state_dict())` would.

Three more steps are taken after the load and after torch's own, and every parameter must have the same bits. What can't be stored
is refused by name.
"""

from __future__ import annotations

import copy
import inspect
import logging
import math
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import ucformat
from tests.reshard.ranks import on_ranks, same
from tests.reshard.state.test_optimizer_forms import assert_equal
from ucformat.errors import UcformatError

Parameters = Sequence[torch.Tensor]
Make = Callable[[Parameters], torch.optim.Optimizer]


def of_torch(kind: str, **options: Any) -> Make:
    return lambda parameters: getattr(torch.optim, kind)(parameters, **options)


def free(kind: str) -> Make:
    def make(parameters: Parameters) -> torch.optim.Optimizer:
        import schedulefree

        optimizer: Any = getattr(schedulefree, kind)(parameters)
        optimizer.train()
        return optimizer  # type: ignore[no-any-return]

    return make


def third(kind: str) -> Make:
    def make(parameters: Parameters) -> torch.optim.Optimizer:
        import pytorch_optimizer

        made: Any = pytorch_optimizer.load_optimizer(kind)
        return made(parameters)  # type: ignore[no-any-return]

    return make


def matrices(parameters: Parameters) -> torch.optim.Optimizer:
    return torch.optim.Muon([p for p in parameters if p.dim() == 2])


def hooked(parameters: Parameters) -> torch.optim.Optimizer:
    optimizer = torch.optim.Adam(parameters)
    optimizer.register_load_state_dict_post_hook(lambda o: None)
    return optimizer


def lookahead(parameters: Parameters) -> torch.optim.Optimizer:
    import pytorch_optimizer

    return pytorch_optimizer.Lookahead(torch.optim.Adam(parameters))


def accelerated(parameters: Parameters) -> torch.optim.Optimizer:
    """A wrapper that skips `super().__init__`."""
    from accelerate import Accelerator

    return Accelerator(cpu=True).prepare(torch.optim.Adam(parameters))  # type: ignore[no-any-return]


ZOO: dict[str, Make] = {
    **{kind: of_torch(kind) for kind in ("Adadelta", "Adafactor", "Adagrad", "Adam", "AdamW", "Adamax", "ASGD", "NAdam")},
    **{kind: of_torch(kind) for kind in ("RAdam", "RMSprop", "Rprop")},
    "LBFGS": of_torch("LBFGS", lr=0.01),
    "Adam, amsgrad": of_torch("Adam", amsgrad=True),
    "AdamW, tensor lr": of_torch("AdamW", lr=torch.tensor(0.01)),
    "AdamW, fused": of_torch("AdamW", fused=True),
    "AdamW, foreach": of_torch("AdamW", foreach=True),
    "RMSprop, centred": of_torch("RMSprop", centered=True, momentum=0.5),
    "SGD": of_torch("SGD", lr=0.1),
    "SGD, momentum": of_torch("SGD", lr=0.1, momentum=0.9, nesterov=True),
    "Muon": matrices,
    "hooks": hooked,
    "schedule-free AdamW": free("AdamWScheduleFree"),
    "schedule-free SGD": free("SGDScheduleFree"),
    "lion": third("lion"),
    "prodigy": third("prodigy"),
    "adabelief": third("adabelief"),
    "ademamix": third("ademamix"),
    "came": third("came"),
    "mars": third("mars"),
    "adopt": third("adopt"),
    "lookahead": lookahead,
    "accelerate": accelerated,
}


def net() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 16), nn.ReLU(), nn.Linear(16, 10), nn.Linear(10, 3))


def train(model: nn.Module, optimizer: torch.optim.Optimizer, steps: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        batch = torch.randn(4, 6, generator=generator)

        def closure(batch: torch.Tensor = batch) -> float:
            optimizer.zero_grad()
            loss: torch.Tensor = (model(batch) ** 2).mean()
            loss.backward()
            return float(loss.detach())

        if "closure" in inspect.signature(optimizer.step).parameters:
            optimizer.step(closure)
        else:
            closure()
            optimizer.step()


def bits(model: nn.Module) -> list[torch.Tensor]:
    with torch.no_grad():
        return [p.to_local() if isinstance(p, DTensor) else p.detach() for p in model.parameters()]


@pytest.mark.parametrize("kind", ZOO)
def test_a_fresh_optimizer_goes_on_as_after_torchs_own_load(kind: str, tmp_path: Path) -> None:
    model, by_torch, by_us = net(), net(), net()
    optimizer, reference, fresh = (ZOO[kind](list(m.parameters())) for m in (model, by_torch, by_us))
    train(model, optimizer, 2, 1)
    by_torch.load_state_dict(copy.deepcopy(model.state_dict()))
    reference.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizer})
    ucformat.load(str(tmp_path / "ck"), into={"model": by_us, "optimizer": fresh})
    train(by_torch, reference, 3, 2)
    train(by_us, fresh, 3, 2)
    assert all(map(same, bits(by_us), bits(by_torch)))
    assert_equal(fresh.state_dict(), reference.state_dict())


def test_schedule_free_goes_on_from_where_it_evaluates(tmp_path: Path) -> None:
    """Saved in eval mode, when the parameters are averages."""
    model, other = net(), net()
    optimizer, fresh = (free("AdamWScheduleFree")(list(m.parameters())) for m in (model, other))
    train(model, optimizer, 3, 1)
    optimizer.eval()  # type: ignore[attr-defined]
    ucformat.save(str(tmp_path / "ck"), {"model": model, "optimizer": optimizer})
    ucformat.load(str(tmp_path / "ck"), into={"model": other, "optimizer": fresh})
    for each in (optimizer, fresh):
        each.train()  # type: ignore[attr-defined]
    train(model, optimizer, 3, 2)
    train(other, fresh, 3, 2)
    assert all(map(same, bits(model), bits(other)))


# ---------------------------------------------------------------- two ranks


def wrapped(how: str) -> nn.Module:
    model = net()
    if how == "ddp":
        return DistributedDataParallel(model)
    if how == "fsdp2":
        mesh = init_device_mesh("cpu", (2,))
        fully_shard(model[2], mesh=mesh)
        fully_shard(model, mesh=mesh)
        return model
    return FullyShardedDataParallel(model, use_orig_params=how == "fsdp1", device_id=torch.device("cpu"))


def local_sgd(parameters: Parameters) -> torch.optim.Optimizer:
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
    from torch.distributed.optim import PostLocalSGDOptimizer

    inner = torch.optim.SGD(parameters, lr=0.1, momentum=0.9)
    return PostLocalSGDOptimizer(inner, PeriodicModelAverager(period=2, warmup_steps=3))


def partitioned(parameters: Parameters) -> torch.optim.Optimizer:
    from torch.distributed.optim import ZeroRedundancyOptimizer

    return ZeroRedundancyOptimizer(parameters, torch.optim.Adam, lr=0.01)


EVERYWHERE = (
    "Adadelta", "Adagrad", "Adam", "Adam, amsgrad", "Adamax", "ASGD", "NAdam", "RAdam", "RMSprop, centred", "SGD",
    "SGD, momentum", "AdamW, tensor lr", "AdamW, fused", "AdamW, foreach", "hooks", "schedule-free AdamW", "schedule-free SGD",
    "lion", "adabelief", "ademamix",
)  # fmt: skip
SOMEWHERE: dict[str, tuple[str, ...]] = {
    "ddp": ("Adafactor", "Rprop", "Muon", "LBFGS", "prodigy", "came", "adopt", "lookahead", "PostLocalSGD", "ZeroRedundancy"),
    "fsdp2": ("Muon", "lookahead"),
    "fsdp1": ("Adafactor", "Rprop", "came"),
    "fsdp1, flat": ("Adafactor", "Rprop"),
}
REFUSED = {
    ("ddp", "LBFGS"): "optimizer/0.weight/prev_loss: values differ on ranks 0, 1",  # each rank has a loss of its own
    ("fsdp2", "lookahead"): "Lookahead.state_dict() is not in the form of torch's optimizers",
    ("fsdp1", "came"): "/RMS: replicas of one tensor have different contents",  # of what each rank has of the parameter
}


def go_on(folder: str) -> dict[tuple[str, str], str]:
    warnings.simplefilter("ignore")  # FSDP1 and LocalSGD speak of their end
    logging.getLogger("ucformat").setLevel(logging.ERROR)
    zoo = {**ZOO, "PostLocalSGD": local_sgd, "ZeroRedundancy": partitioned}
    return {
        (how, kind): _go_on(how, zoo[kind], f"{folder}/{how}-{kind}".replace(" ", ""))
        for how, more in SOMEWHERE.items()
        for kind in (*EVERYWHERE, *more)
    }


def _go_on(how: str, make: Make, path: str) -> str:
    model, other = wrapped(how), wrapped(how)
    optimizer, fresh = (make(list(m.parameters())) for m in (model, other))
    train(model, optimizer, 2, 1 + dist.get_rank())
    try:
        ucformat.save(path, {"model": model, "optimizer": optimizer})
        ucformat.load(path, into={"model": other, "optimizer": fresh})
    except UcformatError as error:
        return f"{type(error).__name__}: {error}"
    train(model, optimizer, 3, 3 + dist.get_rank())
    train(other, fresh, 3, 3 + dist.get_rank())
    return "equal" if all(map(same, bits(model), bits(other))) else "different"


@pytest.mark.slow
def test_optimizers_go_on_exactly_under_every_kind_of_data_parallelism(tmp_path: Path) -> None:
    for outcomes in on_ranks(2, go_on, str(tmp_path)):
        refused = {key: why for key, why in outcomes.items() if why != "equal"}
        assert refused.keys() == REFUSED.keys(), refused
        for key, why in refused.items():
            assert REFUSED[key] in why


# ---------------------------------------------------------------- beside the optimizer


class Warmup:
    """A callable object, of which LambdaLR stores the attributes."""

    def __init__(self, steps: int) -> None:
        self.steps = steps

    def __call__(self, step: int) -> float:
        return min(1.0, (step + 1) / self.steps)


lr = torch.optim.lr_scheduler
SCHEDULERS: dict[str, Callable[[torch.optim.Optimizer], Any]] = {
    "LambdaLR": lambda o: lr.LambdaLR(o, Warmup(7)),
    "MultiplicativeLR": lambda o: lr.MultiplicativeLR(o, Warmup(9)),
    "StepLR": lambda o: lr.StepLR(o, 2),
    "MultiStepLR": lambda o: lr.MultiStepLR(o, [2, 2, 5]),
    "ConstantLR": lambda o: lr.ConstantLR(o, total_iters=4),
    "LinearLR": lambda o: lr.LinearLR(o, total_iters=6),
    "ExponentialLR": lambda o: lr.ExponentialLR(o, 0.9),
    "PolynomialLR": lambda o: lr.PolynomialLR(o, 8, 2.0),
    "CosineAnnealingLR": lambda o: lr.CosineAnnealingLR(o, 8),
    "CosineAnnealingWarmRestarts": lambda o: lr.CosineAnnealingWarmRestarts(o, 3),
    "CyclicLR": lambda o: lr.CyclicLR(o, 0.01, 0.1, 3, cycle_momentum=False),
    "OneCycleLR": lambda o: lr.OneCycleLR(o, 0.1, 10),
    "ReduceLROnPlateau": lambda o: lr.ReduceLROnPlateau(o, patience=1),
    "SequentialLR": lambda o: lr.SequentialLR(o, [lr.LinearLR(o, total_iters=3), lr.ExponentialLR(o, 0.8)], [3]),
    "ChainedScheduler": lambda o: lr.ChainedScheduler([lr.LinearLR(o, total_iters=3), lr.ExponentialLR(o, 0.8)], o),
    "SWALR": lambda o: torch.optim.swa_utils.SWALR(o, 0.02, anneal_epochs=5),
}


@pytest.mark.parametrize("kind", SCHEDULERS)
@pytest.mark.parametrize("rate", [0.1, torch.tensor(0.1)], ids=["float", "tensor"])
def test_schedulers_go_on_exactly(kind: str, rate: Any, tmp_path: Path) -> None:
    def made() -> tuple[torch.optim.Optimizer, Any]:
        optimizer = torch.optim.AdamW(net().parameters(), lr=copy.deepcopy(rate))
        return optimizer, SCHEDULERS[kind](optimizer)

    def step(optimizer: torch.optim.Optimizer, scheduler: Any) -> float:
        optimizer.step()
        scheduler.step(*([1.0] if kind == "ReduceLROnPlateau" else []))
        return float(optimizer.param_groups[0]["lr"])

    optimizer, scheduler = made()
    for _ in range(3):
        step(optimizer, scheduler)
    ucformat.save(str(tmp_path / "ck"), {"optimizer": optimizer, "scheduler": scheduler})
    other, fresh = made()
    ucformat.load(str(tmp_path / "ck"), into={"optimizer": other, "scheduler": fresh})
    assert_equal(fresh.state_dict(), scheduler.state_dict())
    assert [step(other, fresh) for _ in range(6)] == [step(optimizer, scheduler) for _ in range(6)]


class Loop:
    """Everything that a training loop with mixed precision, averaging and random numbers holds."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Dropout(0.3), nn.Linear(8, 2))
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.scheduler = lr.OneCycleLR(self.optimizer, 0.1, 40)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**40, growth_interval=2)
        self.average = AveragedModel(self.model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
        self.generator = torch.Generator().manual_seed(7)

    def state(self) -> dict[str, Any]:
        return {
            "model": self.model,
            "optimizer": self.optimizer,
            "scheduler": self.scheduler,
            "scaler": self.scaler,
            "average": self.average,
            "rng": ucformat.rank_local({"global": torch.get_rng_state(), "data": self.generator.get_state()}),
        }

    def restore(self, state: dict[str, Any]) -> None:
        torch.set_rng_state(state["rng"].value["global"])
        self.generator.set_state(state["rng"].value["data"])

    def run(self, steps: int) -> list[float]:
        losses = []
        for _ in range(steps):
            self.optimizer.zero_grad()
            batch = torch.randn(5, 6, generator=self.generator)
            with torch.autocast("cpu", torch.float16):
                loss = self.model(batch).float().pow(2).mean()
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
            self.scheduler.step()
            self.average.update_parameters(self.model)
            losses.append(float(loss.detach()))
        return losses


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_model_optimizer_scheduler_scaler_average_and_random_numbers_go_on_together(tmp_path: Path) -> None:
    torch.manual_seed(1)
    loop = Loop()
    loop.run(12)
    ucformat.save(str(tmp_path / "ck"), loop.state())
    expected = loop.run(6)
    torch.manual_seed(99)
    fresh = Loop()
    state = fresh.state()
    ucformat.load(str(tmp_path / "ck"), into=state)
    fresh.restore(state)
    assert fresh.run(6) == expected
    assert not any(map(math.isnan, expected))
    assert_equal(fresh.scaler.state_dict(), loop.scaler.state_dict())
    for a, b in ((fresh.model, loop.model), (fresh.average, loop.average)):
        assert all(map(same, a.state_dict().values(), b.state_dict().values()))
    fresh.scaler = torch.amp.GradScaler("cpu", enabled=False)
    ucformat.save(str(tmp_path / "off"), {"scaler": fresh.scaler})
    ucformat.load(str(tmp_path / "off"), into={"scaler": fresh.scaler})
