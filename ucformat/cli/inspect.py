"""`ucconvert inspect PATH`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import typer

from ucformat.cli.screen import bytes_text, count_text, is_leader, remark, say, say_json

if TYPE_CHECKING:
    from ucformat.catalog import Catalog


@dataclass(frozen=True, slots=True)
class FragmentRow:
    """Where one box of a tensor lies."""

    file: str
    start: int
    offset: list[int]
    length: list[int]


@dataclass(frozen=True, slots=True)
class TensorRow:
    """What is printed of a tensor."""

    name: str
    dtype: str
    shape: list[int]
    nbytes: int
    fragments: int
    boxes: list[FragmentRow]


def inspect(
    path: str = typer.Argument(metavar="PATH", help="Checkpoint of any format."),
    select: list[str] | None = typer.Option(None, help="Only names, and values, that match this glob. Repeatable."),
    limit: int = typer.Option(400, min=0, help="Largest number of tensors to print; 0 means all."),
    fragments: bool = typer.Option(False, "--fragments", help="Print every fragment: file, byte offset, box."),
    values: bool = typer.Option(False, "--values", help="Print what is no tensor."),
    json: bool = typer.Option(False, "--json", help="Print everything as JSON."),
) -> None:
    """Show what is in a checkpoint: names, dtypes, shapes, sizes, fragments, mesh.

    Reads metadata only, whatever the size of the checkpoint.
    """
    from ucformat.formats import open_named
    from ucformat.reshard.selection.select import expect_matches, narrow

    if not is_leader():
        return
    name, catalog = open_named(path)
    expect_matches(select or (), [catalog], path, values=True)
    catalog = narrow(catalog, select or (), ()) if select else catalog
    if json:
        say_json(_document(path, name, catalog, fragments))
        return
    _tell_head(path, name, catalog)
    for line in _tree(list(_rows(catalog, fragments)), limit):
        say(line)
    for alias, name in sorted(catalog.aliases.items()):
        say(f"{alias} → {name}")
    if values:
        if catalog.values in ({}, None):
            say("values: none")
        else:
            _tell_values(catalog.values, "")
    for text in catalog.notes.remarks:
        remark(text)


def _rows(catalog: Catalog, boxes: bool) -> Iterator[TensorRow]:
    table = catalog.fragments
    count = np.bincount(table.tensor, minlength=len(catalog.tensors))
    for index, spec in enumerate(catalog.tensors):
        held: list[FragmentRow] = []
        if boxes:
            rows = table.rows(index)
            for row in range(rows.start, rows.stop):
                box = table.box(row, len(spec.shape))
                file = catalog.files[int(table.file[row])].path
                held.append(FragmentRow(file, int(table.start[row]), list(box.offset), list(box.length)))
        yield TensorRow(spec.name, spec.dtype, list(spec.shape), spec.nbytes, int(count[index]), held)


def _document(path: str, name: str, catalog: Catalog, fragments: bool) -> dict[str, object]:
    import msgspec

    from ucformat.values.tree import encode

    return {
        "path": path,
        "format": name,
        "origin": catalog.notes.origin,
        "origin_layout": catalog.notes.origin_layout,
        "step": catalog.notes.step,
        "mesh": catalog.notes.mesh,
        "nbytes": catalog.nbytes,
        "fragments": len(catalog.fragments),
        "files": [{"path": file.path, "size": file.size} for file in catalog.files],
        "tensors": list(_rows(catalog, fragments)),
        "aliases": dict(catalog.aliases),
        "values": msgspec.json.decode(encode(catalog.values)),
        "remarks": catalog.notes.remarks,
    }


def _tell_head(path: str, name: str, catalog: Catalog) -> None:
    notes = catalog.notes
    facts = [name if notes.origin in ("", name) else f"{name} (converted from {notes.origin})"]
    facts += [] if notes.step is None else [f"step {notes.step}"]
    facts += [f"mesh {'×'.join(f'{axis}{size}' for axis, size in notes.mesh.items())}"] if notes.mesh else []
    facts += [
        count_text(len(catalog.tensors), "tensor"),
        bytes_text(catalog.nbytes),
        f"{count_text(len(catalog.fragments), 'fragment')} in {count_text(len(catalog.files), 'file')}",
    ]
    say(f"{path}: {', '.join(facts)}")
    if isinstance(catalog.values, dict) and catalog.values:
        say(f"values: {', '.join(map(str, catalog.values))}")


def _tree(rows: Sequence[TensorRow], limit: int) -> Iterator[str]:
    """Lines of a tree over the `/`-components of names, leaves in columns."""
    shown = rows if limit == 0 else rows[:limit]
    width = max((len(_leaf(row.name)[1]) + 2 * row.name.count("/") for row in shown), default=0)
    before: list[str] = []
    for row in shown:
        folders, leaf = _leaf(row.name)
        same = 0
        while same < min(len(folders), len(before)) and folders[same] == before[same]:
            same += 1
        for depth in range(same, len(folders)):
            yield f"{'  ' * depth}{folders[depth]}/"
        before = folders
        parts = "" if row.fragments == 1 else f"  {count_text(row.fragments, 'fragment')}"
        label = f"{'  ' * len(folders)}{leaf}"
        yield f"{label:<{width}}  {row.dtype:<8} {row.shape!s:<20} {bytes_text(row.nbytes):>9}{parts}"
        for box in row.boxes:
            inside = ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.length, strict=True))
            yield f"{'  ' * len(folders)}    [{inside}] at {box.file}:{box.start}"
    if len(rows) > len(shown):
        yield f"… and {len(rows) - len(shown):,} more tensors (--limit 0 shows all, --select chooses)"


def _leaf(name: str) -> tuple[list[str], str]:
    *folders, leaf = name.split("/")
    return folders, leaf


def _tell_values(value: object, path: str) -> None:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            _tell_values(below, f"{path}/{key}" if path else str(key))
    else:
        text = repr(value)
        say(f"{path or 'values'} = {text if len(text) <= 100 else text[:97] + '...'}")
