"""Which steps are taken, and what is done with them: decided from steps alone, so alike on all ranks."""

from __future__ import annotations

from dataclasses import dataclass

EARLY = 4  # takes in which ranks meet every time
RARELY = 32  # takes of which they meet in one, later
LONGEST = 5  # after so many changes, the least distance between two changes of the layout grows no more


@dataclass(frozen=True, slots=True)
class Due:
    """What the keeper does with a version."""

    persist: bool
    hash: bool


class Cadence:
    """Of the steps that it is asked about, the first one at or after each multiple of `every` is taken.

    Of those, the first one at or after each multiple of `persist_every` (None: never) is persisted; likewise for checksums,
    where 0 means never.
    """

    def __init__(self, every: int, persist_every: int | None, hash_every: int) -> None:
        self._every, self._persist_every, self._hash_every = every, persist_every, hash_every
        self._asked: int | None = None
        self._taken: int | None = None

    def next(self, step: int) -> Due | None:
        """What is done with a step; None when it is not taken. Raises ValueError unless steps ascend (see `restart`)."""
        if self._taken is not None and step <= self._taken:
            raise ValueError(f"step {step} was taken already, and no optimizer step has changed the state since")
        since = step - 1 if self._asked is None else self._asked
        self._asked = step
        if not _reached(self._every, since, step):
            return None
        before = step - self._every if self._taken is None else self._taken
        self._taken = step
        return Due(_reached(self._persist_every or 0, before, step), _reached(self._hash_every, before, step))

    @property
    def last(self) -> int:
        """The step that was taken last; -1 before the first one."""
        return -1 if self._taken is None else self._taken

    def restart(self) -> None:
        """The job has gone back: the next step may be any."""
        self._asked = self._taken = None


def _reached(every: int, before: int, step: int) -> bool:
    """Whether `step` is the first one at or after a multiple of `every`, when the one before it was `before`."""
    return every > 0 and step // every > before // every


class Meetings:
    """In which takes ranks ask each other whether the state has changed its layout: that makes them wait for one another.

    Every early one, since optimizers get their states in the first steps; later once in a while.
    """

    def __init__(self) -> None:
        self._count = self._layouts = self._next = 0

    def next(self) -> bool:
        """Whether they do in this take."""
        self._count = count = self._count + 1
        often = count <= EARLY or (count <= RARELY and count & (count - 1) == 0)
        return count >= self._next and (often or count % RARELY == 0)

    def laid_out(self) -> None:
        """Slots are laid out anew: a state that changes its layout again and again is not worth that every time."""
        self._layouts += 1
        self._next = self._count + 2 ** min(self._layouts, LONGEST)
