"""`ucconvert verify PATH`."""

from __future__ import annotations

import typer

from ucformat.cli.screen import bytes_text, count_text, is_leader, progress, remark, say, say_json

_TENSORS_SHOWN = 4


def verify(
    path: str = typer.Argument(metavar="PATH", help="Checkpoint of any format."),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Check every checksum and the coverage of every tensor.

    Lists all damage with file, byte range and the tensors that it hits; exit status 1 when there is any.
    """
    from ucformat.formats import open_named
    from ucformat.reshard.verify import verify as check

    if not is_leader():
        return
    name, catalog = open_named(path)
    done = 0
    with progress("verify", sum(file.size for file in catalog.files)) as advance:

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            advance(done)

        result = check(catalog, count)
    if json:
        say_json(result)
    else:
        for damage in result.damages:
            place = "" if damage.start is None else f", bytes {damage.start}-{'' if damage.stop is None else damage.stop}"
            shown = ", ".join(damage.tensors[:_TENSORS_SHOWN]) + (" …" if len(damage.tensors) > _TENSORS_SHOWN else "")
            where = f"{damage.file}{place}: " if damage.file else ""
            say(f"{where}{damage.what}{f'; damages {shown}' if shown and damage.file else ''}")
        if result.unchecked:
            files = count_text(len(result.unchecked), "file")
            remark(f"{name} has no checksums for {files}: only the structure was checked")
        verdict = "ok" if result.ok else f"DAMAGED: {count_text(len(result.damages), 'finding')}"
        size = f"{bytes_text(result.nbytes)}, {bytes_text(result.checked)} checksummed"
        say(f"{verdict}: {count_text(result.tensors, 'tensor')}, {size}")
    if not result.ok:
        raise typer.Exit(1)
