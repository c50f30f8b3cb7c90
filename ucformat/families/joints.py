"""How the parts of a parameter in one program make up the parameter of the other, as views, both ways."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ucformat.families.numbers import Numbers
from ucformat.views import View, concat


@dataclass(frozen=True, slots=True)
class Joint:
    """From Hugging Face's parts to Megatron's parameter, and back. Both raise ValueError for what does not fit."""

    join: Callable[[Sequence[View], Numbers], View]
    part: Callable[[View, Numbers, int], list[View]]
    """The last argument is the number of parts."""


def _same(parts: Sequence[View], numbers: Numbers) -> View:
    return parts[0]


def _alone(view: View, numbers: Numbers, count: int) -> list[View]:
    return [view]


def _joined(parts: Sequence[View], numbers: Numbers) -> View:
    return concat(parts)


def _halves(view: View, numbers: Numbers, count: int) -> list[View]:
    if view.shape[0] % count:
        raise ValueError(f"{view.shape[0]} rows are no {count} equal parts")
    return view.split([view.shape[0] // count] * count)


def _sizes(numbers: Numbers) -> tuple[int, int, int]:
    """Groups, heads of each group, and rows of each head."""
    if numbers.heads is None or numbers.head_dim is None:
        raise ValueError("nothing says how many heads there are: give `heads` and `head_dim`")
    groups = numbers.groups or numbers.heads
    if numbers.heads % groups:
        raise ValueError(f"{numbers.heads} heads in {groups} groups")
    return groups, numbers.heads // groups, numbers.head_dim


def _grouped(parts: Sequence[View], numbers: Numbers) -> View:
    """Queries, keys and values, group by group: the rows of its heads' queries, then its keys, then its values."""
    groups, heads, width = _sizes(numbers)
    split = [part.unflatten(0, (groups, n, width)) for part, n in zip(parts, (heads, 1, 1), strict=True)]
    return concat(split, 1).flatten(0, 3)


def _ungrouped(view: View, numbers: Numbers, count: int) -> list[View]:
    groups, heads, width = _sizes(numbers)
    split = view.unflatten(0, (groups, heads + 2, width))
    return [part.flatten(0, 3) for part in split.split([heads, 1, 1], 1)]


def _transposed(parts: Sequence[View], numbers: Numbers) -> View:
    return parts[0].transpose() if parts[0].ndim == 2 else parts[0]


def _back(view: View, numbers: Numbers, count: int) -> list[View]:
    return [_transposed([view], numbers)]


def _transposed_groups(parts: Sequence[View], numbers: Numbers) -> View:
    """One matrix [in, queries + keys + values], as GPT-2 has it."""
    return _grouped(_halves(_transposed(parts, numbers), numbers, 3), numbers)


def _transposed_apart(view: View, numbers: Numbers, count: int) -> list[View]:
    return [_transposed([concat(_ungrouped(view, numbers, 3))], numbers)]


def _vocabulary(view: View, numbers: Numbers, count: int) -> list[View]:
    """Without the rows that fill the embedding up to a multiple of the tensor ranks."""
    if numbers.vocab is None or numbers.vocab == view.shape[0]:
        return [view]
    return [view.narrow(0, 0, numbers.vocab)]


JOINTS = {
    "same": Joint(_same, _alone),
    "joined": Joint(_joined, _halves),
    "groups": Joint(_grouped, _ungrouped),
    "transposed": Joint(_transposed, _back),
    "transposed groups": Joint(_transposed_groups, _transposed_apart),
    "vocabulary": Joint(_same, _vocabulary),
}
"""By the word that family files use (`how`)."""
