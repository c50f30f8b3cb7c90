"""Where a loop tells of its compute and of its optimizers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import nn

from ucformat.snapshot.schedule import hooks
from ucformat.snapshot.schedule.clock import StepClock


def test_an_action_ends_with_its_block_also_by_an_error() -> None:
    clock = StepClock()
    clock.begin()
    with hooks.computing(clock, "a"):
        pass
    with pytest.raises(KeyError), hooks.computing(clock, "b"):
        raise KeyError
    with hooks.computing(clock):
        pass
    assert [span.name for span in clock.spans] == ["a", "b", "compute"]


def test_every_optimizer_of_a_state_is_found_once() -> None:
    made = [torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1) for _ in range(3)]
    state: dict[str, Any] = {"a": made[0], "b": [made[1], {"c": made[0]}], "d": ({"e": (made[2],)}, 3), "f": torch.zeros(2)}
    assert hooks.optimizers(state) == made
    assert hooks.optimizers(made[0]) == [made[0]]
    assert hooks.optimizers({"model": nn.Linear(1, 1)}) == []


def test_the_hook_comes_before_any_change_until_it_is_removed() -> None:
    weight = nn.Parameter(torch.zeros(2))
    optimizer = torch.optim.SGD([weight], lr=1.0)
    weight.grad = torch.ones(2)
    seen: list[float] = []
    handles = hooks.before_update([optimizer], lambda: seen.append(float(weight.detach()[0])))
    optimizer.step()
    optimizer.step()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == [0.0, -1.0]
    assert weight.tolist() == [-3.0, -3.0]


def test_optimizers_that_nobody_named_count_on_the_loops_own_thread() -> None:
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.ones(2)
    seen: list[float] = []
    handles = hooks.before_update([], lambda: seen.append(float(weight.detach()[0])))
    optimizer = torch.optim.SGD([weight], lr=1.0)  # made afterwards
    optimizer.step()
    other = threading.Thread(target=optimizer.step)
    other.start()
    other.join()
    for handle in handles:
        handle.remove()
    optimizer.step()
    assert seen == [0.0]
