"""Copying by plan from a CUDA device: streams and events instead of a thread.

The host runs far ahead of the device, so a gate on the host would see no bubbles. Each copy is enqueued behind the event of the
action before its window, on a stream of its own, into memory that is registered with CUDA; the stream that computes
waits for the last copy before the optimizer's kernels run. The host waits for nothing.
"""

from __future__ import annotations

from collections import defaultdict

import torch

from ucformat.snapshot.bubbles import EXPOSED, OVERLAP
from ucformat.snapshot.clock import Span, now
from ucformat.snapshot.copier import Outcome, Work
from ucformat.storage import Bytes


class DeviceFill:
    """Enqueues copies of device memory on the current stream; row-major bytes of piece i are those of `views[i]`."""

    def __init__(self, views: list[torch.Tensor]) -> None:
        # A view that is not contiguous is made so on the copy stream, at the time of its first chunk.
        self._views = [view.detach() for view in views]
        self._flat: dict[int, torch.Tensor] = {}

    def enqueue(self, piece: int, start: int, stop: int, out: Bytes) -> None:
        flat = self._flat.get(piece)
        if flat is None:
            flat = self._flat[piece] = self._views[piece].contiguous().reshape(-1).view(torch.uint8)
        torch.from_numpy(out[start:stop]).copy_(flat[start:stop], non_blocking=True)


class DeviceCopier:
    """As `HostCopier`, for state on one CUDA device. Seconds are measured with events, so they are the device's."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self._stream = torch.cuda.Stream(device)
        self._work: Work | None = None
        self._fill: DeviceFill | None = None
        self._chunks: dict[int, list[int]] = {}
        self._done: set[int] = set()
        self._outcome = Outcome()

    @property
    def active(self) -> bool:
        return self._work is not None

    def begin_device(self, work: Work, views: list[torch.Tensor]) -> None:
        """Take on a version: copies are ordered behind all that the computing stream was given so far."""
        self._work, self._fill, self._done, self._outcome = work, DeviceFill(views), set(), Outcome()
        self._chunks = defaultdict(list)
        plan = work.plan
        places = [0 if window.after is None else window.after + 1 for window in plan.windows]
        for chunk, window in enumerate(plan.window.tolist()):
            if window != EXPOSED:
                self._chunks[0 if window == OVERLAP else places[window]].append(chunk)
        self._follow()

    def opened(self, position: int) -> None:
        """`position` actions were enqueued: copies of the window after them go behind them."""
        if self._work is None:
            return
        chunks = self._chunks.pop(position, None)
        if chunks:
            self._follow()
            self._outcome.windowed += self._enqueue(chunks)

    def closed(self) -> None:
        """Nothing to do: what is enqueued is bounded by its window's size."""

    def finish(self) -> Outcome:
        """The deadline: enqueue the rest, and make the computing stream wait for all copies."""
        work, outcome = self._work, self._outcome
        if work is None:
            return outcome
        began = now()
        try:
            left = [chunk for chunk in range(len(work.plan)) if chunk not in self._done]
            reached = torch.cuda.Event(enable_timing=True)
            reached.record(torch.cuda.current_stream(self.device))
            outcome.exposed = self._enqueue(left)
            copied = torch.cuda.Event(enable_timing=True)
            copied.record(self._stream)
            torch.cuda.current_stream(self.device).wait_event(copied)
            copied.synchronize()
            reached.synchronize()
            outcome.exposed_s = max(0.0, reached.elapsed_time(copied) / 1e3)
        except Exception as error:
            outcome.failure = error
        outcome.spans.append(Span("copies", began, now()))
        self._work = self._fill = None
        return outcome

    def stop(self) -> None:
        self._stream.synchronize()
        self._work = self._fill = None

    def _follow(self) -> None:
        """Order the copy stream behind what was enqueued for compute."""
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        self._stream.wait_event(event)

    def _enqueue(self, chunks: list[int]) -> int:
        work, fill = self._work, self._fill
        assert work is not None
        assert fill is not None
        moved = 0
        with torch.cuda.stream(self._stream):
            for chunk in chunks:
                piece, start, stop = (int(column[chunk]) for column in (work.plan.piece, work.plan.start, work.plan.stop))
                fill.enqueue(piece, start, stop, work.out[piece])
                self._done.add(chunk)
                moved += stop - start
        self._outcome.nbytes += moved
        return moved


