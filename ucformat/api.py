"""The verbs that users call: `save`, `load`, `open`, `convert`. Re-exported by `ucformat`."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, overload

import torch.distributed as dist

from ucformat import formats, values
from ucformat.catalog import Catalog
from ucformat.errors import ExistsError, NotACheckpointError, UcformatError
from ucformat.formats import native
from ucformat.formats.native.manifest import MANIFEST
from ucformat.formats.source import Source, locate
from ucformat.group import current
from ucformat.reshard.convert import convert
from ucformat.reshard.load import LoadOptions, load_state
from ucformat.reshard.reading.lazy import Checkpoint, read_many
from ucformat.reshard.save import SaveOptions, save_state
from ucformat.storage.open import open_store
from ucformat.storage.store import Store

__all__ = ["convert", "load", "open", "save"]
_LOG = logging.getLogger(__name__)


def save(
    path: str,
    state: Mapping[str, object],
    *,
    step: int | None = None,
    keep: int | None = None,
    overwrite: bool = False,
    check_replicas: bool = True,
    process_group: dist.ProcessGroup | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> str:
    """Save a training state; the path of the committed checkpoint. Every rank of the process group calls it.

    `state` is any nest of dicts, lists, tuples, tensors, DTensors, plain values, and of modules, optimizers and whatever
    else has `state_dict`. With `step` the checkpoint is `path/step-<8 digits>`, else `path` itself. It is committed or
    absent: a reader never sees half of it. `keep` removes all but the newest that many committed steps afterwards.
    A committed checkpoint is replaced only with `overwrite`, and then in one step.

    Tensors that several ranks hold (parameters under DDP, replicas on a mesh, experts that look like replicas) are stored once.
    `check_replicas` compares them first, by digests of all their bytes: about 0.1 s per GB that a rank shares with others.
    Modules' buffers may differ, as they do under DDP: the first rank's are stored, and a warning names them. `on_bytes` is
    called with the number of bytes written, from any thread.

    Raises ExistsError, UnrepresentableError and UnsupportedError (naming the path in `state`), ValueConflictError when ranks
    disagree, StorageError, and RankFailedError when a rank died. Every rank raises the same. Then nothing was committed.
    """
    if keep is not None and keep < 1:
        raise ValueError("keep is at least 1: the newest checkpoint always stays")
    group = current(process_group)
    run = open_store(path)
    store = run if step is None else run.sub(native.step_name(step))
    if step is not None:
        with group.together(f"preparing {store.url}"):
            if group.rank == 0:
                _prepare_run(run, step, store)
    save_state(store, state, SaveOptions(step, overwrite, check_replicas, on_bytes), group)
    if step is not None:
        with group.together(f"removing old checkpoints of {path}"):
            if group.rank == 0:
                _tidy(run, step, keep)
    return store.url


def _prepare_run(run: Store, step: int, store: Store) -> None:
    """Make room, and refuse to mix: a path is a checkpoint or holds the steps of a run, else nobody could say what it means."""
    if run.exists(MANIFEST):
        raise ExistsError(run.url, "is a checkpoint itself, so it can't hold steps, too", "")
    if store.is_link():
        raise ExistsError(store.url, "is a symbolic link, and what it leads to is not changed", "remove the link")
    native.clear_steps(run, but={step})


def _tidy(run: Store, step: int, keep: int | None) -> None:
    """After a commit: what fails here does not undo it."""
    try:
        higher = native.note_saved(run, step)
        if higher:
            shown = ", ".join(map(str, higher))
            _LOG.warning("%s: step %d is the newest one now; higher steps are kept but passed over: %s", run.url, step, shown)
        if keep is not None:
            native.prune_steps(run, step, keep)
    except UcformatError as error:
        _LOG.warning("%s: step %d is committed, but tidying up failed: %s", run.url, step, error)


@overload
def load(path: str, into: None = None, *, step: int | None = ..., verify: bool = ...) -> dict[str, object]: ...
@overload
def load(
    path: str,
    into: MutableMapping[str, Any],
    *,
    step: int | None = ...,
    strict: bool = ...,
    cast: bool = ...,
    verify: bool = ...,
    process_group: dist.ProcessGroup | None = ...,
    on_bytes: Callable[[int], None] | None = ...,
) -> int | None: ...
def load(
    path: str,
    into: MutableMapping[str, Any] | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, object] | int | None:
    """Load a checkpoint of any format and any layout. `path` is one, or a run directory: then its newest committed step.

    With `into`, the state is restored in place, onto whatever layout it has now, and the checkpoint's step (or None) is
    returned; every rank of the process group calls it, and each reads just what it needs. Optimizers need no state yet.
    `strict`: names in `into` that are not stored, or stored and not in `into`, are an error. `cast`: stored dtypes may
    differ from the live ones.

    Without `into`, the whole state as a nest of dicts with CPU tensors. Rank-local items come as `values.RankLocal`.

    Raises NotACheckpointError; before any tensor is read or changed NamesMismatchError, ShapeMismatchError,
    DTypeMismatchError, CoverageError, RankLocalError; ChecksumError, FormatError, StorageError while reading (the state
    is then partly restored and must not be used).
    """
    where = path if step is None else f"{path.rstrip('/')}/{native.step_name(step)}"
    if into is None:
        return _load_all(formats.open_catalog(where), verify=verify)
    group = current(process_group)
    with group.together(f"opening {where}"):
        where = _newest(where) if group.rank == 0 else where
    where = group.broadcast(where)
    return load_state(where, into, LoadOptions(strict, cast, verify, on_bytes), group)


def _newest(path: str) -> str:
    """The checkpoint that a run directory means now, so that all ranks load the same one."""
    source = locate(path)
    return native.find(source).url if formats.detect(source) is native and source.file is None else path


def _load_all(catalog: Catalog, *, verify: bool) -> dict[str, object]:
    names = [spec.name for spec in catalog.tensors]
    tensors = dict(zip(names, read_many(catalog, [(name, None) for name in names], verify=verify), strict=True))
    tensors.update({alias: tensors[target] for alias, target in catalog.aliases.items()})
    tree = values.join(catalog.values, tensors)
    if not isinstance(tree, dict):
        raise NotACheckpointError(catalog.store.url, "its state is no dict")
    return tree


def open(path: str, *, step: int | None = None) -> Checkpoint:  # noqa: A001  # the verb that users expect
    """Open a checkpoint of any format: a mapping from names to lazy tensors. Reads metadata only.

    `open(path)["model/layers.0.wq.weight"][0:8]` reads just those rows. Raises NotACheckpointError, MissingFileError,
    FormatError, VersionError, UnsupportedError.
    """
    return Checkpoint(formats.open_catalog(path if step is None else f"{path.rstrip('/')}/{native.step_name(step)}"))


def steps(path: str) -> list[int]:
    """Committed steps of a run directory, ascending."""
    return native.committed_steps(Source(open_store(path)).store)
