"""A job's state in DeepSpeed's terms, for the writers of its formats: parameters with their state, groups, everything else."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from ucformat import values as trees
from ucformat.catalog import TensorSpec
from ucformat.containers.zip_write import OutgoingObject
from ucformat.errors import UnsupportedError
from ucformat.formats.target import WriteJob, shorten
from ucformat.lazy_torch import torch
from ucformat.naming import MASTER
from ucformat.values import bytes_io
from ucformat.values.codec import Opaque, RankLocal
from ucformat.values.tree import join_name, split_name

VERSION = "0.19.8"
"""The release of DeepSpeed whose files are written, where the checkpoint does not say by which it was made."""
_PLAIN = (bool, int, float, str, type(None))
_SCALERS = frozenset(f"deepspeed.runtime.fp16.loss_scaler.{name}" for name in ("LossScaler", "DynamicLossScaler"))
_RECORDS = ("deepspeed", "client", "scheduler", "data", "args", "step", "optimizer", "model")


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of the job: the index of its one target, and its spec."""

    piece: int
    spec: TensorSpec


@dataclass(frozen=True, slots=True)
class Group:
    """A param group: parameters in order, and its hyper-parameters."""

    names: Sequence[str]
    settings: Mapping[str, object]


@dataclass(slots=True)
class RunState:
    """What a job holds, sorted by what DeepSpeed makes of it."""

    weights: dict[str, Tensor] = field(default_factory=dict)
    """Parameter or buffer → its own tensor."""
    states: dict[str, dict[str, Tensor]] = field(default_factory=dict)
    """Trained parameter → state (`fp32`, `exp_avg`, `step`…) → tensor."""
    tied: dict[str, str] = field(default_factory=dict)
    """Tied name → the name under which it is stored."""
    groups: list[Group] = field(default_factory=list)
    others: dict[str, Tensor] = field(default_factory=dict)
    """Tensors among the values, by canonical name."""
    remarks: list[str] = field(default_factory=list)
    left_out: dict[str, None] = field(default_factory=dict)
    """Canonical names of optimizer state that is not written."""

    def leave_out(self, name: str, key: str, why: str) -> None:
        """One state of a parameter is not written."""
        self.left_out[join_name("optimizer", name, key)] = None
        self.remarks.append(why)

    @property
    def masters(self) -> dict[str, Tensor]:
        """Trained parameter → its master weight, or its weight where there is no other."""
        found: dict[str, Tensor] = {}
        for name, held in self.states.items():
            owner = held.get(MASTER) or self.weights.get(name)
            if owner is not None:
                found[name] = owner
        return found


def takes(names: Sequence[str]) -> list[str]:
    """Those of a checkpoint's tensors that DeepSpeed's files have a place for."""
    return [name for name in names if _is_taken(split_name(name))]


def _is_taken(path: Sequence[str]) -> bool:
    if path[0] == "optimizer":
        return len(path) == 3 and path[1] != "state"
    return path[0] in ("client", "scheduler", "data", "args") or (path[0] == "model" and len(path) == 2)


def run_state(job: WriteJob) -> RunState:
    """Sort a job's tensors and values. Raises UnsupportedError for tensors in pieces."""
    found = RunState()
    for piece, target in enumerate(job.targets):
        if not target.whole:
            raise UnsupportedError(job.store.url, f"{target.name!r} comes in pieces, and DeepSpeed's files hold whole tensors")
        path, tensor = split_name(target.name), Tensor(piece, target.spec)
        if path[0] == "model":
            found.weights[path[1]] = tensor
        elif path[0] == "optimizer":
            found.states.setdefault(path[1], {})[path[2]] = tensor
        else:
            found.others[target.name] = tensor
    for alias, owner in job.aliases.items():
        one, two = split_name(alias), split_name(owner)
        if one[0] == "model" and one[1] != two[1]:
            found.tied[one[1]] = two[1]
        elif one[0] == "optimizer" and one[1] == two[1] and one[2] == MASTER and two[0] == "model":
            found.states.setdefault(one[1], {})[MASTER] = found.weights[two[1]]
    found.states = {name: held for name, held in found.states.items() if name not in found.tied}
    found.groups = _groups(job, found)
    return found


