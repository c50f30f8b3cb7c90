"""ZeRO-1, ZeRO-2, ZeRO-3 and BF16_Optimizer: the ranks' flat buffers as fragments of each parameter's state.

The order of `param_shapes` is the order in the buffers. `param_slice_mappings` is never looked at: it is wrong
when DeepSpeed shuffles parameters (`round_robin_gradients`).
"""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ucformat.errors import FormatError
from ucformat.formats.deepspeed.evidence import check_positions, mismatches
from ucformat.formats.deepspeed.experts import expert_orders, rename_experts
from ucformat.formats.deepspeed.flat import EvenSlices, Geometry, ParameterSlices, Pieces, fill_buffers, slice_elements
from ucformat.formats.deepspeed.optim import MAX_ITEMS, RankOptim, mapping, sequence
from ucformat.formats.deepspeed.per_rank import unite, unite_each
from ucformat.formats.deepspeed.records import Opened, dense, state
from ucformat.pickles.unpickle import StoredTensor
from ucformat.values.codec import RankLocal
from ucformat.values.tree import join_name

Shapes = dict[str, tuple[int, ...]]


@dataclass(slots=True)
class OptimizerState:
    """What was found for the optimizer: who has which state, and the values beside the tensors."""

    states: dict[str, list[str]] = field(default_factory=dict)
    """Parameter → its state tensors (`fp32`, `exp_avg`, …), in the order found."""
    values: dict[str, object] = field(default_factory=dict)
    """The `optimizer` subtree of the value tree."""
    extra: dict[str, object] = field(default_factory=dict)
    """What DeepSpeed keeps beside it: loss scale, clipping…"""

    per_rank: dict[str, dict[str, object]] = field(default_factory=dict)
    """Flat group → state of whole buffers that differs between ranks."""

    def note(self, name: str, key: str) -> None:
        self.states.setdefault(name, []).append(key)


def shapes_of(tree: object, file: str) -> list[Shapes] | None:
    """`param_shapes`: one dict per flat group, or the single dict of old versions. None when there is none."""
    if tree is None:
        return None
    groups = [tree] if isinstance(tree, dict) else sequence(tree, file, "param_shapes")
    return [shape_dict(group, file, "param_shapes") for group in groups]


def shape_dict(tree: object, file: str, what: str) -> Shapes:
    """Names to shapes; a shape is a torch.Size or, from some writers, a plain tuple. Raises FormatError."""
    found: Shapes = {}
    for name, shape in mapping(tree, file, what).items():
        sizes = tuple(sequence(shape, file, f"shape of {name!r}"))
        if (
            not isinstance(name, str)
            or not all(type(n) is int and 0 <= n < MAX_ITEMS for n in sizes)
            or math.prod(sizes) >= MAX_ITEMS
        ):
            raise FormatError(file, f"{what} says {name!r:.100}: {shape!r:.100}")
        found[name] = sizes
    return found


def add_optimizer(
    opened: Opened,
    ranks: Sequence[RankOptim],
    shapes: Sequence[Shapes],
    master: Callable[[str], str],
    weights: Mapping[str, StoredTensor] | None = None,
) -> OptimizerState:
    """Add `optimizer/<parameter>/<state>` of every parameter; its master weight goes by the name `master(parameter)`.

    `weights` are stored in the compute dtype: the master weights must round to them, which proves where each parameter lies.
    Raises FormatError when files and shapes disagree, or masters are those of other parameters.
    """
    _same_structure(ranks)
    groups = _buffers(opened, ranks, shapes, weights or {})
    names = [[name for buffer in buffers for name in buffer.geometry.shapes] for buffers in groups]
    flat = [name for group in names for name in group]
    if len(set(flat)) < len(flat):
        twice = next(name for name in flat if flat.count(name) > 1)
        raise FormatError(ranks[0].path, f"parameter {twice!r} is in two groups")
    found = OptimizerState()
    for g, buffers in enumerate(groups):
        for buffer in buffers:
            _add_group(opened, buffer, g, master, found)
            pieces = buffer.pieces(g) if weights else None
            if weights and pieces is not None:
                check_positions(opened, list(buffer.geometry.shapes), buffer.masters(g), pieces, weights)
    found.values["param_groups"] = _param_groups(opened, ranks, names, found)
    found.extra.update(unite_each(opened, [rank.values for rank in ranks], [rank.path for rank in ranks], "the optimizer's"))
    return found


