"""A catalog under the names and shapes of the other program: Hugging Face's as Megatron's, or the other way round.

Optimizer state goes along, each kind cut and joined as its parameter. Every tensor of the model must be one that the family
knows, and every parameter must have all its parts: else the error names them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from ucformat.catalog import Catalog
from ucformat.errors import CoverageError, UnsupportedError
from ucformat.families import family as files
from ucformat.families import numbers as counts
from ucformat.families.family import Family, Place, Rule
from ucformat.families.joints import JOINTS
from ucformat.families.numbers import Numbers
from ucformat.formats.target import shorten
from ucformat.values.tree import join_name, split_name
from ucformat.views import Rewrite, View

Program = Literal["hf", "megatron"]
_TOPS = ("model", "optimizer")
_MEGATRON = ("embedding.word_embeddings.weight",)


def translate(catalog: Catalog, wanted: str, configs: Iterable[Mapping[str, object]] = ()) -> Catalog:
    """The catalog under the names of the other program. `wanted`: a family's name, with numbers if they are to be given
    (`llama:heads=32,groups=8`), or `auto`. `configs` are configurations that lie beside the model.

    Raises UnsupportedError naming what the family does not know or what nothing says.
    """
    name, given = counts.parse(wanted, catalog.url)
    params = _parameters(catalog)
    source: Program = "megatron" if any(param in params for param in _MEGATRON) else "hf"
    config = next((held for held in configs if "model_type" in held), {})
    args = catalog.values.get("args") if source == "megatron" and isinstance(catalog.values, dict) else None
    family = _recognised(params, source, config, args, catalog.url) if name == "auto" else files.of(name, catalog.url)
    numbers = counts.from_args(args).updated(counts.from_config(config))
    return _Translation(catalog, family, source, numbers.updated(given)).run()


def _parameters(catalog: Catalog) -> dict[str, None]:
    """Names of the model's parameters, in order."""
    split = (split_name(spec.name) for spec in catalog.tensors)
    return {parts[1]: None for parts in split if len(parts) == 2 and parts[0] == "model"}


def _recognised(params: Iterable[str], source: Program, config: Mapping[str, object], args: object, where: str) -> Family:
    """The family of a configuration, or the one that knows all parameters and has such arguments."""
    kind = config.get("model_type")
    if isinstance(kind, str):
        return files.of(kind, where)
    names, said = list(params), counts.arguments(args)
    candidates = [family for family in files.known().values() if not _contradicted(family, said)]
    found = {family.name: used for family in candidates if None not in (used := _uses(family, source, names))}
    different = {tuple(used) for used in found.values()}
    if len(different) != 1:
        why = f"{len(different)} of the model families know" if found else "no model family knows"
        raise UnsupportedError(where, f"{why} all its parameters: name one of {', '.join(found or files.known())}")
    return files.known()[next(iter(found))]


def _contradicted(family: Family, said: Mapping[str, object]) -> bool:
    return any(said.get(key) not in (None, value) for key, value in family.arguments.items())


def _uses(family: Family, source: Program, names: Iterable[str]) -> list[Rule | str | None]:
    """The rule by which each parameter is known (or the pattern of what is left out); None for one that is not."""
    rules: list[tuple[str, Rule | str]] = [(template, rule) for rule in family.rules for template in _templates(rule, source)]
    known = [*rules, *((template, template) for template in family.ignored[source])]
    return [next((rule for template, rule in known if files.match(template, name) is not None), None) for name in names]


def _templates(rule: Rule, source: Program) -> tuple[str, ...]:
    return rule.hf if source == "hf" else (rule.megatron,)


@dataclass(slots=True)
class _Found:
    """One parameter to be made: the rule, where it stands, and the parts that are there by index."""

    rule: Rule
    place: Place
    parts: dict[int, str] = field(default_factory=dict)


