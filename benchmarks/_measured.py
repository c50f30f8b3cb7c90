"""Run one job in a process of its own and tell its seconds and peak memory as JSON on the last line.

`python -m benchmarks._measured JOB ARGS…`; the clock starts after the imports, as does a conversion for who waits for it
in a long-running program; memory counts from the start of the process.
"""

from __future__ import annotations

import json
import shutil
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks import disk
from benchmarks.report import peak_mb

Job = Callable[..., object]


def nothing() -> None:
    """The baseline: an interpreter that has imported torch."""
    torch.zeros(1)


def copy(source: str, target: str) -> None:
    """The yardstick: every file copied by the kernel, and durable."""
    if Path(source).is_dir():
        shutil.copytree(source, target)
    else:
        shutil.copyfile(source, target)
    disk.sync(Path(target))


def convert() -> Job:
    """Our converter, as the command line runs it."""
    from ucformat.cli import main  # what a conversion imports must count as its memory

    def run(source: str, target: str, form: str) -> None:
        sys.argv = ["ucconvert", source, target, "--to", form]
        try:
            main()
        except SystemExit as end:
            if end.code not in (None, 0):
                raise RuntimeError(f"ucconvert ended with {end.code}") from end

    return run


def dcp_to_torch_save() -> Job:
    """PyTorch's own converter of DCP to torch.save."""
    from torch.distributed.checkpoint.format_utils import dcp_to_torch_save as job

    return job


def main() -> None:
    name, *args = sys.argv[1:]
    jobs: dict[str, Callable[[], Job]] = {
        "nothing": lambda: nothing,
        "copy": lambda: copy,
        "convert": convert,
        "dcp_to_torch_save": dcp_to_torch_save,
    }
    job = jobs[name]()
    began, used = time.perf_counter(), time.process_time()
    job(*args)
    told = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - used, "peak_mb": peak_mb()}
    print(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    main()
