"""The state of each parameter in a universal folder: a file per state, with the whole tensor.

From ZeRO-1 and 2 a file holds a dict with the tensor in its shape and hints for tensor parallelism; from ZeRO-3 the flat tensor
alone, whose shape the model file says.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from ucformat.errors import FormatError, MissingFileError
from ucformat.formats.deepspeed.optim import mapping
from ucformat.formats.deepspeed.records import Opened, dense, state
from ucformat.formats.deepspeed.zero import OptimizerState, add_step
from ucformat.formats.ucp.folder import UniversalFiles
from ucformat.pickles.unpickle import StoredTensor

Shapes = Mapping[str, tuple[int, ...]]
_SHOWN = 6


@dataclass(slots=True)
class ParameterState:
    """What a parameter's directory holds."""

    tensors: dict[str, StoredTensor] = field(default_factory=dict)
    """`fp32`, `exp_avg`…, in the parameter's shape."""
    values: dict[str, object] = field(default_factory=dict)
    """`step`, where it is no tensor."""


def open_states(opened: Opened, files: UniversalFiles, shapes: Shapes) -> dict[str, ParameterState]:
    """Every parameter's state. `shapes`: of trained parameters, for files that hold flat tensors. Raises FormatError."""
    places = [(name, key, path) for name, held in files.states.items() for key, path in held.items()]
    found: dict[str, ParameterState] = {name: ParameterState() for name in files.states}
    for (name, key, path), contents in zip(places, opened.trees([path for _, _, path in places]), strict=True):
        value = contents.get("param") if isinstance(contents, dict) else contents
        tensor = dense(value, path, f"{key} of {name!r}")
        if tensor is None and key == "step" and isinstance(value, (int, float)):
            found[name].values[key] = value
        elif tensor is None:
            raise FormatError(path, f"holds no tensor of {name!r}, but a {type(value).__name__}")
        else:
            found[name].tensors[key] = (
                tensor if isinstance(contents, dict) or key == "step" else _shaped(tensor, shapes.get(name), path)
            )
    return found


def _shaped(tensor: StoredTensor, shape: tuple[int, ...] | None, path: str) -> StoredTensor:
    """A flat tensor in its parameter's shape."""
    if shape is None or tensor.shape == shape:
        return tensor
    if math.prod(shape) != math.prod(tensor.shape) or not tensor.contiguous:
        raise FormatError(path, f"holds shape {list(tensor.shape)} of a parameter of shape {list(shape)}")
    strides = [1]
    for n in reversed(shape[1:]):
        strides.append(strides[-1] * n)
    return replace(tensor, shape=shape, stride=tuple(reversed(strides)) if shape else ())


def add_states(
    opened: Opened, states: Mapping[str, ParameterState], trained: Sequence[str], url: str, step: object
) -> OptimizerState:
    """Add `optimizer/<parameter>/<state>` of trained parameters. `step`: of those whose directories have none.

    Raises MissingFileError that names a directory or file too few.
    """
    found = OptimizerState()
    wanted = dict.fromkeys(key for name in trained if name in states for key in states[name].tensors)
    idle: list[str] = []
    for name in trained:
        held = states.get(name)
        if held is None:
            raise MissingFileError(f"{url}/zero/{name}", f"the state of parameter {name!r} is missing")
        keys = set(held.tensors) | set(held.values)
        if missing := [key for key in wanted if key not in keys and not (key == "step" and step is not None)]:
            if "fp32" not in keys or len(keys) > 1:
                raise MissingFileError(f"{url}/zero/{name}/{missing[0]}.pt", "other parameters have this file")
            idle.append(name)
        for key, tensor in held.tensors.items():
            opened.tensor(state(name, key), tensor)
            found.note(name, key)
        number = held.values.get("step", None if "step" in keys or name in idle or len(keys) < 2 else step)
        if isinstance(number, (int, float)):
            add_step(opened, [name], number, f"{url}/zero/{name}", found)
        elif isinstance(number, StoredTensor):
            opened.tensor(state(name, "step"), number)
            found.note(name, "step")
    if idle:
        shown = ", ".join(idle[:_SHOWN]) + ("…" if len(idle) > _SHOWN else "")
        opened.remarks.append(f"parameters without optimizer state, which never had a gradient: {shown}")
    return found


def step_of(settings: Mapping[object, object], path: str) -> object:
    """The step in the optimizer's settings, where ZeRO-3 keeps it; None when there is none."""
    inner = settings.get("optimizer_state_dict")
    by_index = mapping(inner, path, "optimizer_state_dict").get("state") if inner is not None else None
    first = by_index.get(0) if isinstance(by_index, dict) else None
    found = first.get("step") if isinstance(first, dict) else None
    return found if isinstance(found, (int, float, StoredTensor)) else None
