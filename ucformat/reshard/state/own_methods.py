"""Modules that save and load their state in their own way: overridden methods and state-dict hooks.

torch's `state_dict` and `load_state_dict` call them, so they are called here too, for the part of the model below such a module
(a `Unit`). The state that a unit gives is stored by name like any other. Loading reads into tensors beside the live ones, placed
alike, and hands these to the unit's own methods, so a unit takes its size in memory once more while it is loaded. All other
modules are read in place. What torch's own modules override (BatchNorm, FSDP, checkpoint wrappers) needs none of this.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any, cast

import torch
from torch import nn

from ucformat.errors import UnsupportedError
from ucformat.naming import TRANSPARENT
from ucformat.reshard.state import fsdp

VERSIONS = "_metadata"
"""torch's name for the versions of modules, and what their hooks note, which loading methods may go by."""

_IN_PLACE = ("torch.nn.modules.", "torch.nn.parallel.", "torch.nn.utils.parametrizations", "torch.distributed.", "torch._dynamo.")
"""Homes of overrides and hooks that give and take parameters and buffers as they are, under wrappers or for older versions."""


@dataclass(frozen=True, slots=True, eq=False)
class Unit:
    """A module whose state goes through its own methods, with everything below it."""

    module: nn.Module
    path: str
    """Where it stands in the state, for messages."""
    root: bool
    """It is the whole model: its own `load_state_dict` is called, as users call it."""
    adapts: bool
    """A loading method or hook of its own may take other names and shapes than the live ones."""
    keys: dict[str, str]
    """Name in the model → key in what its `state_dict` gave."""
    given: dict[str, object]
    """What its `state_dict` gave: live parameters and buffers, copies, or plain values."""
    versions: dict[str, dict[str, Any]]
    prefix: str = ""
    scratch: dict[int, torch.Tensor] = field(default_factory=dict)
    """By `id` of a given tensor: the tensor that is read instead of it."""


def is_unit(module: nn.Module, *, root: bool) -> bool:
    """Whether the state of `module` goes through its own methods. `root`: it is the whole model."""
    return saves_itself(module) or adapts(module) or (root and _overrides(module, "load_state_dict"))


def saves_itself(module: nn.Module) -> bool:
    """Whether a method or hook of `module` may change what is saved."""
    return any(_overrides(module, name) for name in ("state_dict", "_save_to_state_dict")) or bool(_hooks(module, _SAVING))


def adapts(module: nn.Module) -> bool:
    """Whether a method or hook of this very module may change what is loaded."""
    return _overrides(module, "_load_from_state_dict") or bool(_hooks(module, ("_load_state_dict_pre_hooks",)))


_SAVING = ("_state_dict_hooks", "_state_dict_pre_hooks")


def _overrides(module: nn.Module, name: str) -> bool:
    found = module.__dict__.get(name) or getattr(type(module), name)
    return found is not getattr(nn.Module, name) and not _home(found).startswith(_IN_PLACE)


def _hooks(module: nn.Module, kinds: tuple[str, ...]) -> list[Callable[..., Any]]:
    found = [hook for kind in kinds for hook in module.__dict__.get(kind, {}).values()]
    return [hook for hook in found if not _home(hook).startswith(_IN_PLACE)]


def _home(hook: Any) -> str:
    """The module in which a function, method, partial or hook object is defined."""
    while True:
        inner = hook.func if isinstance(hook, partial) else getattr(hook, "hook", None) or getattr(hook, "__func__", None)
        if inner is None:
            return str(getattr(hook, "__module__", None) or type(hook).__module__)
        hook = inner


def take(module: nn.Module, prefix: str, path: str, *, root: bool, loading: bool) -> Unit:
    """Ask `module` for its state. Raises UnsupportedError where that can't be, or could not be taken back."""
    for inner in module.modules():
        fsdp.reshard(inner)
    given, versions = _ask(module, path, root=root)
    keys: dict[str, str] = {}
    for key in given:
        name = prefix + _clean(key)
        if keys.setdefault(name, key) != key:
            raise UnsupportedError(
                _below(path, prefix, key), f"{_kind(module)}.state_dict() gives it twice: {keys[name]} and {key}"
            )
    unit = Unit(module, path, root, any(map(adapts, module.modules())), keys, given, versions, prefix)
    if loading:
        _check_taken(unit)
        unit.scratch.update((id(x), _beside(x)) for x in given.values() if isinstance(x, torch.Tensor))
    return unit


