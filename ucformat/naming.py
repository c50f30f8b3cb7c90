"""Names of training state: which parts of them come from wrappers, and how users rename what a file calls otherwise.

Wrapped modules (torch.compile, activation checkpointing, FSDP, DDP) put names of their own into those of the parameters.
`unwrapped` takes them out, of live names and of a file's alike, so that the two meet.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from ucformat import values as trees
from ucformat.catalog import Catalog
from ucformat.errors import UnsupportedError

MODEL, OPTIMIZER, GROUPS = "model", "optimizer", "param_groups"
MASTER = "fp32"
"""The state of a parameter that is its master weight, which torch's own optimizers do not keep."""
FILE_METADATA = "hf_metadata"
"""Top-level key of the value tree for what the header of safetensors files says beside their tensors (strings by key; those of
a folder in a dict under its name and `/`). It describes files rather than state: no selection drops it."""
TRANSPARENT = frozenset({"_fsdp_wrapped_module", "_checkpoint_wrapped_module", "_orig_mod"})
"""Names under which wrappers hold the module they wrap; no part of a parameter's name."""
OUTERMOST = "module"  # under which DDP and DataParallel hold theirs; a name of the model's own where it is not all names' first

Rename = Callable[[str], str] | Mapping[str, str] | Sequence[tuple[str, str]]
"""How names change: a function, or regular expressions and what takes the place of whatever they match (as in `re.sub`)."""


def unwrapped(names: Collection[str]) -> dict[str, str]:
    """Name → name without what wrappers added, for all parameter names of one model.

    `module.` goes when all names begin so. Raises UnsupportedError when that gives two names alike.
    """
    plain = {name: ".".join(part for part in name.split(".") if part not in TRANSPARENT) or name for name in names}
    while plain and all(name.startswith(f"{OUTERMOST}.") for name in plain.values()):
        plain = {name: short.removeprefix(f"{OUTERMOST}.") for name, short in plain.items()}
    _check_distinct(plain, "the model")
    return plain


def rename_catalog(catalog: Catalog, rename: Rename) -> Catalog:
    """The catalog with its names renamed, param groups and values by parameter too.

    Names are canonical: `model/<parameter>`, `optimizer/<parameter>/<state>`; a pattern without anchors that matches the
    parameter changes both. Raises UnsupportedError for a pattern that matches nothing or is none, and when two names get alike.
    """
    change, unmatched = _function(rename, catalog.url)
    placed = set(trees.refs(catalog.values))  # tensors in lists and the like: their values say where they belong
    new = {name: name if name in placed else _changed(name, change) for name in catalog.names}
    _check_distinct(new, catalog.url)
    values = _renamed_values(catalog.values, change)
    left = unmatched()
    if left:
        raise UnsupportedError(catalog.url, f"no name matches {left[0]!r}, which is to be renamed")
    return replace(catalog.rename(new.__getitem__), values=values)


def unwrap_model(catalog: Catalog) -> tuple[Catalog, str]:
    """The catalog whose `model/*` names are without what wrappers added, and a remark when there was something."""
    names = [name for name in catalog.names if name.startswith(f"{MODEL}/")]
    split = {name: trees.split_name(name) for name in names}
    plain = unwrapped([parts[1] for parts in split.values() if len(parts) == 2])
    new = {name: trees.join_name(MODEL, plain[parts[1]]) for name, parts in split.items() if len(parts) == 2}
    changed = {old: to for old, to in new.items() if old != to}
    if not changed:
        return catalog, ""
    example = min(changed)
    remark = f"{len(changed)} names without what wrappers added to them: {example} is {changed[example]}"
    return catalog.rename(lambda name: new.get(name, name)), remark


def _function(rename: Rename, where: str) -> tuple[Callable[[str], str], Callable[[], list[str]]]:
    """What renames one name, and what tells of the patterns that have matched none so far."""
    if callable(rename):
        return rename, list
    rules = list(rename.items() if isinstance(rename, Mapping) else rename)
    try:
        patterns = [(re.compile(pattern), text) for pattern, text in rules]
    except re.error as error:
        raise UnsupportedError(where, f"{error.pattern!r} is no regular expression: {error.msg}") from error
    unmatched = dict.fromkeys(pattern for pattern, _ in rules)

    def change(name: str) -> str:
        for pattern, text in patterns:
            try:
                name, hits = pattern.subn(text, name)
            except (re.error, IndexError) as error:
                raise UnsupportedError(where, f"{text!r} can't take the place of {pattern.pattern!r}: {error}") from error
            if hits:
                unmatched.pop(pattern.pattern, None)
        return name

    return change, lambda: list(unmatched)


def _changed(name: str, change: Callable[[str], str]) -> str:
    """A name renamed; of optimizer state the parameter is, and its state stays."""
    parts = name.split("/")
    if parts[0] != OPTIMIZER or len(parts) < 3:
        return change(name)
    return "/".join([change("/".join(parts[:2])), *parts[2:]])


def _check_distinct(new: Mapping[str, str], where: str) -> None:
    taken: dict[str, str] = {}
    for old, name in new.items():
        if not name or name.startswith("/") or name.endswith("/"):
            raise UnsupportedError(where, f"{old!r} would be called {name!r}, which is no name")
        other = taken.setdefault(name, old)
        if other != old:
            raise UnsupportedError(where, f"{other!r} and {old!r} would both be called {name!r}")


def _renamed_values(values: object, change: Callable[[str], str]) -> object:
    """The value tree, in which what belongs to a parameter goes by its new name."""
    if not isinstance(values, dict):
        return values
    found: dict[Any, Any] = dict(values)
    for top in (MODEL, OPTIMIZER):
        if isinstance(found.get(top), dict):
            found[top] = dict(_renamed_items(top, found[top], change))
    held = found.get(OPTIMIZER)
    groups = held.get(GROUPS) if isinstance(held, dict) else None
    if isinstance(groups, list):
        found[OPTIMIZER] = {**found[OPTIMIZER], GROUPS: [_renamed_group(group, change) for group in groups]}
    return found


def _renamed_items(top: str, items: Mapping[Any, Any], change: Callable[[str], str]) -> Iterator[tuple[Any, Any]]:
    for key, value in items.items():
        yield (key if key == GROUPS or not isinstance(key, str) else _parameter(top, key, change)), value


def _renamed_group(group: Any, change: Callable[[str], str]) -> Any:
    if not isinstance(group, dict) or not isinstance(group.get("params"), list):
        return group
    names = [_parameter(OPTIMIZER, name, change) if isinstance(name, str) else name for name in group["params"]]
    return {**group, "params": names}


def _parameter(top: str, name: str, change: Callable[[str], str]) -> str:
    """A parameter's name renamed, as it stands under `top`."""
    parts = trees.split_name(change(trees.join_name(top, name)))
    return parts[1] if len(parts) == 2 and parts[0] == top else name
