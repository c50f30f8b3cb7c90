"""The verbs that users call: `save`, `load`, `resume`, `convert`, `prune`; those that read only are in `look`."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from typing import Any, Literal, TypeVar, overload

import torch
import torch.distributed as dist

from ucformat import formats, values
from ucformat.errors import CheckpointChangedError, ExistsError, MissingFileError, NotACheckpointError, UcformatError
from ucformat.formats import native
from ucformat.formats.adopted.write import AdoptReport
from ucformat.formats.native.manifest import MANIFEST
from ucformat.formats.source import locate
from ucformat.group import Group, current
from ucformat.look import StrPath, checked_step, diff, inspect, latest, open, steps, verify  # noqa: A004  # the verb that users expect
from ucformat.naming import Rename, rename_catalog
from ucformat.reshard import adopt as adopting
from ucformat.reshard import pending
from ucformat.reshard.convert import convert
from ucformat.reshard.load import LoadOptions, LoadReport, load_state
from ucformat.reshard.pending import PendingSave
from ucformat.reshard.prune import prune
from ucformat.reshard.reading.lazy import read_many
from ucformat.reshard.restoring.accounting import EVERYTHING, NameRules
from ucformat.reshard.save import SaveOptions, begin, save_state
from ucformat.reshard.selection.select import expect_matches, narrow
from ucformat.storage.open import open_store
from ucformat.storage.store import Store

__all__ = ["convert", "diff", "index", "inspect", "latest", "load", "open", "prune", "resume", "save", "steps", "verify"]
_LOG = logging.getLogger("ucformat")
LOOKS = 20  # for a checkpoint that changes while it is read: each time, another writer has committed
T = TypeVar("T")


@overload
def save(
    path: StrPath,
    state: Mapping[str, object],
    *,
    step: int | None = ...,
    keep: int | None = ...,
    overwrite: bool = ...,
    wait: Literal[True] = ...,
    check_replicas: bool = ...,
    companions: str | None = ...,
    process_group: dist.ProcessGroup | None = ...,
    on_bytes: Callable[[int], None] | None = ...,
) -> str: ...
@overload
def save(
    path: StrPath,
    state: Mapping[str, object],
    *,
    step: int | None = ...,
    keep: int | None = ...,
    overwrite: bool = ...,
    wait: Literal[False],
    check_replicas: bool = ...,
    companions: str | None = ...,
    process_group: dist.ProcessGroup | None = ...,
    on_bytes: Callable[[int], None] | None = ...,
) -> PendingSave: ...
def save(
    path: StrPath,
    state: Mapping[str, object],
    *,
    step: int | None = None,
    keep: int | None = None,
    overwrite: bool = False,
    wait: bool = True,
    check_replicas: bool = True,
    companions: str | None = None,
    process_group: dist.ProcessGroup | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> str | PendingSave:
    """Save a training state; the path of the committed checkpoint. Every rank of the process group calls it.

    `state` is any nest of dicts, lists, tuples, tensors, DTensors, plain values, and of modules, optimizers and whatever
    else has `state_dict`. With `step` the checkpoint is `path/step-<8 digits>`, else `path` itself. It is committed or
    absent: a reader never sees half of it. `keep` removes all but the newest that many committed steps afterwards.
    A committed checkpoint is replaced only with `overwrite`, and then in one step.

    Tensors that several ranks hold (parameters under DDP, replicas on a mesh, experts that look like replicas) are stored once.
    `check_replicas` compares them first, by digests of all their bytes: about 0.1 s per GB that a rank shares with others.
    Modules' buffers may differ, as they do under DDP: the first rank's are stored, and a warning names them. `on_bytes` is
    called with the number of bytes written, from any thread.

    `companions`: a model directory whose configuration, tokenizer and the like are stored, too, so that a later conversion to
    `hf` needs nothing else.

    With `wait=False`, returns a `PendingSave` as soon as the state is copied to host memory, and may change again; a thread
    writes and commits while training goes on. Its `wait()` returns the path, or raises. The next save, of any kind, first waits
    for it, and raises its error unless `wait()` has; the end of the program waits for it, too. A failure is also logged at
    once. The process group may be destroyed meanwhile. The memory, as large as what this rank writes, is kept for the next
    such save; a save that waits frees it.

    Raises MissingFileError when there are none; ExistsError, UnrepresentableError and UnsupportedError (naming the path in
    `state`), ValueConflictError when ranks disagree, StorageError, and RankFailedError when a rank died. Every rank raises the
    same. Then nothing was committed.
    """
    if keep is not None and keep < 1:
        raise ValueError("keep must be at least 1: the newest checkpoint always stays")
    step = checked_step(step)
    group = current(process_group)
    pending.finish_before(group)
    run = open_store(os.fspath(path))
    store = run if step is None else run.sub(native.step_name(step))
    if step is not None:
        with group.together(f"preparing {store.url}"):
            if group.rank == 0:
                _prepare_run(run, step, store)

    def tidy(group: Group) -> None:
        if step is not None:
            with group.together(f"removing old checkpoints of {path}"):
                if group.rank == 0:
                    _tidy(run, step, keep)

    options = SaveOptions(step, overwrite, check_replicas, on_bytes, companions)
    if not wait:
        return pending.write_later(begin(store, state, options, group), group, tidy)
    pending.let_go()
    save_state(store, state, options, group)
    tidy(group)
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
def load(
    path: StrPath,
    into: None = None,
    *,
    step: int | None = ...,
    select: Sequence[str] = ...,
    rename: Rename | None = ...,
    device: torch.device | str = ...,
    verify: bool = ...,
    on_bytes: Callable[[int], None] | None = ...,
) -> dict[str, object]: ...
@overload
def load(
    path: StrPath,
    into: MutableMapping[str, Any],
    *,
    step: int | None = ...,
    strict: bool = ...,
    allow_missing: Sequence[str] = ...,
    allow_unexpected: Sequence[str] = ...,
    rename: Rename | None = ...,
    family: str | None = ...,
    cast: bool = ...,
    verify: bool = ...,
    process_group: dist.ProcessGroup | None = ...,
    on_bytes: Callable[[int], None] | None = ...,
) -> LoadReport: ...
def load(
    path: StrPath,
    into: MutableMapping[str, Any] | None = None,
    *,
    step: int | None = None,
    strict: bool = True,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    select: Sequence[str] = (),
    rename: Rename | None = None,
    family: str | None = None,
    device: torch.device | str = "cpu",
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> dict[str, object] | LoadReport:
    """Load a checkpoint of any format and any layout.

    With `into`, restores the state in place, onto whatever layout it has now, and returns a `LoadReport`. Every rank of the
    process group calls it, and each reads just what it needs. Optimizers need no state yet. Without `into`, returns the whole
    state as a nest of dicts; rank-local items come as `ucformat.RankLocal`.

    Args:
        path: A checkpoint, or a run directory: then its newest committed step.
        into: The state to restore, as `save` takes it.
        step: That step of the run directory `path`, or of the slots of a snapshot directory.
        strict: Raise NamesMismatchError for names in `into` that are not stored, and stored names that are not in `into`.
            With False they are reported and logged; it is still an error when no name is in both.
        allow_missing: Globs over names in `into` that need not be stored (`model/lora_*`); they stay as they are.
        allow_unexpected: Globs over stored names that `into` need not have; they are not loaded.
        select: Without `into`: globs over the names to load (`model/*`); all by default.
        rename: From stored names to those wanted: a function, or regular expressions and replacements, as in `re.sub`.
            What wrappers add to names (`module.`, `_orig_mod.`, …) is matched without it.
        family: With `into`: the model family by whose rules names and shapes are translated between Megatron and Hugging Face
            transformers, as in `convert` (`llama`, `mixtral`, …, `auto`).
        device: Without `into`: where the tensors are put.
        cast: Convert stored dtypes to those of `into`.
        verify: Compare checksums while reading.
        process_group: The ranks that load together; all by default.
        on_bytes: Called with the number of bytes just read, from any thread.

    A pattern that matches no name at all is an error.

    Raises:
        MissingFileError, NotACheckpointError: Nothing is there, or no checkpoint.
        NamesMismatchError, ShapeMismatchError, DTypeMismatchError, CoverageError, RankLocalError, UnsupportedError: It does
            not fit; nothing was changed.
        ChecksumError, FormatError, StorageError: While reading; the state is then partly restored: don't use it.

    """
    where, number = os.fspath(path), checked_step(step)
    if into is None:
        if family is not None:
            raise ValueError("family is for loading into a state: convert(…, family=…) writes a translated checkpoint")
        target = torch.device(device)
        return _again_if_replaced(
            where, number, lambda: _load_all(where, number, select, rename, target, verify=verify, on_bytes=on_bytes), Group()
        )
    if select:
        raise ValueError("select is for loading without into: leave keys out of `into`, and pass allow_unexpected=[...]")
    rules = NameRules(allow_missing, allow_unexpected) if strict else NameRules(EVERYTHING, EVERYTHING)
    options = LoadOptions(rules, rename, cast, verify, on_bytes, family)
    live, group = into, current(process_group)
    return _again_if_replaced(where, number, lambda: load_state(where, number, live, options, group), group)


def index(path: StrPath, *, checksums: bool = False) -> AdoptReport:
    """Adopt a foreign checkpoint in place: put `ucf.json` and an index beside its files. No tensor is copied.

    `load`, `open` and all else then open `path` by the index, as fast as a native checkpoint: a DeepSpeed or Megatron run of
    thousands of files need not be searched again. The files stay as they are, and their own program's. One that was changed or
    removed since is an error, by its size and the time of its last change. `checksums`: verify what the files' own format lets
    one verify, then keep a digest of each block of 256 KiB, so that damage is found where it is read; this reads everything.
    An index that is there already is replaced. One process calls it.

    Raises what `open` raises; UnsupportedError naming tensors that are stored transposed or overlap, and for a single file;
    ChecksumError for damage, CheckpointChangedError, StorageError where nothing can be written.
    """
    return adopting.index(os.fspath(path), checksums=checksums)


def _again_if_replaced(where: str, step: int | None, load_once: Callable[[], T], group: Group) -> T:
    """Load; and load again where a writer has replaced or removed the checkpoint, or a running job its slots, meanwhile."""
    for _ in range(LOOKS):
        before = _record(where, step) if group.rank == 0 else None
        try:
            return load_once()
        except CheckpointChangedError:  # on all ranks, or on none
            continue
        except MissingFileError:  # the same
            if not group.broadcast(group.rank == 0 and _record(where, step) != before):
                raise
    return load_once()


def _record(where: str, step: int | None) -> bytes | None:
    """The commit record that a path means now; None where there is none, or it can't be read: then loading says why."""
    try:
        source = locate(where if step is None else f"{where.rstrip('/')}/{native.step_name(step)}")
        return native.find(source).read(MANIFEST)
    except UcformatError:
        return None


