"""What lies in a host's memory is listed, and removed only where its job has ended."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.checkpoints import flip
from tests.cli.calls import Program
from tests.snapshot.rigs.hosts import MemoryHosts
from ucformat.formats.snapshot import KEEPER_LOCK, LOCK
from ucformat.snapshot.recovery import memory
from ucformat.snapshot.slots.filelock import FileLock, holder


@pytest.fixture
def job(tmp_path: Path) -> MemoryHosts:
    """Ranks 0 and 2 on one host, 1 on another, with two protected versions; it lives."""
    hosts = MemoryHosts(tmp_path, [0, 1, 0], run="a" * 32)
    for step in (1, 2):
        hosts.take(step)
        hosts.protect()
    return hosts


def files(place: Path, *suffixes: str) -> list[Path]:
    return sorted(path for path in place.rglob("*") if path.suffix in suffixes)


def test_slots_lists_run_ranks_versions_parity_and_whether_the_job_lives(job: MemoryHosts, ucconvert: Program) -> None:
    answer = ucconvert("slots", job.directory(0))
    assert answer.status == 0
    head, newest, older, total = answer.out.splitlines()
    assert "host0: ranks 0, 2, " in head
    assert "in use by process" in head
    assert "step 2, run aaaaaaaa, ranks 0, 2 of 3 (1 not on this host)" in newest
    assert "parity kept by rank 0" in newest
    assert "step 1" in older
    assert total.startswith("1 snapshot, ")
    job.close()
    assert "no process of the job lives" in ucconvert("slots", job.directory(0)).out
    (listed,) = json.loads(ucconvert("slots", job.directory(0), "--json").out)
    assert (listed["owners"], [version["step"] for version in listed["versions"]]) == ([], [2, 1])
    there = files(Path(job.directory(0)), ".safetensors", ".xor")
    assert listed["nbytes"] == sum(path.stat().st_size for path in there)


def test_looking_changes_nothing_and_says_what_is_damaged(job: MemoryHosts, ucconvert: Program) -> None:
    job.close()
    record = files(Path(job.directory(1)), ".json")[0]
    flip(record, record.stat().st_size // 2)
    before = {path: path.stat().st_mtime_ns for path in files(job.place, *(".safetensors", ".xor", ".json", ""))}
    answer = ucconvert("slots", job.directory(1))
    assert answer.status == 0
    assert "ignored: " in answer.err
    assert {path: path.stat().st_mtime_ns for path in before} == before


def test_nothing_of_a_job_goes_while_any_process_of_it_lives(job: MemoryHosts, ucconvert: Program) -> None:
    there = files(job.place, ".safetensors", ".xor", ".json")
    for slots in job.slots[:2]:
        slots.close()  # rank 2 lives: its job may restore what rank 0 has left
    for verb in (["slots", "--prune"], ["prune"]):
        for yes in ([], ["--yes"]):
            answer = ucconvert(*verb, job.directory(0), *yes)
            assert (answer.status, "0 leftovers" in answer.out) == (0, True)
            assert "stays" in answer.out
    job.slots[2].close()
    keeper = FileLock.take(f"{job.directory(0)}/rank-00000/{KEEPER_LOCK}")  # it persists what its dead trainer took
    assert "0 leftovers" in ucconvert("slots", "--prune", "--yes", job.directory(0)).out
    assert "in use by process" in ucconvert("slots", job.directory(0)).out
    keeper.release()
    assert files(job.place, ".safetensors", ".xor", ".json") == there


def test_what_is_dead_is_listed_first_and_removed_with_yes_and_strange_files_stay(job: MemoryHosts, ucconvert: Program) -> None:
    job.close()
    folder = Path(job.directory(0), "rank-00000")
    strange = [folder / "slot-7.safetensors", folder / "parity-9.xor", folder / "notes.txt"]
    for path in strange:
        path.write_bytes(b"mine")
    listed = ucconvert("slots", "--prune", job.directory(0))
    assert "would remove 8 leftovers" in listed.out  # 2 ranks × 3 slots, and 2 × parity of rank 0
    assert "--yes" in listed.err
    assert "removed 8 leftovers" in ucconvert("slots", "--prune", "--yes", job.directory(0)).out
    assert files(Path(job.directory(0)), ".safetensors", ".xor", ".json", ".txt") == sorted(strange)
    assert files(Path(job.directory(1)), ".safetensors") != []


def test_prune_of_slots_needs_directories_and_yes_needs_prune(ucconvert: Program, tmp_path: Path) -> None:
    assert ucconvert("slots", "--prune", "--yes").status == 2
    assert ucconvert("slots", "--yes", tmp_path).status == 2
    assert ucconvert("slots", tmp_path / "gone").status == 1


def test_snapshots_in_memory_are_found(job: MemoryHosts, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory, "memory_mounts", lambda: [str(job.place)])
    assert memory.find() == [job.directory(0), job.directory(1)]


def test_who_holds_a_lock_is_said_without_taking_it(tmp_path: Path) -> None:
    path = str(tmp_path / LOCK)
    assert holder(path) == ""
    with FileLock.take(path):
        assert holder(path).startswith("process ")
    assert holder(path) == ""
