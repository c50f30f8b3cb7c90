"""The snapshot engine as a training loop uses it.

    snap = ucformat.Snapshotter(state, directory="/dev/shm/run")
    stage = snap.stage(module, index, stages, device)        # or `with snap.compute():` in a loop of one's own
    ...
    optimizer.step(); snap.take(step)                        # begins to copy what the step made

All copying of a step lies between its optimizer step and the next one, which waits for what is left. Nothing that goes
wrong here reaches the training loop, unless `on_error="raise"`: it is skipped, counted and reported.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ucformat.group import Group, current
from ucformat.image import Part
from ucformat.reshard.fill import TensorFill
from ucformat.snapshot import bubbles, hooks
from ucformat.snapshot.bubbles import CopyPlan, Mode, Rates
from ucformat.snapshot.clock import Span, StepClock, now
from ucformat.snapshot.copier import HostCopier, Outcome, Work
from ucformat.snapshot.drift import Drift
from ucformat.snapshot.layout import Strategy, derive
from ucformat.snapshot.peers import Peers
from ucformat.snapshot.persistence import Persist, Persistence
from ucformat.snapshot.replay import Times, Track, replay
from ucformat.snapshot.report import Report, StepReport
from ucformat.snapshot.restore import Restored, restore
from ucformat.snapshot.slots import Slot, SlotSet
from ucformat.snapshot.sources import Boundary, Share, agree, look
from ucformat.snapshot.trace import Trace, gaps
from ucformat.storage import Bytes

WARM_UP = 3  # steps that are measured before the first plan: the first one sets up connections and shapes
RATE_DRIFT = 0.25  # of the planned copy rate: more asks for a new plan
WAITING_DRIFT = 0.15  # the same while training waits, of which the prediction is made
RATE_BYTES = 16 << 20  # in less time than these take, the clock and the scheduler measure themselves
GATE_DRIFT = 0.2  # of all idle time: so much more or less of waiting for a slot asks for a new plan
OPENING_S = 0.0002  # from the opening of a window to the first byte: a thread has to wake up
OnError = Literal["skip", "raise"]


@dataclass(slots=True)
class _Taking:
    """A version that is being copied."""

    report: StepReport
    boundary: Boundary
    chosen: list[int]
    """Pieces that the plan copies, in its order."""
    began: float
    """When the step began, on the monotonic clock."""
    slot: Slot | None = None
    """Where it goes; None until a slot is free."""
    gate: float = 0.0
    """Seconds into the step until there was a slot."""
    staged: dict[int, Bytes] = field(default_factory=dict)
    """What had to be copied at the boundary and has no place yet."""


class Snapshotter:
    """Snapshots of `state`, taken while it trains. One on every rank, with equal arguments.

    `state` is what `ucformat.save` takes. `directory` is on tmpfs, shared by the ranks of a host; `slots` (2 or 3) times the
    rank's share of the state is taken there at the first snapshot. `schedule` is a torch pipelining schedule object (or a
    `snapshot.schedule.Schedule`), `mesh` the device mesh: both only inform plan and report. `mode` is how to copy, see
    `bubbles.Mode`; before a plan can be made, copies run beside compute. Steps that are multiples of `every` are taken.

    `persist` sends some of them to storage, in a process of its own, as ordinary checkpoints. The same process computes block
    checksums of steps that are multiples of `hash_every` (0: of persisted ones alone); what has none is not verified when read.
    """

    def __init__(
        self,
        state: MutableMapping[str, Any],
        *,
        directory: str,
        schedule: object | None = None,
        mesh: DeviceMesh | None = None,
        slots: int = 2,
        mode: Mode = "auto",
        every: int = 1,
        persist: Persist | None = None,
        hash_every: int = 1,
        on_error: OnError = "skip",
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if slots < 2 or every < 1:
            raise ValueError("an engine needs two slots at least, and takes every first step or fewer")
        self.state, self.directory, self.mesh, self.mode = state, directory, mesh, mode
        self.schedule: object | None = schedule
        self.every, self.on_error, self.slot_count = every, on_error, slots
        self.group: Group = current(process_group)
        self.enabled = True
        """Set to False, on all ranks, to go without snapshots and what comes with them until set to True again."""
        self.clock = StepClock(self._opened, self._closed)
        self.trace_log = Trace(self.group.rank)
        self._report = Report()
        self._copier: HostCopier | None = None
        self._slots: SlotSet | None = None
        self._share: Share | None = None
        self._strategy: Strategy | None = None
        self._taking: _Taking | None = None
        self._drift: Drift | None = None
        self._tracks: list[tuple[tuple[str, ...], Track]] = []
        self._rates = Rates(alone=4e9, beside=2e9)  # a guess, until the first copies tell
        self._current: tuple[tuple[bool, ...], CopyPlan] | None = None
        self._peers: Peers | None = None
        self._places: dict[int, list[Bytes]] = {}
        self._newest: int | None = None
        self._alone: float | None = None  # bytes per second, measured
        self._waiting: float | None = None
        self._gate = self._typical_gate = 0.0
        self.on_copied: Callable[[int, int, int], None] | None = None
        """Called after every chunk with step, bytes copied so far and bytes in all, by the thread that copies."""
        self._persist, self._hash_every = persist, hash_every
        self._persistence: Persistence | None = None
        self._restored: Restored | None = None
        self._hooks = hooks.before_update(hooks.optimizers(state), self.deadline)

    # -- what a loop calls ---------------------------------------------------------------------------------------

    def stage(self, module: nn.Module, stage_index: int, num_stages: int, device: torch.device, **more: Any) -> hooks.TimedStage:
        """A `torch.distributed.pipelining.PipelineStage` whose actions the engine knows of."""
        return hooks.timed_stage(self.clock, module, stage_index, num_stages, device, **more)

    def compute(self, name: str = "compute") -> AbstractContextManager[None]:
        """Wrap the compute of a loop of one's own: copies then run in the gaps between."""
        return hooks.computing(self.clock, name)

    def take(self, step: int) -> None:
        """Begin a snapshot of the state as it is now: call it right after the optimizer step. Every rank calls it."""
        began = now()
        self.deadline()
        if not self.enabled:
            return
        report = StepReport(step)
        self.trace_log.begin()
        try:
            self._begin(report, began)
        except Exception as error:
            self._fail(report, error)
        finally:
            report.boundary_ms = (now() - began) * 1e3
            self._report.steps.append(report)
            self.trace_log.add("wait", [Span("boundary", began, now())])
            self.clock.begin()

    def deadline(self) -> None:
        """Wait for what is left of the copies: the state is about to change. The optimizers' hooks call it."""
        if not self.clock.running:
            return
        track = self._end_step()
        taking, self._taking = self._taking, None
        if taking is None:
            return
        assert self._copier is not None
        began = now()
        outcome = self._copier.finish()
        try:
            self._commit(taking, outcome)
        except Exception as error:
            self._fail(taking.report, error)
        taking.report.exposed_ms = (now() - began) * 1e3
        taking.report.step_ms = track.seconds * 1e3
        self.trace_log.add("copy", outcome.spans)
        self.trace_log.add("wait", [Span("deadline", began, now())])

    def restore(self) -> Restored | None:
        """Restore the state in place from the newest version, in memory or storage; None when there is none.

        Every rank calls it, before the first `take`. What was taken after that version and is abandoned will be forgotten.
        Raises what loading raises, when no source can be used.
        """
        if self._share is not None:
            raise RuntimeError("restore before the first snapshot is taken: slots are in use")
        self._restored = restore(self.state, self.directory, self._persist.url if self._persist else None, self.group)
        return self._restored

    def report(self) -> Report:
        """What happened so far."""
        return self._report

    def trace(self, path: str) -> None:
        """Write the last steps as a Chrome trace."""
        self.trace_log.write(path)

    def close(self, *, remove: bool = False) -> None:
        """Finish the version in hand and let go; slots stay (they are what a restart loads) unless `remove`."""
        self.deadline()
        for handle in self._hooks:
            handle.remove()
        if self._copier is not None:
            self._copier.stop()
        if self._persistence is not None:
            self._persistence.close()
        if self._slots is not None:
            self._slots.close(remove=remove)

    # -- a snapshot ----------------------------------------------------------------------------------------------

    def _begin(self, report: StepReport, began: float) -> None:
        if self._share is None:
            self._set_up()
        share, slots, copier = self._share, self._slots, self._copier
        assert share is not None
        assert slots is not None
        assert copier is not None
        if report.step % self.every:
            report.skipped = f"every {self.every} steps"
            return
        if self._persistence is not None:
            self._persistence.poll()
        boundary = look(self.state, share, self.group)
        taking = _Taking(report, boundary, np.flatnonzero(boundary.stable).tolist(), now())
        self._open(taking)
        self._copy_at_boundary(taking, fill := TensorFill(boundary.views, [spec.kind for spec, _ in share.keys[: share.pieces]]))
        plan = self._plan(share, boundary)
        report.mode, report.predicted_ms, report.window_use = plan.taken, plan.exposed * 1e3, plan.window_use
        report.nbytes = share.nbytes
        self._taking = taking
        copier.begin(
            Work(
                plan,
                _renumber(fill, taking.chosen),
                partial(self._open, taking),
                partial(self._store, taking),
                self._teller(taking),
            )
        )

    def _teller(self, taking: _Taking) -> Callable[[int], None] | None:
        """What tells `on_copied` of a version's progress."""
        tell, step = self.on_copied, taking.report.step
        if tell is None:
            return None
        total = sum(len(self._places[min(self._places)][i]) for i in taking.chosen)
        return lambda copied: tell(step, copied, total)

    def _open(self, taking: _Taking) -> list[Bytes] | None:
        """The places of the pieces that are copied by plan, once there is a slot. Any thread."""
        assert self._slots is not None
        if taking.slot is None:
            taking.slot = self._slots.begin(self._complete(taking.report.step))
            taking.gate = now() - taking.began
        if taking.slot is None:
            return None
        out = self._places[taking.slot.index]
        for i, data in taking.staged.items():
            out[i][:] = data
        taking.staged = {}
        return [out[i] for i in taking.chosen]

    def _copy_at_boundary(self, taking: _Taking, fill: TensorFill) -> None:
        """Copy what may change before the next optimizer step, aside as long as there is no slot."""
        for i, stable in enumerate(taking.boundary.stable):
            if stable:
                continue
            length = len(self._places[min(self._places)][i])
            if taking.slot is None:
                taking.staged[i] = np.empty(length, dtype=np.uint8)
            place = taking.staged[i] if taking.slot is None else self._places[taking.slot.index][i]
            fill([Part(i, 0, length, place)])

    def _store(self, taking: _Taking) -> None:
        """All is in place: the version is valid from now on. Any thread."""
        share, slots = self._share, self._slots
        assert share is not None
        assert slots is not None
        assert taking.slot is not None
        slots.commit(taking.slot, taking.report.step, taking.boundary.tree, share.aliases, share.mesh, share.coords)
        self._newest = taking.report.step

    def _commit(self, taking: _Taking, outcome: Outcome) -> None:
        report = taking.report
        report.windowed, report.beside, report.exposed = outcome.windowed, outcome.beside, outcome.exposed
        if outcome.failure is not None:
            raise outcome.failure
        if outcome.refused:
            report.skipped = "no free slot: others are read, or still needed until all ranks have the next version"
            self._report.skipped += 1
            return
        self._report.taken += 1
        self._learn(outcome, taking.gate)
        if self._persistence is not None and taking.slot is not None:
            self._persistence.committed(taking.slot, report.step)

    def _complete(self, step: int) -> int | None:
        """The newest step that all ranks are known to hold, see `SlotSet.begin`."""
        if self.group.size == 1 or self._newest is None:
            return None
        assert self._peers is not None
        assert self._slots is not None
        if self._peers.all_here():
            return self._peers.complete()
        # Ranks on other hosts can't be seen. They have passed the optimizer step before this one, since this step's
        # collectives ran, so they hold what is older than that: two slots then skip every other step.
        return max((held for held in self._slots.steps if held < step - 1), default=None)

    def _fail(self, report: StepReport, error: Exception) -> None:
        report.skipped = f"{type(error).__name__}: {error}"
        self._report.failed += 1
        self._report.failures.append(f"step {report.step}: {report.skipped}")
        if self.on_error == "raise":
            raise error

    def _set_up(self) -> None:
        """Agree on the shares and make the slots; every rank does it at its first snapshot."""
        share = agree(self.state, self.group)
        run = self.group.broadcast(uuid.uuid4().hex)
        slots: SlotSet | None = None
        with self.group.together("making room for snapshots"):
            self._strategy = derive(self.mesh, self.schedule)
            slots = SlotSet.create(self.directory, self.group.rank, self.group.size, list(share.keys), self.slot_count, run=run)
        assert slots is not None
        slots.pin()
        if self._restored is not None:
            slots.forget(self._restored.step)
        if self._persist is not None or self._hash_every:
            self._persistence = Persistence(slots, self._report, run, self._persist, hash_every=self._hash_every)
        self._places = {
            slot.index: [slot.tensor(i).reshape(-1).view(torch.uint8).numpy() for i in range(share.pieces)]
            for slot in slots.slots
        }
        self._peers = Peers(self.directory, self.group.size, max(self._places) + 1)
        self._slots, self._share, self._copier = slots, share, HostCopier()
        self._report.strategy, self._report.slots = str(self._strategy), self.slot_count
        self._report.slot_bytes = share.nbytes

    # -- planning ------------------------------------------------------------------------------------------------

    def _plan(self, share: Share, boundary: Boundary) -> CopyPlan:
        """The plan in force, for the pieces that are copied within the step. Made anew only when something changed."""
        if self._current is not None and self._current[0] == boundary.stable:
            return self._current[1]
        pieces = [
            bubbles.Piece(box.volume * spec.kind.itemsize)
            for (spec, box), stable in zip(share.keys[: share.pieces], boundary.stable, strict=True)
            if stable
        ]
        if self._drift is None:
            return bubbles.plan(Track.whole(self._typical_seconds()), pieces, self._rates, "overlap")
        plan = bubbles.plan(_after(self._drift.planned, self._gate), pieces, self._rates, self.mode)
        self._current = boundary.stable, plan
        self._report.plan = f"{plan.taken}: {plan.reason}"
        return plan

    def _typical_seconds(self) -> float:
        return self._tracks[-1][1].seconds if self._tracks else 0.1

    def _end_step(self) -> Track:
        """Close the step's record, and make or renew the plan when it is time."""
        track = self.clock.end()
        names = tuple(span.name for span in self.clock.spans)
        self.trace_log.add("compute", self.clock.spans)
        self.trace_log.add("idle", gaps(self.clock.spans, self.clock.began, self.clock.began + track.seconds))
        if self._drift is None:
            self._tracks.append((names, track))
            if len(self._tracks) > WARM_UP:
                self._first_plan()
        elif len(track.start) == len(self._drift.planned.start) and self._drift.observe(track):
            self._drift.rebase(self._drift.typical())
            self._replan()
        return track

    def _first_plan(self) -> None:
        """Windows from the schedule replayed with all ranks' measured times, or as this rank measured them itself."""
        names, last = self._tracks[-1]
        like = [track for found, track in self._tracks[1:] if found == names]
        drift = Drift(last, steps=len(like))
        for track in like:
            drift.observe(track)
        self._drift = Drift(self._replayed(names, like) or drift.typical())

    def _replayed(self, names: tuple[str, ...], tracks: list[Track]) -> Track | None:
        """The rank's step as the schedule says; None when the loop does not run the schedule as it is written."""
        strategy = self._strategy
        own: Times | None = None
        if strategy is not None and strategy.schedule is not None:
            actions = strategy.schedule.ranks[strategy.rank]
            if tuple(map(str, actions)) == names:
                own = Times.measured(strategy.schedule, strategy.rank, np.stack([t.stop - t.start for t in tracks]))
        known = self.group.all_gather(own)
        if strategy is None or strategy.schedule is None or any(times is None for times in known):
            return None
        united = Times.united(times for times in known if times is not None)
        return _as_run(replay(strategy.schedule, united).tracks[strategy.rank], tracks)

    def _learn(self, outcome: Outcome, gate: float) -> None:
        """What was just measured of rates, and of waiting for a slot, smoothed; a plan that is off is made anew."""
        self._typical_gate += 0.2 * (gate - self._typical_gate)
        if self._drift is not None and abs(self._typical_gate - self._gate) > GATE_DRIFT * self._drift.planned.idle:
            self._gate = self._typical_gate
            self._replan()
        self._alone = _smoothed(self._alone, outcome.nbytes - outcome.exposed, outcome.busy_s)
        self._waiting = _smoothed(self._waiting, outcome.exposed, outcome.exposed_s)
        alone = self._alone or self._waiting or self._rates.alone
        waiting = self._waiting or alone
        known = self._rates.waiting or self._rates.alone
        if abs(alone / self._rates.alone - 1) > RATE_DRIFT or abs(waiting / known - 1) > WAITING_DRIFT:
            self._rates = Rates(alone=alone, beside=alone / 2, opening=OPENING_S, waiting=waiting)
            self._replan()

    def _replan(self) -> None:
        if self._current is not None:
            self._current = None
            self._report.replans += 1

    # -- the gate ------------------------------------------------------------------------------------------------

    def _opened(self, position: int) -> None:
        if self._copier is not None:
            self._copier.opened(position)

    def _closed(self) -> None:
        if self._copier is not None:
            self._copier.closed()


