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
from numpy.typing import NDArray

from ucformat.snapshot.replay import Floats, Track, Window

Mode = Literal["auto", "bubble", "overlap", "blocking"]
"""What the user asks for: `auto` takes what the fit test predicts to cost least."""
Taken = Literal["bubble", "bubble+overlap", "overlap", "blocking"]
"""What a plan does."""

OVERLAP = -1  # in `CopyPlan.window`: beside compute
EXPOSED = -2  # in `CopyPlan.window`: while training waits
CHUNK_BYTES = 4 << 20  # a copy can't be stopped once begun: this bounds by how much the last one may overrun its window
MARGIN = 0.1  # of a window, kept free: stage times vary by some per cent from step to step
PACES = (1.0, 1.02, 1.05, 1.1, 1.25, 1.5, 2.0, 4.0)  # over the slowest even pace: chunks and deadlines may need more


@dataclass(frozen=True, slots=True)
class Piece:
    """Contiguous bytes to copy in every step, at positions of this rank's action list."""

    nbytes: int
    ready: int = 0
    """Final once every action before this position has ended; 0 from the end of the optimizer step on."""
    deadline: int | None = None
    """Must be copied before the action at this position begins; None before the next optimizer step."""


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
    pieces: tuple[Piece, ...]
    windows: tuple[Window, ...]
    piece: NDArray[np.int64]
    """(C,) index into `pieces`."""
    start: NDArray[np.int64]
    """(C,) first byte within the piece."""
    stop: NDArray[np.int64]
    """(C,) one past the last byte."""
    window: NDArray[np.int64]
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
class _Run:
    """Bytes [start, stop) of a piece in chunks of equal size (the last may be shorter), one after the other from `begin`."""

    piece: int
    start: int
    stop: int
    window: int
    begin: float
    speed: _Speed


@dataclass(frozen=True, slots=True)
class _Speed:
    """Seconds that a chunk takes: what it costs, or longer to keep to `limit`."""

    rate: float
    chunk: float
    limit: float = float("inf")

    def seconds(self, nbytes: int) -> float:
        return max(self.chunk + nbytes / self.rate, nbytes / self.limit)


@dataclass(frozen=True, slots=True)
class _Job:
    """The question: what `plan` was asked, with positions turned into seconds."""

    track: Track
    pieces: tuple[Piece, ...]
    rates: Rates
    margin: float
    chunk_bytes: int
    ready: Floats
    deadline: Floats
    windows: tuple[Window, ...]


def plan(
    track: Track,
    pieces: Sequence[Piece],
    rates: Rates,
    mode: Mode = "auto",
    *,
    margin: float = MARGIN,
    chunk_bytes: int = CHUNK_BYTES,
) -> CopyPlan:
    """Lay `pieces` into one rank's step. Earlier deadlines go first, pieces of equal deadline in the given order.

    `margin` is the part of every window that stays free. Without windows `bubble` means `overlap`. Raises ValueError for
    sizes, positions or rates that make no sense.
    """
    job = _job(track, tuple(pieces), rates, margin, chunk_bytes)
    if mode == "blocking":
        return _blocking(job, "asked for")
    if mode == "overlap":
        return _beside(job, "asked for")
    if mode == "bubble" and job.windows:
        return _bubble(job, "asked for")
    if not job.windows:
        return _least((make(job, "the step has no idle windows") for make in (_beside, _blocking)), mode)
    idle, total = track.idle, sum(piece.nbytes for piece in job.pieces)
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


def _job(track: Track, pieces: tuple[Piece, ...], rates: Rates, margin: float, chunk_bytes: int) -> _Job:
    known = (rates.alone, rates.beside, _waiting(rates), rates.chunk, rates.opening, rates.slowdown)
    if not (all(map(isfinite, known)) and min(known[:3]) > 0 and min(known[3:]) >= 0):
        raise ValueError(f"rates must be finite and positive: {rates}")
    if not 0 <= margin < 1 or chunk_bytes < 1:
        raise ValueError(f"a margin of {margin} and chunks of {chunk_bytes} bytes make no plan")
    n = len(track.start)
    last = [n if piece.deadline is None else piece.deadline for piece in pieces]
    for piece, deadline in zip(pieces, last, strict=True):
        if piece.nbytes < 0 or not 0 <= piece.ready <= deadline <= n:
            raise ValueError(f"{piece} does not fit a list of {n} actions")
    ready = track.ready()[np.array([piece.ready for piece in pieces], dtype=np.int64)]
    due = track.deadline()[np.array(last, dtype=np.int64)]
    return _Job(track, pieces, rates, margin, chunk_bytes, ready, due, track.windows())


