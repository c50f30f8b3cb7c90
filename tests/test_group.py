"""Groups: a failure on any rank is a failure on all, over real gloo processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from ucformat.errors import RankFailedError, StorageError
from ucformat.group import Group, current

WORKER = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
from ucformat.errors import StorageError
from ucformat.group import current

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
group = current()
told = {"gathered": group.all_gather(group.rank * 10), "cast": group.broadcast(group.rank)}
half = dist.new_group([1, 2])
if group.rank in (1, 2):
    inner = current(half)
    told["half"] = [inner.rank, inner.size, inner.broadcast(f"from {group.rank}"), inner.all_gather(group.rank)]
for name, failing in [("none", ()), ("one", (1,)), ("all", (0, 1, 2))]:
    try:
        with group.together("saving"):
            if group.rank in failing:
                raise StorageError(f"shard-{group.rank}", "disk full")
        told[name] = "fine"
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"
with open(sys.argv[1] + f"/{group.rank}.json", "w") as file:
    json.dump(told, file)
dist.destroy_process_group()
"""


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


@pytest.fixture(scope="module")
def told(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, object]]:
    """What each of 3 ranks saw."""
    out = tmp_path_factory.mktemp("ranks")
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    workers = [subprocess.Popen([sys.executable, "-c", WORKER, str(out)], env={**env, "RANK": str(rank)}) for rank in range(3)]
    assert [worker.wait(timeout=120) for worker in workers] == [0, 0, 0]
    return [json.loads(Path(out, f"{rank}.json").read_text()) for rank in range(3)]


def test_every_rank_gets_every_item_in_rank_order(told: list[dict[str, object]]) -> None:
    assert [rank["gathered"] for rank in told] == [[0, 10, 20]] * 3
    assert [rank["cast"] for rank in told] == [0, 0, 0]


def test_ranks_of_a_subgroup_count_within_it(told: list[dict[str, object]]) -> None:
    assert told[1]["half"] == [0, 2, "from 1", [1, 2]]
    assert told[2]["half"] == [1, 2, "from 1", [1, 2]]


def test_without_a_failure_all_go_on(told: list[dict[str, object]]) -> None:
    assert [rank["none"] for rank in told] == ["fine"] * 3


def test_a_failure_on_one_rank_raises_on_every_rank_and_names_it(told: list[dict[str, object]]) -> None:
    assert told[1]["one"] == "StorageError: shard-1: disk full"
    for rank in (0, 2):
        assert told[rank]["one"] == "RankFailedError: saving failed: rank 1: StorageError: shard-1: disk full"


def test_each_failing_rank_raises_its_own_error(told: list[dict[str, object]]) -> None:
    assert [rank["all"] for rank in told] == [f"StorageError: shard-{rank}: disk full" for rank in range(3)]


def test_a_single_process_needs_no_process_group() -> None:
    group = current()
    assert group == Group(0, 1, None)
    assert group.all_gather("x") == ["x"]
    assert group.broadcast("x") == "x"
    with pytest.raises(StorageError), group.together("saving"):
        raise StorageError("f", "disk full")


def test_the_errors_of_many_ranks_are_told_briefly() -> None:
    error = RankFailedError("save", dict.fromkeys(range(1000), "disk full"))
    assert "996 more" in str(error)
    assert len(str(error)) < 200
