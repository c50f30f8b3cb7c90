"""A file system for tests of slow and broken storage: the local one, behind a gate that other processes open and close.

`GATE` in the environment names a directory. While `hold` is in it, a file that is being written stops behind its first write and
says so by making `reached`. As long as `failures` holds a number above 0, opening a file for writing fails and takes one off.
"""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

import fsspec
from fsspec.implementations.local import LocalFileOpener, LocalFileSystem

_PREFIX = "gated://"


def gate() -> Path:
    return Path(os.environ["GATE"])


class GatedFile(LocalFileOpener):  # type: ignore[misc]  # fsspec is untyped
    passed = False

    def write(self, data: Any) -> int:
        if self.passed:
            while (gate() / "hold").exists():
                (gate() / "reached").touch()
                time.sleep(0.01)
        self.passed = True
        return int(self.f.write(data))


class GatedFileSystem(LocalFileSystem):  # type: ignore[misc]  # fsspec is untyped
    protocol = "gated"

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        return super()._strip_protocol(path.removeprefix(_PREFIX) if isinstance(path, str) else path)

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **options: Any) -> Any:
        if mode == "rb":
            return super()._open(path, mode, block_size, **options)
        fail_if_told()
        return GatedFile(path, mode, fs=self, **options)


def fail_if_told() -> None:
    file = gate() / "failures"
    left = int(file.read_text()) if file.exists() else 0
    if left:
        file.write_text(str(left - 1))
        raise OSError(5, "the disk is on fire")


fsspec.register_implementation("gated", GatedFileSystem, clobber=True)
