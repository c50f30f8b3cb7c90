"""The pipeline example: a rank that dies in mid copy costs one step, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.demo_snapshot import Run
from examples.proof import run, torchrun

TIMEOUT_S = 120.0


@pytest.mark.slow
def test_a_run_killed_in_mid_copy_goes_on_from_the_step_before_as_if_nothing_had_happened(tmp_path: Path) -> None:
    def train(slots: str, *more: str) -> list[str]:
        command = ("examples.pipeline", "--steps", "7", "--digests", "--directory", str(tmp_path / slots))
        return torchrun(2, *command, *more)

    kill = ("--kill-rank", "1", "--at-step", "5")
    killed = Run.of(run(train("a", *kill), tmp_path / "killed.log", TIMEOUT_S, expect_failure=True))
    after = Run.of(run(train("a", "--seed", "1"), tmp_path / "after.log", TIMEOUT_S))
    whole = Run.of(run(train("b", "--traces", str(tmp_path / "traces")), tmp_path / "whole.log", TIMEOUT_S))

    assert killed.killed["step"] == 5
    assert 0 < killed.killed["copied"] < killed.killed["total"]
    assert after.resumed["step"] == 4
    assert {key: after.resumed[key] for key in ("position", "tensors")} == {
        key: whole.states[4][key] for key in ("position", "tensors")
    }
    assert after.losses == {step: whole.losses[step] for step in (5, 6, 7)}
    assert after.states[7] == whole.states[7]
    assert (whole.snapshots["taken"], whole.snapshots["skipped"], whole.snapshots["failed"]) == (7, 0, 0)
    assert sorted(path.name for path in (tmp_path / "traces").iterdir()) == ["rank0.json", "rank1.json"]
