"""Which names a load fills, which it misses and which nobody asks for, over all ranks, and what the user allows of that.

`account` is called once per load, after the state is prepared and before anything is read.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from ucformat import formats
from ucformat.catalog import Catalog
from ucformat.containers.checksums import digest
from ucformat.errors import NamesMismatchError, UnsupportedError
from ucformat.group import Group, word
from ucformat.reshard.restoring import master_weights
from ucformat.reshard.restoring.prepare import Loading
from ucformat.reshard.selection.select import matcher

EVERYTHING = ("*",)


@dataclass(frozen=True, slots=True)
class NameRules:
    """Names that may be missing or unexpected, as globs; equal on every rank."""

    allow_missing: Sequence[str] = ()
    allow_unexpected: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class NameAccount:
    """What becomes of every name of the state and of the checkpoint, on all ranks together; each sorted."""

    loaded: tuple[str, ...]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    ignored: tuple[str, ...]
    """The origin's own records and master weights, for which the state needs no place."""


@dataclass(frozen=True, slots=True)
class _OfRank:
    """What one rank tells the others: most tell the same."""

    unused_values: tuple[str, ...]
    missing: tuple[str, ...]
    matched: tuple[bool, ...]
    """Which patterns of `allow_missing` match a name that this rank wants."""
    wants: bool
    """Whether this rank wants any name at all."""


def account(loading: Loading, catalog: Catalog, rules: NameRules, group: Group) -> NameAccount:
    """Compare names over all ranks. Every rank of `group` calls it.

    Raises NamesMismatchError for names that are missing or unexpected and not allowed to be, and when state and checkpoint have
    no name in common; UnsupportedError for a pattern that matches no name at all.
    """
    names = catalog.names
    if len(np.unique(group.numbers([word(_digest("\n".join(names)))]))) > 1:
        raise UnsupportedError(
            catalog.url, "ranks take the numbered optimizer states for different parameters: convert it to named ones first"
        )
    used = group.maximum(_used(loading, catalog, names))
    ranks = group.distinct(_of_rank(loading, names, rules))
    loaded = [name for name, hit in zip(names, used, strict=True) if hit]
    missing = sorted({name for rank in ranks for name in rank.missing})
    ignored, unexpected = _spare(
        names, loaded, frozenset.intersection(*(frozenset(rank.unused_values) for rank in ranks)), catalog
    )
    _check_patterns(rules, [any(column) for column in zip(*(rank.matched for rank in ranks), strict=True)], names, catalog)
    if names and not loaded and any(rank.wants for rank in ranks):
        raise NamesMismatchError(
            catalog.url, missing, unexpected, _advice(catalog, missing, unexpected), "no name is both wanted and stored"
        )
    lost = [name for name in missing if not matcher(rules.allow_missing)(name)]
    spare = [name for name in unexpected if not matcher(rules.allow_unexpected)(name)]
    if lost or spare:
        raise NamesMismatchError(catalog.url, lost, spare, _advice(catalog, lost, spare))
    return NameAccount(tuple(loaded), tuple(missing), tuple(unexpected), tuple(ignored))


def _used(loading: Loading, catalog: Catalog, names: Sequence[str]) -> NDArray[np.uint8]:
    """Which of the names this rank reads, or one that is tied to it: 0 or 1."""
    tied = set(catalog.aliases) | set(catalog.aliases.values())
    stored, wanted = set(names), loading.names
    owners = {catalog.aliases.get(name, name) for name in wanted if name in stored}
    used = [name in wanted or (name in tied and catalog.aliases.get(name, name) in owners) for name in names]
    return np.array(used, dtype=np.uint8)


def _of_rank(loading: Loading, names: Sequence[str], rules: NameRules) -> _OfRank:
    stored, wanted = set(names), loading.names
    missing = (*sorted({piece.spec.name for piece in loading.pieces} - stored), *loading.missing)
    asked = (*wanted, *loading.missing)
    matched = tuple(pattern in EVERYTHING or any(map(matcher([pattern]), asked)) for pattern in rules.allow_missing)
    return _OfRank(tuple(sorted(set(loading.unused))), missing, matched, bool(wanted))


