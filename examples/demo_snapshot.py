"""Part (c) of the demo: a pipeline that keeps every step in memory loses a rank in mid copy, and goes on one step before.

Digests and losses come from the runs themselves, gathered by torch alone; the uninterrupted run is the truth.
"""

from __future__ import annotations

import json
import signal
import tempfile
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from examples.proof import Outcome, Proofs, run, torchrun, ucconvert

RANKS = 2
KILL_STEP = 7  # by then the engine copies by a plan, not yet in the first steps
LAST_STEP = 12
RUN_TIMEOUT_S = 240.0  # a run takes some 12 s on 2 quiet cores
MEMORY = Path("/dev/shm")  # tmpfs, where snapshots belong


@dataclass(slots=True)
class Run:
    """The JSON lines of one run."""

    losses: dict[int, float] = field(default_factory=dict)
    states: dict[int, dict[str, Any]] = field(default_factory=dict)
    """By step, right after it."""
    resumed: dict[str, Any] = field(default_factory=dict)
    killed: dict[str, Any] = field(default_factory=dict)
    snapshots: dict[str, Any] = field(default_factory=dict)

    @staticmethod
    def of(outcome: Outcome) -> Run:
        found = Run()
        for line in outcome.stdout.splitlines():
            event: dict[str, Any] = json.loads(line) if line.startswith("{") else {"event": ""}
            if event["event"] == "step":
                found.losses[event["step"]] = event["loss"]
            elif event["event"] == "state":
                found.states[event["step"]] = event
            elif event["event"] in {"resumed", "killed", "snapshots"}:
                setattr(found, event["event"], event)
        return found


def prove_snapshots(work: Path, proofs: Proofs) -> None:
    """One run that is killed in mid copy and started again, and one that is not."""
    with tempfile.TemporaryDirectory(prefix="ucformat-demo-", dir=MEMORY if MEMORY.is_dir() else work) as memory:
        slots = Path(memory) / "run"
        kill = ("--kill-rank", "1", "--at-step", str(KILL_STEP))
        outcome = run(_train(slots, *kill), work / "killed.log", RUN_TIMEOUT_S, expect_failure=True)
        killed = Run.of(outcome)
        newest = run(ucconvert("inspect", slots, "--json"), work / "inspect.log", RUN_TIMEOUT_S, expect_failure=True)
        _prove_killed(killed, outcome, slots, newest, proofs)
        after = Run.of(run(_train(slots), work / "again.log", RUN_TIMEOUT_S))
        whole = Run.of(run(_train(Path(memory) / "whole"), work / "whole.log", RUN_TIMEOUT_S))
    _prove_state(killed, after, proofs)
    _prove_loss(whole, after, proofs)


def _train(slots: Path, *more: str) -> list[str]:
    return torchrun(RANKS, "examples.pipeline", "--directory", slots, "--steps", str(LAST_STEP), "--digests", *more)


def _prove_killed(killed: Run, outcome: Outcome, slots: Path, newest: Outcome, proofs: Proofs) -> None:
    by_signal = f"exitcode: -{signal.SIGKILL.value}" in outcome.log.read_text().replace("exitcode  :", "exitcode:")
    copied, total = killed.killed.get("copied", 0), killed.killed.get("total", 0)
    valid = [sorted(path.name for path in slots.glob(f"rank-{rank:05d}/slot-*.json")) for rank in range(RANKS)]
    step = json.loads(newest.stdout).get("step") if newest.code == 0 else None
    proofs.check(
        f"a rank of a 1F1B pipeline is killed while it copies step {KILL_STEP}: what counts is step {KILL_STEP - 1}, whole",
        f"SIGKILL after {copied / 2**20:.1f} of {total / 2**20:.1f} MiB; valid slots of its: {len(valid[1])} of 2; "
        f"ucformat opens step {step}",
        by_signal and 0 < copied < total and killed.killed["step"] == KILL_STEP and len(valid[1]) == 1 and step == KILL_STEP - 1,
    )


def _prove_state(killed: Run, after: Run, proofs: Proofs) -> None:
    before, found = killed.states.get(KILL_STEP - 1, {}), after.resumed
    tensors, others = before.get("tensors", {}), found.get("tensors", {})
    equal = sum(others.get(key) == digest for key, digest in tensors.items())
    proofs.check(
        "started again, it has exactly the state after that step, without any storage",
        f"step {found.get('step')}, position {found.get('position')}; {equal} of {len(tensors)} full tensors equal by SHA-256",
        found.get("step") == KILL_STEP - 1
        and found.get("position") == before.get("position")
        and equal == len(tensors) == len(others) > 0,
    )


def _prove_loss(whole: Run, after: Run, proofs: Proofs) -> None:
    steps = range(KILL_STEP, LAST_STEP + 1)
    same = [step for step in steps if step in after.losses and after.losses[step] == whole.losses.get(step)]
    equal_end = after.states.get(LAST_STEP, {}).get("tensors") == whole.states.get(LAST_STEP, {}).get("tensors")
    proofs.check(
        "its losses are those of a run that was not interrupted, bit for bit",
        f"{len(same)} of {len(steps)} losses; the final states are {'equal' if equal_end else 'not equal'}; "
        f"{whole.snapshots.get('taken')} steps kept, {whole.snapshots.get('skipped')} skipped in that run",
        len(same) == len(steps) and equal_end and whole.snapshots.get("taken") == LAST_STEP,
    )
