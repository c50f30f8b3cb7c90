"""`ucf_notes.json`: what is known of a checkpoint beside its state, in directories of formats that have no place for it.

Their own programs ignore the file. It is written only where there is something to say.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from ucformat.catalog import Notes
from ucformat.errors import FormatError
from ucformat.storage.store import Store

FILE = "ucf_notes.json"
_MAX_BYTES = 16 << 20  # a line for each folder or name that is arranged in some way


class _Record(msgspec.Struct, frozen=True):
    """The file's content; unknown fields are ignored."""

    origin_layout: dict[str, str] = {}


def put(store: Store, notes: Notes) -> None:
    """Write the file. Raises StorageError."""
    if notes.origin_layout:
        store.put(FILE, msgspec.json.encode(_Record(dict(sorted(notes.origin_layout.items())))) + b"\n")


def read_origin_layout(store: Store) -> Mapping[str, str]:
    """`Notes.origin_layout` of the checkpoint in `store`. Raises FormatError when the file is malformed."""
    if not store.exists(FILE):
        return {}
    size, where = store.size(FILE), f"{store.url}/{FILE}"
    if size > _MAX_BYTES:
        raise FormatError(where, f"notes of {size} bytes: the limit is {_MAX_BYTES}")
    try:
        return msgspec.json.decode(store.read(FILE), type=_Record).origin_layout
    except (msgspec.DecodeError, RecursionError) as error:
        raise FormatError(where, f"malformed notes: {error}", 0, size) from error