def _waiting(rates: Rates) -> float:
    return rates.alone if rates.waiting is None else rates.waiting


def _bubble(job: _Job, why: str) -> CopyPlan:
    """Windows alone; what does not fit is exposed."""
    runs = _in_windows(job)
    return _answer(job, "bubble", runs, 0.0, why)


def _both(job: _Job, why: str) -> CopyPlan:
    """Windows first, the rest beside compute between them."""
    runs = _in_windows(job)
    edges = [0.0, *(edge for window in job.windows for edge in (window.start, window.stop)), job.track.seconds]
    more, limit = _throttled(job, _left(job, runs), list(zip(edges[::2], edges[1::2], strict=True)))
    return _answer(job, "bubble+overlap", [*runs, *more], limit, why)


def _beside(job: _Job, why: str) -> CopyPlan:
    """All through the step, whatever runs."""
    runs, limit = _throttled(job, _left(job, []), [(0.0, job.track.seconds)])
    return _answer(job, "overlap", runs, limit, why)


def _blocking(job: _Job, why: str) -> CopyPlan:
    """While training waits."""
    return _answer(job, "blocking", [], 0.0, why)


def _in_windows(job: _Job) -> list[_Run]:
    slots = [
        _Slot(w.start + job.rates.opening, w.stop, w.seconds * (1 - job.margin) - job.rates.opening, at)
        for at, w in enumerate(job.windows)
    ]
    return _pack(job, _left(job, []), slots, _Speed(job.rates.alone, job.rates.chunk))


def _throttled(job: _Job, left: NDArray[np.int64], spans: Sequence[tuple[float, float]]) -> tuple[list[_Run], float]:
    """Copies beside compute within `spans`, at the slowest pace that leaves nothing over; and that pace, bytes per second."""
    cuts = np.unique(np.r_[job.ready[left < _sizes(job)], job.deadline[left < _sizes(job)]])
    slots = []
    for begin, end in spans:
        edges = [begin, *cuts[(cuts > begin) & (cuts < end)].tolist(), end]
        slots += [_Slot(a, b, (b - a) * (1 - job.margin), OVERLAP) for a, b in pairwise(edges) if b > a]
    nbytes, seconds = int((_sizes(job) - left).sum()), sum(slot.room for slot in slots)
    full = _Speed(job.rates.beside, job.rates.chunk)
    if not nbytes or seconds <= 0:
        return [], 0.0
    top = job.chunk_bytes / full.seconds(job.chunk_bytes)
    for pace in PACES:
        limit = pace * nbytes / seconds
        if limit >= top:
            break
        runs = _pack(job, left, slots, _Speed(job.rates.beside, job.rates.chunk, limit))
        if sum(run.stop - run.start for run in runs) == nbytes:
            return runs, limit
    return _pack(job, left, slots, full), job.rates.beside


def _pack(job: _Job, left: NDArray[np.int64], slots: Sequence[_Slot], speed: _Speed) -> list[_Run]:
    """Fill `slots` in time order, always with the piece that is due first among those that are final.

    `left` is (pieces,) bytes from the front of each piece that are planned already.
    """
    done = left.copy()
    waiting = sorted(np.flatnonzero(done < _sizes(job)).tolist(), key=lambda i: (-job.ready[i], -i))
    due: list[tuple[float, int]] = []
    runs: list[_Run] = []
    for slot in slots:
        while waiting and job.ready[waiting[-1]] <= slot.start:
            piece = waiting.pop()
            heapq.heappush(due, (float(job.deadline[piece]), piece))
        used = 0.0
        while due:
            deadline, piece = due[0]
            if deadline >= slot.stop:
                count, seconds = _fit(job, int(done[piece]), job.pieces[piece].nbytes, slot.room - used, speed)
                if count:
                    runs.append(_Run(piece, int(done[piece]), int(done[piece]) + count, slot.window, slot.start + used, speed))
                    done[piece] += count
                    used += seconds
                if done[piece] < job.pieces[piece].nbytes:
                    break  # the slot is full, but for a sliver
            heapq.heappop(due)
    return runs


