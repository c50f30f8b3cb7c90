"""Where a rank's versions go: slots for its share of the state, what the ranks say of them, and the keeper that reads them."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from contextlib import ExitStack

from ucformat.group import Group
from ucformat.snapshot.copying.host import POLL_S
from ucformat.snapshot.copying.version import Places, Taking
from ucformat.snapshot.keeper.handoff import STOP_S, Persistence
from ucformat.snapshot.protect.client import Done, Protector
from ucformat.snapshot.protect.votes import InOrder
from ucformat.snapshot.schedule.clock import now
from ucformat.snapshot.slots.restart_fence import Fence, write_fence
from ucformat.snapshot.slots.slot_set import Slot, SlotSet
from ucformat.snapshot.slots.votes import VersionVotes
from ucformat.snapshot.source.revisit import Watch
from ucformat.snapshot.source.share import Boundary, Share, TornError, agree


class Room:
    """The slots of one layout of the state. `free_slot`, `store` and `tell` may be called from any thread."""

    def __init__(self, share: Share, slots: SlotSet, votes: VersionVotes, keeper: Persistence | None, group: Group) -> None:
        self.share, self.slots, self.votes, self.keeper = share, slots, votes, keeper
        self.protector: Protector | None = None
        self._tells = InOrder(lambda step, held: votes.tell(step, held=held))
        self.places, self.watch = Places.of(share, slots), Watch(share, group)
        self.patient_until = 0.0
        """On the monotonic clock: until then, a version waits for a slot."""
        self._trainer = threading.get_ident()
        self._on_device = False
        self._lacking: deque[int] = deque()
        """Steps whose versions some rank does not hold, as far as this has become known and is not counted yet."""
        self.restorable: int | None = None
        """The newest step that all ranks are known to hold, in a version that is protected if that was asked for."""

    @classmethod
    def make(
        cls,
        state: Mapping[str, object],
        group: Group,
        create: Callable[[Share], SlotSet],
        start: Callable[[SlotSet], Persistence | None],
        protect: Callable[[Done], Protector | None],
    ) -> Room:
        """Agree on the shares, make slots and start the keepers: on all ranks, or on none, where nothing is left of it.

        Raises what these raise, the same class on every rank.
        """
        share = agree(state, group)
        slots: SlotSet | None = None
        keeper: Persistence | None = None
        try:
            with group.together("making room for snapshots"):
                slots = create(share)
            assert slots is not None
            slots.agree(group.distinct(slots.adopted))
            with group.together("starting keepers"):
                keeper = start(slots)
            room = cls(share, slots, VersionVotes(group), keeper, group)
            room.protector = protect(room.is_protected)
            if room.protector is not None:
                room.votes.allow(room.protector.longest_s)
            return room
        except BaseException:
            if keeper is not None:
                keeper.close()
            if slots is not None:
                slots.undo()
            raise

    def look(self, state: Mapping[str, object]) -> Boundary | Exception:
        """The state as it is now, or why that can't be told: MovedError when slots must be laid out anew."""
        try:
            return self.watch.look(state)
        except Exception as error:  # other ranks may be waiting for this one: it is raised later
            return error

    def pin(self) -> None:
        """Copies come from a device: it writes into slots after the host has gone on."""
        self._on_device = True
        self.slots.pin()

    def free_slot(self) -> Slot | None:
        """A slot to fill, as soon as there is one; None when there is none and nobody waits for it."""
        while True:
            self.hear()
            slot = self.slots.begin()
            if slot is None and threading.get_ident() == self._trainer:  # there may be news since the last look
                self.hear(fresh=True)
                slot = self.slots.begin()
            if slot is not None and self._on_device:
                self.slots.hold(slot)  # until the device is done with it, which may be after the next version was begun
            if slot is not None or now() >= self.patient_until:
                return slot
            if self.keeper is not None:
                self.keeper.poll()
            time.sleep(POLL_S)

    def refused(self, step: int) -> str:
        """No slot was free for a version before its deadline: why."""
        why = "" if self.keeper is None else self.keeper.held_up(step)
        why = why or self.votes.trouble or "others are read, or still needed until all ranks have the next version"
        return f"no free slot: {why}"

    def hear(self, *, fresh: bool = False) -> None:
        """What became of versions that the ranks have told of, as far as is known; `fresh` asks again."""
        for fate in self.votes.hear(fresh=fresh):
            self.slots.settle(fate.step, whole=fate.whole)
            if fate.whole:
                self.restorable = fate.step
            else:
                self._lacking.append(fate.step)
                if self.protector is not None and self.protector.cancel(fate.step):
                    self._tells.known(fate.step, held=False)

    def hear_until(self, until: float) -> None:
        """Hear what becomes of all versions that this rank has told of, or what is known of them at a time (monotonic)."""
        while self.votes.waits and now() < until:
            self.hear()
            time.sleep(POLL_S)

    def protect_until(self, until: float) -> None:
        """Wait until it is known of every version of this rank whether it is protected, or until a time (monotonic)."""
        while self.protector is not None and self.protector.pending and now() < until:
            self.hear()
            time.sleep(POLL_S)

    def lacking(self, before: int | None) -> list[int]:
        """Steps below `before` (None: all) whose versions some rank does not hold, each told once."""
        found: list[int] = []
        while self._lacking and (before is None or self._lacking[0] < before):
            found.append(self._lacking.popleft())
        return found

    def let_go(self, taking: Taking) -> None:
        """Nothing is copied into a version's slot any more."""
        if taking.slot is not None and self._on_device:
            self.slots.release(taking.slot)

    def store(self, taking: Taking) -> None:
        """All is in place: a crash keeps this version from now on. Raises TornError when the state has changed meanwhile."""
        assert taking.slot is not None
        self._prove_whole(taking)
        share = self.share
        self.slots.commit(taking.slot, taking.report.step, taking.boundary.tree, share.aliases, share.mesh, share.coords)
        if self._on_device:  # by the thread that waits for the device, past the deadline
            self.tell(taking.report.step, slot=taking.slot)

    def confirm(self, taking: Taking) -> None:
        """The deadline has passed: tell the other ranks of the version. Raises TornError when it had to be taken back.

        A counter of writes rises only when a kernel has written, so what looked whole when it was stored may be torn. The
        others must not rely on it before that is known: they would give up the version before it.
        """
        assert taking.slot is not None
        held = False
        try:
            self._prove_whole(taking)
            held = True
        finally:
            if not held:
                self.slots.withdraw(taking.slot, taking.report.step)
            self.tell(taking.report.step, slot=taking.slot if held else None)

    def tell(self, step: int, *, slot: Slot | None = None) -> None:
        """Say that this rank holds a version, in a slot, or never will. Where versions are protected: once this one is."""
        protector = self.protector
        if protector is None or slot is None:
            self._tells.expect(step, slot is not None)
        elif self._tells.expect(step, None):
            self.votes.watch(step)  # as soon as it is known that another rank lacks it, it is not waited for
            protector.protect(step, slot.index)

    def is_protected(self, step: int, why: str) -> None:
        """Learn that this rank's part in protecting a version is done, or `why` it is not. By the protector's thread."""
        self._tells.known(step, held=not why)

    def _prove_whole(self, taking: Taking) -> None:
        if changed := taking.changed():
            raise TornError(self.share.keys[i] for i in changed)

    def leave(self, run: str, step: int) -> None:
        """The job goes on from before `step` as `run`, in another room: what is newer here is abandoned, also by the keeper."""
        with ExitStack() as stack:
            stack.callback(self.slots.close)
            stack.callback(self.votes.close)
            if self.keeper is not None:
                stack.callback(self.keeper.close, STOP_S)
            if self.protector is not None:
                stack.callback(self.protector.close)
            write_fence(self.slots.folder, Fence.now(run, step - 1))

    def make_way(self) -> None:
        """Let go of everything but the keeper, which goes on with the slots of another room."""
        if self.protector is not None:
            self.protector.close()
        self.votes.close()
        self.slots.close()

    def give_up(self, taking: Taking) -> None:
        """Nothing copies a version any more, and its deadline was not met: where it was stored and has changed, it is torn."""
        slot, step = taking.slot, taking.report.step
        if slot is not None and slot.step == step and taking.changed():
            self.slots.withdraw(slot, step)

    def close(self, *, remove: bool, wait: bool = True) -> None:
        """Let go of everything, whatever fails; versions stay unless `remove`. A keeper that is not waited for ends by itself."""
        with ExitStack() as stack:
            stack.callback(self.slots.close, remove=remove)
            stack.callback(self.votes.close)
            if self.keeper is not None:
                stack.callback(self.keeper.close if wait else self.keeper.leave)
            if self.protector is not None:
                stack.callback(self.protector.close)
