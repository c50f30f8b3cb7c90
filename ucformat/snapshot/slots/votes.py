"""Which versions all ranks hold: learnt from one another beside training, which waits for nobody.

Ranks commit one after another, so each must keep the last version that all have until all have the next. Every rank votes on
every version once: whether it holds it or not. A version is whole when all hold it, and lost, for ever, when one does not, or
when not all have voted within `VOTE_S`. All ranks learn the same of each version, wherever they run, so no rank gives up what
another one relies on.

They meet in the store that torch.distributed was initialised with: one counter per version, of which adding to and reading are
a round trip each. A thread of its own makes them, since a store whose host is dead or stopped answers late or never. A group of
processes would have to wait for ranks that say nothing, at the latest when it is left.
"""

from __future__ import annotations

import threading
import time
import uuid
import weakref
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import torch.distributed as dist

from ucformat.group import Group, connection
from ucformat.snapshot.schedule.clock import now

VOTE_S = 60.0  # for all ranks to vote on a version: ranks are apart by a part of a step, as a rule
VOTED, HELD = 1, 1 << 32  # what a rank adds for having voted, and for holding
BATCH = 64  # versions whose counters are removed together
LOOK_S, LOOK_PER_RANK_S = 1e-3, 2e-5  # between two looks at the counters: one store serves all ranks
LONGEST_LOOK_S = 0.05  # between looks that nobody asks for
FRESH_S = 0.01  # that `hear` waits for a look: many round trips
SILENT_S = 5.0  # a store that takes longer to answer is not waited for, even for moments
CLOSE_S = 1.0  # that `close` waits for votes to reach the store


@dataclass(frozen=True, slots=True)
class VersionOutcome:
    """What became of a version."""

    step: int
    whole: bool
    """Every rank holds it; else one does not, and never will."""


@dataclass(slots=True)
class _Open:
    """A version whose fate is not known."""

    step: int
    since: float | None
    """When this rank voted on it; None while it only looks."""


class VersionVotes:
    """The ranks of a job, this one included. All make it at once, and `tell` of the same steps in the same order."""

    def __init__(self, group: Group) -> None:
        store = None
        if group.size > 1:
            store = dist.PrefixStore(f"ucformat/{group.broadcast(uuid.uuid4().hex)}", connection())
        self._booth = booth = _Booth(group.size, store, VOTE_S)
        self._end = weakref.finalize(self, booth.close)  # at exit, too: a thread must not be in the store's code then

    def tell(self, step: int, *, held: bool) -> None:
        """Say that this rank holds a version, or never will; any thread. Steps ascend, and the first word counts.

        That it never will may also be said while an earlier step is watched and not told of.
        """
        self._booth.tell(step, held=held)

    def watch(self, step: int) -> None:
        """Learn of a version that another rank lacks, before this rank tells of it, which it will; any thread."""
        self._booth.watch(step)

    def hear(self, *, fresh: bool = False) -> list[VersionOutcome]:
        """What has become known since the last call, in the order of steps. Any thread; never waits for a rank.

        `fresh`: look at the counters first, unless the store takes longer than moments to answer.
        """
        return self._booth.hear(fresh=fresh)

    @property
    def waits(self) -> bool:
        """Whether the fate of a version that this rank has told of is not known, and may still be learnt."""
        return self._booth.waits()

    @property
    def trouble(self) -> str:
        """Why fates are not learnt, in words; empty when all is well."""
        return self._booth.trouble()

    def allow(self, more_s: float) -> None:
        """Ranks may take so many seconds beyond `VOTE_S` to vote."""
        self._booth.vote_s += more_s

    def close(self) -> None:
        """Say and learn nothing more; what was said stays said."""
        self._end()


