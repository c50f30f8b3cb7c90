"""What the other ranks of this host hold: the newest step that all of them have, read from their records on tmpfs.

Ranks commit one after another, so a rank must not overwrite the last version that all have until all have the next.
"""

from __future__ import annotations

import os

from ucformat.formats.snapshot import rank_name, record_name
from ucformat.snapshot.slotfile import read_record


class Peers:
    """The ranks of this host, by their directories. Records are read again only when they have changed."""

    def __init__(self, directory: str, world: int, slots: int) -> None:
        self._folders = [os.path.join(os.path.abspath(directory), rank_name(rank)) for rank in range(world)]
        self._slots = slots
        self._known: dict[str, tuple[int, int | None]] = {}

    def all_here(self) -> bool:
        """Whether every rank of the job has its slots in this directory: else the others are on other hosts."""
        return all(os.path.isdir(folder) for folder in self._folders)

    def complete(self) -> int | None:
        """The newest step of which every rank holds a version; None when there is none yet."""
        common: set[int] | None = None
        for folder in self._folders:
            steps = {step for index in range(self._slots) if (step := self._step(f"{folder}/{record_name(index)}")) is not None}
            common = steps if common is None else common & steps
            if not common:
                return None
        return max(common or (), default=None)

    def _step(self, record: str) -> int | None:
        try:
            changed = os.stat(record).st_mtime_ns
        except OSError:
            return None
        known = self._known.get(record)
        if known is None or known[0] != changed:
            found = read_record(record)
            known = self._known[record] = (changed, None if found is None else found.step)
        return known[1]
