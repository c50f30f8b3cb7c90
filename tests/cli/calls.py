"""How the tests call the program: in this process, or as its users do."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.checkpoints import split_evenly, write_native
from ucformat.catalog import Notes
from ucformat.cli.app import run


@dataclass(frozen=True, slots=True)
class Answer:
    """What the program answered."""

    status: int
    out: str
    err: str


class Program:
    """`ucconvert` in this process."""

    def __init__(self, capture: pytest.CaptureFixture[str]) -> None:
        self._capture = capture

    def __call__(self, *args: str | Path) -> Answer:
        self._capture.readouterr()
        status = run([str(arg) for arg in args])
        text = self._capture.readouterr()
        return Answer(status, text.out, text.err)


def spawn(*args: str | Path, ranks: int = 1) -> Answer:
    """`python -m ucformat.cli` in a process of its own, or under torchrun in several."""
    launcher = [sys.executable, "-m"]
    if ranks > 1:
        launcher += ["torch.distributed.run", "--standalone", "--nproc-per-node", str(ranks), "-m"]
    done = subprocess.run(
        [*launcher, "ucformat.cli", *map(str, args)],
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    return Answer(done.returncode, done.stdout, done.stderr)


def small(path: Path) -> Path:
    """A native checkpoint of a small training state at step 7."""
    torch.manual_seed(0)
    state = {
        "model/layers.0.w": torch.randn(6, 4),
        "model/layers.1.w": torch.randn(6, 4),
        "model/norm": torch.ones(4),
        "optimizer/norm/exp_avg": torch.zeros(4),
    }
    write_native(
        path,
        state,
        {"model/layers.0.w": split_evenly((6, 4), 0, 3)},
        shards=2,
        values={"step": 7, "args": {"lr": 0.5}},
        aliases={"model/tied": "model/norm"},
        notes=Notes(step=7, mesh={"dp": 2}),
    )
    return path
