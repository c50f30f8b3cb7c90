"""The thread of a keeper that talks to the storage: one version after another, none of them for ever.

A version is stored (this rank's shard, then its part), after that it is open until rank 0 has committed it. Open versions are
looked at between the others, so a rank that is late with its part holds nobody up. Everything that happens is emitted as an
event.
"""

from __future__ import annotations

import queue
import random
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TypeVar

from ucformat.errors import ConflictError, ExistsError, MissingFileError, RankFailedError, StorageError
from ucformat.formats import native, ownership
from ucformat.formats.native.manifest import MANIFEST
from ucformat.snapshot.keeper import contributions, retention, slot_copy
from ucformat.snapshot.keeper.contributions import Contribution, Refusal
from ucformat.snapshot.keeper.messages import Event, Failed, KeeperOptions, Order, Persisted, Pruned, Skipped, Stored, Trouble
from ucformat.snapshot.keeper.slot_copy import HeldSlot
from ucformat.storage.open import open_store
from ucformat.storage.store import Store

PAUSE_S, LONGEST_PAUSE_S = 0.5, 30.0  # before a storage is asked again; doubles
LOOK_S, LONGEST_LOOK_S = 0.1, 5.0  # between looks at what other ranks have handed in; half as long again each time
READERS = 16  # parts that rank 0 reads at once: small files, each a round trip
GRACE_S = 5.0  # beyond its time that one call of the storage may take before it counts as hanging

T = TypeVar("T")


def told(error: BaseException) -> str:
    """An error as an event says it."""
    return f"{type(error).__name__}: {error}"


@dataclass(slots=True)
class Open:
    """A version whose shard is stored here, and whose commit is outstanding."""

    step: int
    began: float
    deadline: float
    nbytes: int
    look_at: float
    pause: float = LOOK_S
    parts: dict[int, Contribution] = field(default_factory=dict)
    """Handed in so far; only rank 0 reads them."""
    overtaken_by: int | None = None
    """A later step that is committed. Every rank stores in order, so what is not handed in by now never will be."""


@dataclass(frozen=True, slots=True)
class Doing:
    """An operation of the storage that is under way."""

    step: int
    what: str
    deadline: float
    essential: bool
    """Whether the version depends on it."""


class _AbandonedError(Exception):
    """The job went on from an older step."""


class _GoneError(Exception):
    """A version that this rank has stored is there no more, committed or not."""


