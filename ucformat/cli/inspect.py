"""`ucconvert inspect PATH`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from ucformat.cli.screen import bytes_text, count_text, is_leader, remark, say, say_json

if TYPE_CHECKING:
    from ucformat.reshard.inspect import Inspection, TensorInfo


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
    from ucformat import look

    if not is_leader():
        return
    report = look.inspect(path, select=select or (), boxes=fragments)
    if json:
        say_json(_document(report))
        return
    _print_head(report)
    for line in _tree(report.tensors, limit):
        say(line)
    for alias, name in report.aliases.items():
        say(f"{alias} → {name}")
    if values:
        if report.values in ({}, None):
            say("values: none")
        else:
            _print_values(report.values, "")
    for text in report.remarks:
        remark(text)


def _document(report: Inspection) -> dict[str, object]:
    """The report as JSON has it: values by their exact encoding."""
    import msgspec

    from ucformat.values import encode

    fields = {field: getattr(report, field) for field in report.__dataclass_fields__}
    return {**fields, "values": msgspec.json.decode(encode(report.values))}


def _print_head(report: Inspection) -> None:
    facts = [report.format if report.origin in ("", report.format) else f"{report.format} (converted from {report.origin})"]
    facts += [] if report.step is None else [f"step {report.step}"]
    facts += [f"mesh {'×'.join(f'{axis}{size}' for axis, size in report.mesh.items())}"] if report.mesh else []
    facts += [
        count_text(len(report.tensors), "tensor"),
        bytes_text(report.nbytes),
        f"{count_text(report.fragments, 'fragment')} in {count_text(len(report.files), 'file')}",
    ]
    say(f"{report.path}: {', '.join(facts)}")
    if isinstance(report.values, dict) and report.values:
        say(f"values: {', '.join(map(str, report.values))}")


def _tree(rows: Sequence[TensorInfo], limit: int) -> Iterator[str]:
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
        boxes = "" if row.fragments == 1 else f"  {count_text(row.fragments, 'fragment')}"
        label = f"{'  ' * len(folders)}{leaf}"
        yield f"{label:<{width}}  {row.dtype:<8} {list(row.shape)!s:<20} {bytes_text(row.nbytes):>9}{boxes}"
        for box in row.boxes:
            inside = ", ".join(f"{o}:{o + n}" for o, n in zip(box.offset, box.length, strict=True))
            yield f"{'  ' * len(folders)}    [{inside}] at {box.file}:{box.start}"
    if len(rows) > len(shown):
        yield f"… and {len(rows) - len(shown):,} more tensors (--limit 0 shows all, --select chooses)"


def _leaf(name: str) -> tuple[list[str], str]:
    *folders, leaf = name.split("/")
    return folders, leaf


def _print_values(value: object, path: str) -> None:
    if isinstance(value, dict) and value:
        for key, below in value.items():
            _print_values(below, f"{path}/{key}" if path else str(key))
    else:
        text = repr(value)
        say(f"{path or 'values'} = {text if len(text) <= 100 else text[:97] + '...'}")
