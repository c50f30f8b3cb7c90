"""Runs the real DeepSpeed on checkpoints, several in one go: see `deepspeed_ranks`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SCRIPT = Path(__file__).with_name("deepspeed_ranks.py")
_SECONDS = 280  # until a run counts as stuck, on a busy machine


@dataclass
class DeepSpeedRuns:
    """Cases for one torchrun of so many ranks."""

    folder: Path
    ranks: int
    cases: list[dict[str, Any]] = field(default_factory=list)

    def add(self, **case: Any) -> None:
        """One more case, by the fields of `deepspeed_ranks.Case`."""
        self.cases.append(case)

    def results(self) -> list[dict[str, Any]]:
        """What rank 0 found, for each case."""
        path = self.folder / "cases.json"
        path.write_text(json.dumps(self.cases))
        env = {**os.environ, "DS_ACCELERATOR": "cpu", "DS_BUILD_OPS": "0", "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={self.ranks}"]
        done = subprocess.run(
            [*command, str(SCRIPT), str(path)], env=env, capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        assert done.returncode == 0, done.stderr[-4000:]
        found: list[dict[str, Any]] = json.loads(path.with_suffix(".out").read_text())
        return found
