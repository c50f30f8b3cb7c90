"""A device without hardware: streams are threads that run what they are asked for in order, late, and beside each other.

Its rules are those of CUDA as far as order goes: an event happens when its stream gets there, a stream that waits for an event
does nothing meanwhile, kernels and copies keep no memory alive, and freed memory is overwritten as soon as the
stream on which it was allocated gets there. Nothing of CUDA's own is tested with it.
"""

from __future__ import annotations

import queue
import random
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from ucformat.storage.store import Bytes

LATE_S = 0.0004  # the longest that a stream dawdles before it does what it was asked for
PARTS = 4  # in which a kernel or copy is done, with time between them for others to interfere
POISON = 0xEE


class SimStream:
    """Runs what it is asked for, in order, on a thread of its own."""

    def __init__(self, device: SimDevice, name: str) -> None:
        self.device, self.name = device, name
        self._random = random.Random(len(name))
        self._asked: queue.SimpleQueue[tuple[str, Callable[[], object]] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def ask(self, what: str, act: Callable[[], object]) -> None:
        self._asked.put((what, act))

    def stop(self) -> None:
        self._asked.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (asked := self._asked.get()) is not None:
            time.sleep(self._random.random() * LATE_S)
            what, act = asked
            self.device.log.append((self.name, what))
            try:
                act()
            except BaseException as error:  # shown by `SimDevice.stop`
                self.device.errors.append(error)
            del act, asked


@dataclass(slots=True)
class SimEvent:
    happened: threading.Event = field(default_factory=threading.Event)
    at: float = 0.0

    def happen(self) -> None:
        self.at = time.monotonic()
        self.happened.set()


class SimDevice:
    """One device with one computing stream; see `streams.Device`."""

    def __init__(self) -> None:
        self.log: list[tuple[str, str]] = []
        """Stream and deed, in the order in which they began."""
        self.errors: list[BaseException] = []
        self.refuse: tuple[str, int] | None = None
        """A method and after how many calls of it one is refused."""
        self._memory: dict[int, Bytes] = {}
        self._streams = [SimStream(self, "compute")]
        self.compute = self._streams[0]

    # -- what a training loop does with it -----------------------------------------------------------------------------

    def tensor(self, values: torch.Tensor, stream: SimStream | None = None) -> torch.Tensor:
        """A tensor on the device. Freed with its last view."""
        stream = stream or self.compute
        memory = np.frombuffer(values.contiguous().reshape(-1).view(torch.uint8).numpy().tobytes(), dtype=np.uint8).copy()
        self._memory[memory.ctypes.data] = memory
        handle = memory[:]  # dies with the tensor, the memory does not
        weakref.finalize(handle, stream.ask, "free", lambda: memory.fill(POISON))
        return torch.from_numpy(handle).view(values.dtype).view(values.shape)

    def raw(self, tensor: torch.Tensor) -> torch.Tensor:
        """The same memory, which it does not keep alive: what a kernel gets to see."""
        memory = self._memory[tensor.untyped_storage().data_ptr()]
        flat = torch.from_numpy(memory).view(tensor.dtype)
        return flat.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def launch(self, name: str, tensor: torch.Tensor, kernel: Callable[[torch.Tensor], Any]) -> None:
        """Let `kernel` change a tensor on the computing stream, part by part."""
        raw = self.raw(tensor)

        def run() -> None:
            for part in raw.chunk(PARTS):
                kernel(part)
                time.sleep(LATE_S / PARTS)

        self.compute.ask(name, run)

    @contextmanager
    def paused(self) -> Iterator[None]:
        """The device does nothing until the end of the block."""
        gate = threading.Event()
        self.compute.ask("pause", gate.wait)
        try:
            yield
        finally:
            gate.set()

    def idle(self) -> None:
        """Wait until everything asked for is done."""
        for stream in list(self._streams):
            event = self.record(stream)
            event.happened.wait()

    def stop(self) -> None:
        for stream in self._streams:
            stream.stop()
        assert self.errors == []

    # -- what the engine asks of it ------------------------------------------------------------------------------------

    def holds(self, tensor: torch.Tensor) -> bool:
        return tensor.untyped_storage().data_ptr() in self._memory

    def computing(self) -> SimStream:
        return self.compute

    def stream(self) -> SimStream:
        self._streams.append(SimStream(self, f"copy {len(self._streams)}"))
        return self._streams[-1]

    def record(self, stream: SimStream) -> SimEvent:
        self._refuse("record")
        event = SimEvent()
        stream.ask("record", event.happen)
        return event

    def wait(self, stream: SimStream, event: SimEvent) -> None:
        self._refuse("wait")
        stream.ask("wait", event.happened.wait)

    def copy(self, stream: SimStream, source: torch.Tensor, place: Bytes) -> None:
        self._refuse("copy")
        raw = self.raw(source).numpy()

        def run() -> None:
            for at in np.array_split(np.arange(len(raw)), PARTS):
                place[at] = raw[at]
                time.sleep(LATE_S / PARTS)

        stream.ask(f"copy to {place.ctypes.data}+{len(place)}", run)

    def clone(self, stream: SimStream, source: torch.Tensor) -> torch.Tensor:
        self._refuse("clone")
        made = self.tensor(torch.empty(source.shape, dtype=source.dtype), stream)
        to, raw = self.raw(made), self.raw(source)
        stream.ask("clone", lambda: to.copy_(raw))
        return made

    def synchronise(self, event: SimEvent) -> None:
        self._refuse("synchronise")
        event.happened.wait()

    def elapsed(self, before: SimEvent, after: SimEvent) -> float:
        self._refuse("elapsed")
        assert before.happened.is_set()
        assert after.happened.is_set()
        return after.at - before.at

    def _refuse(self, method: str) -> None:
        if self.refuse is not None and self.refuse[0] == method:
            left = self.refuse[1]
            self.refuse = (method, left - 1) if left else None
            if not left:
                raise RuntimeError(f"the device refuses to {method}")


def position(log: Sequence[tuple[str, str]], what: str) -> int:
    """When something began that was done once."""
    found = [at for at, (_, deed) in enumerate(log) if deed == what]
    assert len(found) == 1, (what, found)
    return found[0]
