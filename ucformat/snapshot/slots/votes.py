"""Which versions all ranks hold: learnt from one another beside training, without waiting for anyone.

Ranks commit one after another, so each must keep the last version that all have until all have the next. Every rank tells
of every version once, whether it holds it or not; a version is whole when all hold it, and lost, for ever, when one does not. All
ranks learn the same of each version, wherever they run, so no rank gives up what another one relies on.

They meet in the store that torch.distributed was initialised with: one counter per version, of which adding to and reading are
a round trip each. A group of processes would have to wait for ranks that say nothing, at the latest when it is left.
"""

from __future__ import annotations

import threading
import uuid
from collections import deque
from dataclasses import dataclass

import torch.distributed as dist

from ucformat.group import Group, connection
from ucformat.snapshot.schedule.clock import now

TOLD, HELD = 1, 1 << 32  # what a rank adds for having told, and for holding
BATCH = 64  # versions whose counters are removed together
LOOK_S, LOOK_PER_RANK_S = 1e-3, 2e-5  # between two looks at the counters: one store serves all ranks


@dataclass(frozen=True, slots=True)
class VersionOutcome:
    """What became of a version."""

    step: int
    whole: bool
    """Every rank holds it; else one does not, and never will."""


class VersionVotes:
    """The ranks of a job, this one included. All make it at once, and `tell` of the same steps in the same order."""

    def __init__(self, group: Group) -> None:
        self._guard = threading.Lock()
        self._world = group.size
        self._open: deque[int] = deque()
        """Steps that this rank has told of and whose fate is not known, ascending."""
        self._known: deque[VersionOutcome] = deque()
        self._past: list[int] = []
        """Steps whose fate is known and whose counters may still be there."""
        self._told, self._batch, self._looked = -1, 0, 0.0
        self._watched: set[int] = set()
        """Steps that this rank will tell of, and looks at before."""
        self._early: set[int] = set()
        """Steps beyond watched ones that were told of: lost ones only."""
        self._over: set[int] = set()
        """Watched steps whose fate became known before this rank told of them."""
        self._store: dist.Store | None = None
        self.trouble = ""
        """Why fates are not learnt, in words; empty when all is well."""
        if group.size > 1:
            self._store = dist.PrefixStore(f"ucformat/{group.broadcast(uuid.uuid4().hex)}", connection())

    def tell(self, step: int, *, held: bool) -> None:
        """Say that this rank holds a version, or never will; any thread. Steps ascend, and the first word counts.

        That it never will may also be said while an earlier step is watched and not told of.
        """
        with self._guard:
            if step in self._early or (step <= self._told and step not in self._watched):
                return
            self._watched.discard(step)
            if any(other < step for other in self._watched):
                self._early.add(step)
            else:
                self._told = max(self._told, step)
                self._early = {other for other in self._early if other > self._told}
            if self._world == 1:
                self._known.append(VersionOutcome(step, held))
                return
            if step not in self._open and step not in self._over:
                self._open.append(step)
            self._over.discard(step)
            self._add(f"{step}", TOLD + HELD * held)

    def watch(self, step: int) -> None:
        """Learn of a version that another rank lacks, before this rank tells of it, which it will; any thread."""
        with self._guard:
            if step > self._told and step not in self._watched:
                self._watched.add(step)
                if self._world > 1:
                    self._open.append(step)

    def hear(self) -> list[VersionOutcome]:
        """What has become known since the last call, in the order of steps. Any thread; never waits for a rank."""
        with self._guard:
            if self._open and now() >= self._looked + LOOK_S + LOOK_PER_RANK_S * self._world:
                self._look()
                self._looked = now()
            known = list(self._known)
            self._known.clear()
        return known

    @property
    def waits(self) -> bool:
        """Whether the fate of a version that this rank has told of is not known, and may still be learnt."""
        with self._guard:
            return bool(self._known) or (bool(self._open) and self._store is not None)

    def close(self) -> None:
        """Say and learn nothing more; what was said stays said."""
        with self._guard:
            self._store = None
            self._open.clear()

    def _add(self, key: str, amount: int) -> int | None:
        """The counter after adding to it; None when the store can't be reached, and never will be again."""
        if self._store is None:
            return None
        try:
            return int(self._store.add(key, amount))
        except (RuntimeError, ValueError) as error:
            self.trouble, self._store = f"the ranks' store can't be reached: {error}", None
            return None

    def _look(self) -> None:
        counts: list[tuple[int, int]] = []
        for step in self._open:
            count = self._add(f"{step}", 0)
            if count is None:
                return
            counts.append((count % HELD, count // HELD))
        # Who tells of a version has told of all before it: when one is whole, nothing more will be told of those.
        last = max((i for i, (_, held) in enumerate(counts) if held == self._world), default=-1)
        self.trouble = ""
        for i, (told, held) in enumerate(counts):
            if i > last and held == told:  # nobody has said that it lacks the version, but not all have spoken
                self.trouble = f"of step {self._open[0]} only {told} of {self._world} ranks have told"
                return
            step = self._open.popleft()
            if step in self._watched:
                self._over.add(step)
            self._known.append(VersionOutcome(step, held == self._world))
            self._forget(step)

    def _forget(self, step: int) -> None:
        """Remove counters once every rank knows the fate of all of a batch."""
        self._past.append(step)
        if len(self._past) < BATCH:
            return
        past, self._past = self._past, []
        self._batch += 1
        if self._add(f"batch/{self._batch}", 1) != self._world or self._store is None:
            return
        for key in (*map(str, past), f"batch/{self._batch}"):
            try:
                self._store.delete_key(key)
            except (RuntimeError, ValueError):
                return  # a store that can't remove keys keeps some bytes per version