class _Translation:
    def __init__(self, catalog: Catalog, family: Family, source: Program, numbers: Numbers) -> None:
        self.catalog, self.family, self.source, self.numbers = catalog, family, source, numbers
        self.rewrite = Rewrite(catalog)
        self.kinds: dict[str, list[str]] = {}
        """Parameter → kinds of its state."""
        for name in catalog.names:
            parts = split_name(name)
            if len(parts) == 3 and parts[0] == "optimizer":
                self.kinds.setdefault(parts[1], []).append(parts[2])
        self.used: set[str] = set()
        self.new: dict[str, list[str]] = {}
        """Parameter of the source → those of the target that it goes into."""

    def run(self) -> Catalog:
        found = self._matched()
        views = {name: self.rewrite.view(name) for name in self.catalog.names if split_name(name)[0] not in _TOPS}
        for one in found:
            sources = [one.parts[i] for i in range(len(one.parts))]
            views.update(self._made(one, sources, ("model",), ()))
            for kind in self.kinds.get(sources[0], []):
                views.update(self._made(one, sources, ("optimizer",), (kind,)))
        self._check_all_used()
        notes = self.catalog.notes
        target = "Megatron" if self.source == "hf" else "Hugging Face transformers"
        remark = f"{self.family.title}: names and shapes of {target}"
        notes = replace(notes, remarks=(*notes.remarks, *self._said(), remark), origin_layout={})
        return self.rewrite.build(views, {}, self._values(), notes)

    def _check_all_used(self) -> None:
        """Raise UnsupportedError for optimizer state that did not go along."""
        left = [
            name
            for name in self.catalog.names
            if name.startswith("optimizer/") and name not in self.used and split_name(name)[1:2] not in self._ignored_parts()
        ]
        if left:
            why = "state by number can't be given new names" if left[0].startswith("optimizer/state/") else "no parameter has it"
            raise UnsupportedError(self.catalog.url, f"{shorten(left)}: {why}; leave it out with select or exclude")

    def _ignored_parts(self) -> list[list[str]]:
        return [[name] for name in _parameters(self.catalog) if name not in self.new]

    def _said(self) -> list[str]:
        ignored = [name for name in _parameters(self.catalog) if name not in self.new]
        return [f"left out, since they are no parameters: {shorten(ignored)}"] if ignored else []

    def _matched(self) -> list[_Found]:
        """What is to be made. Raises UnsupportedError and CoverageError."""
        url = self.catalog.url
        found: dict[tuple[str, Place], _Found] = {}
        unknown: list[str] = []
        for name in _parameters(self.catalog):
            hit = self._rule_of(name)
            if hit is None:
                if not any(files.match(template, name) is not None for template in self.family.ignored[self.source]):
                    unknown.append(name)
                continue
            rule, index, place = hit
            one = found.setdefault((rule.megatron, place), _Found(rule, place))
            one.parts[index] = name
        if unknown:
            raise UnsupportedError(url, f"{self.family.title}: {shorten(unknown)} are no parameters of this family")
        for one in found.values():
            templates = _templates(one.rule, self.source)
            missing = [files.fill(template, one.place) for i, template in enumerate(templates) if i not in one.parts]
            if missing:
                raise CoverageError(missing[0], None, f"{url}: it belongs together with {one.parts[min(one.parts)]}")
        return list(found.values())

    def _rule_of(self, name: str) -> tuple[Rule, int, Place] | None:
        for rule in self.family.rules:
            for index, template in enumerate(_templates(rule, self.source)):
                place = files.match(template, name)
                if place is not None:
                    return rule, index, place
        return None

    def _made(self, one: _Found, sources: list[str], before: tuple[str, ...], behind: tuple[str, ...]) -> dict[str, View]:
        """The target's tensors out of the source's; a tensor's name is its parameter's between `before` and `behind`."""
        target: Program = "hf" if self.source == "megatron" else "megatron"
        params = [files.fill(template, one.place) for template in _templates(one.rule, target)]
        self.new.update((name, params) for name in sources)
        names = [join_name(*before, name, *behind) for name in sources]
        self.used.update(names)
        try:
            parts = [self.rewrite.view(name) for name in names]
        except KeyError as error:
            raise CoverageError(str(error.args[0]), None, self.catalog.url) from None
        joint, made = JOINTS[one.rule.how], [parts[0]] * len(params)
        try:
            if parts[0].ndim:  # else a step count, which belongs to each
                made = (
                    [joint.join(parts, self.numbers)] if target == "megatron" else joint.part(parts[0], self.numbers, len(params))
                )
        except ValueError as error:
            raise UnsupportedError(self.catalog.url, f"{sources[0]} of shape {list(parts[0].shape)}: {error}") from None
        return {join_name(*before, name, *behind): view for name, view in zip(params, made, strict=True)}

    def _values(self) -> object:
        """The values, with the new names in the optimizer's groups."""
        values = self.catalog.values
        held = values.get("optimizer") if isinstance(values, dict) else None
        groups = held.get("param_groups") if isinstance(held, dict) else None
        if not isinstance(values, dict) or not isinstance(held, dict) or not isinstance(groups, list):
            return values
        return {**values, "optimizer": {**held, "param_groups": [self._group(group) for group in groups]}}

    def _group(self, group: Any) -> Any:
        if not isinstance(group, dict) or not isinstance(group.get("params"), list):
            return group
        names = [new for name in group["params"] for new in self.new.get(name, [name])]
        return {**group, "params": list(dict.fromkeys(names))}
