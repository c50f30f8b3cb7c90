"""What a DeepSpeed optimizer file says, whatever its layout: one `RankOptim` per rank.

Two layouts: equal slices of each group's flat buffer (ZeRO-1, ZeRO-2, BF16_Optimizer; rigid or elastic form), and flat
buffers of per-parameter slices (ZeRO-3, one per sub-group).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.deepspeed.files import LATER
from ucformat.pickles.unpickle import RefusedTensor, StoredTensor

MAX_ITEMS = 1 << 48  # of one parameter: a thousand times the largest model, and sums of them stay within int64

_FLAT_ENTRIES = {
    "base_optimizer_state", "base_optimizer_state_step", "single_partition_of_fp32_groups", "group_paddings", "partition_count",
    "param_slice_mappings", "param_alignment_paddings", "zero_stage",
}  # fmt: skip
_SLICED_ENTRIES = {"optimizer_state_dict", "fp32_flat_groups", "partition_count", "zero_stage", "ds_zero_partition_groups"}
"""Entries that describe the layout, or hold what is read elsewhere; the others are values (loss scale, clipping…)."""


@dataclass(frozen=True, slots=True)
class FlatGroup:
    """One flat buffer of a rank and the optimizer's state for it."""

    master: StoredTensor
    """1-D: the master weights."""
    state: Mapping[str, object]
    """State by its optimizer's own key: 1-D tensors as long as the buffer, per-group scalars, anything else."""


@dataclass(frozen=True, slots=True)
class RankOptim:
    """A rank's optimizer file, understood."""

    path: str
    sliced: bool
    """True for ZeRO-3: buffers of per-parameter slices."""
    groups: Sequence[FlatGroup]
    counts: Sequence[int]
    """Number of ranks that each group is said to be spread over."""
    param_groups: Sequence[Mapping[str, object]] | None
    """Hyper-parameters of each param group, without `params`; None where the file has none (elastic form)."""
    members: Sequence[Sequence[int]]
    """Flat groups of each param group."""
    paddings: Sequence[int] = ()
    """Unused elements at the end of this rank's slice, per group; empty when the file does not say."""
    alignment: Sequence[Sequence[int]] = ()
    """Unused elements after each parameter, per group; empty when there are none."""
    values: Mapping[str, object] = field(default_factory=dict)
    """Plain entries: loss scale, clipping, versions."""
    shapes: object = None
    """`param_shapes`, where an old version wrote it here instead of into the model file."""
    dp: int = 0
    """Its data-parallel rank."""


def mapping(value: object, file: str, what: str) -> Mapping[Any, Any]:
    """`value` when it is a dict. Raises FormatError."""
    if not isinstance(value, dict):
        raise FormatError(file, f"{what} is a {type(value).__name__}, not a dict")
    return value


def sequence(value: object, file: str, what: str) -> Sequence[Any]:
    """`value` when it is a list or tuple. Raises FormatError."""
    if not isinstance(value, (list, tuple)):
        raise FormatError(file, f"{what} is a {type(value).__name__}, not a list")
    return value


def _counts(value: object, file: str, what: str, length: int | None = None) -> list[int]:
    found = sequence(value, file, what)
    if not all(type(n) is int and 0 <= n < MAX_ITEMS for n in found) or (length is not None and len(found) != length):
        raise FormatError(file, f"{what} is {found!r:.100}, not {'a' if length is None else length} numbers")
    return list(found)


def flat_tensor(value: object, file: str, what: str) -> StoredTensor:
    """`value` when it is a contiguous 1-D tensor. Raises FormatError, UnsupportedError."""
    if isinstance(value, RefusedTensor):
        raise UnsupportedError(file, f"{what} is {value.kind}")
    if not isinstance(value, StoredTensor) or len(value.shape) != 1 or not value.contiguous:
        raise FormatError(file, f"{what} is no flat tensor")
    return value


def parse(tree: object, file: str) -> RankOptim:
    """Understand the contents of an optimizer file. Raises FormatError, UnsupportedError."""
    top = mapping(tree, file, "the optimizer file")
    if top.get("folding"):
        raise UnsupportedError(file, f"a DeepSpeed checkpoint with AutoEP experts: {LATER}")
    body = mapping(top.get("optimizer_state_dict"), file, "optimizer_state_dict")
    if body.get("ds_zero_partition_groups"):
        raise UnsupportedError(file, f"a DeepSpeed ZeRO-3 checkpoint with AutoEP experts: {LATER}")
    if "fp32_flat_groups" in body:
        return replace(_sliced(body, file), shapes=top.get("param_shapes"))
    if "single_partition_of_fp32_groups" not in body:
        raise UnsupportedError(file, f"optimizer state of a kind that is not known (it holds {', '.join(map(str, body))[:200]})")
    return replace(_sliced_evenly(body, file), shapes=top.get("param_shapes"))


