"""The snapshot engine as a training loop uses it.

    snap = ucformat.Snapshotter(state, directory="/dev/shm/run")
    stage = snap.stage(module, index, stages, device)        # or `with snap.compute():` in a loop of one's own
    ...
    optimizer.step(); snap.take(step)                        # begins to copy what the step made

All copying of a step lies between its optimizer step and the next one, which waits for what is left. Once set up, nothing
that goes wrong here reaches the training loop, unless `on_error="raise"`: it is skipped, counted, reported and logged.
"""

from __future__ import annotations

import uuid
from collections import deque
from collections.abc import Callable, MutableMapping
from contextlib import AbstractContextManager, ExitStack
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh

from ucformat.group import Group, current
from ucformat.snapshot.cadence import Cadence, Meetings
from ucformat.snapshot.copying.device import DeviceCopier, copier_for, known
from ucformat.snapshot.copying.device_version import LateOutcome
from ucformat.snapshot.copying.host import HostCopier, Outcome
from ucformat.snapshot.copying.version import Taking
from ucformat.snapshot.copyplan.plan import Mode
from ucformat.snapshot.keeper.handoff import Persist, Persistence
from ucformat.snapshot.planner import Planner
from ucformat.snapshot.protect.setup import Protection
from ucformat.snapshot.recovery.hosts import ranks_here
from ucformat.snapshot.report import SnapshotReport, StepReport, Warnings
from ucformat.snapshot.restore import Restored, restore
from ucformat.snapshot.room import Room
from ucformat.snapshot.schedule import hooks
from ucformat.snapshot.schedule.clock import Span, StepClock, now
from ucformat.snapshot.schedule.strategy import derive
from ucformat.snapshot.schedule.uncompiled import Uncompiled
from ucformat.snapshot.slots.slot_set import SlotSet
from ucformat.snapshot.source.share import Boundary, MovedError, Share
from ucformat.snapshot.timeline import Timeline
from ucformat.snapshot.trace import Trace

if TYPE_CHECKING:
    from ucformat.snapshot.schedule.timed_stage import TimedStage

CLOSE_S = 60.0  # that `close` waits for a slot for the version in hand
SERVE_S = 10.0  # as long where versions are protected
TELL_S = 2.0  # that `close` waits to hear from the other ranks of the last version
OnError = Literal["skip", "raise"]


