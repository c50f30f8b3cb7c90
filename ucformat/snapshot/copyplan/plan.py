"""Which bytes are copied when: one rank's pieces, cut to chunks and laid into the idle windows of its step.

Pure: times, rates and sizes in, a `CopyPlan` out. Windows take what fits; the rest runs throttled beside compute or is
the exposed rest for which training waits. `plan` is called again when times drift (`drift`).
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from math import isfinite
from typing import Literal

import numpy as np

from ucformat.box import Ints
from ucformat.snapshot.schedule.replay import Floats, IdleWindow, Track

Mode = Literal["auto", "bubble", "overlap", "blocking"]
"""What the user asks for: `auto` takes what the fit test predicts to cost least."""
Taken = Literal["bubble", "bubble+overlap", "overlap", "blocking"]
"""What a plan does."""

OVERLAP = -1  # in `CopyPlan.window`: beside compute
EXPOSED = -2  # in `CopyPlan.window`: while training waits
NEVER = 1 << 62  # in `Pieces.deadline`: a position that no action has
CHUNK_BYTES = 4 << 20  # a copy can't be stopped once begun: this bounds by how much the last one may overrun its window
MARGIN = 0.1  # of a window, kept free: stage times vary by some per cent from step to step
PACES = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)  # over the slowest even pace: chunks and deadlines may need more


@dataclass(frozen=True, slots=True, eq=False)
class Pieces:
    """Contiguous bytes to copy in every step, at positions of this rank's action list. Columns: a state has thousands."""

    nbytes: Ints
    """(P,)."""
    ready: Ints
    """(P,) final once every action before this position has ended; 0 from the end of the optimizer step on."""
    deadline: Ints
    """(P,) to be copied before the action at this position begins; NEVER: before the next optimizer step."""

    @classmethod
    def lasting(cls, nbytes: Ints) -> Pieces:
        """Pieces that change in the optimizer step alone."""
        return cls(nbytes, np.zeros_like(nbytes), np.full_like(nbytes, NEVER))


@dataclass(frozen=True, slots=True)
class Rates:
    """What copying costs, measured."""

    alone: float
    """Bytes per second while no compute runs on this rank."""
    beside: float
    """Bytes per second beside compute."""
    chunk: float = 0.0
    """Seconds that each chunk costs whatever its size."""
    opening: float = 0.0
    """Seconds from the opening of a window to the first byte."""
    slowdown: float = 0.0
    """Seconds of compute lost per second of copying beside it."""
    waiting: float | None = None
    """Bytes per second while training waits, when other ranks often do the same; None: as `alone`."""


@dataclass(frozen=True, slots=True, eq=False)
class CopyPlan:
    """C chunks in the order in which they begin. Together they are every byte of every piece, once."""

    taken: Taken
    reason: str
    """Why this mode, for reports."""
    pieces: Pieces
    windows: tuple[IdleWindow, ...]
    piece: Ints
    """(C,) index into `pieces`."""
    start: Ints
    """(C,) first byte within the piece."""
    stop: Ints
    """(C,) one past the last byte."""
    window: Ints
    """(C,) index into `windows`, or OVERLAP, or EXPOSED."""
    begin: Floats
    """(C,) seconds into the step; exposed chunks follow their deadline (their readiness when everything blocks)."""
    end: Floats
    """(C,) planned end."""
    limit: float
    """Bytes per second that OVERLAP chunks keep to, 0 where there are none."""
    exposed: float
    """Seconds for which training is predicted to wait."""
    overlapped: float
    """Seconds of copying beside compute."""
    slowed: float
    """Seconds that compute is predicted to lose to it."""
    window_use: float
    """Fraction of the windows' seconds that is spent copying."""

    def __len__(self) -> int:
        return len(self.piece)

    @property
    def cost(self) -> float:
        """Predicted seconds by which the step gets longer."""
        return self.exposed + self.slowed


@dataclass(frozen=True, slots=True)
class _Slot:
    """Seconds [start, stop) of which `room` may be used for copies of one kind."""

    start: float
    stop: float
    room: float
    window: int


