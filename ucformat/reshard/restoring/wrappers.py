"""Names with what wrappers add to them (`module.`, `_orig_mod.`), matched between checkpoint and live state.

A module's names never hold them, since the walk leaves them out; those of a checkpoint do that somebody wrote from
`ddp.state_dict()`, and those of a live `state_dict()` in its place.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping

from torch import nn

from ucformat.catalog import Catalog
from ucformat.errors import UnsupportedError
from ucformat.group import Group
from ucformat.naming import MODEL, rename_catalog, unwrapped
from ucformat.reshard.state.leaf import is_tensor
from ucformat.values import join_name, split_name

PREFIXES = ("", "module.", "_orig_mod.", "module._orig_mod.", "_orig_mod.module.")
"""What a live `state_dict()` may have in front of all its names; "" stands for none."""


def as_live(catalog: Catalog, into: Mapping[str, object], group: Group) -> tuple[Catalog, str]:
    """The catalog with its `model/*` names as those of `into` are, and a remark when that changed any. All ranks call it.

    Names change only where more of them are then both stored and wanted, on all ranks together.
    """
    stored = [name for name in catalog.names if name.startswith(f"{MODEL}/") and len(split_name(name)) == 2]
    forms = _forms([split_name(name)[1] for name in stored])
    live = set(_live_names(into.get(MODEL)))
    hits = [len(live.intersection(form.values())) for form in forms]
    best = group.numbers(hits).sum(axis=0).tolist()
    chosen = best.index(max(best))  # as it is stored, where that is as good
    changed = {old: new for old, new in forms[chosen].items() if old != new}
    if not changed:
        return catalog, ""
    names = {join_name(MODEL, old): new for old, new in changed.items()}

    def rename(name: str) -> str:
        top, _, rest = name.partition("/")
        new = names.get(f"{MODEL}/{rest}")
        return name if new is None else join_name(top, new)

    example = min(changed)
    remark = f"{len(changed)} names are stored as wrappers call them: {example} is taken for {changed[example]}"
    return rename_catalog(catalog, rename), remark


def _forms(names: Collection[str]) -> list[dict[str, str]]:
    """Stored name → name, in each form that the live state may have: as it is first."""
    same = {name: name for name in names}
    try:
        plain = unwrapped(names)
    except UnsupportedError:  # two names would be one
        return [same, *({} for _ in PREFIXES)]
    return [same, *({name: prefix + short for name, short in plain.items()} for prefix in PREFIXES)]


def _live_names(model: object) -> Iterator[str]:
    if isinstance(model, nn.Module):
        names = [name for name, _ in (*model.named_parameters(), *model.named_buffers())]
        try:
            yield from unwrapped(names).values()
        except UnsupportedError:
            yield from names
    elif isinstance(model, (list, tuple)):
        for stage in model:
            yield from _live_names(stage)
    elif isinstance(model, Mapping):
        yield from (str(name) for name, item in model.items() if is_tensor(item))
