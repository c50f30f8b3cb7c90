"""What a process owes to those beside it: its share of the host's cores, and when Python looks for cyclic garbage."""

from __future__ import annotations

import gc
import os
from collections.abc import Iterator
from contextlib import contextmanager

MOST = 4  # threads beyond that wait for the disk or for memory, not for a core


def share(most: int = MOST) -> int:
    """Cores for this process, at least one: those that it may run on, divided by the ranks that torchrun started here."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(most, cores // max(1, int(ranks) if ranks.isdecimal() else 1)))


@contextmanager
def collected_later() -> Iterator[None]:
    """Collect no cyclic garbage inside: walking a large state would set off dozens of searches that find nothing."""
    if not gc.isenabled():
        yield
        return
    gc.disable()
    try:
        yield
    finally:
        gc.enable()