def resume(
    path: StrPath,
    into: MutableMapping[str, Any],
    *,
    allow_missing: Sequence[str] = (),
    allow_unexpected: Sequence[str] = (),
    rename: Rename | None = None,
    cast: bool = False,
    verify: bool = True,
    process_group: dist.ProcessGroup | None = None,
    on_bytes: Callable[[int], None] | None = None,
) -> LoadReport | None:
    """Load the newest checkpoint of a run into `into` if there is one, else return None: the first line of a training loop.

    None only when `path` does not exist or holds no committed checkpoint. What is damaged, unreadable, does not fit, or is no
    checkpoint that ucformat reads raises what `load` raises. Every rank of the process group calls it; rank 0 decides.
    """
    group, where = current(process_group), os.fspath(path)
    found = False
    with group.together(f"looking for a checkpoint at {where}"):
        found = group.rank == 0 and formats.is_there(where)
    if not group.broadcast(found):
        _LOG.info("%s: nothing to resume from", where)
        return None
    options = LoadOptions(NameRules(allow_missing, allow_unexpected), rename, cast, verify, on_bytes)
    return _again_if_replaced(where, None, lambda: load_state(where, None, into, options, group), group)


def _load_all(
    where: str,
    step: int | None,
    select: Sequence[str],
    rename: Rename | None,
    device: torch.device,
    *,
    verify: bool,
    on_bytes: Callable[[int], None] | None,
) -> dict[str, object]:
    catalog = formats.open_catalog(where, step)
    catalog = catalog if rename is None else rename_catalog(catalog, rename)
    if select:
        expect_matches(select, [catalog], where, values=True)
        catalog = narrow(catalog, select, ())
    names = [spec.name for spec in catalog.tensors]
    read = read_many(catalog, [(name, None) for name in names], verify=verify, on_bytes=on_bytes)
    tensors = {name: tensor.to(device) for name, tensor in zip(names, read, strict=True)}
    tensors.update({alias: tensors[target] for alias, target in catalog.aliases.items()})
    tree = values.join(catalog.values, tensors)
    if not isinstance(tree, dict):
        raise NotACheckpointError(catalog.url, "its state is no dict")
    for remark in catalog.notes.remarks:
        _LOG.warning("%s: %s", where, remark)
    return tree
