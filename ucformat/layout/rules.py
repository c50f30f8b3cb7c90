"""Which rule a tensor has: at most one, and every pattern names a tensor."""

from __future__ import annotations

import fnmatch
import re

from ucformat.errors import LayoutError
from ucformat.layout.language import Declared, Rule

_KINDS = ("model", "optimizer")
_ALL = 6  # names in a message


def parameter_of(name: str) -> str | None:
    """The parameter that a canonical name is of (`model/<parameter>`, `optimizer/<parameter>/<state>`); None for other names."""
    path = name.split("/")
    return path[1] if len(path) in (2, 3) and path[0] == _KINDS[len(path) - 2] else None


class RuleBook:
    """The rules of a layout, and which of their patterns have matched something."""

    def __init__(self, declared: Declared) -> None:
        self.title, self.layout = declared.title, declared.layout
        self._whole: list[tuple[str, re.Pattern[str], Rule]] = []
        self._parameters: list[tuple[str, re.Pattern[str], Rule]] = []
        for rule in self.layout.rules:
            for glob in rule.globs:
                entry = glob, re.compile(fnmatch.translate(glob)), rule
                (self._whole if "/" in glob else self._parameters).append(entry)
        self._unused = dict.fromkeys(glob for rule in self.layout.rules for glob in rule.globs)
        self._exact: set[int] = {id(rule) for _, _, rule in self._whole}

    def rule(self, name: str) -> Rule | None:
        """The rule of a tensor. One whose pattern has a `/` goes before those over parameters.

        Raises LayoutError when two match.
        """
        found = _matching(self._whole, name) or _matching(self._parameters, parameter_of(name) or name)
        for glob, _ in found:
            self._unused.pop(glob, None)
        rules = {id(rule): rule for _, rule in found}
        if len(rules) > 1:
            shown = " and ".join(repr(glob) for glob, _ in found[:_ALL])
            raise LayoutError(self.title, f"rules {shown} all match tensor {name!r}: it needs one")
        return next(iter(rules.values()), None)

    def names_states(self, name: str) -> bool:
        """Whether a pattern with a `/` matches, so that the rule holds whatever the tensor's shape."""
        return bool(_matching(self._whole, name))

    def check_used(self, checkpoint: str) -> None:
        """Raise LayoutError for patterns that have matched nothing."""
        if self._unused:
            shown = ", ".join(map(repr, list(self._unused)[:_ALL]))
            raise LayoutError(self.title, f"rule {shown} matches no tensor of {checkpoint}")

    def error(self, rule: Rule | None, name: str, why: object) -> LayoutError:
        """The error that a rule does not fit a tensor."""
        by = "no rule" if rule is None else f"rule {rule.title!r}"
        return LayoutError(self.title, f"{by}, tensor {name!r}: {why}")


def _matching(entries: list[tuple[str, re.Pattern[str], Rule]], name: str) -> list[tuple[str, Rule]]:
    return [(glob, rule) for glob, pattern, rule in entries if pattern.match(name)]
