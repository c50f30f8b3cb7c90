"""What the engine needs of an accelerator: streams that run things in order, and events that order them between streams.

All but `synchronise` return at once; what they ask for happens when the stream gets there. The copier of devices
(`device`) is written against this alone.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Protocol

import torch

from ucformat.storage.store import Bytes

Stream = Any  # each device's own kinds, which nobody else looks into
Event = Any


class Device(Protocol):
    """One accelerator. Its methods raise what its runtime raises."""

    def holds(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor lies in this device's memory."""

    def computing(self) -> Stream:
        """The stream on which the calling thread computes now."""

    def stream(self) -> Stream:
        """A stream for copies."""

    def record(self, stream: Stream) -> Event:
        """An event that happens when all that was asked of `stream` so far is done."""

    def wait(self, stream: Stream, event: Event) -> None:
        """What is asked of `stream` from now on begins after `event`."""

    def copy(self, stream: Stream, source: torch.Tensor, place: Bytes) -> None:
        """Copy a one-dimensional, contiguous uint8 tensor of the device to pinned memory. Keeps neither alive."""

    def clone(self, stream: Stream, source: torch.Tensor) -> torch.Tensor:
        """A contiguous copy on the device, whose contents are there when `stream` gets there. Does not keep `source` alive."""

    def synchronise(self, event: Event) -> None:
        """Make the calling thread, and nobody else, wait for an event."""

    def elapsed(self, before: Event, after: Event) -> float:
        """Seconds between two events that have happened."""


class Cuda:
    """A CUDA device, as torch sees it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.device == self._device

    def computing(self) -> Stream:
        return torch.cuda.current_stream(self._device)

    def stream(self) -> Stream:
        return torch.cuda.Stream(self._device, priority=0)  # 0 is the lowest: others have negative numbers

    def record(self, stream: Stream) -> Event:
        # `blocking` lets a thread that synchronises sleep; it does not make anything else block
        return stream.record_event(torch.cuda.Event(enable_timing=True, blocking=True))

    def wait(self, stream: Stream, event: Event) -> None:
        stream.wait_event(event)

    def copy(self, stream: Stream, source: torch.Tensor, place: Bytes) -> None:
        with torch.cuda.stream(stream):
            torch.from_numpy(place).copy_(source, non_blocking=True)

    def clone(self, stream: Stream, source: torch.Tensor) -> torch.Tensor:
        with torch.cuda.stream(stream):
            return source.clone(memory_format=torch.contiguous_format)

    def synchronise(self, event: Event) -> None:
        event.synchronize()

    def elapsed(self, before: Event, after: Event) -> float:
        return float(before.elapsed_time(after)) / 1e3


def devices(tensors: Iterable[torch.Tensor]) -> list[Device]:
    """The devices of tensors whose copies can be ordered on the device: each CUDA device once."""
    found = sorted({tensor.device for tensor in tensors if tensor.device.type == "cuda"}, key=str)
    return [Cuda(device) for device in found]
