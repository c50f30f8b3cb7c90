"""Family files: which parameter of Megatron is which of Hugging Face's. Read from the JSON files beside this module.

A rule names a parameter of Megatron, the part or parts of it that Hugging Face has, and how they join (see `joints`). `{i}`,
`{e}` and `{w}` stand for a layer, an expert, and `weight` or `bias`.
"""

from __future__ import annotations

import functools
import json
import re
from dataclasses import dataclass
from importlib import resources

from ucformat.errors import UnsupportedError

_PLACES = {"{i}": r"(?P<i>\d+)", "{e}": r"(?P<e>\d+)", "{w}": r"(?P<w>weight|bias)"}
Place = tuple[tuple[str, str], ...]
"""What stands for the placeholders: sorted (placeholder, text)."""


@dataclass(frozen=True, slots=True)
class Rule:
    """One line of a family file."""

    megatron: str
    hf: tuple[str, ...]
    how: str = "same"
    tied: bool = False
    """Whether it may be missing, where it is tied to the embedding."""


@dataclass(frozen=True, slots=True)
class Family:
    """A family file."""

    name: str
    title: str
    model_types: tuple[str, ...]
    arguments: dict[str, object]
    """Megatron's arguments by which such a model is known, where its names don't tell."""
    ignored: dict[str, tuple[str, ...]]
    """Program → names that are no parameters, and are left out."""
    rules: tuple[Rule, ...]


@functools.cache
def known() -> dict[str, Family]:
    """All families by name."""
    found: dict[str, Family] = {}
    for file in sorted(resources.files(__package__).iterdir(), key=lambda file: file.name):
        if file.name.endswith(".json"):
            name = file.name.removesuffix(".json")
            tree = json.loads(file.read_text(encoding="utf-8"))
            ignored = {program: tuple(names) for program, names in tree["ignore"].items()}
            found[name] = Family(
                name, tree["title"], tuple(tree["model_types"]), tree["arguments"], ignored, tuple(map(_rule, tree["rules"]))
            )
    return found


def _rule(tree: dict[str, object]) -> Rule:
    hf = tree["hf"]
    parts = (hf,) if isinstance(hf, str) else tuple(map(str, hf)) if isinstance(hf, list) else ()
    return Rule(str(tree["megatron"]), parts, str(tree.get("how", "same")), bool(tree.get("tied", False)))


def of(name: str, where: str) -> Family:
    """The family that is called so, or that has a model type called so. Raises UnsupportedError."""
    families = known()
    if name in families:
        return families[name]
    for family in families.values():
        if name in family.model_types:
            return family
    raise UnsupportedError(where, f"no model family is called {name!r} (known: {', '.join(families)})")


@functools.cache
def _pattern(template: str) -> re.Pattern[str]:
    return re.compile("".join(_PLACES.get(part, re.escape(part)) for part in re.split(r"(\{[iew]\})", template)))


def match(template: str, name: str) -> Place | None:
    """What stands for the placeholders of a template in a name; None when it is another name."""
    found = _pattern(template).fullmatch(name)
    return tuple(sorted(found.groupdict().items())) if found else None


def fill(template: str, place: Place) -> str:
    """The name that a template has there."""
    for key, text in place:
        template = template.replace(f"{{{key}}}", text)
    return template