def _fit(job: _Job, start: int, stop: int, room: float, speed: _Speed) -> tuple[int, float]:
    """How many bytes from `start` on fit into `room` seconds in whole chunks, and the seconds that they take."""
    whole = speed.seconds(job.chunk_bytes)
    count, tail = divmod(stop - start, job.chunk_bytes)
    fits = min(count, int(max(room, 0.0) / whole))
    nbytes, seconds = fits * job.chunk_bytes, fits * whole
    if fits == count and tail and seconds + speed.seconds(tail) <= room:
        return nbytes + tail, seconds + speed.seconds(tail)
    return nbytes, seconds


def _sizes(job: _Job) -> NDArray[np.int64]:
    return np.array([piece.nbytes for piece in job.pieces], dtype=np.int64)


def _left(job: _Job, runs: Sequence[_Run]) -> NDArray[np.int64]:
    """(pieces,) bytes from the front of each piece that `runs` copy."""
    done = np.zeros(len(job.pieces), dtype=np.int64)
    for run in runs:
        done[run.piece] = max(done[run.piece], run.stop)
    return done


def _rest(job: _Job, done: NDArray[np.int64], *, first: bool) -> list[_Run]:
    """What is copied while training waits: at the first possible moment, or at the last."""
    speed = _Speed(_waiting(job.rates), job.rates.chunk)
    when = job.ready if first else job.deadline
    clock = 0.0
    runs = []
    for piece in sorted(np.flatnonzero(done < _sizes(job)).tolist(), key=lambda i: (when[i], i)):
        start, stop = int(done[piece]), job.pieces[piece].nbytes
        clock = max(clock, float(when[piece]))
        runs.append(_Run(piece, start, stop, EXPOSED, clock, speed))
        count, tail = divmod(stop - start, job.chunk_bytes)
        clock += count * speed.seconds(job.chunk_bytes) + (speed.seconds(tail) if tail else 0.0)
    return runs


def _answer(job: _Job, taken: Taken, runs: Sequence[_Run], limit: float, why: str) -> CopyPlan:
    """The plan of these runs and of the exposed rest, as columns."""
    rest = _rest(job, _left(job, runs), first=taken == "blocking")
    piece, start, stop, window, begin, end = _chunks([*runs, *rest], job.chunk_bytes)
    size, idle = stop - start, sum(w.seconds for w in job.windows)
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
        piece[order],
        start[order],
        stop[order],
        window[order],
        begin[order],
        end[order],
        limit,
        exposed,
        overlapped,
        overlapped * job.rates.slowdown * busy,
        inside / idle if idle else 0.0,
    )


Columns = tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], NDArray[np.int64], Floats, Floats]


def _chunks(runs: Sequence[_Run], chunk_bytes: int) -> Columns:
    """(piece, start, stop, window, begin, end) of every chunk of `runs`."""
    first = np.array([run.start for run in runs], dtype=np.int64)
    last = np.array([run.stop for run in runs], dtype=np.int64)
    count = -(-(last - first) // chunk_bytes)
    of = np.repeat(np.arange(len(runs)), count)
    step = np.arange(len(of)) - np.repeat(np.cumsum(count) - count, count)
    start = first[of] + step * chunk_bytes
    stop = np.minimum(start + chunk_bytes, last[of])
    speed = np.array([(run.speed.rate, run.speed.chunk, run.speed.limit) for run in runs], dtype=np.float64).reshape(-1, 3)[of]
    seconds = np.maximum(speed[:, 1] + (stop - start) / speed[:, 0], (stop - start) / speed[:, 2])
    whole = np.array([run.speed.seconds(chunk_bytes) for run in runs], dtype=np.float64)[of]
    begin = np.array([run.begin for run in runs], dtype=np.float64)[of] + step * whole
    piece = np.array([run.piece for run in runs], dtype=np.int64)[of]
    window = np.array([run.window for run in runs], dtype=np.int64)[of]
    return piece, start, stop, window, begin, begin + seconds
