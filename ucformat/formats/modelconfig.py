"""What a model's `config.json` says of the weights' dtype: kept true when a conversion changes it.

`from_pretrained(dtype="auto")` believes the file, so one that still names the old dtype would undo the conversion.
"""

from __future__ import annotations

import json
import re
from typing import Any

CONFIG = "config.json"
_KEYS = ("torch_dtype", "dtype")  # before and since transformers 4.56
_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_KNOWN = frozenset({*_NAMES.values(), "double", "float", "half"})
_SAID = re.compile(r'"(?:torch_dtype|dtype)"\s*:\s*"(?:torch\.)?(\w+)"')
_OTHERS = ("quantization_config", "compression_config")  # their dtypes are not those of the stored weights


def with_dtype(data: bytes, dtype: str) -> bytes:
    """A `config.json` that names `dtype` (F64, F32, F16, BF16) wherever it named a floating-point dtype of the weights.

    All else keeps its bytes. What is no JSON object, or names no such dtype, is returned as it is.
    """
    try:
        text = data.decode()
        before = json.loads(text)
        wanted = _changed(json.loads(text), _NAMES[dtype])
    except (ValueError, RecursionError):
        return data
    if wanted == before:
        return data
    out = _SAID.sub(lambda said: _put(said, _NAMES[dtype]), text)
    if json.loads(out) != wanted:  # such a key stands in a place that says something else, too
        out = json.dumps(wanted, indent=2, ensure_ascii=False) + "\n"
    return out.encode()


def parse(data: bytes) -> dict[str, Any]:
    """What a configuration says; nothing, where it is no JSON object."""
    try:
        tree = json.loads(data)
    except (ValueError, RecursionError):
        return {}
    return tree if isinstance(tree, dict) else {}


def _put(said: re.Match[str], name: str) -> str:
    if said[1] not in _KNOWN:
        return said[0]
    start, stop = (at - said.start() for at in said.span(1))
    return said[0][:start] + name + said[0][stop:]


def _changed(tree: Any, name: str) -> Any:
    """The parsed file with its dtypes changed: at the top, and in the configurations of parts (`text_config`…)."""
    if not isinstance(tree, dict):
        return tree
    for key, value in tree.items():
        if key in _KEYS and isinstance(value, str) and value.removeprefix("torch.") in _KNOWN:
            tree[key] = "torch." * value.startswith("torch.") + name
        elif key.endswith("_config") and key not in _OTHERS:
            tree[key] = _changed(value, name)
    return tree
