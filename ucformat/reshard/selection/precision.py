"""Which tensors a change of dtype (`dtype=`) converts, and which keep theirs.

Only floating-point tensors of the model change. Libraries keep some of these wide whatever dtype a model is loaded in
(routers of experts, T5's `wo`, rotary frequencies): rounded in the file, they would be wrong for good, so they keep their
dtype. A quantised model is refused: its scales belong to the quantised weights and to a configuration that stays as it is.
"""

from __future__ import annotations

import fnmatch
import importlib
import importlib.util
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ucformat.catalog import TensorSpec
from ucformat.errors import UnsupportedError
from ucformat.formats.target import shorten
from ucformat.values import split_name

FLOATS = ("F64", "F32", "F16", "BF16")
"""The dtypes that `dtype=` converts, and converts to. Integers, flags and scaled low-precision numbers stay as they are."""
_HALF = ("F16", "BF16")
_SPELLINGS = {
    "bfloat16": "BF16",
    "float16": "F16",
    "half": "F16",
    "float32": "F32",
    "float": "F32",
    "float64": "F64",
    "double": "F64",
    "fp16": "F16",
    "fp32": "F32",
    "fp64": "F64",
}
_ALWAYS = ("inv_freq", "e_score_correction_bias")  # no model computes with these in half precision
# of `model_type`, where no library is there to ask
_BY_TYPE: Mapping[str, tuple[str, ...]] = {
    **dict.fromkeys(("deepseek_v2", "deepseek_v3", "deepseek_v32"), ("gate.weight",)),
    "rwkv": ("time_decay", "time_first"),
}
_BY_TYPE_IN_F16: Mapping[str, tuple[str, ...]] = dict.fromkeys(("t5", "mt5", "umt5", "udop", "pop2piano"), ("wo",))
_QUANTISED = ("quantization_config", "compression_config")
_SCALED = ("F8_", "F6_", "F4")  # beginnings of dtypes that mostly go with a scale
_SCALES = (
    *("*.qweight", "*.qzeros", "*.g_idx", "*.weight_scale", "*.weight_scale_inv", "*.weight_packed", "*.scales"),
    *("*.absmax", "*.quant_map", "*.SCB", "*.quant_state.*"),
)
_LOG = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Precision:
    """What was asked for."""

    dtype: str
    """One of FLOATS."""
    keep: tuple[str, ...] = ()
    """Globs over names (with or without `model/`) that keep their dtype."""
    configs: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    """What the `config.json` says of the model (under an empty name), and of its parts by their folders."""


def dtype_of(name: str) -> str:
    """The dtype that a user means: `bf16`, `torch.float32`, `F16`. Raises UnsupportedError."""
    short = _SPELLINGS.get(name.lower().removeprefix("torch."), name.upper())
    if short not in FLOATS:
        raise UnsupportedError(f"dtype {name}", f"converts to {', '.join(FLOATS)} only: scaled formats need calibration")
    return short


def is_kept(name: str, keep: Sequence[str]) -> bool:
    """Whether a tensor is to keep its dtype: its name, with or without `model/`, matches one of the globs `keep`."""
    return any(fnmatch.fnmatchcase(form, pattern) for form in (name, name.removeprefix("model/")) for pattern in keep)


def converted(specs: Sequence[TensorSpec], wanted: Precision, where: str) -> tuple[list[TensorSpec], list[str]]:
    """The specs that are written, and remarks on those that keep their dtype against the wish.

    Of a state without a model all floating-point tensors are converted. Raises UnsupportedError for a quantised model without
    `keep`, and for a pattern in `keep` that matches nothing.
    """
    named = any(spec.name.startswith("model/") for spec in specs)
    changing = {
        spec.name
        for spec in specs
        if spec.dtype in FLOATS and spec.dtype != wanted.dtype and (not named or spec.name.startswith("model/"))
    }
    asked = _asked(specs, wanted.keep, where)
    if not wanted.keep:
        _refuse_quantised([spec for spec in specs if not named or spec.name.startswith("model/")], wanted, changing, where)
    wide = sorted(_wide(changing - asked, wanted)) if wanted.dtype in _HALF else []
    kept = asked.union(wide)
    remarks = [f"kept in their dtype, as the model's library computes with them in it: {shorten(wide)}"] if wide else []
    return [replace(spec, dtype=wanted.dtype) if spec.name in changing - kept else spec for spec in specs], remarks