class Snapshotter:
    """Snapshots of `state`, taken while it trains. One on every rank, with equal arguments.

    `state` is what `ucformat.save` takes. `directory` is on tmpfs, shared by the ranks of a host; `slots` times the rank's share
    of the state is taken there at the first snapshot (3 if storage is slow). `schedule` is a torch pipelining schedule (or a
    `snapshot.schedule.Schedule`), `mesh` the device mesh: both only inform plan and report. `mode` is how to copy, see
    `copyplan.plan.Mode`; before a plan can be made, copies run beside compute. Of the steps that `take` is called with, the
    first one at or after each multiple of `every` is taken. Use it as a context manager, or call `close`.

    `persist` sends some of them to storage, in a process of its own, as ordinary checkpoints. The same process computes block
    checksums, of the first step taken at or after each multiple of `hash_every` (0: of persisted ones alone); a version that
    has none is not verified when it is read.
    `protect` (`none`, `auto`, `mirror`, `xor`, `xor:<members>`) keeps parity of every version on other hosts; `domain` names what
    is lost together, by default a host. `interface` is what other hosts reach this one at, by default that towards the master.
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
        interface: str | None = None,
        protect: str = "none",
        domain: str | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        self._protection = Protection(protect, directory, domain, interface)
        if slots < 2 or every < 1:
            raise ValueError(f"slots ({slots}) must be at least 2 and every ({every}) at least 1")
        if persist is not None and persist.keep_every is not None and persist.every % every:
            raise ValueError(
                f"with keep_every, Persist.every ({persist.every}) must be a multiple of every ({every}): steps beside its "
                "multiples would be persisted, and keep_every would keep few of them or none"
            )
        self.state, self.directory, self.mesh = state, directory, mesh
        self.schedule: object | None = schedule
        self.every, self.on_error, self.slot_count = every, on_error, slots
        self.group: Group = current(process_group)
        self.interface, self.enabled = interface, True
        """Set to False, on all ranks, to go without snapshots and what comes with them until set to True again."""
        self.clock = StepClock()
        self.trace_log = Trace(self.group.rank)
        self._report = SnapshotReport()
        self._copier: HostCopier | DeviceCopier | None = None
        self._room: Room | None = None
        self._taking: Taking | None = None
        self._late: deque[tuple[Taking, Outcome]] = deque()
        """Versions past their deadline of which is not known yet what became of them, or not counted."""
        self._planner = Planner(mode, self.group, self._report)
        self._timeline = Timeline(self.clock, self.trace_log, self._planner)
        self._run = ""
        self._cadence = Cadence(every, persist.every if persist else None, hash_every)
        self._meetings = Meetings()
        self._was_set_up = False
        self._warnings = Warnings(self.group.rank)
        self.on_copied: Callable[[int, int, int], None] | None = None
        """Called after every chunk with step, bytes copied so far and bytes in all, by the thread that copies."""
        self._persist, self._hash_every = persist, hash_every
        # none of this is for torch.compile to trace
        self._uncompiled_clock = hooks.UncompiledClock.of(self.clock)
        self._take, self._deadline = Uncompiled(self._take_now), Uncompiled(self._meet_deadline)
        self._hooks = hooks.before_update(hooks.optimizers(state), self._meet_deadline)

    def __enter__(self) -> Snapshotter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # -- what a loop calls ---------------------------------------------------------------------------------------

    def stage(self, module: nn.Module, stage_index: int, num_stages: int, device: torch.device, **more: Any) -> TimedStage:
        """A `torch.distributed.pipelining.PipelineStage` whose actions the engine knows of."""
        from ucformat.snapshot.schedule.timed_stage import timed_stage

        return timed_stage(self.clock, module, stage_index, num_stages, device, **more)

    def compute(self, name: str = "compute") -> AbstractContextManager[None]:
        """Wrap the compute of a loop of one's own: copies then run in the gaps between."""
        return hooks.computing(self._uncompiled_clock, name)

    def take(self, step: int) -> None:
        """Begin a snapshot of the state as it is now: call it right after the optimizer step. Every rank calls it.

        The first call makes the slots. What fails then is undone as a whole and raised, the same class on every rank, and the
        next call tries again: SnapshotMemoryError, SnapshotInUseError, StorageError, ValueConflictError, UnrepresentableError,
        RankFailedError. Later failures are skipped, counted and logged at WARNING, the first of each kind (see `on_error`).

        Until the next optimizer step, parameters and optimizer states must not change unless `deadline()` is called before: a
        version that they changed in is withdrawn, and counts as failed. That is seen by autograd's counters of in-place writes;
        not seen are writes through `.data`, numpy or kernels that torch does not know. So update moving averages and other
        parameters that no optimizer holds before `take`, or after `deadline()`. Buffers, tensors beside modules and optimizers,
        and inference tensors are copied within this call and may change at once.
        """
        self._take(step)

    def _take_now(self, step: int) -> None:
        began, updated = now(), not self.clock.running
        self._meet_deadline()
        if not self.enabled:
            return
        if not self._was_set_up:  # raises, whatever `on_error` says: nothing was promised yet
            self._room, self._was_set_up = self._set_up(), True
        report = StepReport(step)
        self.trace_log.begin()
        try:
            self._begin(report, updated=updated)
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
        track, taking = self._timeline.end(on_host=not isinstance(self._copier, DeviceCopier)), self._taking
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

        Every rank calls it, before the first `take`. Ranks may be others, more or fewer, and on other hosts, than those that took
        the version: hosts read one another's memory. What was taken after that version is abandoned, and forgotten here.
        Raises what loading raises when a version does not fit the state, or when all are damaged, and SnapshotInUseError while
        another job fills the slots: the same class on every rank. Which version was passed over, and whether the one that was
        taken could be verified, is said in `Restored` and logged.
        """
        if self._room is not None:
            raise RuntimeError("restore before the first snapshot is taken: slots are in use")
        self._run = self.group.broadcast(uuid.uuid4().hex)
        url = self._persist.url if self._persist else None
        restored = restore(self.state, self.directory, url, self._run, self.group, self.interface)
        self._report.restorable = None if restored is None else restored.step
        return restored

    def report(self) -> SnapshotReport:
        """What happened so far."""
        if self._room is not None:
            self._room.hear()
            if self._room.restorable is not None:
                self._report.restorable = self._room.restorable
        return self._report

    def trace(self, path: str) -> None:
        """Write the last steps as a Chrome trace."""
        self.trace_log.write(path)

    def close(self, *, remove: bool = False, wait: bool = True) -> None:
        """Finish the version in hand and let go; slots stay (they are what a restart loads) unless `remove`.

        Waits until the version in hand has a slot, for the other ranks and the keeper, but no longer than a minute; and
        until the keeper has persisted what it was given, for which `Persist.timeout_s` is the limit.

        With `wait=False`, ends within seconds and asks no other rank: for when a collective has failed, and before the process
        group is destroyed. The version in hand is given up. What the keeper has begun to persist it finishes by itself. Make
        another Snapshotter then, in the new process group, and `restore`.
        """
        with ExitStack() as stack:
            if self._room is not None:
                self._room.patient_until = now() + CLOSE_S * wait
                stack.callback(self._room.close, remove=remove, wait=wait)
                if not wait and self._taking is not None:
                    stack.callback(self._room.give_up, self._taking)
            if self._copier is not None:
                stack.callback(self._copier.stop)
            for handle in self._hooks:
                stack.callback(handle.remove)
            if not wait:
                return
            self.deadline()
            self.wait()
            if self._room is not None:
                self._room.protect_until(now() + CLOSE_S)
                # others may still read here for their parity
                self._room.hear_until(now() + (TELL_S if self._room.protector is None else SERVE_S))
            self._collect()

    # -- a snapshot ----------------------------------------------------------------------------------------------

    def _begin(self, report: StepReport, *, updated: bool) -> None:
        """`updated`: the deadline of the version before was met before `take` was called."""
        if report.step < self._cadence.last or (report.step == self._cadence.last and any(self.group.all_gather(updated))):
            self._go_back(report.step)
        due = self._cadence.next(report.step)
        if due is None:
            report.skipped = f"every {self.every} steps"
            return
        if self._room is None:  # the job has gone back, or it could not be laid out anew
            self._room = self._set_up()
        room, boundary = self._look(self._room)
        if room.keeper is not None:
            room.keeper.poll()
        if self._copier is None:
            self._copier = copier = copier_for(boundary.views)
            self.clock.opened, self.clock.closed = copier.opened, copier.closed
            if isinstance(self._copier, DeviceCopier):
                room.pin()
        taking = Taking(report, boundary, due, room.places, room.free_slot, self._copier)
        try:
            taking.begin()
            plan = self._planner.plan(taking.sizes)
        except Exception:
            room.let_go(taking)
            raise
        report.mode, report.predicted_ms, report.window_use = plan.taken, plan.exposed * 1e3, plan.window_use
        report.nbytes = room.share.nbytes
        self._taking = taking
        taking.copy(plan, partial(room.store, taking), partial(self._ended, room, taking), taking.teller(self.on_copied))

    def _go_back(self, step: int) -> None:
        """The job has loaded an older step: what it took after that is abandoned. Votes and names begin anew. All ranks."""
        self._warnings.first(
            "went back", f"step {step} after step {self._cadence.last}: from step {step} on, earlier ones are abandoned"
        )
        self._report.went_back.append(step)
        self._report.restorable = None
        self._collect(wait=True)
        self._cadence.restart()
        self._run = self.group.broadcast(uuid.uuid4().hex)
        room, self._room = self._room, None
        if room is not None:
            room.leave(self._run, step)

    def _look(self, room: Room) -> tuple[Room, Boundary]:
        """The state as it is now, and its slots, laid out anew if it has changed its layout on any rank. Raises MovedError."""
        found = room.look(self.state)
        moved = isinstance(found, MovedError)
        if self._meetings.next() and self.group.any_rank(moved):
            self._meetings.laid_out()
            room = self._lay_out_anew(room)
            self._warnings.first(
                "layout", f"slots were laid out anew ({found if moved else 'the state has changed on another rank'})"
            )
            found = room.look(self.state)
        if isinstance(found, Exception):
            raise found
        return room, found

    def _lay_out_anew(self, old: Room) -> Room:
        """Make slots for the state as it is now. The newest version stays in its old slot until there is one in a new slot."""
        self._collect(wait=True)
        self._room = None  # until all is set up again, here or in a later step
        old.make_way()
        try:
            room = self._room = self._set_up(old.keeper)
        except BaseException:
            if old.keeper is not None:
                old.keeper.close()
            raise
        return room

    @staticmethod
    def _ended(room: Room, taking: Taking, outcome: LateOutcome) -> None:
        """A device has copied a version, or never will. Another thread."""
        if outcome.quiet:
            room.let_go(taking)
        if not outcome.finished:
            room.tell(taking.report.step)

    def _collect(self, *, wait: bool = False) -> None:
        """Count the versions of which is known what became of them; `wait` for all."""
        while self._late and known(self._late[0][1], wait=wait):
            taking, outcome = self._late.popleft()
            if isinstance(outcome, LateOutcome):
                self._timeline.measured(taking, outcome)
            self.trace_log.add("copy", outcome.spans)
            try:
                self._commit(taking, outcome)
            except Exception as error:
                self._fail(taking.report, error)
        if self._room is not None:
            for step in self._room.lacking(self._late[0][0].report.step if self._late else None):
                alone = self._room.protector is None
                why = "not all ranks hold it, or said so in time" if alone else "it is not protected on all ranks"
                if self._report.uncount(step, why):
                    self._warnings.first("another rank", f"step {step}: {why}")

    def _commit(self, taking: Taking, outcome: Outcome) -> None:
        report, room = taking.report, self._room
        assert room is not None
        report.windowed, report.beside, report.exposed = outcome.windowed, outcome.beside, outcome.exposed
        if outcome.failure is not None:
            raise outcome.failure
        if outcome.refused:
            report.skipped = room.refused(report.step)
            self._report.skipped += 1
            self._warnings.first("skipped", f"step {report.step}: {report.skipped}")
            return
        if taking.slot is not None:
            room.confirm(taking)
        self._report.taken += 1
        # a device that is behind the host does not see when the host found a slot
        self._planner.learn(outcome, 0.0 if isinstance(outcome, LateOutcome) else taking.gate)
        if room.keeper is not None and taking.slot is not None:
            due = taking.due if room.protector is None else replace(taking.due, hash=False)  # that is hashed for its parity
            room.keeper.committed(taking.slot, report.step, due, room.patient_until)

    def _lost(self, step: int) -> None:
        """Tell that this rank will never hold a version, after what is told of earlier ones."""
        for _, outcome in self._late:
            known(outcome, wait=True)
        if self._room is not None:
            self._room.tell(step)

    def _fail(self, report: StepReport, error: Exception) -> None:
        report.skipped = f"{type(error).__name__}: {error}"
        self._report.failed += 1
        self._report.failures.append(f"step {report.step}: {report.skipped}")
        self._warnings.first(type(error).__name__, f"step {report.step} is not kept: {report.skipped}")
        if self.on_error == "raise":
            raise error

    def _set_up(self, keeper: Persistence | None = None) -> Room:
        """Every rank does it at its first snapshot, with the others. A `keeper` that runs already goes on with the new slots."""
        run = self._run = self._run or self.group.broadcast(uuid.uuid4().hex)
        here = ranks_here(self.directory, self.group)

        def create(share: Share) -> SlotSet:
            self._planner.strategy = derive(self.mesh, self.schedule)
            ours, pieces = self.group, list(share.keys)
            return SlotSet.create(self.directory, ours.rank, ours.size, pieces, self.slot_count, run=run, here=here)

        def start(slots: SlotSet) -> Persistence | None:
            if keeper is not None:
                keeper.move(slots)
                return keeper
            if self._persist is None and not self._hash_every:
                return None
            return Persistence(slots, self._report, run, self._persist, self._warnings.first)

        guard = partial(self._protection.start, self.group, run, self._report, self._warnings.first)
        room = Room.make(self.state, self.group, create, start, guard)
        if isinstance(self._copier, DeviceCopier):
            room.pin()
        self._report.strategy, self._report.slots = str(self._planner.strategy), self.slot_count
        self._report.slot_bytes, self._report.remarks = room.share.nbytes, room.slots.remarks
        return room