class _Booth:
    """The votes of one rank, and the thread that brings them to the store and counts there."""

    def __init__(self, world: int, store: dist.Store | None, vote_s: float = VOTE_S) -> None:
        self._changed = threading.Condition()
        self._world, self._store, self.vote_s = world, store, vote_s
        self._open: deque[_Open] = deque()
        """Ascending."""
        self._unsent: deque[tuple[int, bool]] = deque()
        """Votes that are not on their way to the store. None is sent twice, whatever comes of it."""
        self._watched: set[int] = set()
        """Steps that this rank will vote on, and looks at before."""
        self._early: set[int] = set()
        """Steps beyond watched ones that were voted on: lost ones only."""
        self._over: set[int] = set()
        """Watched steps whose fate became known before this rank voted."""
        self._known: deque[VersionOutcome] = deque()
        self._past: list[int] = []
        """Steps whose fate is known and whose counters may still be there."""
        self._told, self._batch = -1, 0
        self._asked = self._looks = 0
        """How often somebody asked for a look, and how many of these have been answered."""
        self._busy_since: float | None = None
        """When the round trips that are under way began."""
        self._why = ""
        self._closed = False
        self._thread = threading.Thread(target=self._run, name="ucf-votes", daemon=True)
        if store is not None:
            self._thread.start()

    # -- any thread ------------------------------------------------------------------------------------------------

    def tell(self, step: int, *, held: bool) -> None:
        with self._changed:
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
            elif not self._closed:
                self._vote(step, held)

    def _vote(self, step: int, held: bool) -> None:
        watched = next((item for item in self._open if item.step == step), None)
        if watched is not None:
            watched.since = now()
        elif step not in self._over:
            self._open.append(_Open(step, now()))
        self._over.discard(step)
        self._unsent.append((step, held))
        self._changed.notify_all()

    def watch(self, step: int) -> None:
        with self._changed:
            if step > self._told and step not in self._watched:
                self._watched.add(step)
                if self._world > 1 and not self._closed:
                    self._open.append(_Open(step, None))
                    self._changed.notify_all()

    def hear(self, *, fresh: bool) -> list[VersionOutcome]:
        with self._changed:
            if self._open and self._store is not None and not self._known:
                self._asked += 1
                self._changed.notify_all()
                if fresh and not self._silent():
                    asked = self._asked
                    self._changed.wait_for(lambda: self._looks >= asked or self._store is None, FRESH_S)
            known = list(self._known)
            self._known.clear()
        return known

    def waits(self) -> bool:
        with self._changed:
            return bool(self._known) or (bool(self._open) and self._store is not None)

    def trouble(self) -> str:
        with self._changed:
            return "the store that the ranks meet in does not answer" if self._silent() else self._why

    def close(self) -> None:
        with self._changed:
            reached = self._store is None or self._silent()
            self._changed.wait_for(lambda: reached or self._store is None or self._has_sent(), CLOSE_S)
            self._closed, self._store = True, None
            self._open.clear()
            self._unsent.clear()
            self._changed.notify_all()
        if self._thread.is_alive():
            self._thread.join(0.0 if reached else CLOSE_S)

    def _has_sent(self) -> bool:
        return not self._unsent and self._busy_since is None

    def _silent(self) -> bool:
        return self._busy_since is not None and now() > self._busy_since + SILENT_S

    # -- the thread ------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        pause = shortest = LOOK_S + LOOK_PER_RANK_S * self._world
        while (store := self._store) is not None:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or bool(self._open) or bool(self._unsent))
                if self._closed:
                    return
                votes, versions, asked = list(self._unsent), list(self._open), self._asked
                self._unsent.clear()
                self._busy_since = now()
            outcomes: list[VersionOutcome] = []
            try:
                outcomes, why = self._meet(store, votes, versions)
            except (RuntimeError, ValueError) as error:
                why = f"the store that the ranks meet in can't be reached: {error}"
                self._store = None
            with self._changed:
                self._busy_since, self._why, self._looks = None, why, asked
                self._settle(outcomes)
                self._changed.notify_all()
                pause = shortest if outcomes else min(1.5 * pause, LONGEST_LOOK_S)
            time.sleep(shortest)
            with self._changed:  # until somebody asks for a look, or votes
                self._changed.wait_for(self._is_asked_since(asked), pause - shortest)

    def _is_asked_since(self, asked: int) -> Callable[[], bool]:
        return lambda: self._closed or self._asked > asked or bool(self._unsent)

    def _settle(self, outcomes: list[VersionOutcome]) -> None:
        for outcome in outcomes if not self._closed else ():
            self._open.popleft()
            if outcome.step in self._watched:
                self._over.add(outcome.step)
            self._known.append(outcome)

    def _meet(self, store: dist.Store, votes: list[tuple[int, bool]], versions: list[_Open]) -> tuple[list[VersionOutcome], str]:
        """Bring votes to the store, then count: what is known by now of the first versions, and what is waited for."""
        for step, held in votes:
            store.add(f"{step}", VOTED + HELD * held)
        counts = [divmod(int(store.add(f"{version.step}", 0)), HELD) for version in versions]
        # Who votes on a version has voted on all before it: when one is whole, no more will be said of those.
        last = max((i for i, (held, voted) in enumerate(counts) if held == voted == self._world), default=-1)
        known: list[VersionOutcome] = []
        for i, (version, (all_held, voted)) in enumerate(zip(versions, counts, strict=True)):
            if i > last and all_held == voted < self._world:  # nobody is known to lack the version, but not all have voted
                if version.since is None or now() < version.since + self.vote_s:
                    return known, f"{voted} of {self._world} ranks have said so far what became of step {version.step}"
                all_held, voted = _withdraw(store, f"{version.step}", all_held, voted)
                if all_held == voted < self._world:  # one more has voted this moment
                    return known, ""
            known.append(VersionOutcome(version.step, all_held == voted == self._world))
            self._forget(store, version.step)
        return known, ""

    def _forget(self, store: dist.Store, step: int) -> None:
        """Remove counters once every rank knows the fate of all of a batch."""
        self._past.append(step)
        if len(self._past) < BATCH:
            return
        past, self._past = self._past, []
        self._batch += 1
        if store.add(f"batch/{self._batch}", 1) != self._world:
            return
        for key in (*map(str, past), f"batch/{self._batch}"):
            try:
                store.delete_key(key)
            except (RuntimeError, ValueError):
                return  # a store that can't remove keys keeps some bytes per version


def _withdraw(store: dist.Store, key: str, held: int, voted: int) -> tuple[int, int]:
    """Make a version lost on which not all ranks have voted in time, unless they do so this moment; its counts (held, voted).

    It gets a vote too many, only if nothing has changed since: one that is whole stays so, and all ranks see the same.
    """
    before, after = (VOTED * n + HELD * held for n in (voted, voted + 1))
    count = int(store.compare_set(key, f"{before}", f"{after}"))
    return count // HELD, count % HELD
