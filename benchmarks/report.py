"""What all benchmarks share: their arguments, the machine, medians, and the one form in which results are told."""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

ROOT = Path(__file__).parent.parent
MB = 1e6  # as disks are sold
GB = 1e9
MIB = 2**20


@dataclass(frozen=True, slots=True)
class Line:
    """One row of a benchmark's table: what, ours, the peer's, and the ratio (above 1 is better than the peer)."""

    what: str
    ours: str
    peer: str
    ratio: float | None = None


@dataclass(frozen=True, slots=True)
class Result:
    """The outcome of one benchmark."""

    name: str
    ratios: Mapping[str, float]
    values: Mapping[str, float]
    lines: Sequence[Line]

    def publish(self, as_json: bool) -> None:
        """Print the table, or one JSON object."""
        if as_json:
            ratios = {key: round(value, 3) for key, value in self.ratios.items()}
            values = {key: round(value, 4) for key, value in self.values.items()}
            print(json.dumps({"name": self.name, "machine": machine(), "ratios": ratios, "values": values}))
            return
        about = machine()
        title = f"{self.name}: {about['cpu']}, {about['cores']} cores, load {about['load']}"
        table = Table(title=title)
        table.add_column("what")
        table.add_column("ours", justify="right")
        table.add_column("peer or limit", justify="right")
        table.add_column("ratio", justify="right")
        for line in self.lines:
            table.add_row(line.what, line.ours, line.peer, "" if line.ratio is None else f"{line.ratio:.2f}")
        Console(width=None if sys.stdout.isatty() else 120).print(table)


def arguments(description: str | None) -> argparse.ArgumentParser:
    """A parser with the options that every benchmark has."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--rounds", type=int, default=5, help="measurements of each kind; their median counts")
    parser.add_argument(
        "--dir", type=Path, help="where to write; its disk is what is measured (default: the temporary directory)"
    )
    return parser


def machine() -> dict[str, str | int | float]:
    """What figures depend on, without anything that identifies the machine."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    return {
        "cpu": _cpu(),
        "cores": os.cpu_count() or 1,
        "memory_gb": round(memory / GB, 1),
        "system": f"{platform.system()} {platform.release()}",
        "python": platform.python_version(),
        "torch": version("torch"),
        "load": round(os.getloadavg()[0], 2),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor()
    names = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor()


def median(values: Sequence[float]) -> float:
    return statistics.median(values)


def peak_mb() -> float:
    """The largest resident size this process has had, in MB.

    VmHWM, not ru_maxrss: the latter starts at the size of the parent that forked it.
    """
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith("VmHWM:"):
            return int(line.split()[1]) * 1024 / MB
    raise RuntimeError("/proc/self/status has no VmHWM")


def on_ranks(count: int, module: str, *args: object, temporary: str, timeout_s: float = 1800) -> Any:
    """Run a benchmark's module under torchrun; the JSON on the last line of its output. Raises RuntimeError with its errors.

    `temporary`: a directory of the caller's, as torchrun never removes its own temporary files.
    """
    launcher = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count), "-m", module]
    command = [sys.executable, *launcher, *map(str, args)]
    env = {**os.environ, "OMP_NUM_THREADS": "1", "TMPDIR": temporary}
    done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=ROOT, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"a rank failed:\n{done.stdout[-2000:]}\n{done.stderr[-6000:]}")
    return json.loads(done.stdout.strip().splitlines()[-1])


def child(*command: str, timeout_s: float = 1800) -> dict[str, float]:
    """Run a Python process; the JSON object on its last line of output. Raises RuntimeError with its errors."""
    done = subprocess.run([sys.executable, *command], capture_output=True, text=True, cwd=ROOT, timeout=timeout_s, check=False)
    if done.returncode != 0:
        raise RuntimeError(f"{' '.join(command)} failed:\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}")
    result: dict[str, float] = json.loads(done.stdout.strip().splitlines()[-1])
    return result
