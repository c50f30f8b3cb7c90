"""Keys of megatron-core's distributed checkpoints, and the parameters that they hold.

Where all layers are alike, one tensor holds a parameter of all of them, with the layers as first axis, and the experts as
next one; else keys have the layer's number. `singleton_local_shards` gives every expert, and the gate and up rows of a
gated MLP, keys of their own.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ucformat.errors import FormatError
from ucformat.formats.megatron import names
from ucformat.naming import MASTER
from ucformat.views import View, concat

_STATE = re.compile(r"(?:chained_\d+\.)?optimizer\.state\.(?P<kind>\w+?)\.(?P<key>.+)", re.DOTALL)
_MASTER = {"param": MASTER, "fp32_param": MASTER, "master_param": MASTER}  # kinds of state that are the master weight
_STACKED = re.compile(r"(?P<stack>(?:.*?\.)?layers)\.(?!\d+\.)(?P<rest>.+)", re.DOTALL)
_EXPERTS = re.compile(r"(?P<before>.*\bmlp\.experts)\.experts\.(?!\d+\.)(?P<rest>.+)", re.DOTALL)
_ONE_EXPERT = re.compile(r"(?P<before>.*\bmlp\.experts)\.experts\.(?P<expert>\d+)\.(?P<rest>.+)", re.DOTALL)
_HALF = re.compile(r"(?P<key>.*\blinear_fc1\.(?:weight|bias))_(?P<half>[wv])")


@dataclass(frozen=True, slots=True)
class Held:
    """A key of the checkpoint: the parameter's own key, and which state of the optimizer it is (empty: the weight)."""

    key: str
    kind: str


def parse(key: str) -> Held | None:
    """What a tensor's key stands for; None for tensors of the optimizer that belong to no one parameter."""
    state = _STATE.fullmatch(key)
    if state is not None:
        return Held(_bare(state["key"]), _MASTER.get(state["kind"], state["kind"]))
    if re.match(r"(?:chained_\d+\.)?optimizer\.", key):
        return None
    return Held(_bare(key), "")


def _bare(key: str) -> str:
    """The key without what NeMo's modules add in front."""
    return re.sub(r"^(?:model\.)?module\.", "", key)


def parameters(held: Mapping[str, View], where: str) -> dict[str, View]:
    """Parameters by canonical name, of tensors by their parameter's own key. Raises FormatError for what does not fit."""
    found: dict[str, View] = {}
    for key, view in _joined_halves(held, where).items():
        for name, part in _layers(key, view, where):
            if name in found:
                raise FormatError(where, f"two tensors hold {name}")
            found[name] = part
    return found


def _joined_halves(held: Mapping[str, View], where: str) -> dict[str, View]:
    """Gate and up rows that have keys of their own, together again."""
    joined: dict[str, View] = {}
    for key, view in held.items():
        match = _HALF.fullmatch(key)
        if match is None:
            joined[key] = view
        elif match["half"] == "w":
            other = held.get(f"{match['key']}_v")
            if other is None or other.shape != view.shape:
                raise FormatError(where, f"{key} has no {match['key']}_v of the same shape beside it")
            joined[match["key"]] = concat([view, other], view.ndim - (2 if key.endswith("weight_w") else 1))
        elif f"{match['key']}_w" not in held:
            raise FormatError(where, f"{key} has no {match['key']}_w beside it")
    return joined


def _layers(key: str, view: View, where: str) -> Iterator[tuple[str, View]]:
    stacked = _STACKED.fullmatch(key)
    if stacked is None:
        yield from _experts(key, view, where)
        return
    if not view.ndim:
        raise FormatError(where, f"{key} should hold a parameter of all layers, and is a scalar")
    for i in range(view.shape[0]):
        yield from _experts(f"{stacked['stack']}.{i}.{stacked['rest']}", view.select(0, i), where)


def _experts(key: str, view: View, where: str) -> Iterator[tuple[str, View]]:
    one = _ONE_EXPERT.fullmatch(key)
    if one is not None:
        yield f"{one['before']}.local_experts.{int(one['expert'])}.{one['rest']}", view
        return
    several = _EXPERTS.fullmatch(key)
    if several is None:
        yield names.plain(key), view
        return
    if not view.ndim:
        raise FormatError(where, f"{key} should hold a parameter of all experts, and is a scalar")
    for e in range(view.shape[0]):
        yield f"{several['before']}.local_experts.{e}.{several['rest']}", view.select(0, e)


def from_fragments(view: View, shape: tuple[int, ...]) -> View:
    """A tensor of `shape` that is stored by fragments: axes that count them, then one that holds each fragment's items, as
    megatron-core up to 0.13 keeps optimizer state. Raises ValueError when it can't be that.
    """
    counts = view.shape[:-1]
    if len(counts) != len(shape) or any(n % c if c else 1 for n, c in zip(shape, counts, strict=True)):
        raise ValueError(f"fragments {list(counts)} of shape {list(shape)}")
    sizes = tuple(n // c for n, c in zip(shape, counts, strict=True))
    split = view.unflatten(len(shape), sizes)
    order = [axis for i in range(len(shape)) for axis in (i, len(shape) + i)]
    split = split.permute(*order)
    for axis in range(len(shape)):
        split = split.flatten(axis)
    return split