@dataclass(frozen=True, slots=True)
class _Stretch:
    """Chunks [first, last) that are final at one moment and due at another."""

    first: int
    last: int
    ready: float
    due: float


@dataclass(frozen=True, slots=True, eq=False)
class _Run:
    """Chunks [first, last), one after the other from `begin`."""

    first: int
    last: int
    window: int
    begin: float
    clock: Floats
    """(C + 1,) seconds at which each chunk would begin if all of them were copied at this speed from 0 on."""


@dataclass(frozen=True, slots=True, eq=False)
class _Job:
    """The question: what `plan` was asked, cut to chunks, with positions turned into seconds."""

    track: Track
    pieces: Pieces
    rates: Rates
    margin: float
    chunk_bytes: int
    windows: tuple[IdleWindow, ...]
    piece: Ints
    """(C,) as in `CopyPlan`, but in the order in which chunks are due."""
    start: Ints
    stop: Ints
    stretches: tuple[_Stretch, ...]
    """All chunks, in order."""

    def clock(self, rate: float, limit: float = float("inf")) -> Floats:
        """`_Run.clock` at `rate`, or slower to keep to `limit`, both in bytes per second."""
        size = self.stop - self.start
        return np.concatenate([np.zeros(1), np.cumsum(np.maximum(self.rates.chunk + size / rate, size / limit))])


def plan_copies(
    track: Track,
    pieces: Pieces,
    rates: Rates,
    mode: Mode = "auto",
    *,
    margin: float = MARGIN,
    chunk_bytes: int = CHUNK_BYTES,
) -> CopyPlan:
    """Lay `pieces` into one rank's step. Earlier deadlines go first, then what is final later, then the given order.

    `margin` is the part of every window that stays free. Without windows `bubble` means `overlap`. Raises ValueError for
    sizes, positions or rates that make no sense.
    """
    job = _job(track, pieces, rates, margin, chunk_bytes)
    if mode == "blocking":
        return _blocking(job, "asked for")
    if mode == "overlap":
        return _beside(job, "asked for")
    if mode == "bubble" and job.windows:
        return _bubble(job, "asked for")
    if not job.windows:
        return _least((make(job, "the step has no idle windows") for make in (_beside, _blocking)), mode)
    idle, total = track.idle, int(pieces.nbytes.sum())
    told = f"{total / 2**20:.1f} MiB for {len(job.windows)} windows of {idle * 1e3:.1f} ms in all"
    return _least((make(job, told) for make in (_bubble, _both, _beside, _blocking)), mode)


def _least(choice: Iterable[CopyPlan], mode: Mode) -> CopyPlan:
    """The fit test: the cheapest, earlier ones first where they cost the same. What comes after one without cost isn't made."""
    options: list[CopyPlan] = []
    for option in choice:
        options.append(option)
        if mode == "bubble":
            return option
        if not option.cost:
            break
    least = min(option.cost for option in options)
    found = next(option for option in options if option.cost <= least * (1 + 1e-9))
    verdict = {"bubble": "all fits into the windows", "bubble+overlap": "the windows are too small, beside compute is room"}
    why = "not all fits anywhere: this costs least" if found.exposed else verdict.get(found.taken, "all fits beside compute")
    return replace(found, reason=f"{why}: {found.reason}")


