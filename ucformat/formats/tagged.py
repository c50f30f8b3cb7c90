"""Run folders of DeepSpeed that we write: one tag, a file that points to it, and a note that says that it is ours to replace."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from ucformat.catalog import Notes
from ucformat.errors import UnsupportedError
from ucformat.formats import notes_file
from ucformat.formats.contract import Owns
from ucformat.formats.source import Source
from ucformat.storage.store import Store


def put(store: Store, notes: Notes, name: str, pointer: str, tag: str) -> None:
    """Write the file `pointer`, and the notes with the tag. Raises StorageError."""
    notes_file.put(store, replace(notes, origin_layout={**notes.origin_layout, f"{name}:tag": tag}))
    store.put(pointer, tag.encode())


def origin_layout(store: Store, name: str) -> Mapping[str, str]:
    """How the origin of a run folder was arranged, as `put` noted it. Raises FormatError."""
    return {key: value for key, value in notes_file.read_origin_layout(store).items() if key != f"{name}:tag"}


def owned_files(name: str, pointer: str) -> Callable[[Source], Owns]:
    """For `Reader.owned_files`: what `put` and its writer made. Raises UnsupportedError for a run that DeepSpeed wrote."""

    def owned(source: Source) -> Owns:
        tag = notes_file.read_origin_layout(source.store).get(f"{name}:tag")
        if not tag or "/" in tag:
            why = (
                f"holds a checkpoint of the format {name}, which is never replaced unless it was written here: remove it yourself"
            )
            raise UnsupportedError(source.url, why)
        return lambda path: path.startswith(f"{tag}/") or path in (pointer, notes_file.FILE)

    return owned
