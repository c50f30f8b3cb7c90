"""A copier with live memory, a plan, and a record of what was copied by whom."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from hypothesis import strategies as st

from ucformat.containers.file_image import ByteRequest
from ucformat.dtypes import DTYPES
from ucformat.reshard.reading.fill import TensorFill
from ucformat.snapshot.copying.host import HostCopier, Outcome, Work
from ucformat.snapshot.copyplan.plan import NEVER, CopyPlan, Mode, Pieces, Rates, plan_copies
from ucformat.snapshot.schedule.replay import Track
from ucformat.storage.store import Bytes

CHUNK = 1000  # bytes
RATE = Rates(alone=1e5, beside=1e5)  # a chunk is planned to take 10 ms, and takes microseconds
MODES: tuple[Mode, ...] = ("auto", "bubble", "overlap", "blocking")
LONG = 1e6  # seconds: never comes within a test
SOON_S = 0.1  # far longer than a copy that is due takes to be made
PATIENCE_S = 20.0  # nothing here waits so long unless it is broken


class Piece(NamedTuple):
    """A row of `Pieces`."""

    nbytes: int
    ready: int = 0
    deadline: int | None = None


def columns(pieces: Sequence[Piece]) -> Pieces:
    rows = [(piece.nbytes, piece.ready, NEVER if piece.deadline is None else piece.deadline) for piece in pieces]
    return Pieces(*np.array(rows, dtype=np.int64).reshape(-1, 3).T)


@dataclass
class Rig:
    """A copier, live memory and the place of a version; what was copied by whom."""

    plan: CopyPlan
    live: list[torch.Tensor]
    out: list[Bytes]
    copier: HostCopier = field(default_factory=HostCopier)
    copies: list[tuple[int, bool]] = field(default_factory=list)
    """Piece and whether the copying thread did it."""
    changed: threading.Condition = field(default_factory=threading.Condition)
    hold: threading.Event = field(default_factory=threading.Event)
    """While clear, the copying thread waits in each copy before it reads."""
    held: threading.Event = field(default_factory=threading.Event)
    """Set once the copying thread waits."""
    done: list[bool] = field(default_factory=list)
    """For each call, whether it came from the copying thread."""
    told: list[int] = field(default_factory=list)

    @property
    def work(self) -> Work:
        return Work(self.plan, self.fill, self.place, self.settle, self.told.append)

    def beside(self) -> bool:
        return threading.current_thread().name == "ucf-copy"

    def settle(self) -> None:
        assert self.reached(len(self.plan), 0)  # all is in place by now
        self.done.append(self.beside())

    def place(self) -> Sequence[Bytes] | None:
        return self.out

    def fill(self, parts: Sequence[ByteRequest]) -> None:
        if self.beside() and not self.hold.is_set():
            self.held.set()
            assert self.hold.wait(PATIENCE_S)
        TensorFill(self.live, [DTYPES["U8"]] * len(self.live))(parts)
        with self.changed:
            self.copies += [(part.piece, self.beside()) for part in parts]
            self.changed.notify_all()

    def reached(self, count: int, within: float = PATIENCE_S) -> bool:
        """Whether `count` chunks get copied."""
        with self.changed:
            return self.changed.wait_for(lambda: len(self.copies) >= count, within)

    def assert_copied(self, outcome: Outcome, truth: Sequence[torch.Tensor]) -> None:
        assert outcome.failure is None
        assert [torch.equal(torch.from_numpy(a), b) for a, b in zip(self.out, truth, strict=True)] == [True] * len(truth)
        assert outcome.windowed + outcome.beside + outcome.exposed == outcome.nbytes == sum(len(a) for a in self.out)
        assert self.told == sorted(self.told)
        assert self.told[-1:] == [outcome.nbytes][: len(self.plan)]
        assert (outcome.finished, outcome.refused, len(self.done)) == (True, False, 1)


@st.composite
def questions(draw: st.DrawFn) -> tuple[Track, list[Piece], Rates, Mode, float, int]:
    """What a planner is asked: the step, pieces, rates, mode, margin and bytes of a chunk."""
    n = draw(st.integers(0, 8))
    parts = draw(st.lists(st.sampled_from([0.0, 0.001, 0.01, 0.03, 0.2]), min_size=2 * n + 1, max_size=2 * n + 1))
    edges = np.cumsum(np.array(parts))
    found = Track(edges[0:-1:2], edges[1::2], float(edges[-1]))
    pieces = []
    for _ in range(draw(st.integers(0, 12))):
        ready = draw(st.integers(0, n)) if draw(st.booleans()) else 0
        deadline = draw(st.none() | st.integers(ready, n))
        pieces.append(Piece(draw(st.sampled_from([0, 1, 1000, 1 << 20, 20 << 20, 300 << 20, (300 << 20) + 7])), ready, deadline))
    rates = Rates(
        draw(st.sampled_from([1e9, 10e9])),
        draw(st.sampled_from([0.5e9, 5e9])),
        draw(st.sampled_from([0.0, 50e-6])),
        draw(st.sampled_from([0.0, 200e-6])),
        draw(st.sampled_from([0.0, 0.3])),
    )
    chunk_bytes = draw(st.sampled_from([100_000, 1 << 20, 4 << 20]))
    return found, pieces, rates, draw(st.sampled_from(MODES)), draw(st.sampled_from([0.0, 0.1, 0.5])), chunk_bytes


@contextmanager
def rig(pieces: Sequence[Piece], track: Track, mode: Mode, rates: Rates = RATE, *, record: bool = True) -> Iterator[Rig]:
    generator = torch.Generator().manual_seed(len(pieces))
    live = [torch.randint(0, 256, (p.nbytes,), dtype=torch.uint8, generator=generator) for p in pieces]
    plan = plan_copies(track, columns(pieces), rates, mode, margin=0.0, chunk_bytes=CHUNK)
    made = Rig(plan, live, [np.zeros(p.nbytes, dtype=np.uint8) for p in pieces], HostCopier(record=record))
    made.hold.set()
    try:
        yield made
    finally:
        made.hold.set()
        made.copier.stop()


def track(*edges: float, seconds: float) -> Track:
    """Actions that begin and end at these seconds."""
    return Track(np.array(edges[::2]), np.array(edges[1::2]), seconds)


@contextmanager
def meanwhile(act: Callable[[], Any]) -> Iterator[threading.Thread]:
    """Run `act` on another thread within the block, and wait for it after."""
    thread = threading.Thread(target=act, daemon=True)
    thread.start()
    try:
        yield thread
    finally:
        thread.join(PATIENCE_S)
        assert not thread.is_alive()
