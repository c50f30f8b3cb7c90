"""Where a training loop tells the snapshot engine what it does: pipeline stages, own loops, and the optimizer's step.

`timed_stage` makes a `PipelineStage` that reports its actions through public methods alone; every schedule of
torch.distributed.pipelining calls these. Loops of one's own wrap their compute in `computing`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.optim.optimizer import register_optimizer_step_pre_hook

from ucformat.snapshot.clock import StepClock


@contextmanager
def computing(clock: StepClock, name: str = "compute") -> Iterator[None]:
    """Compute runs inside the block: what is left out is idle time that copies may use."""
    clock.enter(name)
    try:
        yield
    finally:
        clock.leave()


class TimedStage(PipelineStage):
    """A pipeline stage whose every action is an action of `clock`."""

    clock: StepClock

    def _timed(self, kind: str, microbatch: int | None, run: Callable[[], Any]) -> Any:
        self.clock.enter(f"{self.stage_index}{kind}{'' if microbatch is None else microbatch}")
        try:
            return run()
        finally:
            self.clock.leave()

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        run = super().forward_one_chunk
        return self._timed("F", fwd_chunk_id, lambda: run(fwd_chunk_id, *args, **kwargs))

    def backward_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        run = super().backward_one_chunk
        kind = "B" if kwargs.get("full_backward", True) else "I"
        return self._timed(kind, bwd_chunk_id, lambda: run(bwd_chunk_id, *args, **kwargs))

    def backward_weight_one_chunk(self, bwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        run = super().backward_weight_one_chunk
        return self._timed("W", bwd_chunk_id, lambda: run(bwd_chunk_id, *args, **kwargs))

    def perform_reduce_grad(self, *args: Any, **kwargs: Any) -> Any:
        run = super().perform_reduce_grad
        return self._timed("REDUCE_GRAD", None, lambda: run(*args, **kwargs))


def timed_stage(
    clock: StepClock, module: nn.Module, stage_index: int, num_stages: int, device: torch.device, **more: Any
) -> TimedStage:
    """`PipelineStage(module, stage_index, num_stages, device, **more)`, timed by `clock`."""
    stage = TimedStage(module, stage_index, num_stages, device, **more)
    stage.clock = clock
    return stage


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
    itself, or that were made later, may hold the same parameters.
    """
    thread, known = threading.get_ident(), {id(item) for item in items}

    def others(optimizer: torch.optim.Optimizer, *_: Any) -> None:
        if threading.get_ident() == thread and id(optimizer) not in known:
            hook()

    return [*(item.register_step_pre_hook(lambda *_: hook()) for item in items), register_optimizer_step_pre_hook(others)]