def _same_structure(ranks: Sequence[RankOptim]) -> None:
    first = ranks[0]
    for rank in ranks[1:]:
        same = (rank.sliced, len(rank.groups), rank.alignment, rank.members) == (
            first.sliced,
            len(first.groups),
            first.alignment,
            first.members,
        )
        if not same or (rank.param_groups is None) != (first.param_groups is None):
            raise FormatError(rank.path, f"its groups are not those of {first.path}: left over from another run?")


@dataclass(frozen=True, slots=True)
class _Buffer:
    """One flat buffer, and the ranks that hold it: all of them, or for experts those that train the same ones."""

    ranks: Sequence[RankOptim]
    geometry: Geometry
    label: str
    """What it is called where it is kept as it is."""

    def masters(self, g: int) -> list[StoredTensor]:
        return [rank.groups[g].master for rank in self.ranks]

    def pieces(self, g: int) -> Pieces | None:
        return self.geometry.pieces([master.shape[0] for master in self.masters(g)])


def _buffers(
    opened: Opened, ranks: Sequence[RankOptim], shapes: Sequence[Shapes], weights: Mapping[str, StoredTensor]
) -> list[list[_Buffer]]:
    """The buffers of each group: one, but for experts that are spread over ranks one for each share of them."""
    if ranks[0].sliced:
        return [[_Buffer(ranks, geometry, str(g))] for g, geometry in enumerate(_sliced(ranks, shapes))]
    first, world = ranks[0], len(ranks)
    if len(shapes) != len(first.groups):
        raise FormatError(first.path, f"{len(first.groups)} groups, and param_shapes has {len(shapes)}")
    groups: list[list[_Buffer]] = []
    for g, group in enumerate(shapes):
        count = first.counts[g] if first.counts else world
        if count == world:
            groups.append([_Buffer(ranks, _even(ranks, group, g), str(g))])
            continue
        named = [rename_experts(group, share, world // count) for share in range(world // count)]

        def arranged(order: Sequence[Sequence[int]], g: int = g, named: Sequence[Shapes] = named) -> list[_Buffer]:
            held = [[ranks[dp] for dp in members] for members in order]
            return [
                _Buffer(members, _even(members, own, g), f"{g}/ep{share}")
                for share, (members, own) in enumerate(zip(held, named, strict=True))
            ]

        orders = [arranged(order) for order in expert_orders(world, count)]
        groups.append(_proven(opened, orders, g, weights))
    return groups


def _proven(opened: Opened, orders: Sequence[list[_Buffer]], g: int, weights: Mapping[str, StoredTensor]) -> list[_Buffer]:
    """The order of ranks in which the masters of experts are the stored weights, as far as samples show."""
    odd: list[str] = []
    for buffers in orders:
        odd = []
        for buffer in buffers:
            pieces = buffer.pieces(g)
            odd += [] if pieces is None else mismatches(opened, list(buffer.geometry.shapes), buffer.masters(g), pieces, weights)
        if not odd:
            return buffers
    path = orders[0][0].ranks[0].path
    raise FormatError(
        path, f"the master weights of experts are not the stored weights, whichever ranks held which of them ({odd[0]!r} differs)"
    )


def _sliced(ranks: Sequence[RankOptim], shapes: Sequence[Shapes]) -> Sequence[Geometry]:
    """The buffers of ZeRO-3."""
    first, world = ranks[0], len(ranks)
    sizes = [group.master.shape[0] for group in first.groups]
    spread: Sequence[Shapes] | None = shapes
    if [slice_elements(group, world) for group in shapes] != sizes:
        spread = fill_buffers({name: shape for group in shapes for name, shape in group.items()}, sizes, world)
    if spread is None:
        raise FormatError(first.path, f"its buffers of {sizes} elements do not fit param_shapes over {world} ranks")
    return [ParameterSlices(group) for group in spread]


def _even(ranks: Sequence[RankOptim], group: Shapes, g: int) -> EvenSlices:
    """A buffer of ZeRO-1, ZeRO-2 or BF16_Optimizer that these ranks share."""
    first = ranks[0]
    alignment = first.alignment[g] if g < len(first.alignment) else [0] * len(group)
    if len(alignment) != len(group):
        raise FormatError(first.path, f"{len(alignment)} alignment paddings for {len(group)} parameters of group {g}")
    recorded = sum(rank.paddings[g] for rank in ranks if rank.paddings)
    return EvenSlices(group, alignment, tail=max(recorded, 2 * len(ranks) - 1))  # padded to a multiple of twice the ranks


def _add_group(opened: Opened, buffer: _Buffer, g: int, master: Callable[[str], str], found: OptimizerState) -> None:
    """One flat buffer: master weights, then each state of the optimizer."""
    ranks, geometry, masters = buffer.ranks, buffer.geometry, buffer.masters(g)
    groups = [rank.groups[g] for rank in ranks]
    if not _add_flat(opened, geometry, masters, master):
        lengths = [tensor.shape[0] for tensor in masters]
        need = sum(map(math.prod, geometry.shapes.values()))
        odd = next((rank for rank, n in enumerate(lengths) if n != lengths[0]), 0)
        raise FormatError(
            ranks[odd].path,
            f"group {g}: the ranks hold {lengths[:16]} elements, which are no slices of the {need} that param_shapes wants",
        )
    for name in geometry.shapes:
        found.note(name, "fp32")
    for key in dict.fromkeys(key for group in groups for key in group.state):
        _add_state(opened, buffer, g, key, found)


def _add_flat(opened: Opened, geometry: Geometry, tensors: Sequence[StoredTensor], name_of: Callable[[str], str]) -> bool:
    """Add state that is laid out like the weights; False when these tensors are not."""
    pieces = geometry.pieces([tensor.shape[0] for tensor in tensors])
    if pieces is None or len({tensor.dtype for tensor in tensors}) != 1:
        return False
    opened.spread(list(map(name_of, geometry.shapes)), list(geometry.shapes.values()), tensors, pieces)
    return True


def _add_state(opened: Opened, buffer: _Buffer, g: int, key: str, found: OptimizerState) -> None:
    """One state of one flat buffer, whatever it is: like the weights, a scalar, a number, or something else."""
    ranks, geometry = buffer.ranks, buffer.geometry
    for rank in ranks:
        if key not in rank.groups[g].state:
            raise FormatError(rank.path, f"group {g} has no {key!r}, which other ranks have: left over from another run?")
    held = [rank.groups[g].state[key] for rank in ranks]
    tensors = [
        tensor for value, rank in zip(held, ranks, strict=True) if (tensor := dense(value, rank.path, f"{key} of group {g}"))
    ]
    names = geometry.shapes
    if not tensors:
        if key == "step" or _is_alike(opened, buffer, key, held, found):
            _add_value(opened, names, ranks, key, held, found)
        return
    if len(tensors) < len(ranks):
        raise FormatError(ranks[0].path, f"{key!r} of group {g} is a tensor in the files of some ranks, and none in others'")
    if all(tensor.shape == () for tensor in tensors):
        if key == "step":
            _same_step([_number(data, t.dtype) for data, t in zip(opened.bytes_of(tensors), tensors, strict=True)], ranks)
        if not _is_alike(opened, buffer, key, tensors, found):
            return
        for name in names:
            opened.tensor(state(name, key), tensors[0])
    elif not _is_flat(tensors) or not _add_flat(opened, geometry, tensors, lambda name: state(name, key)):
        _add_raw(opened, tensors, key, buffer, g)
        return
    for name in names:
        found.note(name, key)


def _is_alike(opened: Opened, buffer: _Buffer, key: str, held: Sequence[object], found: OptimizerState) -> bool:
    """Whether all ranks hold the same. Else it is a statistic of each rank's buffer, and is kept as that."""
    files, coords = [rank.path for rank in buffer.ranks], [{"dp": rank.dp} for rank in buffer.ranks]
    value = unite(opened, held, files, f"optimizer state {key!r} of flat group {buffer.label}", coords)
    if isinstance(value, RankLocal):
        found.per_rank.setdefault(buffer.label, {})[key] = value
    return not isinstance(value, RankLocal)


def _is_flat(tensors: Sequence[StoredTensor]) -> bool:
    return all(len(tensor.shape) == 1 and tensor.contiguous for tensor in tensors)


def _add_value(
    opened: Opened, names: Iterable[str], ranks: Sequence[RankOptim], key: str, held: Sequence[object], found: OptimizerState
) -> None:
    """State that is no tensor: a step count becomes each parameter's, anything else a value of each parameter."""
    if key == "step" and type(held[0]) in (int, float):
        _same_step(held, ranks)
        add_step(opened, names, held[0], ranks[0].path, found)  # type: ignore[arg-type]  # just checked
    elif held[0] is not None:
        for name in names:
            values = found.values.setdefault(name, {})
            assert isinstance(values, dict)
            values[key] = held[0]


def add_step(opened: Opened, names: Iterable[str], value: float, file: str, found: OptimizerState) -> None:
    """Add a step count that the file holds as a number, as the 0-d F32 tensor of each parameter that torch has."""
    if not 0 <= value < MAX_ITEMS:
        raise FormatError(file, f"{value!r} is no number of steps")
    for name in names:
        opened.inline(state(name, "step"), "F32", (), struct.pack("<f", value), f"{file} (step)")
        found.note(name, "step")


def _add_raw(opened: Opened, tensors: Sequence[StoredTensor], key: str, buffer: _Buffer, g: int) -> None:
    """Keep state that belongs to a rank's whole buffer (statistics, quantisation tables) as it is, under its rank."""
    ranks = buffer.ranks
    like_weights = [tensor.shape == rank.groups[g].master.shape for tensor, rank in zip(tensors, ranks, strict=True)]
    if any(like_weights):  # then it is per element, and must be so on every rank
        odd = like_weights.index(False) if False in like_weights else 0
        raise FormatError(
            ranks[odd].path, f"{key!r} of group {g} is {tensors[odd].dtype} {list(tensors[odd].shape)}, unlike its weights"
        )
    for rank, tensor in zip(ranks, tensors, strict=True):
        opened.tensor(join_name("deepspeed", "optimizer_state", *buffer.label.split("/"), key, str(rank.dp)), tensor)
    kept = f"kept per rank as deepspeed/optimizer_state/{buffer.label}/{key}/<rank>"
    opened.remarks.append(f"optimizer state {key!r} of group {g} is not per element: {kept}")


def _number(data: bytes, dtype: str) -> object:
    """A scalar's value where it is cheap to know, for messages; its bytes otherwise."""
    code = {"F32": "<f", "F64": "<d", "I64": "<q", "I32": "<i"}.get(dtype)
    return struct.unpack(code, data)[0] if code else data


def _same_step(steps: Sequence[object], ranks: Sequence[RankOptim]) -> None:
    """Files of one checkpoint were saved at one step."""
    for step, rank in zip(steps, ranks, strict=True):
        if step != steps[0]:
            other = f"{ranks[0].path} is of step {steps[0]}"
            raise FormatError(rank.path, f"optimizer state of step {step}, and {other}: left over from another save?")


def _param_groups(
    opened: Opened, ranks: Sequence[RankOptim], names_of: Sequence[Sequence[str]], found: OptimizerState
) -> list[dict[str, object]]:
    """Hyper-parameters of each group with parameter names; a step count among them becomes each parameter's.

    Those that differ between ranks are rank-local.
    """
    first, files = ranks[0], [rank.path for rank in ranks]
    groups: list[dict[str, object]] = []
    for g, members in enumerate(first.members):
        names = [name for i in members for name in names_of[i]]
        held = [{} if rank.param_groups is None else rank.param_groups[g] for rank in ranks]
        hyper = unite_each(opened, held, files, f"of param group {g} the hyper-parameter")
        stepped = any("step" in found.states.get(name, []) for name in names)
        if not stepped and type(step := hyper.get("step")) in (int, float):
            add_step(opened, names, step, first.path, found)  # type: ignore[arg-type]  # just checked
            del hyper["step"]
        groups.append({**hyper, "params": names})
    if first.param_groups is None:
        opened.remarks.append("saved in DeepSpeed's elastic form, which leaves out the hyper-parameters of the param groups")
    return groups