def _sliced_evenly(body: Mapping[Any, Any], file: str) -> RankOptim:
    """ZeRO-1, ZeRO-2, BF16_Optimizer."""
    masters = sequence(body["single_partition_of_fp32_groups"], file, "single_partition_of_fp32_groups")
    base = body.get("base_optimizer_state")
    param_groups: list[dict[str, object]] | None = None
    if isinstance(base, list):
        states = [mapping(state, file, "base_optimizer_state") for state in base]
        if len(states) != len(masters):
            raise FormatError(file, f"{len(masters)} groups of weights and {len(states)} of optimizer state")
    else:
        inner = mapping(base, file, "base_optimizer_state")
        by_index = mapping(inner.get("state"), file, "base_optimizer_state.state")
        param_groups, indices = _param_groups(inner, file)
        if [len(found) for found in indices] != [1] * len(masters):
            raise FormatError(file, f"{len(masters)} groups of weights, and param_groups over {indices}")
        states = [mapping(by_index.get(found[0], {}), file, f"state of group {g}") for g, found in enumerate(indices)]
    if "base_optimizer_state_step" in body:
        states = [{"step": body["base_optimizer_state_step"], **state} for state in states]
    number = len(masters)
    paddings = _counts(body["group_paddings"], file, "group_paddings", number) if "group_paddings" in body else []
    alignment = sequence(body.get("param_alignment_paddings") or [], file, "param_alignment_paddings")
    return RankOptim(
        file,
        sliced=False,
        groups=_flat_groups(masters, states, file),
        counts=_partition_count(body.get("partition_count"), file, number),
        param_groups=param_groups,
        members=[[g] for g in range(number)],
        paddings=paddings,
        alignment=[_counts(item, file, "param_alignment_paddings") for item in alignment],
        values={key: value for key, value in body.items() if key not in _FLAT_ENTRIES},
    )


def _sliced(body: Mapping[Any, Any], file: str) -> RankOptim:
    """ZeRO-3."""
    masters = sequence(body["fp32_flat_groups"], file, "fp32_flat_groups")
    inner = mapping(body.get("optimizer_state_dict"), file, "optimizer_state_dict.optimizer_state_dict")
    by_index = mapping(inner.get("state"), file, "optimizer_state_dict.state")
    param_groups, members = _param_groups(inner, file)
    if len(members) == 1 and not members[0]:
        members = [list(range(len(masters)))]  # some versions save the group after they took its parameters out
    if sorted(i for found in members for i in found) != list(range(len(masters))):
        raise FormatError(file, f"{len(masters)} flat groups, and param_groups over {members}")
    return RankOptim(
        file,
        sliced=True,
        groups=_flat_groups(masters, [mapping(by_index.get(i, {}), file, f"state {i}") for i in range(len(masters))], file),
        counts=_partition_count(body.get("partition_count"), file, len(masters)),
        param_groups=param_groups,
        members=members,
        values={key: value for key, value in body.items() if key not in _SLICED_ENTRIES},
    )


def _flat_groups(masters: Sequence[object], states: Sequence[Mapping[Any, Any]], file: str) -> list[FlatGroup]:
    if not all(isinstance(key, str) for state in states for key in state):
        raise FormatError(file, "the optimizer's state has entries without a name")
    return [
        FlatGroup(flat_tensor(master, file, f"fp32 weights of flat group {i}"), state)
        for i, (master, state) in enumerate(zip(masters, states, strict=True))
    ]


def _partition_count(value: object, file: str, number: int) -> list[int]:
    """Ranks per group: a list, or one number for all; empty when it is not stored."""
    if value is None:
        return []
    if isinstance(value, int):
        return [value] * number
    return _counts(value, file, "partition_count", number)


def _param_groups(inner: Mapping[Any, Any], file: str) -> tuple[list[dict[str, object]], list[list[int]]]:
    """Hyper-parameters of each param group, and the indices of its flat groups."""
    groups = [mapping(group, file, "a param group") for group in sequence(inner.get("param_groups"), file, "param_groups")]
    members = [_counts(group.get("params"), file, "params of a param group") for group in groups]
    return [{key: value for key, value in group.items() if key != "params"} for group in groups], members
