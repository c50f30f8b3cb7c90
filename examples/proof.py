"""What the demo is made of: commands with a timeout and a log, and rows of a table that say what was proven."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console
from rich.table import Table

GRACE_S = 10.0  # torchrun needs some seconds to end its workers before it is killed itself
LOG_LINES = 30  # of the first error, and of the end: enough to see what happened and where


class DemoError(Exception):
    """A step of the demo could not be run at all; the message holds the end of its log."""


@dataclass(frozen=True, slots=True)
class Row:
    """One claim, what was seen, and whether that proves it."""

    claim: str
    evidence: str
    passed: bool


@dataclass(slots=True)
class Proofs:
    """The rows gathered so far, each also told as it comes."""

    console: Console
    rows: list[Row] = field(default_factory=list)

    def check(self, claim: str, evidence: str, passed: bool) -> None:
        self.rows.append(Row(claim, evidence, passed))
        self.console.print(f"  {_mark(passed)} {claim}: {evidence}", highlight=False)

    @property
    def passed(self) -> bool:
        return bool(self.rows) and all(row.passed for row in self.rows)

    def show(self, title: str) -> None:
        table = Table(title=title, show_lines=True)
        table.add_column("what was proven", ratio=3)
        table.add_column("seen", ratio=4)
        table.add_column("", width=4)
        for row in self.rows:
            table.add_row(row.claim, row.evidence, _mark(row.passed))
        self.console.print(table)


def _mark(passed: bool) -> str:
    return "[green]yes[/green]" if passed else "[red]NO[/red]"


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a command ended."""

    code: int
    stdout: str
    log: Path
    """Its stderr."""


def environment(work: Path) -> dict[str, str]:
    """Of a command of the demo."""
    env = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    env["TMPDIR"] = str(work.resolve())  # torchrun never removes its own temporary files
    return env


def run(command: Sequence[str], log: Path, timeout_s: float, expect_failure: bool = False) -> Outcome:
    """Run `command` in the repository, stderr into `log`.

    Raises DemoError when it does not end in time, or fails unless `expect_failure`.
    """
    env = environment(log.parent)
    with log.open("w") as stderr:
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=stderr, text=True, env=env, cwd=Path(__file__).parent.parent
        )
        try:
            stdout, _ = process.communicate(timeout=timeout_s)
        except subprocess.TimeoutExpired:
            stop(process)
            raise DemoError(f"not done after {timeout_s:.0f} s: {' '.join(command)}\n{tail(log)}") from None
        except BaseException:  # Ctrl-C: leave no ranks behind
            stop(process)
            raise
    if process.returncode != 0 and not expect_failure:
        raise DemoError(f"exit code {process.returncode}: {' '.join(command)}\n{stdout[-2000:]}\n{tail(log)}")
    return Outcome(process.returncode, stdout, log)


def stop(process: subprocess.Popen[str]) -> None:
    """End a process; torchrun is asked first, since only then it ends its workers."""
    process.terminate()
    try:
        process.wait(GRACE_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()  # not read to its end: an orphan might hold it open


def tail(log: Path) -> str:
    """The first traceback in a log, which torchrun's own report often buries, and the end."""
    lines = log.read_text(errors="replace").splitlines()
    first = next((i for i, line in enumerate(lines) if "Traceback" in line), len(lines))
    shown = sorted({*range(first, min(first + LOG_LINES, len(lines))), *range(max(0, len(lines) - LOG_LINES), len(lines))})
    return "\n".join(lines[i] for i in shown)


def ucconvert(*args: str | Path) -> list[str]:
    """The command line of our own converter."""
    return [sys.executable, "-m", "ucformat.cli", *map(str, args)]


def torchrun(ranks: int, *args: str | Path) -> list[str]:
    """A module under torchrun on this machine, on a free port."""
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    return [sys.executable, *launcher, *map(str, args)]
