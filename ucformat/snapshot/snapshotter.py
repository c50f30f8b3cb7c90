"""The snapshot engine as a training loop uses it.

    snap = ucformat.Snapshotter(state, directory="/dev/shm/run")
    stage = snap.stage(module, index, stages, device)        # or `with snap.compute():` in a loop of one's own
    ...
    optimizer.step(); snap.take(step)                        # begins to copy what the step made

All copying of a step lies between its optimizer step and the next one, which waits for what is left. Nothing that goes
wrong here reaches the training loop, unless `on_error="raise"`: it is skipped, counted and reported.
"""

from __future__ import annotations

import time
import uuid
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ucformat.group import Group, current
from ucformat.snapshot.copying.device import DeviceCopier, copier_for, known
from ucformat.snapshot.copying.device_version import LateOutcome
from ucformat.snapshot.copying.host import POLL_S, HostCopier, Outcome
from ucformat.snapshot.copying.version import Places, Taking
from ucformat.snapshot.copyplan.plan import Mode
from ucformat.snapshot.keeper.handoff import Persist, Persistence
from ucformat.snapshot.planner import Planner
from ucformat.snapshot.report import SnapshotReport, StepReport
from ucformat.snapshot.restore import Restored, restore
from ucformat.snapshot.schedule import hooks
from ucformat.snapshot.schedule.clock import Span, StepClock, now
from ucformat.snapshot.schedule.replay import Track
from ucformat.snapshot.schedule.strategy import derive
from ucformat.snapshot.slots.slot_set import Slot, SlotSet
from ucformat.snapshot.slots.votes import VersionVotes
from ucformat.snapshot.source.revisit import Watch
from ucformat.snapshot.source.share import Share, TornError, agree
from ucformat.snapshot.trace import Trace, gaps

if TYPE_CHECKING:
    from ucformat.snapshot.schedule.timed_stage import TimedStage

