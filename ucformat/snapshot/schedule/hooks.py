"""Where a training loop tells the snapshot engine what it does: loops of one's own, and the optimizer's step.

Pipeline stages are in `stages`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ucformat.snapshot.schedule.clock import StepClock
from ucformat.snapshot.schedule.uncompiled import Uncompiled


@dataclass(frozen=True, slots=True)
class UncompiledClock:
    """A clock's `enter` and `leave`, never traced by torch.compile: a compiled function has a graph break at each call."""

    enter: Callable[[str], None]
    leave: Callable[[], None]

    @classmethod
    def of(cls, clock: StepClock) -> UncompiledClock:
        return cls(Uncompiled(clock.enter), Uncompiled(clock.leave))


@contextmanager
def computing(clock: StepClock | UncompiledClock, name: str = "compute") -> Iterator[None]:
    """Compute runs inside the block: what is left out is idle time that copies may use."""
    clock.enter(name)
    try:
        yield
    finally:
        clock.leave()


def optimizers(state: object) -> list[torch.optim.Optimizer]:
    """All optimizers below `state`, each once."""
    if isinstance(state, torch.optim.Optimizer):
        return [state]
    below = state.values() if isinstance(state, dict) else state if isinstance(state, (list, tuple)) else ()
    found: dict[int, torch.optim.Optimizer] = {}
    for item in below:
        found.update((id(optimizer), optimizer) for optimizer in optimizers(item))
    return list(found.values())


def before_update(items: list[torch.optim.Optimizer], hook: Callable[[], None]) -> list[Any]:
    """Call `hook` before an optimizer changes anything; handles to take the hooks away with.

    Optimizers other than `items` count as well, if they step on the thread that calls this: those that a framework keeps to
    itself, or that were made later, may hold the same parameters. Of those that wrap another one and never called
    `super().__init__()`, which have no hooks, the inner one is seen.
    """
    thread = threading.get_ident()
    own = [item for item in items if hasattr(item, "_optimizer_step_pre_hooks")]
    known = {id(item) for item in own}

    def of_state(*_: Any) -> None:
        hook()

    def others(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() == thread and id(optimizer) not in known:
            hook()

    return [
        *(item.register_step_pre_hook(Uncompiled(of_state)) for item in own),
        register_optimizer_step_pre_hook(Uncompiled(others)),
    ]
