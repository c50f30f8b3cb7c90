"""What Hugging Face's Trainer and accelerate keep beside the weights: optimizer, scheduler, RNG states, the trainer's records.

Each is a file of its own. Readers of the weights pass their catalog through `with_training_state`, which adds what is there
under canonical names: `optimizer` (by number, as torch has it, or by name where the file knows it), `scheduler`, `rng` for each
rank, `trainer_state`. Nothing is left out without a remark.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from ucformat import values as trees
from ucformat.catalog import Catalog, CatalogBuilder, File, Notes
from ucformat.containers.zip_read import checks_of
from ucformat.errors import FormatError, UnsupportedError
from ucformat.formats.torchsave import add_leaves, is_tensor, placeholders
from ucformat.formats.torchstate import to_canonical
from ucformat.formats.unite import seen_from, unite
from ucformat.pickles.unpickle import open_torch_zip, to_values
from ucformat.storage.store import Store
from ucformat.values.codec import RankLocal

BOOKKEEPING = frozenset({"args", "custom", "dl_state_dict", "rng", "sampler", "scaler", "trainer_state"})
"""Names of what nobody has to have a place for: see `formats.bookkeeping`."""

_RECORDS = "trainer_state.json"
_RECORDS_BYTES = 256 << 20  # a line for every logged step
_ARGUMENTS = "training_args.bin"
_SINGLE = re.compile(r"((?:optimizer|scheduler|sampler|scaler|dl_state_dict)(?:_\d+)?)\.(?:pt|bin)")
_RNG = re.compile(r"(?:rng_state|random_states)(?:_(\d{1,7}))?\.(?:pth|pkl)")
_CUSTOM = re.compile(r"custom_checkpoint_(\d{1,7})\.pkl")


def is_training_file(name: str) -> bool:
    """Whether a file of this name beside weights is read as training state: then it describes no model."""
    return name in (_RECORDS, _ARGUMENTS) or any(pattern.fullmatch(name) for pattern in (_SINGLE, _RNG, _CUSTOM))


@dataclass(slots=True)
class _Found:
    """What the files hold, before it becomes a catalog."""

    tree: dict[str, Any]
    files: dict[str, File]
    remarks: list[str]


def with_training_state(catalog: Catalog, root: Store) -> Catalog:
    """The catalog and what lies beside the weights in `root`, the directory that was given.

    Raises FormatError, ChecksumError and UnsafePickleError for a damaged or hostile file; what can't be read is in the remarks.
    """
    names = [name for name in root.list() if not name.endswith("/")]
    if not any(name == _RECORDS or _SINGLE.fullmatch(name) or _RNG.fullmatch(name) for name in names):
        return catalog
    found = _Found({}, {}, [])
    for name in names:
        if (match := _SINGLE.fullmatch(name)) is not None:
            _take(root, name, (match[1],), found)
        elif (match := _CUSTOM.fullmatch(name)) is not None:
            _take(root, name, ("custom", match[1]), found)
        elif name == _ARGUMENTS:
            _take(root, name, ("args",), found)
    _take_rng(root, names, found)
    if _RECORDS in names:
        found.tree["trainer_state"] = _records(root)
    return _united(seen_from(catalog, root), found)


def _take(root: Store, name: str, place: Sequence[str], found: _Found) -> None:
    tree = _open(root, name, found)
    if tree is None:
        return
    held = found.tree
    for part in place[:-1]:
        held = held.setdefault(part, {})
    held[place[-1]] = tree[0]


def _open(root: Store, name: str, found: _Found) -> tuple[Any] | None:
    """The content of a torch.save file, None (and a remark) for one of a kind that isn't read."""
    try:
        opened = open_torch_zip(root, name)
    except UnsupportedError as error:
        found.remarks.append(f"not read: {name}: {error.why}")
        return None
    data = [entry for key, entry in opened.entries.items() if key.startswith("data/")]
    found.files[name] = File(name, root.size(name), checks_of(data))
    return (to_values(opened.tree, name),)


def _take_rng(root: Store, names: Sequence[str], found: _Found) -> None:
    """The RNG states of all ranks, as one item of which each rank has its own."""
    ranks = sorted((int(match[1] or 0), name) for name in names if (match := _RNG.fullmatch(name)) is not None)
    opened = [(rank, _open(root, name, found)) for rank, name in ranks]
    held = [(rank, tree[0]) for rank, tree in opened if tree is not None]
    if held:
        coords = tuple({"dp": rank} for rank, _ in held)
        found.tree["rng"] = RankLocal("error", coords, tuple(state for _, state in held))


def _records(root: Store) -> Any:
    where, size = f"{root.url}/{_RECORDS}", root.size(_RECORDS)
    if size > _RECORDS_BYTES:
        raise FormatError(where, f"{size} bytes: the limit is {_RECORDS_BYTES}")
    try:
        return json.loads(root.read(_RECORDS).decode())
    except (ValueError, RecursionError) as error:
        raise FormatError(where, f"malformed: {error}", 0, size) from error


def _united(catalog: Catalog, found: _Found) -> Catalog:
    known = set(catalog.values) if isinstance(catalog.values, dict) else set()
    known |= {name.split("/")[0] for name in catalog.names}
    twice = sorted(known & found.tree.keys())
    tree = {key: value for key, value in found.tree.items() if key not in twice}
    if twice:
        found.remarks.append(f"left out, since the checkpoint itself has it: {', '.join(twice)} of the trainer")
    nest, _ = to_canonical(tree, is_tensor)
    kept, leaves = trees.split(nest, is_tensor)
    builder = CatalogBuilder(catalog.store)
    add_leaves(builder, leaves, found.files)
    united = unite(catalog, builder.build(kept, Notes()))
    records = tree.get("trainer_state")
    step = records.get("global_step") if isinstance(records, dict) else None
    notes = replace(
        catalog.notes,
        step=step if catalog.notes.step is None and type(step) is int else catalog.notes.step,
        remarks=(*catalog.notes.remarks, *found.remarks, *placeholders(kept)),
    )
    return replace(united, notes=notes)
