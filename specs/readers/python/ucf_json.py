"""JSON as the ucf checkpoint format takes it: strict, and of stated kinds."""

from __future__ import annotations

import json
import math
import re
from typing import Any, NoReturn

MAX = 1 << 63
TEXT = ".*"


class RefusedError(Exception):
    """`kind` is one of the classes of errors that the specification lists."""

    def __init__(self, kind: str, why: str) -> None:
        self.kind = kind
        super().__init__(why)


def refuse(why: str, kind: str = "format") -> NoReturn:
    raise RefusedError(kind, why)


def need(condition: object, why: str, kind: str = "format") -> None:
    if not condition:
        refuse(why, kind)


def strict_json(data: bytes, where: object) -> Any:
    """RFC 8259 without keys twice, numbers out of range, and halves of characters."""

    def number(text: str, kind: type = float) -> Any:
        need(-MAX <= int(text) < MAX if kind is int else math.isfinite(float(text)), f"{where}: the number {text}")
        return kind(text)

    def members(items: list[tuple[str, Any]]) -> dict[str, Any]:
        need(len(dict(items)) == len(items), f"{where}: a key twice")
        return dict(items)

    try:
        text = data.decode()
        tree = json.loads(
            text, object_pairs_hook=members, parse_int=lambda t: number(t, int), parse_float=number, parse_constant=refuse
        )
        json.dumps(tree, ensure_ascii=False).encode()
    except (ValueError, RecursionError) as error:
        refuse(f"{where}: {error}")
    return tree


def fits(kind: Any, x: Any) -> bool:
    """Whether JSON is of a kind: a type, a pattern of text, [items], (one, or other), {member or "member?" or "*": its kind}."""
    if isinstance(kind, list):
        return isinstance(x, list) and all(fits(kind[0], item) for item in x)
    if isinstance(kind, dict) and "*" in kind:
        return isinstance(x, dict) and all(fits(kind["*"], item) for item in x.values())
    if isinstance(kind, dict):
        named = {name.rstrip("?"): name for name in kind}
        return isinstance(x, dict) and all(fits(kind[k], x[n]) if n in x else k[-1] == "?" for n, k in named.items())
    if isinstance(kind, tuple):
        return any(fits(one, x) for one in kind)
    if isinstance(kind, str):
        return isinstance(x, str) and re.fullmatch(kind, x, re.DOTALL) is not None
    return kind in {object, type(x)} if isinstance(kind, type) else bool(kind(x))
