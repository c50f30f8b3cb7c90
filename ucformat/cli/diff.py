"""`ucconvert diff A B`."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

import typer

from ucformat.cli.screen import bytes_text, count_text, is_leader, progress, remark, say, say_json

if TYPE_CHECKING:
    from ucformat.reshard.diff import Diff, Difference

_SHOWN = 50  # lines printed; --json prints all differences
_ALIKE = 8  # differences of one kind and wording that have a line each; more of them share one
_EXAMPLES = 3


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

    Exit status 0 when they are equal, 1 when they differ or nothing was compared. Tied weights that one side stores under one
    name only are equal.
    """
    from ucformat.formats import open_catalog
    from ucformat.reshard.diff import Tolerance
    from ucformat.reshard.diff import diff as compare
    from ucformat.reshard.selection.select import expect_matches, narrow

    if not is_leader():
        return
    both = [open_catalog(path) for path in (a, b)]
    expect_matches(select or (), both, f"{a} and {b}", values=values)
    expect_matches(exclude or (), both, f"{a} and {b}", values=True)
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
        _print_result(result, as_numbers=tolerance is not None or ignore_dtype, ignore_dtype=ignore_dtype)
    if not result.equal:
        raise typer.Exit(1)


def _print_result(result: Diff, *, as_numbers: bool, ignore_dtype: bool) -> None:
    lines = list(_lines(result.differences))
    for line in lines[:_SHOWN]:
        say(line)
    if len(lines) > _SHOWN:
        say(f"… and {len(lines) - _SHOWN:,} more (--json lists all)")
    for text in result.notes:
        remark(text)
    kinds = Counter(item.kind for item in result.differences)
    if kinds["dtype"] and not ignore_dtype:
        remark("tensors of different dtypes were not compared: --ignore-dtype --rtol 0.01 compares them as numbers")
    if result.nothing:
        say("nothing was compared: there are no tensors on either side (--values compares values)")
        return
    several = f" ({', '.join(f'{count:,} {kind}' for kind, count in kinds.most_common())})" if len(kinds) > 1 else ""
    verdict = "equal" if result.equal else count_text(len(result.differences), "difference") + several
    size = f"{count_text(result.tensors, 'tensor')}, {bytes_text(result.nbytes)} compared"
    how = "as numbers" if as_numbers else "bit for bit"
    say(f"{verdict}: {f'{size} {how}' if result.tensors else 'no tensor was compared'}")


def _lines(differences: Sequence[Difference]) -> Iterator[str]:
    """A line for each difference, but one for all that are many and alike."""
    alike: dict[tuple[str, str], list[str]] = {}
    for item in differences:
        alike.setdefault((item.kind, item.detail), []).append(item.name)
    for item in differences:
        names, detail = alike[item.kind, item.detail], f": {item.detail}" if item.detail else ""
        if len(names) <= _ALIKE:
            yield f"{item.name}: {item.kind}{detail}"
        elif item.name == names[0]:
            shown, more = ", ".join(names[:_EXAMPLES]), len(names) - _EXAMPLES
            yield f"{len(names):,} names: {item.kind}{detail}: {shown} and {more:,} more (--json lists all)"
