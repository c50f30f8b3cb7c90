"""The Megatron checkpoints in tests/data/megatron (megatron-core 0.16.1; `fsms` by 0.13.1), unpacked, and ways to edit them.

Each archive holds one run in several forms: `<run>_legacy` (`mp_rank_*` folders), `<run>` or `<run>_<form of the optimizer>`
(torch_dist). Both forms of a run hold the same weights.
"""

from __future__ import annotations

import argparse
import functools
import tarfile
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from ucformat.catalog import Catalog
from ucformat.formats import megatron
from ucformat.formats.source import locate
from ucformat.reshard.reading.lazy import read_many

DATA = Path(__file__).parent.parent / "data" / "megatron"
RUNS = sorted(path.name.removesuffix(".tar.xz") for path in DATA.iterdir())
ITERATION = "iter_0000010"
_UNPACKED = tempfile.TemporaryDirectory(prefix="ucf-megatron-")  # for as long as the tests run


@functools.cache
def _unpacked(run: str) -> Path:
    into = Path(_UNPACKED.name) / run
    with tarfile.open(DATA / f"{run}.tar.xz") as archive:
        archive.extractall(into, filter="data")
    return into


def folder(run: str, form: str = "") -> Path:
    """The run folder of one form. Not to be written to."""
    return _unpacked(run) / (f"{run}_{form}" if form else run)


def forms(run: str) -> list[str]:
    """Forms of a run that are there."""
    return sorted(path.name.removeprefix(run).lstrip("_") for path in _unpacked(run).iterdir())


def opened(path: Path) -> Catalog:
    source = locate(str(path))
    assert megatron.detect(source)
    return megatron.open_catalog(source)


@functools.cache
def catalog_of(run: str, form: str = "") -> Catalog:
    """The catalog of one form of a run."""
    return opened(folder(run, form))


@functools.cache
def tensors_of(run: str, form: str = "") -> dict[str, torch.Tensor]:
    """All tensors of one form of a run."""
    return tensors(catalog_of(run, form))


def tensors(catalog: Catalog) -> dict[str, torch.Tensor]:
    return dict(zip(catalog.names, read_many(catalog, [(name, None) for name in catalog.names]), strict=True))


def rank_files(run: Path) -> list[Path]:
    """The model files of a legacy run folder."""
    return sorted(run.glob(f"{ITERATION}/mp_rank_*/model_optim_rng.pt"))


def torch_load(file: Path) -> Any:
    """What torch itself loads from a file: the independent witness."""
    with torch.serialization.safe_globals([argparse.Namespace]):
        return torch.load(file, weights_only=True)


def edit(file: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """Rewrite a file with its contents changed in place."""
    tree = torch_load(file)
    change(tree)
    torch.save(tree, file)


def raw(path: Path, scratch: Path) -> dict[str, Any]:
    """What a torch_dist folder holds by key, as torch's own reader gives it."""
    dcp_to_torch_save(path, scratch / "raw.pt")
    found: dict[str, Any] = torch.load(scratch / "raw.pt", weights_only=False)
    return found