class Persister(threading.Thread):
    """Persists the versions it is given, in their order, until `finish`."""

    def __init__(self, options: KeeperOptions, emit: Callable[[Event], None]) -> None:
        super().__init__(name="ucf-persister", daemon=True)  # one that hangs must not keep the process
        self._options, self._emit = options, emit
        self._queue: queue.SimpleQueue[tuple[Order, HeldSlot | None] | None] = queue.SimpleQueue()
        self._open: dict[int, Open] = {}
        self._claims: dict[int, ownership.Claim] = {}
        """Of the versions that are stored or open: others see that this process lives."""
        self._settled: set[int] = set()
        self._more = True
        self._drop = False
        self._abandoned: int | None = None
        self._patience: float | None = None
        self._doing: Doing | None = None

    def submit(self, order: Order, slot: HeldSlot | None) -> None:
        """Persist a hashed slot, or only see to the commit when there is none."""
        self._queue.put((order, slot))

    def finish(self, *, drop: bool, within_s: float | None = None) -> None:
        """End once what was submitted is done; with `drop` only what has been begun. Other ranks are waited for that long."""
        self._drop = self._drop or drop
        self._patience = None if within_s is None else time.monotonic() + within_s
        self._queue.put(None)

    def abandon(self, step: int) -> None:
        """The job was started again and went on from `step`: what is later must not appear in the storage."""
        self._abandoned = step if self._abandoned is None else min(step, self._abandoned)

    def hanging(self) -> Doing | None:
        """An operation that has not come back although its version's time is over. Called by another thread."""
        doing = self._doing
        return doing if doing is not None and time.monotonic() > doing.deadline + GRACE_S else None

    def run(self) -> None:
        while self._more or self._open:
            item = self._next()
            if item is not None and not self._drop:
                order, slot = item
                self._guard(order.step, partial(self._store, order, slot))
            for version in [v for v in self._open.values() if v.look_at <= time.monotonic()]:
                if version.step in self._open:
                    self._guard(version.step, partial(self._look, version))

    def _next(self) -> tuple[Order, HeldSlot | None] | None:
        """The next version; None when it is time to look at an open one, or there will be no more."""
        wait = min((version.look_at for version in self._open.values()), default=None)
        pause = None if wait is None else max(0.0, wait - time.monotonic())
        try:
            item = self._queue.get(timeout=pause)
        except queue.Empty:
            return None
        self._more = self._more and item is not None
        return item

    def _guard(self, step: int, action: Callable[[], None]) -> None:
        """Any failure ends this version, and nothing else."""
        try:
            action()
        except _GoneError:
            del self._open[step]
            self._emit(Skipped(step, "gone when this rank looked: committed and pruned, or given up by rank 0", missed=False))
        except _AbandonedError as error:
            self._open.pop(step, None)
            self._emit(Skipped(step, f"abandoned: {error}"))
            self._give_up(step, error, all_done=True)
        except Exception as error:
            version = self._open.pop(step, None)
            self._emit(Failed(step, told(error)))
            self._give_up(step, error, all_done=version is not None and version.overtaken_by is not None)
        finally:
            if step not in self._open and (claim := self._claims.pop(step, None)) is not None:
                claim.hold.release()

    # -- storing -------------------------------------------------------------------------------------------------------

    def _store(self, order: Order, slot: HeldSlot | None) -> None:
        options, step = self._options, order.step
        began = time.monotonic()
        deadline = began + options.timeout_s
        store = self._persistently(step, "opening", deadline, lambda: self._version(step))
        if self._persistently(step, "opening", deadline, lambda: self._run().exists(MANIFEST)):
            raise ExistsError(self._run().url, "is a checkpoint itself, so it can't hold steps, too", "")
        if self._persistently(step, "looking for a commit", deadline, lambda: native.is_committed(store)):
            by_us = partial(contributions.made_by, store, options.run)
            if self._persistently(step, "looking for a commit", deadline, by_us):  # a keeper that has died since made it
                self._emit(Persisted(step, time.monotonic() - began, order.nbytes))
            else:
                self._emit(
                    Skipped(step, f"{store.url} was committed already, by what the job went back from or another start of it")
                )
            self._make_room(store, step)
            return
        nbytes = order.nbytes
        begin = partial(contributions.begin, store, options.run)
        self._claims[step] = self._persistently(step, "writing", deadline, begin)
        if slot is not None:
            nbytes = slot.record.size
            path = contributions.shard_path(options.rank, options.run)
            part = contributions.make_part(slot, path)
            self._persistently(
                step,
                "writing",
                deadline,
                lambda: slot_copy.copy_slot(slot, store, path, lambda: self._check(store, step, deadline)),
            )
            self._emit(Stored(step, slot.index, time.monotonic() - began, nbytes))
            self._persistently(step, "handing in", deadline, lambda: contributions.put_part(store, options.run, part))
        self._open[step] = Open(step, began, deadline, nbytes, time.monotonic())

    def _check(self, store: Store, step: int, deadline: float) -> None:
        self._prove_wanted(step)
        if time.monotonic() > deadline:
            raise StorageError(store.url, f"not written within {self._options.timeout_s:g} s")

    def _prove_wanted(self, step: int) -> None:
        if self._abandoned is not None and step > self._abandoned:
            raise _AbandonedError(f"the job was started again and went on from step {self._abandoned}")

    def _run(self) -> Store:
        assert self._options.persist_url is not None
        return open_store(self._options.persist_url)

    def _version(self, step: int) -> Store:
        return self._run().sub(native.step_name(step))

    def _persistently(self, step: int, what: str, deadline: float, action: Callable[[], T]) -> T:
        """Repeat an operation of the storage that failed, with growing pauses, until it is given up."""
        attempt = 0
        while True:
            try:
                with self._at(step, what, deadline):
                    return action()
            except (StorageError, OSError) as error:
                pause = min(PAUSE_S * 2**attempt, LONGEST_PAUSE_S) * random.uniform(0.5, 1)  # ranks must not return all at once
                attempt += 1
                if attempt > self._options.retries or time.monotonic() + pause > deadline:
                    raise
                self._emit(Trouble(step, f"{what}, attempt {attempt} of {self._options.retries + 1}: {told(error)}"))
                time.sleep(pause)

    @contextmanager
    def _at(self, step: int, what: str, deadline: float, *, essential: bool = True) -> Iterator[None]:
        self._doing = Doing(step, what, deadline, essential)
        try:
            yield
        finally:
            self._doing = None

    # -- committing ----------------------------------------------------------------------------------------------------

    def _look(self, version: Open) -> None:
        """See whether an open version can be committed, or has been."""
        self._prove_wanted(version.step)
        store = self._version(version.step)
        try:
            with self._at(version.step, "looking for parts", version.deadline):
                done = self._gather(store, version) if self._options.rank == 0 else self._is_committed(store, version)
        except (StorageError, MissingFileError, OSError) as error:
            self._emit(Trouble(version.step, f"looking for parts: {told(error)}"))
            done = False
        if done:
            if self._options.rank == 0:
                self._persistently(version.step, "committing", version.deadline, lambda: self._commit(store, version))
            del self._open[version.step]
            by_us = partial(contributions.made_by, store, self._options.run)
            if self._persistently(version.step, "looking", version.deadline, by_us):
                self._emit(Persisted(version.step, time.monotonic() - version.began, version.nbytes))
            else:
                self._emit(Skipped(version.step, f"{store.url} was committed by another start of the job"))
            self._make_room(store, version.step)
            return
        out_of_time = time.monotonic() > min(version.deadline, self._patience or version.deadline)
        if version.overtaken_by is not None or out_of_time:
            raise RankFailedError(f"persisting step {version.step}", self._late(version))
        version.look_at = min(time.monotonic() + version.pause, max(version.deadline, time.monotonic()) + LOOK_S)
        version.pause = min(version.pause * 1.5, LONGEST_LOOK_S)

    def _gather(self, store: Store, version: Open) -> bool:
        """Whether all ranks have handed in their part, on rank 0. Raises RankFailedError when one has given up."""
        run, step, world = self._options.run, version.step, range(self._options.world)
        said = contributions.answers(store, run)
        if said.refusals:
            whys = {rank: contributions.read_refusal(store, run, rank, step).why for rank in sorted(said.refusals)}
            raise RankFailedError(f"persisting step {step}", whys)
        fresh = [rank for rank in world if rank in said.parts and rank not in version.parts]
        with ThreadPoolExecutor(READERS) as pool:
            version.parts.update(
                zip(fresh, pool.map(lambda rank: contributions.read_part(store, run, rank, step), fresh), strict=True)
            )
        return len(version.parts) == len(world)

    def _commit(self, store: Store, version: Open) -> None:
        """Make the checkpoint, unless another start of the job has made one of this step: that one stays as it is."""
        self._prove_wanted(version.step)
        if native.is_committed(store):
            return
        parts = [version.parts[rank] for rank in range(self._options.world)]
        try:
            contributions.commit_parts(self._claims[version.step], version.step, parts)
        except ConflictError:
            if not native.is_committed(store):
                raise

    def _is_committed(self, store: Store, version: Open) -> bool:
        """Whether rank 0 has committed. Raises RankFailedError when it gave up, _GoneError when there is nothing any more."""
        said = contributions.answers(store, self._options.run)
        if native.is_committed(store):
            return True
        if 0 in said.refusals:
            why = contributions.read_refusal(store, self._options.run, 0, version.step).why
            raise RankFailedError(f"persisting step {version.step}", {0: why})
        if self._options.rank not in said.parts:
            raise _GoneError
        return False

    def _late(self, version: Open) -> dict[int, str]:
        span = f"within {self._options.timeout_s:g} s"
        if self._options.rank:
            return {0: f"did not commit {span}"}
        if version.overtaken_by is not None:
            span = f"for it, but has for step {version.overtaken_by}"
        return {rank: f"handed in nothing {span}" for rank in range(self._options.world) if rank not in version.parts}

    def _make_room(self, store: Store, step: int) -> None:
        """Remove what a committed version makes superfluous, on rank 0. What fails here costs space, not the version."""
        options = self._options
        if options.rank:
            return
        for other in self._open.values():
            if other.step < step:
                other.overtaken_by, other.look_at = step, time.monotonic()
        try:
            with self._at(step, "removing older versions", time.monotonic() + options.timeout_s, essential=False):
                native.clear(store, own=options.run)
                run = self._run()
                native.note_saved(run, step)
                self._settled |= retention.clear_abandoned(run, step, options.run, self._settled | self._open.keys())
                keep = options.keep
                gone = [] if keep is None else native.prune_steps(run, step, keep, options.keep_every)
        except Exception as error:
            self._emit(Trouble(step, f"removing older versions: {told(error)}"))
            return
        if gone:
            self._emit(Pruned(step, tuple(gone)))

    def _give_up(self, step: int, error: BaseException, *, all_done: bool) -> None:
        """Leave nothing of a version that failed (rank 0), and tell the others not to wait for it.

        A rank that is still writing would make the directory anew and hand in its part: so the word has to stay there, until
        a later version is committed. With `all_done` no rank is, and those that wait see that their parts are gone.
        """
        rank = self._options.rank
        try:
            with self._at(step, "clearing up", time.monotonic() + self._options.timeout_s, essential=False):
                store = self._version(step)
                if native.is_committed(store):
                    return
                contributions.clear(store, self._options.run, rank)
                if self._options.world > 1 and not (all_done or (rank and isinstance(error, RankFailedError))):
                    contributions.refuse(store, self._options.run, Refusal(step, rank, told(error)))
        except Exception as other:
            self._emit(Trouble(step, f"clearing up: {told(other)}"))
