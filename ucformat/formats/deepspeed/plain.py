"""ZeRO-0: the optimizer inside the model file, unpartitioned, its state numbered instead of named.

torch numbers parameters in the order in which the training script listed them, which need not be the order of the model. So a
number gets a name when it is proven: by `param_names`, by a shape that just one parameter has, or by its master weight, which
rounds to the model's weight (see `evidence`). Else nothing is guessed: the state keeps its numbers, in torch's own form.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucformat.errors import FormatError
from ucformat.formats.deepspeed.evidence import HEAD_ITEMS, Span, Weights, complete, items_of, settle
from ucformat.formats.deepspeed.fused import add_fused
from ucformat.formats.deepspeed.optim import flat_tensor, mapping, sequence
from ucformat.formats.deepspeed.records import Opened, dense, numel, state
from ucformat.formats.deepspeed.zero import OptimizerState, add_step
from ucformat.pickles.unpickle import StoredTensor

_FLAT = "fp32_groups_flat"  # fused optimizers: one flat buffer per group


@dataclass(frozen=True, slots=True)
class Numbered:
    """An entry of the optimizer: its number in the state, and its master weight where there is one."""

    index: int
    master: StoredTensor | None
    shape: tuple[int, ...] | None
    """None when nothing is stored that has the parameter's shape."""


def add_optimizer(opened: Opened, tree: object, module: Mapping[str, StoredTensor], file: str) -> OptimizerState:
    """Add `optimizer/<parameter>/<state>`. `module` holds the parameters that may be trained, each tied one once.

    State whose parameters nothing proves is kept as torch has it, `optimizer/state/<number>/<state>`, and the remarks say so.
    """
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
        return add_fused(opened, masters, by_index, raw_groups, module, found, file)
    groups = _numbered(raw_groups, by_index, outer.get("fp32_groups"), file)
    names = _names(opened, raw_groups, groups, module)
    named = complete(names)
    if named is None:
        _keep_numbers(opened, by_index, raw_groups, groups, names, found, file)
        return found
    for group, members, raw in zip(groups, named, raw_groups, strict=True):
        for entry, name in zip(group, members, strict=True):
            _add_entry(opened, name, entry, mapping(by_index.get(entry.index, {}), file, f"state {entry.index}"), found, file)
        _add_hyper(opened, raw, members, found, file)
    return found


def _names(
    opened: Opened,
    raw_groups: Sequence[Mapping[Any, Any]],
    groups: Sequence[Sequence[Numbered]],
    module: Mapping[str, StoredTensor],
) -> Sequence[Sequence[str | None]]:
    """The name of each entry, as far as shapes, values, or names in the file prove it."""
    mastered = any(entry.master is not None for group in groups for entry in group)
    weights = Weights(opened, module) if mastered else None
    shaped: dict[tuple[int, ...] | None, list[str]] = {None: list(module)}
    for name, tensor in module.items():
        shaped.setdefault(tensor.shape, []).append(name)
    candidates = [[_candidates(opened, entry, module, shaped, weights) for entry in group] for group in groups]
    stored = _stored_names(raw_groups, candidates)
    return settle(candidates) if stored is None else stored


def _candidates(
    opened: Opened,
    entry: Numbered,
    module: Mapping[str, StoredTensor],
    shaped: Mapping[tuple[int, ...] | None, Sequence[str]],
    weights: Weights | None,
) -> Sequence[str]:
    """The parameters that an entry may be of."""
    if weights is None or entry.master is None:
        return shaped.get(entry.shape, ())
    span = Span(entry.master, 0, numel(entry.master))
    same = weights.rounding_of(span, items_of(opened, Span(entry.master, 0, min(span.items, HEAD_ITEMS))))
    return [name for name in same if module[name].shape == entry.master.shape]


def _keep_numbers(
    opened: Opened,
    by_index: Mapping[Any, Any],
    raw_groups: Sequence[Mapping[Any, Any]],
    groups: Sequence[Sequence[Numbered]],
    names: Sequence[Sequence[str | None]],
    found: OptimizerState,
    file: str,
) -> None:
    """Keep the optimizer as torch has it, by number. Master weights go under the name of their weight where it is proven."""
    for group, named in zip(groups, names, strict=True):
        for entry, name in zip(group, named, strict=True):
            if entry.master is not None and name is not None:
                opened.tensor(state(name, "fp32"), entry.master)
                found.note(name, "fp32")
            elif entry.master is not None:
                opened.tensor(f"deepspeed/optimizer_state/{entry.index}/fp32", entry.master)
    if by_index:
        for index, held in by_index.items():
            for key, value in mapping(held, file, f"state {index}").items():
                dense(value, file, f"{key} of parameter {index}")
        found.values["state"] = dict(by_index)
    found.values["param_groups"] = [dict(group) for group in raw_groups]
    mastered = any(entry.master is not None for group in groups for entry in group)
    why = (
        "several weights equal the rounded master weights of some, or none does"
        if mastered
        else "several parameters have the same shape, and in fp32 there are no master weights to compare"
    )
    opened.remarks.append(
        f"the optimizer numbers its parameters, and nothing proves which is which ({why}): its state keeps the numbers, as "
        "optimizer/state/<number>/<state>, in the order in which the training script listed the parameters"
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
    raw_groups: Sequence[Mapping[Any, Any]], candidates: Sequence[Sequence[Sequence[str]]]
) -> list[list[str]] | None:
    """The names that newer torch optimizers keep (`param_names`), when they are all there and nothing speaks against them."""
    names = [raw.get("param_names") for raw in raw_groups]
    if not all(isinstance(found, list) and len(found) == len(group) for found, group in zip(names, candidates, strict=True)):
        return None
    listed: list[list[str]] = [list(found) for found in names if found is not None]
    pairs = ((name, may) for found, group in zip(listed, candidates, strict=True) for name, may in zip(found, group, strict=True))
    return listed if all(name in may for name, may in pairs) else None


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
