"""`ucconvert diff A B`."""

from __future__ import annotations

import typer

from ucformat.cli.screen import bytes_text, count_text, is_leader, progress, remark, say, say_json

_SHOWN = 50  # differences printed; --json prints all


def diff(
    a: str = typer.Argument(metavar="A", help="One checkpoint, of any format."),
    b: str = typer.Argument(metavar="B", help="The other, of any format."),
    atol: float | None = typer.Option(None, min=0.0, help="Absolute tolerance; bit for bit without it and --rtol."),
    rtol: float | None = typer.Option(None, min=0.0, help="Relative tolerance."),
    ignore_dtype: bool = typer.Option(False, "--ignore-dtype", help="Compare numbers across dtypes."),
    values: bool = typer.Option(False, "--values", help="Compare what is no tensor, too: step, hyper-parameters…"),
    select: list[str] | None = typer.Option(None, help="Only names, and values, that match this glob. Repeatable."),
    exclude: list[str] | None = typer.Option(None, help="Not names, nor values, that match this glob. Repeatable."),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Compare two checkpoints: names, dtypes, shapes and values.

    Exit status 0 when they are equal, 1 when they differ. Tied weights that one side stores under one name only are equal.
    """
    from ucformat.formats import open_catalog
    from ucformat.reshard.diff import Tolerance
    from ucformat.reshard.diff import diff as compare
    from ucformat.reshard.selection.select import expect_matches, narrow

    if not is_leader():
        return
    both = [open_catalog(path) for path in (a, b)]
    expect_matches(select or (), both, f"{a} and {b}", values=values)
    left, right = (narrow(catalog, select or (), exclude or ()) for catalog in both)
    tolerance = None if atol is None and rtol is None else Tolerance(atol or 0.0, rtol or 0.0)
    done = 0
    with progress("diff", left.nbytes) as advance:

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            advance(done)

        result = compare(left, right, tolerance=tolerance, any_dtype=ignore_dtype, values=values, on_bytes=count)
    if json:
        say_json(result)
    else:
        for item in result.differences[:_SHOWN]:
            say(f"{item.name}: {item.kind}{f': {item.detail}' if item.detail else ''}")
        if len(result.differences) > _SHOWN:
            say(f"… and {len(result.differences) - _SHOWN:,} more (--json lists all)")
        for text in result.notes:
            remark(text)
        verdict = "equal" if result.equal else count_text(len(result.differences), "difference")
        how = "bit for bit" if tolerance is None and not ignore_dtype else "as numbers"
        say(f"{verdict}: {count_text(result.tensors, 'tensor')}, {bytes_text(result.nbytes)} compared {how}")
    if not result.equal:
        raise typer.Exit(1)
