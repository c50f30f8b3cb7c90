"""Value trees of the ucf checkpoint format, as JSON: checked (section 6), and those of several ranks merged (section 7.3)."""

from __future__ import annotations

import base64
import binascii
import json
from collections.abc import Callable
from typing import Any

from specs.readers.python.ucf_json import TEXT, fits, need, refuse

NUMPY = {"bool": 1, "float16": 2, "float32": 4, "float64": 8, "complex64": 8, "complex128": 16}
NUMPY |= {f"{sign}int{8 * n}": n for sign in ("", "u") for n in (1, 2, 4, 8)}
PATHS = {"PosixPath", "WindowsPath", "PurePosixPath", "PureWindowsPath"}
MUTABLE = {"$dict", "$ordered", "$set", "$namespace"}
FLAT = {"$bytes", "$complex", "$int", "$float", "$str"}


def decoded(x: Any) -> bytes | None:
    try:
        return base64.b64decode(x, validate=True) if isinstance(x, str) else None
    except (binascii.Error, ValueError):
        return None


def is_surrogates(x: Any) -> bool:
    try:
        return (decoded(x) or b"").decode("utf-8", "surrogatepass") is not None and decoded(x) is not None
    except UnicodeDecodeError:
        return False


def is_numpy(x: Any) -> bool:
    return fits([TEXT], x) and len(x) == 2 and x[0] in NUMPY and len(decoded(x[1]) or b"") == NUMPY[x[0]]


def is_rank_local(x: Any) -> bool:
    kind = {"policy": STR, "coords": [(type(None), {"*": int})], "values": [object], "first?": int}
    return fits(kind, x) and len(x) == 3 + ("first" in x) and len(x["coords"]) == len(x["values"])


def no_twins(items: list[Any]) -> bool:
    return len({key_of(item) for item in items}) == len(items)


STR = (TEXT, lambda x: isinstance(x, dict) and x.keys() == {"$str"})
FLOAT = (float, lambda x: isinstance(x, dict) and x.keys() == {"$float"})
PAIRS: Callable[[Any], bool] = lambda x: fits([[object]], x) and {*map(len, x)} <= {2} and no_twins([pair[0] for pair in x])  # noqa: E731
ITEMS: Callable[[Any], bool] = lambda x: isinstance(x, list) and no_twins(x)  # noqa: E731
TAGS: dict[str, Any] = {
    "$tuple": [object], "$dict": PAIRS, "$ordered": PAIRS, "$set": ITEMS, "$frozenset": ITEMS, "$int": "-?0x[0-9a-fA-F]+",
    "$float": "nan|-?inf", "$complex": lambda x: fits([FLOAT], x) and len(x) == 2, "$bytes": lambda x: decoded(x) is not None,
    "$str": is_surrogates, "$numpy": is_numpy, "$size": [int], "$dtype": "[a-z0-9_]+", "$device": "[a-z]+(:[0-9]+)?",
    "$path": lambda x: fits([STR], x) and len(x) == 2 and x[0] in PATHS,
    "$namespace": lambda x: isinstance(x, dict) and not any(key.startswith("$") for key in x), "$tensor": STR, "$array": STR, "$rank_local": is_rank_local,
    "$opaque": lambda x: fits({"class": STR, "state": object}, x) and len(x) == 2,
}  # fmt: skip


def check_value(x: Any) -> Any:
    """The same tree. Refuses what section 6 does not allow."""
    tag = next((key for key in x if key.startswith("$")), None) if isinstance(x, dict) else None
    for item in x.values() if isinstance(x, dict) else x if isinstance(x, list) else ():
        check_value(item)
    if tag is not None:
        need(len(x) == 1 and tag in TAGS, f"values: unknown tag {tag}, or members beside it")
        need(fits(TAGS[tag], x[tag]), f"values: content of {tag}")
    return x


def key_of(x: Any) -> Any:
    """What is equal for two keys, or items of a set, that are the same."""
    if not isinstance(x, (list, dict)):
        return ("text", x) if isinstance(x, str) else x
    found: tuple[str, Any] = next(iter(x.items())) if isinstance(x, dict) and x else ("", None)
    tag, body = found
    need(tag in TAGS.keys() - MUTABLE, f"values: {tag or 'an array or object'} in a key or set")
    if tag == "$float":
        return object() if body == "nan" else float(body)
    if tag == "$int":
        return int(body, 16)
    if tag in {"$rank_local", "$opaque"}:
        need(not any(body.get("coords", [])), "values: an object in a key or set")
        body = [*body["values"]] if tag == "$rank_local" else [body["class"], body["state"]]
    if isinstance(body, list):
        keys = [key_of(item) for item in body]
        return (tag, frozenset(keys)) if tag == "$frozenset" else (tag, *keys)
    return tag, body


def is_flat(items: list[Any]) -> bool:
    return not any(isinstance(x, list) or (isinstance(x, dict) and not x.keys() & FLAT) for x in items)


def merge(trees: list[Any], key: Any = "", *, items: bool = False) -> Any:
    """The trees of the ranks that have one at a place, as one. `items`: they are what a `$tuple` or the like holds."""
    first = trees[0]
    if all(isinstance(x, dict) and x.keys() == {"$rank_local"} for x in trees):
        bodies = [x["$rank_local"] for x in trees]
        need(len({body["policy"] for body in bodies}) == 1, f"policies of {key!r} differ", "conflict")
        return {
            "$rank_local": {"policy": bodies[0]["policy"], **{k: [x for b in bodies for x in b[k]] for k in ("coords", "values")}}
        }
    if len({json.dumps(x) for x in trees}) == 1:
        return first
    if all(isinstance(x, list) for x in trees):
        if key == "param_groups" and not items:
            return [merge_group([x[i] for x in trees if i < len(x)], i) for i in range(max(map(len, trees)))]
        if len({len(x) for x in trees}) == 1 and not all(map(is_flat, trees)):
            return [merge([x[i] for x in trees], i) for i in range(len(first))]
    if all(isinstance(x, dict) for x in trees):
        tags = {next((k for k in x if k.startswith("$")), "") for x in trees}
        tag = tags.pop() if len(tags) == 1 else "none in common"
        if tag == "":
            return {k: merge([x[k] for x in trees if k in x], k) for k in dict.fromkeys(k for x in trees for k in x)}
        if tag in {"$tuple", "$namespace"}:
            return {tag: merge([x[tag] for x in trees], items=True)}
        if tag in {"$dict", "$ordered"}:
            found: dict[Any, list[Any]] = {}
            for k, item in (pair for x in trees for pair in x[tag]):
                found.setdefault(key_of(k), [k]).append(item)
            return {tag: [[k, merge(held, k)] for k, *held in found.values()]}
    return refuse(f"ranks differ about {key!r}", "conflict")


def merge_group(groups: list[Any], key: int) -> Any:
    if all(isinstance(x, dict) and isinstance(x.get("params"), list) for x in groups):
        united = {json.dumps(name): name for x in groups for name in x["params"]}
        groups = [{**x, "params": list(united.values())} for x in groups]
    return merge(groups, key)