def _asked(specs: Sequence[TensorSpec], keep: Sequence[str], where: str) -> set[str]:
    """The names that `keep` matches."""
    found: set[str] = set()
    for pattern in keep:
        hit = {spec.name for spec in specs if is_kept(spec.name, [pattern])}
        if not hit:
            raise UnsupportedError(where, f"no name matches {pattern!r}, which is to keep its dtype")
        found |= hit
    return found


def _refuse_quantised(specs: Sequence[TensorSpec], wanted: Precision, changing: set[str], where: str) -> None:
    signs = [f"config.json has a {key}" for key in _QUANTISED if any(_find(config, key) for config in wanted.configs.values())]
    low = any(spec.dtype.startswith(_SCALED) for spec in specs)
    scaled = [
        spec.name for spec in specs if _matches(spec.name, _SCALES) or (low and "scale" in spec.name and spec.name in changing)
    ]
    signs += [f"it holds {shorten(scaled)}"] if scaled else []
    if signs and changing:
        how = "leave dtype out, dequantise it first, or say with keep_dtype (--keep-dtype '*scale*') what keeps its dtype"
        raise UnsupportedError(where, f"a quantised model ({'; '.join(signs)}), and its scales would be rounded: {how}")


def _find(config: Mapping[str, Any], key: str) -> bool:
    """Whether a configuration, or that of one of its parts, says something under `key`."""
    below = (value for name, value in config.items() if name.endswith("_config") and isinstance(value, dict))
    return bool(config.get(key)) or any(value.get(key) for value in below)


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def _has(name: str, pattern: str) -> bool:
    """Whether the components of `pattern` follow one another among those of a name."""
    parts = [part for component in split_name(name) for part in component.split(".")]
    wanted = pattern.split(".")
    return any(parts[i : i + len(wanted)] == wanted for i in range(len(parts) - len(wanted) + 1))


def _wide(names: Iterable[str], wanted: Precision) -> Iterator[str]:
    """Those of `names` that a library keeps wide."""
    configs = {"": {}, **wanted.configs}
    patterns = {
        f"model/{folder}/" if folder else "": _kept_by_library(config, wanted.dtype) for folder, config in configs.items()
    }
    for name in names:
        if any(name.startswith(folder) and _has(name, part) for folder, parts in patterns.items() for part in parts):
            yield name


def _kept_by_library(config: Mapping[str, Any], dtype: str) -> tuple[str, ...]:
    """Parts of names that the model's library keeps in float32, by its own declaration where it is installed."""
    kind = config.get("model_type")
    found = set(_ALWAYS)
    if isinstance(kind, str):
        found.update(_BY_TYPE.get(kind, ()), _BY_TYPE_IN_F16.get(kind, ()) if dtype == "F16" else ())
    names = config.get("architectures")
    classes = [("transformers", name) for name in names] if isinstance(names, list) else []
    classes += [("diffusers", config["_class_name"])] if "_class_name" in config else []
    for library, name in classes:
        if isinstance(name, str) and name.isidentifier():
            found.update(_declared(library, name, dtype))
    return tuple(sorted(found))


def _declared(library: str, name: str, dtype: str) -> tuple[str, ...]:
    """What a model class of a library declares to be kept; nothing where library or class are not there."""
    if importlib.util.find_spec(library) is None:
        return ()
    try:
        model = getattr(importlib.import_module(library), name, None)
        keys = ["_keep_in_fp32_modules_strict", *(["_keep_in_fp32_modules"] if dtype == "F16" or library == "diffusers" else [])]
        found = [getattr(model, key, None) for key in keys]
    except Exception as error:
        _LOG.warning("%s can't be asked which weights of %s it keeps in float32: %s", library, name, error)
        return ()
    return tuple(part for value in found if isinstance(value, (list, tuple, set)) for part in value if isinstance(part, str))
