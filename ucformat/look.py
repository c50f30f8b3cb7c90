"""The verbs that look: `open`, `inspect`, `verify`, `diff`, `steps`, `latest`. They need no torch. Re-exported by `ucformat`."""

from __future__ import annotations

import operator
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from ucformat import formats
from ucformat.formats import native
from ucformat.group import current
from ucformat.reshard import diff as differences
from ucformat.reshard import fingerprint as fingerprints
from ucformat.reshard import inspect as inspecting
from ucformat.reshard import verify as verifying
from ucformat.reshard.reading.lazy import Checkpoint
from ucformat.reshard.selection.select import expect_matches, narrow
from ucformat.storage.open import open_store

if TYPE_CHECKING:
    import torch.distributed as dist

StrPath = str | os.PathLike[str]
"""A local path or any fsspec URL."""


def open(path: StrPath, *, step: int | None = None) -> Checkpoint:  # noqa: A001  # the verb that users expect
    """Open a checkpoint of any format: a mapping from names to lazy tensors. Reads metadata only.

    `open(path)["model/layers.0.wq.weight"][0:8]` reads just those rows. Raises NotACheckpointError, MissingFileError,
    FormatError, VersionError, UnsupportedError.
    """
    return Checkpoint(formats.open_catalog(os.fspath(path), checked_step(step)))


def inspect(path: StrPath, *, step: int | None = None, select: Sequence[str] = (), boxes: bool = False) -> inspecting.Inspection:
    """What is in a checkpoint of any format: names, dtypes, shapes, values, files. Reads metadata only.

    `select`: only tensors and values that match one of these globs (`model/*`). `boxes`: of each tensor, also which box of it
    lies where in which file. Raises what `open` raises, and UnsupportedError for a pattern that matches nothing.
    """
    where = os.fspath(path)
    name, catalog = formats.open_named(where, checked_step(step))
    return inspecting.inspect(catalog, where, name, select, boxes=boxes)


def steps(path: StrPath) -> list[int]:
    """Committed steps of a run directory, ascending; empty when there is none."""
    return native.committed_steps(open_store(os.fspath(path)))


def latest(path: StrPath) -> int | None:
    """The newest committed step of a run directory, which `load` takes; None when there is none."""
    return native.newest_step(open_store(os.fspath(path)))


def verify(path: StrPath, *, step: int | None = None, on_bytes: Callable[[int], None] | None = None) -> verifying.Verification:
    """Read a checkpoint of any format whole and compare its checksums. `.ok` says whether all is well, `.damage` where it isn't.

    `on_bytes` is called with the number of bytes just read. Raises what `open` raises.
    """
    return verifying.verify(formats.open_catalog(os.fspath(path), checked_step(step)), on_bytes)


def diff(
    a: StrPath,
    b: StrPath,
    *,
    rtol: float = 0.0,
    atol: float = 0.0,
    ignore_dtype: bool = False,
    values: bool = True,
    on_bytes: Callable[[int], None] | None = None,
) -> differences.Diff:
    """Compare two checkpoints of any formats and layouts: names, dtypes, shapes, bytes and `values`; `.equal` is the verdict.

    With `rtol` or `atol`, numbers within the tolerance are equal, as in `torch.isclose`. With `ignore_dtype`, numbers of
    different dtypes are compared. `on_bytes` is called with the number of bytes just compared.

    Raises what `open` raises, and ChecksumError, FormatError and StorageError while reading.
    """
    tolerance = differences.Tolerance(atol, rtol) if atol or rtol else None
    left, right = formats.open_catalog(os.fspath(a)), formats.open_catalog(os.fspath(b))
    return differences.diff(left, right, tolerance=tolerance, any_dtype=ignore_dtype, values=values, on_bytes=on_bytes)


def fingerprint(
    path: StrPath,
    *,
    step: int | None = None,
    select: Sequence[str] = (),
    process_group: dist.ProcessGroup | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> fingerprints.Fingerprint:
    """A digest of each tensor that is the same in every format and layout, defined in specs/fingerprint.md.

    Compares checkpoints that lie far apart: `a.differences(b.tensors)` are the names that differ. Every rank of `process_group`
    calls it and reads a share of the tensors; all get the whole. `select`: globs of names. `on_bytes` is called with the number
    of bytes that this rank has just read.

    Raises what `open` raises, and CoverageError, ChecksumError, FormatError and StorageError while reading; RankFailedError.
    """
    group = current(process_group)
    catalog = formats.open_catalog(os.fspath(path), checked_step(step))
    expect_matches(select, [catalog], os.fspath(path))
    return fingerprints.fingerprint(narrow(catalog, select, ()), group, on_bytes)


def checked_step(step: object) -> int | None:
    """A step as a plain int, or None. Raises TypeError for what is no integer (True, 8.0), ValueError for a negative one."""
    if step is None:
        return None
    if isinstance(step, bool):
        raise TypeError("step must be an integer, not a bool")
    number = operator.index(step)  # type: ignore[arg-type]  # says itself what it does not take
    if number < 0:
        raise ValueError(f"step must be at least 0, not {number}")
    return number
