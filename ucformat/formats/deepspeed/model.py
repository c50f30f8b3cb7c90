"""What a DeepSpeed model file says, and the weights, buffers and tied names that come from it.

Under ZeRO-0, 1, 2 and BF16_Optimizer it holds every weight in the compute dtype. Under ZeRO-3 it holds buffers, and empty
placeholders for the weights, which then exist only as master weights in the optimizer files.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.deepspeed import plain, zero
from ucformat.formats.deepspeed.evidence import same_values
from ucformat.formats.deepspeed.flat import ParameterSlices
from ucformat.formats.deepspeed.optim import RankOptim, flat_tensor, mapping
from ucformat.formats.deepspeed.records import Opened, dense, numel, state, weight
from ucformat.formats.deepspeed.zero import OptimizerState, Shapes, shape_dict, shapes_of
from ucformat.pickles.unpickle import StoredTensor


@dataclass(frozen=True, slots=True)
class Model:
    """The model file of rank 0, understood."""

    file: str
    tree: Mapping[Any, Any]
    tensors: Mapping[str, StoredTensor]
    """Tensor entries of `module`, placeholders too."""
    rest: Mapping[str, object]
    """Other entries of `module`."""
    shapes: Sequence[Shapes]
    """Trained parameters of each flat group, in the order of its buffer; empty under ZeRO-0."""
    shared: Mapping[str, str]
    """Tied name → the name that is stored, as DeepSpeed recorded it."""
    buffers: Collection[str]

    @property
    def trained(self) -> dict[str, tuple[int, ...]]:
        return {name: shape for group in self.shapes for name, shape in group.items()}


def parse_model(tree: Mapping[Any, Any], file: str, ranks: Sequence[RankOptim], weights: object) -> Model:
    """Understand a model file. `weights`: its module, or what layer and expert files hold.

    Raises FormatError, UnsupportedError.
    """
    module = mapping(weights, file, "module")
    tensors: dict[str, StoredTensor] = {}
    rest: dict[str, object] = {}
    for name, value in module.items():
        if not isinstance(name, str):
            raise FormatError(file, f"module has an entry named {name!r:.100}")
        tensor = dense(value, file, f"module entry {name!r}")
        if tensor is None:
            rest[name] = value
        else:
            tensors[name] = tensor
    shapes = shapes_of(tree.get("param_shapes"), file)
    if shapes is None and ranks:
        shapes = shapes_of(ranks[0].shapes, ranks[0].path)
        if shapes is None:
            raise UnsupportedError(file, "no param_shapes: a DeepSpeed older than 0.3.13, which did not say where parameters lie")
    shared = mapping(tree.get("shared_params") or {}, file, "shared_params")
    if not all(isinstance(name, str) for pair in shared.items() for name in pair):
        raise FormatError(file, "shared_params holds something that is no name")
    buffers = tree.get("buffer_names")
    names = {name for name in buffers if isinstance(name, str)} if isinstance(buffers, (list, tuple)) else set()
    return Model(file, tree, tensors, rest, shapes or [], dict(shared), names)


def frozen_excluded(model: Model, stage: object) -> bool:
    """Whether weights that were not trained were left out on saving (`exclude_frozen_parameters`)."""
    trained = model.trained
    if stage in (2, 3) and model.tree.get("frozen_param_shapes", ...) is None:  # else a dict, if an empty one
        return True
    adapters = [name for name in trained if ".lora_" in name]
    return bool(adapters) and set(model.tensors) <= {*trained, *model.buffers, *model.shared}


def add_whole(opened: Opened, model: Model, ranks: Sequence[RankOptim]) -> OptimizerState:
    """Add weights and optimizer state of ZeRO-0, 1, 2 and BF16_Optimizer."""
    tensors = model.tensors
    aliases = tied(opened, model)
    for name, tensor in tensors.items():
        if name not in aliases:
            opened.tensor(weight(name), tensor)
    if ranks:
        for name, shape in model.trained.items():
            if name in tensors and tensors[name].shape != shape:
                raise FormatError(
                    model.file, f"{name!r} has shape {list(tensors[name].shape)} in module and {list(shape)} in param_shapes"
                )
        found = zero.add_optimizer(opened, ranks, model.shapes, lambda name: state(name, "fp32"), tensors)
    else:
        trainable = {n: t for n, t in tensors.items() if n not in aliases and n not in model.buffers}
        found = plain.add_optimizer(opened, model.tree.get("optimizer"), trainable, model.file)
        for name, keys in found.states.items():
            if "fp32" not in keys and trainable[name].dtype == "F32":  # the weight itself is the master weight
                opened.builder.alias(state(name, "fp32"), weight(name))
                found.note(name, "fp32")
    for name in found.states:
        if name not in tensors:
            opened.builder.alias(weight(name), state(name, "fp32"))
    _add_aliases(opened, aliases, found)
    return found


def tied(opened: Opened, model: Model) -> dict[str, str]:
    """Tied name → owner: as recorded where the values agree, and what lies at the same bytes. The owner is the trained one."""
    tensors, trained = model.tensors, model.trained
    aliases: dict[str, str] = {}
    for alias, owner in model.shared.items():
        same = alias in tensors and owner in tensors and tensors[alias].shape == tensors[owner].shape
        # DeepSpeed compares addresses, and all empty tensors have the same
        if not same or alias in trained or not numel(tensors[alias]):
            continue
        if tensors[alias] == tensors[owner] or same_values(opened, tensors[alias], tensors[owner]):
            aliases[alias] = owner
        else:
            opened.remarks.append(
                f"{alias!r} is recorded as tied to {owner!r}, and its values differ: kept as a weight of its own"
            )
    owners: dict[tuple[object, ...], str] = {}
    for name in sorted(tensors, key=lambda name: name not in trained):
        tensor = tensors[name]
        place = (tensor.file, tensor.start, tensor.dtype, tensor.shape, tensor.stride)
        if name in aliases or not numel(tensor):
            continue
        if place in owners and name not in trained:
            aliases[name] = owners[place]
        owners.setdefault(place, name)
    return aliases


def _add_aliases(opened: Opened, aliases: Mapping[str, str], found: OptimizerState) -> None:
    """Tied names, for the weight and for every state."""
    for alias, owner in aliases.items():
        opened.builder.alias(weight(alias), weight(owner))
        for key in found.states.get(owner, []):
            opened.builder.alias(state(alias, key), state(owner, key))


def add_sliced(opened: Opened, model: Model, ranks: Sequence[RankOptim], others: Sequence[Mapping[Any, Any]]) -> OptimizerState:
    """Add weights and optimizer state of ZeRO-3. `others` are the other ranks' model files, which frozen weights need."""
    trained, tensors = model.trained, model.tensors
    frozen = shape_dict(model.tree.get("frozen_param_shapes") or {}, model.file, "frozen_param_shapes")
    known = {*trained, *frozen}
    aliases = {alias: owner for alias, owner in model.shared.items() if alias not in known and owner in known}
    whole = {name for name in trained if name in tensors and tensors[name].shape == trained[name] and numel(tensors[name])}
    for name, tensor in tensors.items():
        if name in whole or name in model.buffers or (name not in {*known, *aliases} and numel(tensor)):
            opened.tensor(weight(name), tensor)
        elif name not in known and name not in aliases:
            opened.remarks.append(f"{name!r} is an empty placeholder whose weight is not in the checkpoint")
    computed = {name: tensors[name].dtype for name in trained if name in tensors}
    masters = {group.master.dtype for group in ranks[0].groups}
    is_weight = {name for name in trained if name not in whole and {computed.get(name, "F32")} == masters}
    found = zero.add_optimizer(
        opened,
        ranks,
        model.shapes,
        lambda name: weight(name) if name in is_weight else state(name, "fp32"),
        {name: tensors[name] for name in whole},
    )
    for name in trained:
        if name in is_weight:
            opened.builder.alias(state(name, "fp32"), weight(name))
        elif name not in whole:
            opened.builder.alias(weight(name), state(name, "fp32"))
    low = sorted(set(computed.values()) - masters)
    if low:
        opened.remarks.append(f"ZeRO-3 stores master weights only: model/* are those, and the run computed in {', '.join(low)}")
    if frozen:
        add_frozen(opened, frozen, [model.tree, *others])
    _add_aliases(opened, aliases, found)
    return found


def add_frozen(opened: Opened, frozen: Shapes, trees: Sequence[Mapping[Any, Any]]) -> None:
    """Frozen weights of ZeRO-3, of which every rank's model file has its slice."""
    for name, shape in frozen.items():
        parts: list[StoredTensor] = []
        for rank, tree in enumerate(trees):
            where = f"the model file of rank {rank}"
            fragments = mapping(tree.get("frozen_param_fragments"), where, "frozen_param_fragments")
            parts.append(flat_tensor(fragments.get(name), where, f"frozen {name!r}"))
        lengths = [part.shape[0] for part in parts]
        pieces = ParameterSlices({name: shape}).pieces(lengths)
        if pieces is None or len({part.dtype for part in parts}) > 1:
            raise FormatError(parts[0].file, f"frozen {name!r} of shape {list(shape)} is held in slices of {lengths[:16]}")
        opened.spread([weight(name)], [shape], parts, pieces)