def _ask(module: nn.Module, path: str, *, root: bool) -> tuple[dict[str, object], dict[str, dict[str, Any]]]:
    out: Any = OrderedDict()
    out._metadata = OrderedDict()
    try:
        if not root:
            module.state_dict(destination=out, prefix="", keep_vars=True)
        elif _overrides(module, "state_dict"):
            out = cast(Any, module).state_dict()
        else:
            out = module.state_dict(keep_vars=True)
    except Exception as error:
        raise UnsupportedError(path, f"{_kind(module)}.state_dict() failed: {type(error).__name__}: {error}") from error
    if not isinstance(out, Mapping) or not all(isinstance(key, str) for key in out):
        raise UnsupportedError(path, f"{_kind(module)}.state_dict() gives no dict with names")
    versions = {name: dict(local) for name, local in getattr(out, "_metadata", {}).items()}
    live = _live(module)
    return {key: live.get(_memory(x), x) if isinstance(x, torch.Tensor) else x for key, x in out.items()}, versions


def _live(module: nn.Module) -> dict[object, torch.Tensor]:
    """Parameters and buffers by where they lie: `state_dict` may give them detached."""
    return {_memory(x): x for held in (module.buffers(), module.parameters()) for x in held if not nn.parameter.is_lazy(x)}


def _memory(x: torch.Tensor) -> object:
    """Where a plain or distributed tensor lies; for others, which may have no address, the object itself."""
    local = getattr(x, "_local_tensor", x)
    if nn.parameter.is_lazy(x) or type(local) not in {torch.Tensor, nn.Parameter} or local.layout != torch.strided:
        return id(x)
    if local.is_meta or not local.numel() or local.is_quantized:
        return id(x)
    return (local.data_ptr(), tuple(local.shape), tuple(x.shape), local.stride(), local.dtype)


def _check_taken(unit: Unit) -> None:
    """Refuse what the module gives and its loading, as torch does it, would not take back."""
    module = unit.module
    held = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    held |= {name for name, _ in module.named_buffers(remove_duplicate=False)}
    if unit.root and _overrides(module, "load_state_dict"):
        return
    for key in unit.given:
        owners = [inner for name, inner in module.named_modules(remove_duplicate=False) if not name or key.startswith(f"{name}.")]
        if key not in held and not key.endswith("_extra_state") and not any(map(adapts, owners)):
            raise UnsupportedError(
                _below(unit.path, unit.prefix, key),
                f"{_kind(owners[-1])} adds it to its state, and has no loading method that takes it back: load it without "
                "`into`, and make the module of it as its library says",
            )


def _beside(x: torch.Tensor) -> torch.Tensor:
    if nn.parameter.is_lazy(x) or x.is_meta or x.is_quantized or x.layout != torch.strided:
        return x  # refused where leaves are made
    return torch.zeros_like(x.detach(), requires_grad=False)


def give(unit: Unit, stored: Mapping[str, object], versions: Mapping[str, dict[str, Any]] | None) -> None:
    """Hand a unit its state: tensors in `scratch` where they were read, else what `stored` has (name in the model → value).

    Raises UnsupportedError when the module refuses it.
    """
    state: Any = OrderedDict()
    for name, key in unit.keys.items():
        if name in stored:
            state[key] = stored[name]
    for name, x in stored.items():
        if name not in unit.keys:
            state[name.removeprefix(unit.prefix)] = x
    state._metadata = OrderedDict(unit.versions if versions is None else versions)
    load = cast(Any, unit.module).load_state_dict if unit.root else partial(nn.Module.load_state_dict, unit.module)
    own = unit.root and _overrides(unit.module, "load_state_dict")
    try:
        result = load(state) if own else load(state, strict=False)
    except Exception as error:
        raise UnsupportedError(unit.path, f"{_kind(unit.module)} refused its state: {type(error).__name__}: {error}") from error
    left = [] if own else result.unexpected_keys
    if left:
        raise UnsupportedError(_below(unit.path, unit.prefix, left[0]), f"{_kind(unit.module)} did not take it back")


def after_load(modules: Mapping[str, nn.Module]) -> None:
    """Run the hooks that modules have for the time after a load. Raises UnsupportedError when one fails."""
    for path, module in modules.items():
        result = nn.modules.module._IncompatibleKeys([], [])
        for hook in _hooks(module, ("_load_state_dict_post_hooks",)):
            try:
                hook(module, result)
            except Exception as error:
                raise UnsupportedError(
                    path, f"a hook of {_kind(module)} that runs after loading failed: {type(error).__name__}: {error}"
                ) from error


def has_after_load(module: nn.Module) -> bool:
    return bool(_hooks(module, ("_load_state_dict_post_hooks",)))


def buffers(unit: Unit) -> set[int]:
    """The `id` of its buffers."""
    return {id(x) for x in unit.module.buffers()}


def _below(path: str, prefix: str, key: str) -> str:
    return f"{path}{'.' if prefix else '/'}{key}"


def _clean(key: str) -> str:
    return ".".join(part for part in key.split(".") if part not in TRANSPARENT)


def _kind(module: nn.Module) -> str:
    return type(module).__qualname__
