"""Ranks of several hosts: none sees the others' slots, and yet at every moment all hold a version in common."""

from __future__ import annotations

import random
import signal
import time
from pathlib import Path

import pytest

import ucformat
from tests.snapshot.rigs.jobs import Job, dawdle, united
from ucformat.reshard.reading.lazy import read

WORLD = 4
BEHIND = 20  # steps in a row of which no version is whole: never by chance, but if ranks keep what the others lack


def held(everywhere: Path) -> int:
    """The newest version that all ranks hold, which is one of a single step, bit for bit."""
    catalog = ucformat.open(str(everywhere)).catalog
    step = catalog.notes.step
    assert step is not None
    assert isinstance(catalog.values, dict)
    assert catalog.values["step"] == step
    for rank in range(WORLD):
        assert bool((read(catalog, f"model/w{rank}") == -step).all())
    return step


@pytest.mark.parametrize("hosts", [1, 2])
def test_whenever_a_job_dies_all_ranks_hold_a_version_in_common(tmp_path: Path, hosts: int) -> None:
    places = [tmp_path / f"host{i}" for i in range(hosts)]
    everywhere = united(tmp_path / "everywhere", places, WORLD)
    chance, known = random.Random(hosts), 0
    for start in range(3):
        job = Job(WORLD, dawdle, places, start, str(everywhere) if start else None)
        while min(job.hear(rank)[1] for rank in range(WORLD)) < 3:
            pass
        for _ in range(8):  # stopped, all that they have made stands still and can be looked at
            time.sleep(chance.uniform(0.0, 0.1))
            steps = [job.latest(rank)[0] for rank in range(WORLD)]
            job.signal(signal.SIGSTOP)
            found = held(everywhere)
            assert found >= known
            known = found
            assert known > max(steps) - BEHIND
            job.signal(signal.SIGCONT)
        time.sleep(chance.uniform(0.0, 0.1))
        job.kill()
        assert held(everywhere) >= known
        known = held(everywhere)
    assert known > 20