CLOSE_S = 60.0  # that `close` waits for a slot for the version in hand
OnError = Literal["skip", "raise"]


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
        self.state, self.directory, self.mesh = state, directory, mesh
        self.schedule: object | None = schedule
        self.every, self.on_error, self.slot_count = every, on_error, slots
        self.group: Group = current(process_group)
        self.enabled = True
        """Set to False, on all ranks, to go without snapshots and what comes with them until set to True again."""
        self.clock = StepClock(self._opened, self._closed)
        self.trace_log = Trace(self.group.rank)
        self._report = SnapshotReport()
        self._copier: HostCopier | DeviceCopier | None = None
        self._slots: SlotSet | None = None
        self._share: Share | None = None
        self._watch: Watch | None = None
        self._taking: Taking | None = None
        self._late: deque[tuple[Taking, Outcome]] = deque()
        """Versions past their deadline of which is not known yet what became of them, or not counted."""
        self._planner = Planner(mode, self.group, self._report)
        self._peers: VersionVotes | None = None
        self._places: Places | None = None
        self._run, self._last = "", -1
        self._patient_until = 0.0  # on the monotonic clock: until then, a version waits for a slot
        self.on_copied: Callable[[int, int, int], None] | None = None
        """Called after every chunk with step, bytes copied so far and bytes in all, by the thread that copies."""
        self._persist, self._hash_every = persist, hash_every
        self._persistence: Persistence | None = None
        # none of this is for torch.compile to trace
        self._uncompiled_clock = hooks.UncompiledClock.of(self.clock)
        self._take, self._deadline = torch.compiler.disable(self._take_now), torch.compiler.disable(self._meet_deadline)
        self._hooks = hooks.before_update(hooks.optimizers(state), self._meet_deadline)

    # -- what a loop calls ---------------------------------------------------------------------------------------

    def stage(self, module: nn.Module, stage_index: int, num_stages: int, device: torch.device, **more: Any) -> TimedStage:
        """A `torch.distributed.pipelining.PipelineStage` whose actions the engine knows of."""
        from ucformat.snapshot.schedule.timed_stage import timed_stage

        return timed_stage(self.clock, module, stage_index, num_stages, device, **more)

    def compute(self, name: str = "compute") -> AbstractContextManager[None]:
        """Wrap the compute of a loop of one's own: copies then run in the gaps between."""
        return hooks.computing(self._uncompiled_clock, name)

    def take(self, step: int) -> None:
        """Begin a snapshot of the state as it is now: call it right after the optimizer step. Every rank calls it."""
        self._take(step)

    def _take_now(self, step: int) -> None:
        began = now()
        self._meet_deadline()
        if not self.enabled:
            return
        report = StepReport(step)
        self.trace_log.begin()
        try:
            self._begin(report)
        except Exception as error:
            self._lost(step)
            self._fail(report, error)
        finally:
            report.boundary_ms = (now() - began) * 1e3
            self._report.steps.append(report)
            self.trace_log.add("wait", [Span("boundary", began, now())])
            self.clock.begin()

    def deadline(self) -> None:
        """The state is about to change: the optimizers' hooks call it. Waits for what is left of the copies.

        Of copies from a device it does not wait itself: it makes the device's stream wait.
        """
        self._deadline()

    def _meet_deadline(self) -> None:
        self._collect(wait=self.clock.running and self._planner.due)
        if not self.clock.running:
            return
        track, taking = self._end_step(), self._taking
        self._taking = None
        if taking is None:
            return
        assert self._copier is not None
        taking.names = tuple(span.name for span in self.clock.spans)
        taking.seal()
        began = now()
        outcome = self._copier.finish()
        taking.report.step_ms = track.seconds * 1e3
        self._late.append((taking, outcome))
        try:
            if not isinstance(outcome, LateOutcome) and (outcome.refused or outcome.failure is not None):
                self._lost(taking.report.step)
            self._collect()
        finally:
            if not isinstance(outcome, LateOutcome):
                taking.report.exposed_ms = (now() - began) * 1e3
                self.trace_log.add("wait", [Span("deadline", began, now())])

    def wait(self) -> None:
        """Wait until it is known of every version past its deadline what became of it: for a device, that comes later."""
        self._collect(wait=True)

    def restore(self) -> Restored | None:
        """Restore the state in place from the newest version, in memory or storage; None when nothing is there.

        Every rank calls it, before the first `take`. What was taken after that version is abandoned, and forgotten here.
        Raises what loading raises when a version does not fit the state, or when all are damaged, and SnapshotInUseError while
        another job fills the slots: the same class on every rank. Which version was passed over, and whether the one that was
        taken could be verified, is said in `Restored` and logged.
        """
        if self._share is not None:
            raise RuntimeError("restore before the first snapshot is taken: slots are in use")
        self._run = self.group.broadcast(uuid.uuid4().hex)
        return restore(self.state, self.directory, self._persist.url if self._persist else None, self._run, self.group)

    def report(self) -> SnapshotReport:
        """What happened so far."""
        return self._report

    def trace(self, path: str) -> None:
        """Write the last steps as a Chrome trace."""
        self.trace_log.write(path)

    def close(self, *, remove: bool = False) -> None:
        """Finish the version in hand and let go; slots stay (they are what a restart loads) unless `remove`.

        Waits until the version in hand has a slot, for the other ranks and the keeper, but no longer than a minute; and
        until the keeper has persisted what it was given, for which `Persist.timeout_s` is the limit.
        """
        self._patient_until = now() + CLOSE_S
        try:
            self.deadline()
            self.wait()
        finally:
            for handle in self._hooks:
                handle.remove()
            if self._copier is not None:
                self._copier.stop()
            if self._persistence is not None:
                self._persistence.close()
            if self._peers is not None:
                self._peers.close()
            if self._slots is not None:
                self._slots.close(remove=remove)

    # -- a snapshot ----------------------------------------------------------------------------------------------

    def _begin(self, report: StepReport) -> None:
        if self._share is None:
            self._set_up()
        share, slots, places = self._share, self._slots, self._places
        assert share is not None
        assert slots is not None
        assert places is not None
        if report.step % self.every:
            report.skipped = f"every {self.every} steps"
            return
        if report.step <= self._last:
            raise ValueError(f"step {report.step} after step {self._last}: steps ascend; to go back, make a new Snapshotter")
        self._last = report.step
        if self._persistence is not None:
            self._persistence.poll()
        assert self._watch is not None
        boundary = self._watch.look(self.state)
        if self._copier is None:
            self._copier = copier_for(boundary.views)
            if isinstance(self._copier, DeviceCopier):
                slots.pin()
        taking = Taking(report, boundary, places, self._free_slot, self._copier)
        try:
            taking.begin()
            plan = self._planner.plan(taking.sizes)
        except Exception:
            self._let_go(taking)
            raise
        report.mode, report.predicted_ms, report.window_use = plan.taken, plan.exposed * 1e3, plan.window_use
        report.nbytes = share.nbytes
        self._taking = taking
        taking.copy(plan, partial(self._store, taking), partial(self._ended, taking), self._teller(taking))

    def _teller(self, taking: Taking) -> Callable[[int], None] | None:
        """What tells `on_copied` of a version's progress."""
        tell, step = self.on_copied, taking.report.step
        if tell is None:
            return None
        total = int(taking.sizes.sum())
        return lambda copied: tell(step, copied, total)

    def _store(self, taking: Taking) -> None:
        """All is in place: the version is valid from now on. Any thread."""
        share, slots = self._share, self._slots
        assert share is not None
        assert slots is not None
        assert taking.slot is not None
        if changed := taking.changed():
            raise TornError(share.keys[i] for i in changed)
        slots.commit(taking.slot, taking.report.step, taking.boundary.tree, share.aliases, share.mesh, share.coords)
        self._tell(taking.report.step, held=True)

    def _ended(self, taking: Taking, outcome: LateOutcome) -> None:
        """A device has copied a version, or never will. Another thread."""
        if outcome.quiet:
            self._let_go(taking)
        if not outcome.finished:
            self._tell(taking.report.step, held=False)

    def _let_go(self, taking: Taking) -> None:
        """Nothing is copied into a version's slot any more."""
        if taking.slot is not None and isinstance(self._copier, DeviceCopier):
            assert self._slots is not None
            self._slots.release(taking.slot)

    def _collect(self, *, wait: bool = False) -> None:
        """Count the versions of which is known what became of them; `wait` for all."""
        while self._late and known(self._late[0][1], wait=wait):
            taking, outcome = self._late.popleft()
            if isinstance(outcome, LateOutcome):
                self._measured(taking, outcome)
            self.trace_log.add("copy", outcome.spans)
            try:
                self._commit(taking, outcome)
            except Exception as error:
                self._fail(taking.report, error)

    def _commit(self, taking: Taking, outcome: Outcome) -> None:
        report = taking.report
        report.windowed, report.beside, report.exposed = outcome.windowed, outcome.beside, outcome.exposed
        if outcome.failure is not None:
            raise outcome.failure
        if outcome.refused:
            report.skipped = "no free slot: others are read, or still needed until all ranks have the next version"
            if self._peers is not None and self._peers.trouble:
                report.skipped += f" ({self._peers.trouble})"
            self._report.skipped += 1
            return
        self._report.taken += 1
        # a device that is behind the host does not see when the host found a slot
        self._planner.learn(outcome, 0.0 if isinstance(outcome, LateOutcome) else taking.gate)
        if self._persistence is not None and taking.slot is not None:
            self._persistence.committed(taking.slot, report.step, self._patient_until)

    def _free_slot(self) -> Slot | None:
        """A slot to fill, as soon as there is one; `close` waits for it."""
        assert self._slots is not None
        assert self._peers is not None
        while True:
            for fate in self._peers.hear():
                self._slots.settle(fate.step, whole=fate.whole)
            slot = self._slots.begin()
            if slot is not None and isinstance(self._copier, DeviceCopier):
                self._slots.hold(slot)  # until the device is done with it, which may be after the next version was begun
            if slot is not None or now() >= self._patient_until:
                return slot
            if self._persistence is not None:
                self._persistence.poll()
            time.sleep(POLL_S)

    def _tell(self, step: int, *, held: bool) -> None:
        """Every rank tells the others what became of each version."""
        if self._peers is not None:
            self._peers.tell(step, held=held)

    def _lost(self, step: int) -> None:
        """Tell that this rank will never hold a version, after what is told of earlier ones."""
        for _, outcome in self._late:
            known(outcome, wait=True)
        self._tell(step, held=False)

    def _fail(self, report: StepReport, error: Exception) -> None:
        report.skipped = f"{type(error).__name__}: {error}"
        self._report.failed += 1
        self._report.failures.append(f"step {report.step}: {report.skipped}")
        if self.on_error == "raise":
            raise error

    def _set_up(self) -> None:
        """Agree on the shares and make the slots; every rank does it at its first snapshot."""
        share = agree(self.state, self.group)
        run = self._run = self._run or self.group.broadcast(uuid.uuid4().hex)
        slots: SlotSet | None = None
        with self.group.together("making room for snapshots"):
            self._planner.strategy = derive(self.mesh, self.schedule)
            slots = SlotSet.create(self.directory, self.group.rank, self.group.size, list(share.keys), self.slot_count, run=run)
        assert slots is not None
        slots.agree(self.group.all_gather(slots.adopted))
        if self._persist is not None or self._hash_every:
            self._persistence = Persistence(slots, self._report, run, self._persist, hash_every=self._hash_every)
        self._places = Places.of(share, slots)
        self._peers = VersionVotes(self.group)
        self._slots, self._share, self._watch = slots, share, Watch(share, self.group)
        self._report.strategy, self._report.slots = str(self._planner.strategy), self.slot_count
        self._report.slot_bytes, self._report.remarks = share.nbytes, slots.remarks

    # -- the step ------------------------------------------------------------------------------------------------

    def _end_step(self) -> Track:
        """Close the step's record. What the host saw of it counts unless a device tells later."""
        track = self.clock.end()
        if not isinstance(self._copier, DeviceCopier):
            self._note(self.clock.spans, self.clock.began, track)
        self._planner.ended()
        return track

    def _measured(self, taking: Taking, outcome: LateOutcome) -> None:
        """A step as the device ran it."""
        track, report = outcome.track, taking.report
        if track is None:
            return
        starts, stops = (outcome.began + track.start).tolist(), (outcome.began + track.stop).tolist()
        self._note([Span(*span) for span in zip(taking.names, starts, stops, strict=False)], outcome.began, track)
        report.exposed_ms, report.step_ms = outcome.exposed_s * 1e3, track.seconds * 1e3
        due = outcome.began + track.seconds
        self.trace_log.add("wait", [Span("deadline", due, due + outcome.exposed_s)])

    def _note(self, spans: list[Span], began: float, track: Track) -> None:
        self.trace_log.add("compute", spans)
        self.trace_log.add("idle", gaps(spans, began, began + track.seconds))
        self._planner.measured(tuple(span.name for span in spans), track)

    def _opened(self, position: int) -> None:
        if self._copier is not None:
            self._copier.opened(position)

    def _closed(self) -> None:
        if self._copier is not None:
            self._copier.closed()
