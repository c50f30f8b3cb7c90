"""Whoever leaves a process group is rid of it: nothing of ucformat keeps it, so its threads end before the interpreter does."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import leaving

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(sys.platform != "linux", reason="threads are counted in /proc")
@pytest.mark.parametrize("part", leaving.PARTS)
def test_a_group_that_was_left_is_gone(part: str, tmp_path: Path) -> None:
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.leaving"]
    command = [*launch, part, str(tmp_path / part)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
    counts = [tuple(map(int, line.split())) for line in done.stdout.splitlines()]
    assert len(counts) == 2
    for before, after in counts:
        assert before > 0
        assert after == 0