def _groups(job: WriteJob, found: RunState) -> list[Group]:
    """The param groups, as the values say; all trained parameters in one where they don't."""
    raw = _tree(job.values, "optimizer", "param_groups")
    groups: list[Group] = []
    for item in raw if isinstance(raw, list) else []:
        names = item.get("params") if isinstance(item, dict) else None
        if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
            found.remarks.append("its param groups do not name their parameters: hyper-parameters are left out")
            groups = []
            break
        settings: dict[str, object] = {}
        for key, value in item.items():
            if isinstance(value, RankLocal):
                found.remarks.append(f"hyper-parameter {key!r} differs between ranks: the first one's is taken")
                value = value.values[0]
            if key != "params":
                settings[key] = value
        groups.append(Group([name for name in names if name in found.states], settings))
    named = {name for group in groups for name in group.names}
    rest = [name for name in found.states if name not in named]
    if rest and (groups or found.states):
        if groups:
            found.remarks.append(f"in no param group, and put into the first one: {shorten(rest)}")
            groups[0] = Group([*groups[0].names, *rest], groups[0].settings)
        else:
            groups = [Group(rest, {})]
    return groups


def _tree(values: object, *path: str) -> object:
    for key in path:
        values = values.get(key) if isinstance(values, dict) else None
    return values


def record(job: WriteJob, key: str) -> object:
    """An entry of DeepSpeed's own records in the values; None where it has none."""
    return _tree(job.values, "deepspeed", key)


def settings_of(job: WriteJob) -> dict[str, object]:
    """The optimizer's own settings: plain ones (clipping), and the loss scaler as the object that DeepSpeed has for it."""
    kept = record(job, "optimizer")
    plain = kept if isinstance(kept, dict) else {}
    found: dict[str, object] = {
        key: value for key, value in plain.items() if isinstance(key, str) and isinstance(value, (bool, int, float, str))
    }
    scaler = loss_scaler(plain.get("loss_scaler"))
    return found if scaler is None else {**found, "loss_scaler": scaler}


def loss_scaler(value: object) -> OutgoingObject | None:
    """A loss scaler of DeepSpeed, which came as a stand-in; None for anything else."""
    if not isinstance(value, Opaque) or value.class_name not in _SCALERS or not isinstance(value.state, dict):
        return None
    attributes = value.state.get("state", value.state)
    plain = isinstance(attributes, dict) and all(isinstance(item, (*_PLAIN, torch.dtype)) for item in attributes.values())
    if not plain or not all(isinstance(key, str) for key in attributes):
        return None
    module, _, name = value.class_name.rpartition(".")
    return OutgoingObject(module, name, dict(attributes))


def model_entries(job: WriteJob, state: RunState, leaves: Mapping[str, Any]) -> dict[str, Any]:
    """The entries of a model file beside weights and shapes: counters, scheduler, client state. `leaves`: tensors by name."""
    kept = trees.prune(job.values, lambda path, value: _is_lost(state, path, value))
    held = {name: leaves[name] for name in state.others if name in leaves}
    tree = trees.join(kept if isinstance(kept, dict) else {}, held)
    assert isinstance(tree, dict)
    own = _records(tree)
    step = tree.get("step")
    entries: dict[str, Any] = {
        "lr_scheduler": tree.get("scheduler"),
        "data_sampler": tree.get("data"),
        "random_ltd": None,
        "sparse_tensor_module_names": [],
        "skipped_steps": _number(own.get("skipped_steps")),
        "global_steps": _number(step if step is not None else job.notes.step),
        "global_samples": _number(own.get("global_samples")),
        "ds_config": own.get("ds_config") or {},
        "ds_version": own.get("ds_version") or VERSION,
    }
    client = tree.get("client")
    entries |= {key: value for key, value in (client if isinstance(client, dict) else {}).items() if key not in entries}
    if tree.get("args") is not None:
        entries["args"] = tree["args"]
    lost = [key for key in tree if key not in _RECORDS]
    if lost:
        state.remarks.append(f"values without a place in DeepSpeed's files are left out: {shorten(sorted(map(str, lost)))}")
    return entries


def _records(tree: dict[str, Any]) -> dict[str, Any]:
    own = tree.get("deepspeed")
    return own if isinstance(own, dict) else {}


def _is_lost(state: RunState, path: str, value: object) -> bool:
    """Whether a value has no place in DeepSpeed's files; says so."""
    if isinstance(value, Opaque) and not bytes_io.is_one(value):
        if loss_scaler(value) is None:
            state.remarks.append(f"left out, being of a class that is not known here: {path} ({value.class_name})")
        return True
    if not isinstance(value, RankLocal):
        return False
    if not path.startswith("optimizer/"):
        state.remarks.append(f"{path!r} differs between ranks, and is left out")
    return True


def _number(value: object) -> int:
    return value if type(value) is int else 0


def shapes(state: RunState, names: Sequence[str]) -> dict[str, torch.Size]:
    """`param_shapes` of one group."""
    masters = state.masters
    return {name: torch.Size(masters[name].spec.shape) for name in names}


def items(tensor: Tensor) -> int:
    """Items of a tensor."""
    return math.prod(tensor.spec.shape)
