"""Pipeline stages that tell the snapshot engine of their actions.

Through public methods alone: every schedule of torch.distributed.pipelining calls these. Only who makes a stage imports this:
torch.distributed.pipelining, first imported when a process group is alive, keeps that for good (see `reshard.fsdp.known`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.distributed.pipelining import PipelineStage

from ucformat.snapshot.schedule.clock import StepClock


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
