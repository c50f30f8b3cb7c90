"""Loops whose optimizer step or whole step is compiled, and optimizers that wrap others."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms.model_averaging.averagers import ModelAverager

import ucformat
from ucformat.snapshot.snapshotter import Snapshotter

with warnings.catch_warnings():
    warnings.simplefilter("ignore", DeprecationWarning)  # torch scripts some of its optimizers as it imports them
    from torch.distributed.optim import PostLocalSGDOptimizer

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::UserWarning")  # of torch's compiler
STEPS = 7  # the first plan is made in the fourth


class Loop:
    def __init__(self, directory: Path, wrap: Callable[[torch.optim.Optimizer], Any] = lambda optimizer: optimizer) -> None:
        torch.manual_seed(0)
        self.directory = str(directory)
        self.model = nn.Linear(8, 8)
        self.optimizer = wrap(torch.optim.Adam(self.model.parameters()))
        state = {"model": self.model, "optimizer": self.optimizer}
        self.update = self.optimizer.step
        self.snap = Snapshotter(state, directory=self.directory, hash_every=0, mode="blocking", on_error="raise")

    def step(self, step: int) -> None:
        with self.snap.compute():
            self.model(torch.ones(2, 8)).sum().backward()
        self.update()
        self.prove_met()
        self.optimizer.zero_grad()
        self.snap.take(step)

    @torch.compiler.disable  # type: ignore[untyped-decorator]
    def prove_met(self) -> None:
        """The update has waited for the version in hand, of its own accord."""
        assert self.snap._taking is None

    def assert_kept(self, step: Callable[[int], None]) -> None:
        for number in range(1, STEPS + 1):
            step(number)
            truth = self.model.weight.detach().clone()
            if number % 2:  # after the others, the update itself is the deadline
                self.snap.deadline()
                found = ucformat.open(self.directory)
                assert found.step == number
                assert torch.equal(found["model/weight"][...], truth)
        self.snap.close()
        assert (self.snap.report().taken, self.snap.report().failed) == (STEPS, 0)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_compiled_optimizer_step_waits_for_the_copies(tmp_path: Path, backend: str) -> None:
    loop = Loop(tmp_path)
    loop.update = torch.compile(loop.optimizer.step, backend=backend)
    loop.assert_kept(loop.step)


def test_a_loop_that_is_compiled_as_a_whole_is_snapshot_as_any_other(tmp_path: Path) -> None:
    loop = Loop(tmp_path)
    loop.assert_kept(torch.compile(loop.step, backend="eager"))


class NoAverages(ModelAverager):
    def __init__(self) -> None:
        """Without a process group."""
        self.step = 0

    def average_parameters(self, params: object) -> None: ...


def post_local_sgd(optimizer: torch.optim.Optimizer) -> torch.optim.Optimizer:
    return PostLocalSGDOptimizer(optimizer, NoAverages())


class Wrapper(torch.optim.Optimizer):
    """As accelerate's: an Optimizer by name that hands everything on, and never was initialised as one."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self.optimizer = optimizer

    @property
    def state(self) -> Any:
        return self.optimizer.state

    @state.setter
    def state(self, state: Any) -> None: ...

    @property
    def param_groups(self) -> Any:
        return self.optimizer.param_groups

    @param_groups.setter
    def param_groups(self, groups: Any) -> None: ...

    def state_dict(self) -> Any:
        return self.optimizer.state_dict()

    def load_state_dict(self, state: Any) -> None:
        self.optimizer.load_state_dict(state)

    def zero_grad(self, set_to_none: bool = True) -> None:
        self.optimizer.zero_grad(set_to_none)

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        self.optimizer.step(closure)


@pytest.mark.parametrize("wrap", [post_local_sgd, Wrapper])
def test_optimizers_that_were_never_initialised_are_seen_by_what_they_wrap(
    tmp_path: Path, wrap: Callable[[torch.optim.Optimizer], Any]
) -> None:
    loop = Loop(tmp_path, wrap)
    loop.assert_kept(loop.step)
