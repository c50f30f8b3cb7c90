"""A live transformers model under the names that its files have.

Since version 5 transformers keeps some models otherwise in memory than in files: experts stacked into one parameter, parts of a
multimodal model under another prefix, old names brought up to date. It declares how, and that declaration is applied here to the
live tensors: the state that comes out has the names of files, and each tensor in it is the live one, or a view of a part of it.
So it is loaded in place, and saved as its files would be.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from importlib import import_module
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from ucformat import formats
from ucformat.errors import UnsupportedError
from ucformat.formats.target import shorten
from ucformat.reshard.state.fsdp import known

_PREFIX = "model/"


def hf_state(model: torch.nn.Module, path: str | None = None) -> dict[str, torch.Tensor]:
    """The parameters and persistent buffers of a transformers model by the names that `save_pretrained` would give them.

        ucformat.load("org/model", into={"model": ucformat.hf_state(model, "org/model")})

    Tensors share the model's memory. With `path`, a checkpoint whose model has other names for some of them (older ones, or those
    of the same model without or with its head), these are used. What the model computes and never saves is left out. Stacked
    experts come as one view each; finding out where each lies in its parameter takes 4 to 8 bytes per item of that parameter for
    a moment.

    Raises UnsupportedError where what a file holds is no part of one live tensor (weights that are merged, permuted or
    dequantised while loading, and stacked experts that are distributed): load such a model with `from_pretrained` and save
    it with ucformat, which needs no other names.
    """
    library = _library()
    live, model = dict(model.state_dict()), _as_declared(model)
    probes = {name: torch.empty(tensor.shape, dtype=torch.bool, device="meta") for name, tensor in live.items()}
    owners = {id(probe): name for name, probe in probes.items()}
    state: dict[str, torch.Tensor] = {}
    origin: dict[str, str] = {}
    converted: dict[str, torch.Tensor] = {}
    for file_name, probe in _reverted(library, model, probes).items():
        name = owners.get(id(probe))
        if name is None:
            converted[file_name] = probe
        else:
            state[file_name], origin[file_name] = live[name], name
    for name in sorted(set(live).difference(origin.values())):
        for file_name, part in _parts(library, model, name, live[name]).items():
            if file_name not in converted or converted[file_name].shape != part.shape or file_name in state:
                raise UnsupportedError(f"model/{name}", _why("files merge it with other tensors", [file_name]))
            state[file_name], origin[file_name] = part, name
    stored = [] if path is None else _names(path)
    unsaved = set(getattr(model, "_keys_to_ignore_on_save", None) or ()).difference(stored)  # computed, as sinusoidal positions
    state = {file_name: tensor for file_name, tensor in state.items() if origin[file_name] not in unsaved}
    return state if path is None else _as_stored(library, model, live, state, origin, stored)


def _library() -> Any:
    try:
        return import_module("transformers.core_model_loading")
    except ImportError as error:
        why = (
            "names of files are looked up in transformers 5 or newer, which is not installed; older ones name files as in memory"
        )
        raise UnsupportedError("hf_state", why) from error


def _as_declared(model: torch.nn.Module) -> Any:
    """The model, or one like it without memory: transformers looks classes up by name, and FSDP2 changes these."""
    if not any(isinstance(module, known("FSDPModule")) for module in model.modules()):
        return model
    kind: Any = next(kind for kind in type(model).__mro__ if not issubclass(kind, known("FSDPModule")))
    with torch.device("meta"):
        twin = kind(model.config)
    if hasattr(model, "_weight_conversions"):  # what `from_pretrained` did
        twin._weight_conversions = model._weight_conversions
    return twin


def _names(path: str) -> list[str]:
    return [name.removeprefix(_PREFIX) for name in formats.open_catalog(path).names if name.startswith(_PREFIX)]


def _parts(library: Any, model: torch.nn.Module, name: str, tensor: torch.Tensor) -> dict[str, torch.Tensor]:
    """What one live tensor is in files: name → a view of a part of it."""
    if isinstance(tensor, DTensor) or not tensor.is_contiguous():
        how = "distributed" if isinstance(tensor, DTensor) else "not contiguous"
        raise UnsupportedError(f"model/{name}", _why(f"it is {how}, and files hold it in several parts"))
    kind = torch.int32 if tensor.numel() < 1 << 31 else torch.int64
    numbered = torch.arange(tensor.numel(), dtype=kind).view(tensor.shape)
    found = _reverted(library, model, {name: numbered})
    return {file_name: _view(tensor, index, name) for file_name, index in found.items()}


def _reverted(library: Any, model: torch.nn.Module, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """What `save_pretrained` makes of tensors."""
    try:
        found: dict[str, torch.Tensor] = library.revert_weight_conversion(model, dict(tensors))
    except Exception as error:
        where = f"model/{next(iter(tensors))}" if len(tensors) == 1 else f"the names of {type(model).__name__}"
        raise UnsupportedError(where, _why(f"transformers can't convert to what files hold ({error})")) from error
    return found


def _view(tensor: torch.Tensor, index: torch.Tensor, name: str) -> torch.Tensor:
    """The view of a contiguous `tensor` whose items have the numbers `index`."""
    offset = int(index.reshape(-1)[0]) if index.numel() else 0
    strides = [
        int(index.select(d, 1).reshape(-1)[0]) - offset if n > 1 and index.numel() else 1 for d, n in enumerate(index.shape)
    ]
    wanted = torch.full((), offset, dtype=index.dtype)
    for stride, n in zip(strides, index.shape, strict=True):
        wanted = wanted.unsqueeze(-1) + torch.arange(n, dtype=index.dtype) * stride
    if any(stride < 0 for stride in strides) or not torch.equal(wanted, index):
        raise UnsupportedError(f"model/{name}", _why("what files hold of it is no view of it"))
    return tensor.detach().as_strided(tuple(index.shape), tuple(strides), tensor.storage_offset() + offset)


def _why(reason: str, names: Sequence[str] = ()) -> str:
    held = f" ({shorten(sorted(names))})" if names else ""
    return f"{reason}{held}: load this model with from_pretrained, and save and load it with ucformat under its own names"


def _as_stored(
    library: Any,
    model: torch.nn.Module,
    live: Mapping[str, torch.Tensor],
    state: Mapping[str, torch.Tensor],
    origin: Mapping[str, str],
    stored: Iterable[str],
) -> dict[str, torch.Tensor]:
    """`state` with the names of a checkpoint that has others, each live tensor once."""
    found: dict[str, torch.Tensor] = {}
    named: set[str] = set()
    renamings, converters = _transforms(library, model)
    prefix = str(getattr(model, "base_model_prefix", ""))
    for name in stored:
        forms = (name, f"{prefix}.{name}", name.removeprefix(f"{prefix}.")) if prefix else (name,)
        known = next((form for form in forms if form in state), None)
        if known is not None:
            found[name] = state[known]
            named.add(origin[known])
            continue
        current, pattern = library.rename_source_key(name, renamings, converters, prefix or None, live)
        if pattern is None and current in live:
            found[name] = live[current]
            named.add(current)
    return {**{name: tensor for name, tensor in state.items() if origin[name] not in named and name not in found}, **found}


def _transforms(library: Any, model: torch.nn.Module) -> tuple[list[Any], list[Any]]:
    """Renamings and converters, from files to memory."""
    mapping = import_module("transformers.conversion_mapping").get_model_conversion_mapping(model)
    return (
        [entry for entry in mapping if isinstance(entry, library.WeightRenaming)],
        [entry for entry in mapping if isinstance(entry, library.WeightConverter)],
    )