def _bytes(tensor: torch.Tensor) -> Bytes:
    """A contiguous tensor's memory."""
    return tensor.reshape(-1).view(torch.uint8).numpy()


def _smoothed(rate: float | None, nbytes: int, seconds: float) -> float | None:
    """A rate in bytes per second, with the newest measurement in it."""
    if nbytes < RATE_BYTES or seconds <= 0:
        return rate
    return nbytes / seconds if rate is None else 0.85 * rate + 0.15 * nbytes / seconds


def _after(track: Track, seconds: float) -> Track:
    """What is left of a step when its first `seconds` are over."""
    seconds = min(seconds, track.seconds / 2)  # a plan needs a step to lie in
    return Track(np.maximum(track.start - seconds, 0.0), np.maximum(track.stop - seconds, 0.0), track.seconds - seconds)


def _as_run(planned: Track, measured: list[Track]) -> Track:
    """`planned` as this loop runs it: a rank that does not wait for the others before its optimizer idles after it instead."""
    rest = float(np.median([track.seconds - track.stop[-1] for track in measured]))
    late = max(0.0, planned.seconds - float(planned.stop[-1]) - rest)
    return Track(planned.start + late, planned.stop + late, planned.seconds)


def _renumber(fill: TensorFill, chosen: list[int]) -> Any:
    """`fill` for a plan whose piece i is `chosen[i]`."""

    def renumbered(parts: Any) -> None:
        fill([Part(chosen[part.piece], part.start, part.stop, part.out) for part in parts])

    return renumbered