def _job(track: Track, pieces: Pieces, rates: Rates, margin: float, chunk_bytes: int) -> _Job:
    known = (rates.alone, rates.beside, _waiting(rates), rates.chunk, rates.opening, rates.slowdown)
    if not (all(map(isfinite, known)) and min(known[:3]) > 0 and min(known[3:]) >= 0):
        raise ValueError(f"rates must be finite and positive: {rates}")
    if not 0 <= margin < 1 or chunk_bytes < 1:
        raise ValueError(f"a margin of {margin} and chunks of {chunk_bytes} bytes make no plan")
    n = len(track.start)
    last = np.where(pieces.deadline == NEVER, n, pieces.deadline)
    wrong = (pieces.nbytes < 0) | (pieces.ready < 0) | (pieces.ready > last) | (last > n)
    if wrong.any():
        nbytes, final, due_at = (int(column[wrong][0]) for column in (pieces.nbytes, pieces.ready, pieces.deadline))
        raise ValueError(f"{nbytes} bytes from position {final} to {due_at}: that does not fit a list of {n} actions")
    ready, due = track.ready()[pieces.ready], track.deadline()[last]
    order = np.lexsort((-ready, due))  # what is final late has fewer places to go to
    count = -(-pieces.nbytes[order] // chunk_bytes)
    piece = np.repeat(order, count)
    start = (np.arange(len(piece)) - np.repeat(np.cumsum(count) - count, count)) * chunk_bytes
    stop = np.minimum(start + chunk_bytes, pieces.nbytes[piece])
    ready, due = ready[piece], due[piece]
    cuts = np.flatnonzero((np.diff(ready) != 0) | (np.diff(due) != 0)) + 1
    edges = [0, *cuts.tolist(), len(piece)] if len(piece) else []
    stretches = tuple(_Stretch(a, b, float(ready[a]), float(due[a])) for a, b in pairwise(edges))
    return _Job(track, pieces, rates, margin, chunk_bytes, track.windows(), piece, start, stop, stretches)


def _waiting(rates: Rates) -> float:
    return rates.alone if rates.waiting is None else rates.waiting


def _bubble(job: _Job, why: str) -> CopyPlan:
    """Windows alone; what does not fit is exposed."""
    runs, done = _in_windows(job)
    return _answer(job, "bubble", runs, done, 0.0, why)


def _both(job: _Job, why: str) -> CopyPlan:
    """Windows first, the rest beside compute between them."""
    runs, done = _in_windows(job)
    edges = [0.0, *(edge for window in job.windows for edge in (window.start, window.stop)), job.track.seconds]
    more, planned, limit = _throttled(job, done, list(zip(edges[::2], edges[1::2], strict=True)))
    return _answer(job, "bubble+overlap", [*runs, *more], planned, limit, why)


def _beside(job: _Job, why: str) -> CopyPlan:
    """All through the step, whatever runs."""
    runs, done, limit = _throttled(job, _none(job), [(0.0, job.track.seconds)])
    return _answer(job, "overlap", runs, done, limit, why)


def _blocking(job: _Job, why: str) -> CopyPlan:
    """While training waits."""
    return _answer(job, "blocking", [], _none(job), 0.0, why)


def _none(job: _Job) -> list[int]:
    """By stretch, its first chunk that is not planned: nothing is yet."""
    return [stretch.first for stretch in job.stretches]


def _in_windows(job: _Job) -> tuple[list[_Run], list[int]]:
    slots = [
        _Slot(w.start + job.rates.opening, w.stop, w.seconds * (1 - job.margin) - job.rates.opening, at)
        for at, w in enumerate(job.windows)
    ]
    return _pack(job, _none(job), slots, job.clock(job.rates.alone))


def _throttled(job: _Job, done: Sequence[int], spans: Sequence[tuple[float, float]]) -> tuple[list[_Run], Sequence[int], float]:
    """Copies beside compute within `spans`, at the slowest pace that leaves nothing over; what is planned then; that pace."""
    left = [(at, stretch) for at, stretch in zip(done, job.stretches, strict=True) if at < stretch.last]
    cuts = sorted({when for _, stretch in left for when in (stretch.ready, stretch.due)})
    slots = []
    for begin, end in spans:
        edges = [begin, *(cut for cut in cuts if begin < cut < end), end]
        slots += [_Slot(a, b, (b - a) * (1 - job.margin), OVERLAP) for a, b in pairwise(edges) if b > a]
    nbytes = sum(int((job.stop - job.start)[at : stretch.last].sum()) for at, stretch in left)
    seconds = sum(slot.room for slot in slots)
    if not nbytes or seconds <= 0:
        return [], done, 0.0
    top = job.chunk_bytes / (job.rates.chunk + job.chunk_bytes / job.rates.beside)
    for pace in PACES:
        limit = pace * nbytes / seconds
        if limit >= top:
            break
        runs, planned = _pack(job, done, slots, job.clock(job.rates.beside, limit))
        if all(at == stretch.last for at, stretch in zip(planned, job.stretches, strict=True)):
            return runs, planned, limit
    return *_pack(job, done, slots, job.clock(job.rates.beside)), job.rates.beside


def _pack(job: _Job, done: Sequence[int], slots: Sequence[_Slot], clock: Floats) -> tuple[list[_Run], list[int]]:
    """Fill `slots` in time order, always with what is due first of what is final, from the chunks on that `done` tells.

    Gives the runs, and by stretch its first chunk that is not planned then.
    """
    planned, stretches = list(done), job.stretches
    waiting = sorted(range(len(stretches)), key=lambda at: -stretches[at].ready)
    due: list[int] = []  # stretches are in the order of their deadlines
    runs: list[_Run] = []
    for slot in slots:
        while waiting and stretches[waiting[-1]].ready <= slot.start:
            heapq.heappush(due, waiting.pop())
        used = 0.0
        while due:
            at = due[0]
            first, stretch = planned[at], stretches[at]
            if stretch.due >= slot.stop:
                fit = int(np.searchsorted(clock, clock[first] + max(slot.room - used, 0.0), side="right")) - 1
                last = min(fit, stretch.last)
                if last > first:
                    runs.append(_Run(first, last, slot.window, slot.start + used, clock))
                    used += float(clock[last] - clock[first])
                    planned[at] = last
                if last < stretch.last:
                    break  # the slot is full, but for a sliver
            heapq.heappop(due)
    return runs, planned


def _rest(job: _Job, done: Sequence[int], *, first: bool) -> list[_Run]:
    """What is copied while training waits: at the first possible moment, or at the last."""
    clock = job.clock(_waiting(job.rates))
    left = [
        (stretch.ready if first else stretch.due, at, stretch.last)
        for at, stretch in zip(done, job.stretches, strict=True)
        if at < stretch.last
    ]
    time, runs = 0.0, []
    for when, at, last in sorted(left):
        time = max(time, when)
        runs.append(_Run(at, last, EXPOSED, time, clock))
        time += float(clock[last] - clock[at])
    return runs


def _answer(job: _Job, taken: Taken, runs: Sequence[_Run], done: Sequence[int], limit: float, why: str) -> CopyPlan:
    """The plan of these runs and of the exposed rest, as columns."""
    size, idle = job.stop - job.start, sum(w.seconds for w in job.windows)
    window, begin, end = np.empty_like(size), np.empty(len(size)), np.empty(len(size))
    for run in (*runs, *_rest(job, done, first=taken == "blocking")):
        times = run.begin + (run.clock[run.first : run.last + 1] - run.clock[run.first])
        begin[run.first : run.last], end[run.first : run.last] = times[:-1], times[1:]
        window[run.first : run.last] = run.window
    exposed = float((job.rates.chunk + size[window == EXPOSED] / _waiting(job.rates)).sum())
    overlapped = float((job.rates.chunk + size[window == OVERLAP] / job.rates.beside).sum())
    inside = float((end - begin)[window >= 0].sum())
    busy = 1 - idle / job.track.seconds if taken == "overlap" and idle else 1.0  # what falls into windows slows nothing
    told = f"{why}: {exposed * 1e3:.1f} ms exposed"
    order = np.argsort(begin, kind="stable")
    return CopyPlan(
        taken,
        f"{told}, {inside * 1e3:.1f} ms in windows, {overlapped * 1e3:.1f} ms beside compute",
        job.pieces,
        job.windows,
        job.piece[order],
        job.start[order],
        job.stop[order],
        window[order],
        begin[order],
        end[order],
        limit,
        exposed,
        overlapped,
        overlapped * job.rates.slowdown * busy,
        inside / idle if idle else 0.0,
    )
