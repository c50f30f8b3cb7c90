"""ZeRO-0: the optimizer inside the model file, unpartitioned, its state numbered instead of named.

torch numbers parameters through the param groups in order, and each group lists them in the order of the model. So a number
gets its name from shapes and order (and from values, where master weights are stored): when just one assignment fits,
that is it. When several fit, nothing is guessed: the state is kept under its number.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from ucformat.errors import FormatError
from ucformat.formats.deepspeed.fused import add_fused
from ucformat.formats.deepspeed.optim import flat_tensor, mapping, sequence
from ucformat.formats.deepspeed.records import Opened, dense, head, state
from ucformat.formats.deepspeed.zero import OptimizerState, add_step
from ucformat.pickles.unpickle import StoredTensor
from ucformat.values.tree import join_name

_MAX_PATHS = 200_000  # states of the search for names; a model of some thousand parameters in two groups stays below
_COMPARE_BYTES = 16 << 10  # enough of a parameter to tell it from another of its shape
_FLAT = "fp32_groups_flat"  # fused optimizers: one flat buffer per group


@dataclass(frozen=True, slots=True)
class Numbered:
    """An entry of the optimizer: its number in the state, and its master weight where there is one."""

    index: int
    master: StoredTensor | None
    shape: tuple[int, ...] | None
    """None when nothing is stored that has the parameter's shape."""


def add_optimizer(opened: Opened, tree: object, module: Mapping[str, StoredTensor], file: str) -> OptimizerState:
    """Add `optimizer/<parameter>/<state>`. `module` holds the parameters that may be trained, each tied one once."""
    found = OptimizerState()
    if tree is None:
        return found
    outer = mapping(tree, file, "optimizer")
    inner = mapping(outer.get("optimizer_state_dict", outer), file, "optimizer_state_dict")
    by_index = mapping(inner.get("state", {}), file, "optimizer state")
    raw_groups = [mapping(g, file, "a param group") for g in sequence(inner.get("param_groups", []), file, "param_groups")]
    if inner is not outer:
        found.extra.update({k: v for k, v in outer.items() if k not in ("optimizer_state_dict", "fp32_groups", _FLAT)})
    if _FLAT in outer:
        flat = sequence(outer[_FLAT], file, _FLAT)
        masters = [flat_tensor(tensor, file, f"fp32 weights of group {g}") for g, tensor in enumerate(flat)]
        fused = add_fused(opened, masters, by_index, raw_groups, module, file)
        if fused is None:
            _keep_numbered(opened, by_index, raw_groups, dict(enumerate(masters)), found, file)
            return found
        fused.extra.update(found.extra)
        return fused
    groups = _numbered(raw_groups, by_index, outer.get("fp32_groups"), file)
    assigned = _stored_names(raw_groups, module, groups) or assign(module, groups, _same_values(opened, module))
    if assigned is None:
        known = {entry.index: entry.master for group in groups for entry in group if entry.master is not None}
        _keep_numbered(opened, by_index, raw_groups, known, found, file)
        return found
    for group, names, raw in zip(groups, assigned, raw_groups, strict=True):
        for entry, name in zip(group, names, strict=True):
            _add_entry(opened, name, entry, mapping(by_index.get(entry.index, {}), file, f"state {entry.index}"), found, file)
        _add_hyper(opened, raw, names, found, file)
    return found


def _keep_numbered(
    opened: Opened,
    by_index: Mapping[Any, Any],
    raw_groups: Sequence[Mapping[Any, Any]],
    masters: Mapping[int, StoredTensor],
    found: OptimizerState,
    file: str,
) -> None:
    """Keep state whose parameters can't be told under its number."""
    for index, master in masters.items():
        opened.tensor(f"deepspeed/optimizer_state/{index}/fp32", master)
    for index, held in by_index.items():
        for key, value in mapping(held, file, f"state {index}").items():
            tensor = dense(value, file, f"{key} of parameter {index}")
            if tensor is not None:
                opened.tensor(join_name("deepspeed", "optimizer_state", str(index), str(key)), tensor)
    found.extra["param_groups"] = [dict(group) for group in raw_groups]
    if by_index or masters:
        opened.remarks.append(
            "the optimizer numbers its parameters, and shapes and order fit several names: "
            "its state is kept as deepspeed/optimizer_state/<number>/<state>"
        )


def _numbered(
    raw_groups: Sequence[Mapping[Any, Any]], by_index: Mapping[Any, Any], masters: object, file: str
) -> list[list[Numbered]]:
    """The entries of each param group, in order."""
    held = None if masters is None else [sequence(group, file, "fp32_groups") for group in sequence(masters, file, "fp32_groups")]
    groups: list[list[Numbered]] = []
    for g, raw in enumerate(raw_groups):
        entries: list[Numbered] = []
        for i, index in enumerate(sequence(raw.get("params"), file, "params of a param group")):
            if type(index) not in (int, str):
                raise FormatError(file, f"a param group lists {index!r:.40} as a parameter")
            master = dense(held[g][i], file, f"master weight {index}") if held and g < len(held) and i < len(held[g]) else None
            state_of = mapping(by_index.get(index, {}), file, f"state {index}")
            shapes = {t.shape for t in state_of.values() if isinstance(t, StoredTensor) and t.shape}
            shape = master.shape if master else (shapes.pop() if len(shapes) == 1 else None)
            entries.append(Numbered(index, master, shape))
        groups.append(entries)
    return groups


