"""Hosts that vanish from under a job of real processes, at any moment: see `tests.snapshot.rigs.machines`."""

from __future__ import annotations

import random
import shutil
import tempfile
from pathlib import Path

from tests.snapshot.rigs.machines import lose_a_host


class HostLosses:
    """A trial: some hosts train, one is lost with its memory, others go on."""

    def __init__(self, work: Path) -> None:
        self.work = work

    def __call__(self, chance: random.Random) -> str:
        place = Path(tempfile.mkdtemp(dir=self.work))
        try:
            return lose_a_host(place / "memory", chance)
        finally:
            shutil.rmtree(place, ignore_errors=True)
