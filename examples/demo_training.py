"""Part (b) of the demo: a training run loses a rank and goes on in other layouts, exactly where it stood.

The state that was saved is known independently: the run reports digests of its full tensors, gathered by torch alone.
"""

from __future__ import annotations

import json
import math
import signal
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from examples.proof import Outcome, Proofs, run, torchrun, ucconvert

SAVE_STEP = 4
KILL_STEP = 6  # two steps after the save: there is work to lose and to do again
LAST_STEP = 8
RUN_TIMEOUT_S = 240.0  # a run takes some 15 s on 2 quiet cores
NEXT_STEP_TOLERANCE = 1e-5  # relative; fp32 sums in another order differ by some 1e-7
LATER_TOLERANCE = 1e-4  # the difference grows with each update


@dataclass(frozen=True, slots=True)
class Report:
    """The JSON lines of one run, by kind."""

    losses: dict[int, float]
    """Step to loss of the global batch."""
    states: dict[int, Mapping[str, Any]]
    """Step to what `state_digests` saw right after saving or loading."""

    @staticmethod
    def of(outcome: Outcome) -> Report:
        events = [json.loads(line) for line in outcome.stdout.splitlines() if line.startswith("{")]
        return Report(
            {e["step"]: e["loss"] for e in events if e["event"] == "step"},
            {e["step"]: e for e in events if e["event"] == "state"},
        )


def prove_training(work: Path, proofs: Proofs) -> None:
    """One run that is killed, one that is not, and two that resume."""
    saved_to = work / "run"
    killed = run(
        _train(
            4,
            "dp=2,tp=2",
            "--save-to",
            saved_to,
            "--save-every",
            SAVE_STEP,
            "--digests",
            "--kill-rank",
            1,
            "--at-step",
            KILL_STEP,
        ),
        work / "killed.log",
        RUN_TIMEOUT_S,
        expect_failure=True,
    )
    before = Report.of(killed)
    _prove_killed(killed, before, saved_to, work, proofs)
    whole = Report.of(run(_train(4, "dp=2,tp=2"), work / "whole.log", RUN_TIMEOUT_S))
    for name, ranks, mesh in (("DP3", 3, "dp=3"), ("PP2×TP2", 4, "pp=2,tp=2")):
        again = work / f"again-{mesh}"
        # Another seed: what is equal afterwards was loaded, not initialised alike.
        resume = _train(ranks, mesh, "--seed", 1, "--resume-from", saved_to, "--resave-to", again, "--digests")
        after = Report.of(run(resume, work / f"{mesh}.log", RUN_TIMEOUT_S))
        _prove_state(name, before, after, proofs)
        _prove_diff(name, saved_to, again, work, proofs)
        _prove_loss(name, whole, after, proofs)


def _train(ranks: int, mesh: str, *args: str | int | Path) -> list[str]:
    return torchrun(ranks, "examples.train", "--mesh", mesh, "--steps", str(LAST_STEP), *map(str, args))


def _checkpoint(run_directory: Path) -> Path:
    return run_directory / f"step-{SAVE_STEP:08d}"


def _prove_killed(killed: Outcome, report: Report, saved_to: Path, work: Path, proofs: Proofs) -> None:
    by_signal = f"exitcode: -{signal.SIGKILL.value}" in killed.log.read_text().replace("exitcode  :", "exitcode:")
    verified = run(ucconvert("verify", _checkpoint(saved_to)), work / "verify.log", RUN_TIMEOUT_S, expect_failure=True)
    proofs.check(
        "a rank of the DP2×TP2 run on 4 ranks is killed; its last checkpoint stands",
        f"rank 1 ended by SIGKILL in step {KILL_STEP}; step {SAVE_STEP} verifies (checksums, coverage)",
        by_signal and max(report.losses, default=0) == KILL_STEP - 1 and verified.code == 0,
    )


def _prove_state(name: str, before: Report, after: Report, proofs: Proofs) -> None:
    saved, loaded = before.states.get(SAVE_STEP, {}), after.states.get(SAVE_STEP, {})
    tensors, others = saved.get("tensors", {}), loaded.get("tensors", {})
    equal = sum(others.get(key) == digest for key, digest in tensors.items())
    place = [f"{key} {loaded.get(key)}" for key in ("step", "position", "learning_rate")]
    proofs.check(
        f"{name} resumes with exactly the weights, optimizer state, step and data position that DP2×TP2 saved",
        f"{equal} of {len(tensors)} full tensors equal by SHA-256; {', '.join(place)}",
        equal == len(tensors) == len(others) > 0
        and all(saved.get(key) == loaded.get(key) for key in ("step", "position", "learning_rate")),
    )


def _prove_diff(name: str, saved_to: Path, again: Path, work: Path, proofs: Proofs) -> None:
    # Each rank has random state of its own, and now there may be another number of ranks.
    command = ucconvert("diff", _checkpoint(saved_to), _checkpoint(again), "--exclude", "rng/*")
    outcome = run(command, work / f"diff-{again.name}.log", RUN_TIMEOUT_S, expect_failure=True)
    last = (outcome.stdout.strip().splitlines() or [""])[-1]
    proofs.check(f"saved again by {name} at once, the checkpoint is the same", f"ucconvert diff: {last}", outcome.code == 0)


def _prove_loss(name: str, whole: Report, after: Report, proofs: Proofs) -> None:
    steps = range(SAVE_STEP + 1, LAST_STEP + 1)
    pairs = [(after.losses.get(step, math.nan), whole.losses.get(step, math.nan)) for step in steps]
    gaps = [abs(ours - truth) / truth for ours, truth in pairs]
    ours, truth = pairs[0]
    proofs.check(
        f"{name}'s loss goes on as if nothing had happened",
        f"step {steps[0]}: {ours:.6f}, uninterrupted {truth:.6f} (relative difference {gaps[0]:.0e}); "
        f"up to step {LAST_STEP}: at most {max(gaps):.0e}",
        gaps[0] <= NEXT_STEP_TOLERANCE and all(gap <= LATER_TOLERANCE for gap in gaps),  # a NaN fails both
    )
