"""Run one job in a process of its own and tell its seconds and peak memory as JSON on the last line.

`python -m benchmarks._measured JOB ARGS…`; the clock starts after the imports, as does a conversion for who waits for it
in a long-running program; memory counts from the start of the process.
"""

from __future__ import annotations

import json
import queue
import shutil
import sys
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from benchmarks import disk
from benchmarks.report import peak_mb
from ucformat.storage.store import Reader

Job = Callable[..., object]
Buffer = NDArray[np.uint8]
_BUFFERS = 6  # between the thread that reads and the one that writes


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


def limit() -> Job:
    """The limit of a conversion: one thread reads as our loads do, one writes as our saves do, and nothing in between."""
    from ucformat.containers.file_image import CHUNK_BYTES
    from ucformat.storage.local import LocalStore, aligned

    def run(source: str, target: str) -> None:
        place = Path(source)
        old = LocalStore(str(place if place.is_dir() else place.parent))
        new = LocalStore(target)
        free: queue.Queue[Buffer] = queue.Queue()
        for _ in range(_BUFFERS):
            free.put(aligned(CHUNK_BYTES))
        for path in list(old.files()) if place.is_dir() else [place.name]:
            size = old.size(path)
            full: queue.Queue[tuple[int, Buffer, int] | None] = queue.Queue()
            with old.reader(path) as reader, new.writer(path, size) as writer, ThreadPoolExecutor(1) as pool:
                read = pool.submit(_read, reader, size, free, full)
                while (item := full.get()) is not None:
                    at, buffer, count = item
                    writer.write(at, buffer[:count])
                    free.put(buffer)
                read.result()

    return run


def _read(reader: Reader, size: int, free: queue.Queue[Buffer], full: queue.Queue[tuple[int, Buffer, int] | None]) -> None:
    try:
        at = 0
        while at < size:
            buffer = free.get()
            count = min(len(buffer), size - at)
            reader.read_into(at, buffer[:count])
            reader.drop_cached(at, count)
            full.put((at, buffer, count))
            at += count
    finally:
        full.put(None)


def convert() -> Job:
    """Our converter, as the command line runs it."""
    from ucformat.cli import main  # what a conversion imports must count as its memory

    def run(source: str, target: str, form: str, *more: str) -> None:
        sys.argv = ["ucconvert", source, target, "--to", form, *more]
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


def ds_to_universal() -> Job:
    """DeepSpeed's own converter to a universal folder, with so many workers."""
    from deepspeed.checkpoint import ds_to_universal as peer

    def run(source: str, target: str, extract: str, merge: str) -> None:
        tag = Path(source, "latest").read_text().strip()
        sys.argv = ["ds_to_universal", "--input_folder", f"{source}/{tag}", "--output_folder", f"{target}/universal"]
        sys.argv += ["--num_extract_workers", extract, "--num_merge_workers", merge, "--inject_missing_state"]
        peer.main(peer.parse_arguments())
        disk.sync(Path(target))

    return run


def zero_to_fp32() -> Job:
    """DeepSpeed's own converter to fp32 weights in safetensors."""
    from deepspeed.utils.zero_to_fp32 import convert_zero_checkpoint_to_fp32_state_dict as peer

    def run(source: str, target: str) -> None:
        peer(source, target, safe_serialization=True)
        disk.sync(Path(target))

    return run


def main() -> None:
    name, *args = sys.argv[1:]
    jobs: dict[str, Callable[[], Job]] = {
        "nothing": lambda: nothing,
        "copy": lambda: copy,
        "limit": limit,
        "convert": convert,
        "dcp_to_torch_save": dcp_to_torch_save,
        "ds_to_universal": ds_to_universal,
        "zero_to_fp32": zero_to_fp32,
    }
    job = jobs[name]()
    began, used = time.perf_counter(), time.process_time()
    job(*args)
    told = {"seconds": time.perf_counter() - began, "cpu_s": time.process_time() - used, "peak_mb": peak_mb()}
    print(f"\n{json.dumps(told)}")


if __name__ == "__main__":
    main()
