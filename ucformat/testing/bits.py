"""What the suites compare: bytes of tensors, and files of directories."""

from __future__ import annotations

import os
import stat
from collections.abc import Iterator
from pathlib import Path

import torch

from ucformat.catalog import Catalog
from ucformat.reshard.reading.lazy import Checkpoint


def bits(tensor: torch.Tensor) -> bytes:
    """The bytes of a tensor, row-major."""
    flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
    return flat.view(torch.uint8).numpy().tobytes()


def same(tensor: torch.Tensor, wanted: torch.Tensor) -> bool:
    """Whether dtype, shape and every bit agree."""
    return (tensor.dtype, tensor.shape) == (wanted.dtype, wanted.shape) and bits(tensor) == bits(wanted)


def read_all(catalog: Catalog) -> dict[str, torch.Tensor]:
    """Every tensor, by name and by alias."""
    opened = Checkpoint(catalog)
    return {name: opened[name].read() for name in opened}


def files_in(folder: Path) -> dict[str, bytes]:
    """Path → content of all regular files below a directory."""
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in _regular(folder)}


def _regular(folder: Path) -> Iterator[Path]:
    for root, _, names in os.walk(folder):
        yield from (path for name in sorted(names) if stat.S_ISREG((path := Path(root, name)).lstat().st_mode))
