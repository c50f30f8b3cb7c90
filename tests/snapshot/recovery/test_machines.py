"""A host of a running job vanishes with its memory: real processes in network namespaces, with a tmpfs for each host.

Where namespaces can't be made (no root), hosts are directories and loopback addresses: `Machines.real` says which it was.
`python -m tests.campaigns --only hosts` tries it at many moments.
"""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from examples.hosts import Machines, can_namespaces
from tests.snapshot.rigs.machines import lose_a_host


@pytest.mark.slow
def test_a_job_that_loses_a_host_goes_on_from_the_newest_protected_version(tmp_path: Path) -> None:
    assert lose_a_host(tmp_path / "memory", random.Random(4)) == ""


def test_a_host_of_the_test_bed_has_memory_of_its_own_that_goes_with_it(tmp_path: Path) -> None:
    with Machines(tmp_path / "memory", 2) as machines:
        assert machines.real == can_namespaces()
        for host in range(2):
            write = f"echo {host} > {machines.memory(host)}/who && cat {machines.memory(host)}/who"
            assert machines.run(host, write) == f"{host}\n"
        machines.lose(0)
        machines.start(0)
        assert machines.run(0, f"ls {machines.memory(0)}") == ""
        assert machines.run(1, f"cat {machines.memory(1)}/who") == "1\n"