def _spare(
    names: Sequence[str], loaded: Sequence[str], unused_values: frozenset[str], catalog: Catalog
) -> tuple[list[str], list[str]]:
    """What is stored and not loaded: what nobody needs to have a place for, and the rest."""
    own = formats.bookkeeping(catalog.notes.origin)
    placeless = set(master_weights.placeless(loaded, catalog))
    taken = set(loaded)
    left = [name for name in names if name not in taken] + sorted(unused_values)
    ignored = [name for name in left if name in placeless or name.split("/")[0] in own]
    gone = set(ignored)
    return ignored, [name for name in left if name not in gone]


def _check_patterns(rules: NameRules, wanted: Sequence[bool], names: Sequence[str], catalog: Catalog) -> None:
    idle = [pattern for pattern, hit in zip(rules.allow_missing, wanted, strict=True) if not hit]
    if idle:
        raise UnsupportedError(catalog.url, f"allow_missing: no name of the state matches {idle[0]!r}")
    paths = (*names, *_value_paths(catalog))
    for pattern in rules.allow_unexpected:
        if pattern not in EVERYTHING and not any(map(matcher([pattern]), paths)):
            raise UnsupportedError(catalog.url, f"allow_unexpected: no stored name matches {pattern!r}")


def _value_paths(catalog: Catalog) -> list[str]:
    """Paths of stored values, those of containers included."""
    found: list[str] = []

    def visit(node: object, path: str) -> None:
        if path:
            found.append(path)
        if isinstance(node, dict):
            for key, item in node.items():
                visit(item, f"{path}/{key}" if path else str(key))

    visit(catalog.values, "")
    return found


def _advice(catalog: Catalog, missing: Sequence[str], unexpected: Sequence[str]) -> str:
    """What to do about names that do not agree."""
    of_model = all(any(name.startswith("model/") for name in names) for names in (missing, unexpected))
    known = formats.names_advice(catalog.notes.origin) if of_model else ""
    if known:
        return known
    frozen = next((remark for remark in catalog.notes.remarks if "exclude_frozen_parameters" in remark), "")
    if missing and not unexpected and frozen:
        return f"{frozen}; pass allow_missing=[…] with patterns for them"
    pair = _same_ending(missing, unexpected)
    if pair is not None:
        old, new = pair
        return f"pass rename={{{old!r}: {new!r}}} if they are the same tensors under other names"
    options = ["allow_missing=[…] to leave what is not stored as it is"] * bool(missing)
    options += ["allow_unexpected=[…] to leave out what the state has no place for"] * bool(unexpected)
    return f"pass {', '.join(options)}"


def _same_ending(missing: Sequence[str], unexpected: Sequence[str]) -> tuple[str, str] | None:
    """A regular expression and its replacement that turn all unexpected names into missing ones; None without such a pair.

    Looks at a prefix that is there on one side only, or another one on each.
    """
    lost = set(missing)
    for old in unexpected[:1]:
        for new in missing:
            ending = _common_ending(old, new)
            if not ending:
                continue
            before, after = old[: len(old) - len(ending)], new[: len(new) - len(ending)]
            if all(name.startswith(before) and after + name[len(before) :] in lost for name in unexpected):
                return f"^{re.escape(before)}", after
    return None


def _common_ending(a: str, b: str) -> str:
    """The longest ending of whole components (`.` or `/`) that two names share."""
    n = 0
    while n < min(len(a), len(b)) and a[-1 - n] == b[-1 - n]:
        n += 1
    ending = a[len(a) - n :]
    if n in {len(a), len(b)} or (a[-1 - n] in "./" and b[-1 - n] in "./"):  # it begins where components do
        return ending
    cut = next((i for i, c in enumerate(ending) if c in "./"), -1)
    return ending[cut + 1 :] if cut >= 0 else ""


def identity(catalog: Catalog) -> int:
    """A number that tells checkpoints apart: step, names, dtypes, shapes, and where every fragment lies."""
    table = catalog.fragments
    tensors = "\n".join(f"{spec.name}\t{spec.dtype}\t{spec.shape}" for spec in catalog.tensors)
    files = "\n".join(f"{file.path}\t{file.size}" for file in catalog.files)
    columns = (table.tensor, table.file, table.start, table.offset, table.length)
    return _digest(f"{catalog.notes.step}\n{tensors}\n{files}\n", *(column.tobytes() for column in columns))


def _digest(text: str, *parts: bytes) -> int:
    whole = (text.encode("utf-8", "surrogatepass"), *parts)
    return digest("xxh3-64", np.frombuffer(b"".join(whole), dtype=np.uint8))
