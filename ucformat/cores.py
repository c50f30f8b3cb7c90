"""How many threads a process should use: the cores that are its share, when several ranks run on one host.

More threads than that only take turns, and push each other's buffers out of the cache on the way.
"""

from __future__ import annotations

import os

MOST = 4  # threads beyond that wait for the disk or for memory, not for a core


def share(most: int = MOST) -> int:
    """Cores for this process, at least one: those that it may run on, divided by the ranks that torchrun started here."""
    try:
        cores = len(os.sched_getaffinity(0))
    except AttributeError:  # not Linux
        cores = os.cpu_count() or 1
    ranks = os.environ.get("LOCAL_WORLD_SIZE", "")
    return max(1, min(most, cores // max(1, int(ranks) if ranks.isdecimal() else 1)))