def _stored_names(
    raw_groups: Sequence[Mapping[Any, Any]], module: Mapping[str, StoredTensor], groups: Sequence[Sequence[Numbered]]
) -> list[list[str]] | None:
    """The names that newer torch optimizers keep (`param_names`), when they are all there and fit."""
    names = [raw.get("param_names") for raw in raw_groups]
    if not all(isinstance(found, list) and len(found) == len(group) for found, group in zip(names, groups, strict=True)):
        return None
    listed: list[list[str]] = [list(found) for found in names if found is not None]
    return listed if all(name in module for found in listed for name in found) else None


Fits = Callable[[str, Numbered], bool]


def assign(module: Mapping[str, StoredTensor], groups: Sequence[Sequence[Numbered]], same: Fits) -> list[list[str]] | None:
    """The names of the entries of each group, when just one assignment fits; else None.

    `same(name, entry)` is asked only when shapes and order leave several.
    """
    names = list(module)

    def shaped(name: str, entry: Numbered) -> bool:
        return entry.shape is None or entry.shape == module[name].shape

    return _only(names, groups, shaped) or _only(names, groups, lambda name, entry: shaped(name, entry) and same(name, entry))


def _only(names: Sequence[str], groups: Sequence[Sequence[Numbered]], fits: Fits) -> list[list[str]] | None:
    """Walk the names in order; each is the next entry of some group, or untrained. None unless there is one way only."""
    sizes = tuple(map(len, groups))
    spare = len(names) - sum(sizes)
    if spare < 0:
        return None
    layers: list[dict[tuple[int, ...], int]] = [{(0,) * len(groups): 1}]
    paths = 0
    for i, name in enumerate(names):
        layer: dict[tuple[int, ...], int] = {}
        for at, ways in layers[-1].items():
            for step in _steps(name, at, groups, fits, may_skip=i - sum(at) < spare):
                layer[step] = min(2, layer.get(step, 0) + ways)
        paths += len(layer)
        if paths > _MAX_PATHS:
            return None
        layers.append(layer)
    if layers[-1].get(sizes) != 1:
        return None
    return _trace(names, groups, layers, fits)


def _steps(
    name: str, at: tuple[int, ...], groups: Sequence[Sequence[Numbered]], fits: Fits, *, may_skip: bool
) -> list[tuple[int, ...]]:
    """Positions after `name` was given to each group that can take it, or skipped."""
    steps = [at] if may_skip else []
    for g, position in enumerate(at):
        if position < len(groups[g]) and fits(name, groups[g][position]):
            steps.append((*at[:g], position + 1, *at[g + 1 :]))
    return steps


def _trace(
    names: Sequence[str], groups: Sequence[Sequence[Numbered]], layers: Sequence[Mapping[tuple[int, ...], int]], fits: Fits
) -> list[list[str]]:
    """The one way through the layers, walked backwards."""
    assigned: list[list[str]] = [[] for _ in groups]
    at = tuple(map(len, groups))
    for i in range(len(names) - 1, -1, -1):
        for g, position in enumerate(at):
            before = (*at[:g], position - 1, *at[g + 1 :])
            if before in layers[i] and fits(names[i], groups[g][position - 1]):
                assigned[g].insert(0, names[i])
                at = before
                break
    return assigned


def _same_values(opened: Opened, module: Mapping[str, StoredTensor]) -> Fits:
    """Whether a master weight, rounded to the model's dtype, is the model's weight (as far as a first part of it tells)."""
    known: dict[tuple[str, int], bool] = {}

    def compare(name: str, entry: Numbered) -> bool:
        weight, master = module[name], entry.master
        if master is None or not (master.contiguous and weight.contiguous):
            return True
        items = min(math.prod(master.shape), _COMPARE_BYTES // 4)
        heads = [head(opened, tensor, items) for tensor in (master, weight)]
        return torch.equal(heads[0].to(heads[1].dtype), heads[1])

    def same(name: str, entry: Numbered) -> bool:
        key = (name, entry.index)
        if key not in known:
            known[key] = compare(name, entry)
        return known[key]

    return same


def _add_entry(opened: Opened, name: str, entry: Numbered, held: Mapping[Any, Any], found: OptimizerState, file: str) -> None:
    """One parameter's master weight and state."""
    if entry.master is not None:
        opened.tensor(state(name, "fp32"), entry.master)
        found.note(name, "fp32")
    for key, value in held.items():
        tensor = dense(value, file, f"{key} of {name}")
        if tensor is not None:
            opened.tensor(state(name, str(key)), tensor)
            found.note(name, str(key))
        elif key == "step" and isinstance(value, (int, float)):
            add_step(opened, [name], value, file, found)
        elif value is not None:
            kept = found.values.setdefault(name, {})
            assert isinstance(kept, dict)
            kept[str(key)] = value


def _add_hyper(opened: Opened, raw: Mapping[Any, Any], names: Sequence[str], found: OptimizerState, file: str) -> None:
    """A param group's hyper-parameters, with names; a step count among them becomes each parameter's."""
    hyper = {key: value for key, value in raw.items() if key not in ("params", "param_names")}
    step = hyper.get("step")
    if type(step) in (int, float) and not any("step" in found.states.get(name, []) for name in names):
        add_step(opened, names, hyper.pop("step"), file, found)
    groups = found.values.setdefault("param_groups", [])
    assert isinstance(groups, list)
    groups.append({**hyper, "params": list(names)})
