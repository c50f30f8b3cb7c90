"""`ucconvert index SRC`."""

from __future__ import annotations

import typer

from ucformat.cli.screen import bytes_text, count_text, is_leader, remark, say, say_json


def index(
    src: str = typer.Argument(metavar="SRC", help="DeepSpeed, Megatron, DCP… directory: what `load` is given later."),
    checksums: bool = typer.Option(False, "--checksums", help="Keep a digest of each block of 256 KiB; reads everything."),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Put `ucf.json` and an index beside the files of a foreign checkpoint; no tensor is copied.

    It then opens as fast as a native one. Files that were changed or removed since are an error. Run it again after a change;
    remove `ucf.json` to have the files read as before.
    """
    from ucformat.reshard.adopt import index as adopt

    if not is_leader():
        return
    report = adopt(src, checksums=checksums)
    if json:
        say_json(report)
        return
    files = count_text(report.files, "file")
    say(
        f"indexed {report.path}: {count_text(report.tensors, 'tensor')} in {files} of {report.format}, "
        f"{bytes_text(report.written_bytes)} written"
        + (f", {bytes_text(report.checksummed_bytes)} checksummed" if checksums else "")
    )
    for text in report.remarks:
        remark(text)
