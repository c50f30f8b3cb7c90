"""Groups: a failure on any rank is a failure on all, over real gloo processes."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.reshard.ranks import on_ranks
from tests.world import run
from ucformat.errors import RankFailedError, StorageError
from ucformat.group import Group, current, first_of_each, leaders

WORKER = """
import json, sys
from datetime import timedelta
import torch.distributed as dist
from ucformat.errors import MissingFileError, StorageError
from ucformat.group import current

dist.init_process_group("gloo", timeout=timedelta(seconds=60))
group = current()
told = {"gathered": group.all_gather(group.rank * 10), "cast": group.broadcast(group.rank)}
half = dist.new_group([1, 2])
if group.rank in (1, 2):
    inner = current(half)
    told["half"] = [inner.rank, inner.size, inner.broadcast(f"from {group.rank}"), inner.all_gather(group.rank)]
cases = {
    "none": {},
    "one": {1: StorageError("shard-1", "disk full", 8, 16)},
    "all": {rank: StorageError(f"shard-{rank}", "disk full") for rank in range(3)},
    "mixed": {1: MissingFileError("index"), 2: StorageError("shard-2", "disk full")},
    "foreign": {2: KeyError("w")},
    "foreign everywhere": {rank: ValueError(f"step {rank}") for rank in range(3)},
    "foreign first": {0: KeyError("w"), 2: StorageError("shard-2", "disk full")},
}
for name, failing in cases.items():
    try:
        with group.together("saving"):
            if group.rank in failing:
                raise failing[group.rank]
        told[name] = "fine"
    except Exception as error:
        told[name] = f"{type(error).__name__}: {error}"
        told[f"{name}: facts"] = [getattr(error, "start", None), sorted(getattr(error, "failures", {}))]
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


def test_a_failure_on_one_rank_raises_the_same_class_with_its_facts_on_every_rank(told: list[dict[str, object]]) -> None:
    own = "StorageError: shard-1, bytes 8-16: disk full"
    for rank in (0, 2):
        assert told[rank]["one"] == own.replace("shard", "rank 1: shard")
        assert told[rank]["one: facts"] == [8, [1]]
    assert told[1]["one"] == own


def test_when_ranks_fail_differently_all_raise_the_class_of_the_lowest(told: list[dict[str, object]]) -> None:
    assert told[1]["mixed"] == "MissingFileError: index: missing"
    for rank in (0, 2):
        assert told[rank]["mixed"] == "MissingFileError: rank 1: index: missing (1 other rank failed, too)"
        assert told[rank]["mixed: facts"] == [None, [1, 2]]


def test_an_error_that_is_not_ours_is_rank_failed_on_every_rank(told: list[dict[str, object]]) -> None:
    for rank in range(3):
        assert told[rank]["foreign"] == "RankFailedError: saving failed: rank 2: KeyError: 'w'"
        first = "RankFailedError: saving failed: rank 0: KeyError: 'w'; rank 2: StorageError: shard-2: disk full"
        assert told[rank]["foreign first"] == first


def test_where_all_ranks_fail_alike_each_raises_its_own_error(told: list[dict[str, object]]) -> None:
    assert [rank["all"] for rank in told] == [f"StorageError: shard-{rank}: disk full" for rank in range(3)]
    assert [rank["foreign everywhere"] for rank in told] == [f"ValueError: step {rank}" for rank in range(3)]


LOSING = """
import os, signal, sys, time
from datetime import timedelta
import torch.distributed as dist
from ucformat.errors import RankFailedError
from ucformat.group import current

dist.init_process_group("gloo", timeout=timedelta(seconds=8))
group = current()
group.all_gather(0)
victim, how = int(sys.argv[1]), sys.argv[2]
if group.rank == victim:
    os.kill(os.getpid(), getattr(signal, how))
try:
    with group.together("saving"):
        pass
except RankFailedError as error:
    print(sorted(error.failures), str(error).startswith("saving failed: rank"))
    sys.stdout.flush()
    time.sleep(10)  # in step with slower ranks: who leaves seems to have died, too
os._exit(0)
"""


@pytest.mark.parametrize(("victim", "how"), [(1, "SIGKILL"), (2, "SIGSTOP"), (0, "SIGKILL")])
def test_a_rank_that_died_or_hangs_is_named_as_the_suspect(victim: int, how: str) -> None:
    port = free_port()
    env = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "3", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-c", LOSING, str(victim), how]
    ranks = [
        subprocess.Popen(command, env={**env, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
        for rank in range(3)
    ]
    try:
        for rank in set(range(3)) - {victim}:
            assert ranks[rank].communicate(timeout=120)[0].strip() == f"[{victim}] True"
    finally:
        for process in ranks:
            process.kill()
            process.communicate()


@given(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 1)), min_size=1, max_size=9))
def test_the_leader_of_a_rank_is_the_first_that_has_the_same(rows: list[tuple[int, int]]) -> None:
    assert leaders(np.array(rows)).tolist() == [rows.index(row) for row in rows]
    assert first_of_each(np.array(rows)) == sorted({rows.index(row) for row in rows})


def exchanges(group: Group) -> list[object]:
    mine = f"kind {group.rank % 2}"
    return [
        group.numbers([group.rank, -1]).tolist(),
        group.maximum(np.array([group.rank, -group.rank])).tolist(),
        [group.any_rank(group.rank == 2), group.any_rank(False)],
        group.distinct(mine),
        group.gather_from(mine, [0, 3]),
    ]


def test_simulated_ranks_exchange_what_real_ones_do() -> None:
    found = run(4, exchanges)
    assert found == on_ranks(4, real_exchanges)
    assert found[1] == [[[0, -1], [1, -1], [2, -1], [3, -1]], [3, 0], [True, False], ["kind 0", "kind 1"], {}]
    assert found[0][4] == {0: "kind 0", 3: "kind 1"}


def real_exchanges() -> list[object]:
    return exchanges(current())


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
