"""Hyper-parameters of Megatron's optimizer, by parameter: its files say what groups there are, and not what is in them.

Which parameter is in which group follows from Megatron's own rule: biases and vectors are without weight decay, experts and
the embedding may have groups of their own. Where the groups are not those of this rule they are kept as they are.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from ucformat.formats.megatron.names import expert_of
from ucformat.formats.megatron.ranks import Opened
from ucformat.pickles.unpickle import to_values
from ucformat.values.tree import join_name
from ucformat.views import View

_MAX_STEP = 1 << 53
_EMBEDDINGS = ("embedding.word_embeddings.weight", "output_layer.weight")
_STATE = ("param_groups", "state", "param_state", "fp32_from_fp16_params")
_Key = tuple[bool, bool, bool]
"""Of experts, without weight decay, with a learning rate of its own."""


def add_groups(
    opened: Opened,
    found: dict[str, Any],
    held: Sequence[object],
    states: Mapping[str, Mapping[str, View]],
    views: dict[str, View],
    ndim: Mapping[str, int],
) -> None:
    """Add hyper-parameters to the values `found` and step counts to `views`. `held` are entries `optimizer` of the files,
    `states` the optimizer's state by kind and parameter, `ndim` of each parameter.
    """
    lists = [to_values(groups, "param_groups") for entry in held for groups in _lists(entry)]
    rest = [to_values(_without_groups(entry), "optimizer") for entry in held]
    groups = _distinct(lists)
    params = list(dict.fromkeys(name for kind in states.values() for name in kind))
    named = assigned(groups, params, ndim) if params else None
    if groups and params and named is None:
        opened.remarks.append("the optimizer's groups are not those that Megatron makes by itself: kept without their parameters")
    if groups and named is None:
        rest.append({"param_groups": groups})
    kept = [value for value in rest if value not in ({}, None)]
    if kept:
        found.setdefault("megatron", {})["optimizer"] = kept[0] if len(kept) == 1 else kept
    if named is None:
        return
    steps: dict[float, View] = {}
    done: list[dict[str, Any]] = []
    for group, params in named:
        step = group.get("step")
        if isinstance(step, (int, float)) and 0 <= step < _MAX_STEP and "step" not in states:
            if step not in steps:
                steps[step] = opened.rewrite.inline("F32", (), struct.pack("<f", step), "the optimizer's step")
            views.update((join_name("optimizer", name, "step"), steps[step]) for name in params)
            group = {key: value for key, value in group.items() if key != "step"}
        done.append({**group, "params": params})
    if done:
        found["optimizer"] = {"param_groups": done}


def _lists(entry: object) -> Iterable[list[Any]]:
    """The lists of groups in an entry: one, or that of each of several optimizers."""
    if isinstance(entry, list):
        for item in entry:
            yield from _lists(item)
    elif isinstance(entry, dict):
        groups = entry.get("param_groups")
        if isinstance(groups, list):
            yield groups
        for key, value in entry.items():
            if isinstance(value, (dict, list)) and (key == "optimizer" or type(key) is int):
                yield from _lists(value)


def _without_groups(entry: object) -> object:
    """What else an entry holds, of what is neither groups nor state."""
    if not isinstance(entry, dict):
        return {}
    kept = {key: value for key, value in entry.items() if key not in _STATE}
    for key, value in list(kept.items()):
        if key == "optimizer" or type(key) is int:
            below = _without_groups(value)
            kept.pop(key)
            if below:
                kept[key] = below
    return kept


def _distinct(lists: Sequence[Any]) -> list[dict[str, Any]]:
    """All groups, each once: every model-parallel rank has its own list of the same."""
    found: list[dict[str, Any]] = []
    for groups in lists:
        for group in groups:
            settings = {key: value for key, value in group.items() if key != "params"} if isinstance(group, dict) else None
            if settings is not None and settings not in found:
                found.append(settings)
    return found


def assigned(
    groups: Sequence[dict[str, Any]], params: Sequence[str], ndim: Mapping[str, int], names: Mapping[str, str] | None = None
) -> list[tuple[dict[str, Any], list[str]]] | None:
    """Each group with its parameters; None when the groups are not those of Megatron's rule.

    `names` are the parameters' names, where `params` are something else.
    """
    by_key: dict[_Key, dict[str, Any]] = {}
    for group in groups:
        if "wd_mult" not in group:
            return None
        key = (group.get("is_expert_parallel") is True, group["wd_mult"] == 0, group.get("is_decoupled_lr") is True)
        if by_key.setdefault(key, group) is not group:
            return None
    experts = any(key[0] for key in by_key)
    decoupled = any(key[2] for key in by_key)
    members: dict[_Key, list[str]] = {key: [] for key in by_key}
    for param in params:
        name = param if names is None else names[param]
        key = (
            experts and expert_of(name) is not None,
            name.endswith(".bias") or ndim.get(param, 2) == 1,
            decoupled and name in _EMBEDDINGS,
        )
        if key not in members:
            return None
        members[key].append(param)
    return [(group, members[key]) for key, group in by_key.items()]
