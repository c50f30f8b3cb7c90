"""`ucconvert SRC DST --to FORMAT`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from ucformat.cli.screen import bytes_text, count_text, join_ranks, parse_size, progress, remark, say, say_json

if TYPE_CHECKING:
    from ucformat.reshard.convert import Conversion, ConvertReport
    from ucformat.reshard.selection.mesh_layout import MeshLayout

_NAMES_SHOWN = 6
_EQUALS = re.compile(r"(?<!\(\?)(?<!\(\?<)=")  # not that of (?=…) and (?<=…)


def convert(
    src: str = typer.Argument(metavar="SRC", help="Checkpoint to read: a directory, a file, or an fsspec URL."),
    dst: str = typer.Argument(metavar="DST", help="Where to write. It appears only when complete."),
    to: str = typer.Option(
        ...,
        "--to",
        "-t",
        help="Format to write: native, hf, dcp, torchsave, megatron, deepspeed, ucp, or one that another package registered.",
    ),
    dtype: str | None = typer.Option(None, help="Convert the model's floating-point tensors: bf16, fp16, fp32, fp64."),
    keep_dtype: list[str] | None = typer.Option(None, help="Names that keep their dtype under --dtype: a glob. Repeatable."),
    companions: str | None = typer.Option(None, metavar="DIR", help="Model directory whose config, tokenizer… go along."),
    select: list[str] | None = typer.Option(None, help="Only names that match this glob, as `model/*`. Repeatable."),
    exclude: list[str] | None = typer.Option(None, help="Not names that match this glob. Repeatable."),
    rename: list[str] | None = typer.Option(
        None, help="Rename: `REGEX=TEXT` over names, as `^model/net\\.=model/`. Repeatable, applied in order."
    ),
    family: str | None = typer.Option(
        None, help="Translate between Megatron and Hugging Face: `llama`, `mixtral`, … or `auto`; `llama:heads=32,groups=8`."
    ),
    layout: str | None = typer.Option(None, help="Cut for a mesh, one file per rank: `dp=2,tp=4` or a JSON rule file."),
    option: list[str] | None = typer.Option(
        None, metavar="NAME=VALUE", help="Setting of the target format, as `stage=3` for deepspeed. Repeatable."
    ),
    max_file_size: str = typer.Option("4GiB", help="Largest file of an output that is split into several."),
    overwrite: bool = typer.Option(False, "--overwrite", help="Replace the checkpoint at DST."),
    drop: bool = typer.Option(
        False, "--drop", help="Leave out weights and optimizer state that the target format has no place for, and list them."
    ),
    dry_run: bool = typer.Option(False, "--dry-run", help="Say what would be read and written; write nothing."),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Convert a checkpoint into another format.

    Reads by byte range and writes in bounded memory. Optimizer state keeps its dtypes under `--dtype`; a format without a
    place for it (hf) leaves it out and says so. Nothing is written before all that is needed is known to be there.
    """
    from ucformat.reshard.convert import prepare, run

    mesh = None if layout is None else read_layout(layout)
    limit = parse_size(max_file_size)
    group = join_ranks()
    with group.together(f"planning the conversion of {src}"):
        conversion = prepare(
            src,
            dst,
            to,
            dtype=dtype,
            keep_dtype=keep_dtype or (),
            companions=companions,
            select=select or (),
            exclude=exclude or (),
            rename=parse_renames(rename or ()),
            family=family,
            layout=mesh,
            options=parse_options(option or ()),
            max_file_bytes=limit,
            overwrite=overwrite,
            drop=drop,
        )
    if dry_run:
        _tell_plan(conversion, json)
        return
    with progress(f"{conversion.read_as} → {to}", -(-conversion.written_bytes // group.size)) as advance:
        report = run(conversion, group, lambda done, total: advance(done))
    _tell_report(conversion, report, json)


def parse_renames(texts: Sequence[str]) -> list[tuple[str, str]]:
    """`REGEX=TEXT`, cut at the first `=` that is no part of a lookahead or lookbehind."""
    found = [_EQUALS.split(text, maxsplit=1) for text in texts]
    for text, parts in zip(texts, found, strict=True):
        if len(parts) != 2 or not parts[0]:
            raise typer.BadParameter(f"{text!r} is not REGEX=TEXT", param_hint="--rename")
    return [(parts[0], parts[1]) for parts in found]


def parse_options(texts: Sequence[str]) -> dict[str, str]:
    """`NAME=VALUE`, each name once."""
    found: dict[str, str] = {}
    for text in texts:
        name, equals, value = text.partition("=")
        if not equals or not name or name in found:
            raise typer.BadParameter(f"{text!r} is not NAME=VALUE, or the second of its name", param_hint="--option")
        found[name] = value
    return found


def read_layout(text: str) -> MeshLayout:
    """`dp=2,tp=4`, or the name of a JSON file."""
    from ucformat.errors import LayoutError
    from ucformat.reshard.selection.mesh_layout import parse

    if not os.path.isfile(text):
        return parse(text)
    try:
        return parse(Path(text).read_text(encoding="utf-8"))
    except UnicodeDecodeError as error:
        raise LayoutError(text, f"not a text file: {error}") from error


def _tell_report(conversion: Conversion, report: ConvertReport, json: bool) -> None:
    if json:
        say_json(report)
        return
    speed = bytes_text(report.written_bytes / max(report.seconds, 1e-6))
    say(
        f"{conversion.read_as} → {conversion.to}: {count_text(report.tensors, 'tensor')}, "
        f"{bytes_text(report.written_bytes)} in {report.seconds:.1f} s ({speed}/s) to {conversion.dst}"
    )
    _tell_rest(conversion)


def _tell_rest(conversion: Conversion) -> None:
    if conversion.left_out:
        shown = ", ".join(conversion.left_out[:_NAMES_SHOWN])
        more = len(conversion.left_out) - _NAMES_SHOWN
        remark(f"left out: {shown}{f' and {more:,} more' if more > 0 else ''}")
    for text in conversion.remarks:
        remark(text)


def _tell_plan(conversion: Conversion, json: bool) -> None:
    if json:
        say_json(
            {
                "to": conversion.to,
                "tensors": conversion.tensors,
                "read_bytes": conversion.read_bytes,
                "written_bytes": conversion.written_bytes,
                "reads": conversion.reads,
                "writes": conversion.writes(),
                "left_out": conversion.left_out,
                "values_left_out": conversion.values_left_out,
                "remarks": conversion.remarks,
            }
        )
        return
    files = count_text(len(conversion.reads), "file")
    say(f"would read {bytes_text(conversion.read_bytes)} from {files} of {conversion.source.url}")
    for share in conversion.reads:
        say(f"  {share.path}: {bytes_text(share.nbytes)} of {bytes_text(share.size)}")
    writes = conversion.writes()
    say(
        f"would write {count_text(conversion.tensors, 'tensor')}, {bytes_text(conversion.written_bytes)}, "
        f"in {count_text(len(writes), 'file')} as {conversion.to} to {conversion.dst}"
    )
    for number, nbytes in enumerate(writes):
        say(f"  file {number + 1}: {bytes_text(nbytes)}")
    _tell_rest(conversion)
