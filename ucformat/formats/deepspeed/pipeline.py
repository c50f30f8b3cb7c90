"""Pipeline parallelism: a file of weights per layer, and which stage trains which layer.

Layer `i` of the model has the names `i.<name>`. A layer that is used in several places is `tied_modules.<key>.<name>`, and its
file is that of the place where it is used first.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from ucformat.errors import FormatError, MissingFileError
from ucformat.formats.deepspeed.evidence import same_values
from ucformat.formats.deepspeed.files import RankFiles
from ucformat.formats.deepspeed.optim import mapping
from ucformat.formats.deepspeed.records import Opened
from ucformat.formats.deepspeed.zero import Shapes
from ucformat.pickles.unpickle import StoredTensor

_TIED = re.compile(r"tied_modules\.(?P<key>[^.]+)\.(?P<name>.+)")


def stage_modules(
    opened: Opened, files: RankFiles, trained: Sequence[Mapping[str, tuple[int, ...]]], tp: int
) -> list[dict[str, Any]]:
    """The weights of each stage by name, for tensor rank `tp`. `trained`: each stage's trained parameters.

    Raises MissingFileError, FormatError that name a layer's file.
    """
    layers = files.layers.get(tp if files.layers_by_rank else 0, {})
    if not layers:
        name = f"layer_00-model_{tp:02d}-model_states.pt" if tp else "layer_00-model_states.pt"
        raise MissingFileError(f"{files.store.url}/{name}", "the layer files of this run with pipeline parallelism are missing")
    modules: list[dict[str, Any]] = [{} for _ in trained]
    tied = _Tied(opened, trained)
    stage = 0
    for (layer, path), contents in zip(layers.items(), opened.trees(list(layers.values())), strict=True):
        entries = mapping(contents, path, "the layer file")
        named = {f"{layer}.{name}": value for name, value in entries.items()}
        owner = next((p for p, names in enumerate(trained) if any(name in names for name in named)), None)
        if owner is None:
            found = tied.name(entries, path)
            if found is not None:
                owner, named = found
            elif any(trained) and entries:
                opened.remarks.append(f"no parameter of layer {layer} was trained ({path})")
        stage = stage if owner is None else owner
        modules[stage].update(named)
    _complete(files, trained, modules, tp)
    return modules


class _Tied:
    """Layers that are used in several places, and what is known of their keys."""

    def __init__(self, opened: Opened, trained: Sequence[Mapping[str, tuple[int, ...]]]) -> None:
        self._opened = opened
        self._keys: dict[str, tuple[int, Shapes]] = {}
        self._taken: dict[str, Mapping[Any, Any]] = {}
        for stage, names in enumerate(trained):
            for name, shape in names.items():
                if match := _TIED.fullmatch(name):
                    first, shapes = self._keys.setdefault(match["key"], (stage, {}))
                    if first == stage:
                        shapes[match["name"]] = shape

    def name(self, entries: Mapping[Any, Any], path: str) -> tuple[int, dict[str, Any]] | None:
        """The stage and named weights of a layer whose own names were not trained; None when it is no tied one.

        In the order of their first use, keys belong to layers. A file of a later use repeats the first one's.
        """
        fitting = [key for key, (_, shapes) in self._keys.items() if _fits(entries, shapes)]
        free = next((key for key in fitting if key not in self._taken), None)
        if free is not None:
            self._taken[free] = entries
            return self._keys[free][0], {f"tied_modules.{free}.{name}": value for name, value in entries.items()}
        if not fitting:
            return None
        if not any(self._same(self._taken[key], entries) for key in fitting):
            raise FormatError(path, "holds other weights than the tied layer whose names and shapes it has")
        return self._keys[fitting[0]][0], {}

    def _same(self, one: Mapping[Any, Any], other: Mapping[Any, Any]) -> bool:
        if set(one) != set(other):
            return False
        pairs = [(one[name], other[name]) for name in one if isinstance(one[name], StoredTensor)]
        return all(
            isinstance(b, StoredTensor) and a.shape == b.shape and a.dtype == b.dtype and same_values(self._opened, a, b)
            for a, b in pairs
        )


def _fits(entries: Mapping[Any, Any], shapes: Shapes) -> bool:
    found = {name: value.shape for name, value in entries.items() if isinstance(value, StoredTensor)}
    return all(found.get(name) == shape for name, shape in shapes.items())


def _complete(
    files: RankFiles, trained: Sequence[Mapping[str, tuple[int, ...]]], modules: Sequence[dict[str, Any]], tp: int
) -> None:
    """Check that every trained parameter has its weight; those of tied layers go to every stage that trains them."""
    for names, module in zip(trained, modules, strict=True):
        for name in names:
            if name in module:
                continue
            owner = next((other for other in modules if name in other), None)
            if owner is not None and _TIED.fullmatch(name):
                module[name] = owner[name]
                continue
            layer = name.partition(".")[0]
            number = f"{int(layer):02d}" if layer.isdecimal() and len(layer) < 9 else "*"
            path = f"layer_{number}-model_{tp:02d}-model_states.pt" if files.layers_by_rank else f"layer_{number}-model_states.pt"
            raise MissingFileError(f"{files.store.url}/{path}", f"no layer file holds the weight of {name!r}")
