"""`ucconvert validate PATH`."""

from __future__ import annotations

import typer

from ucformat.cli.screen import count_text, is_leader, say, say_json


def validate(
    path: str = typer.Argument(metavar="PATH", help="Checkpoint, or run directory, of ucformat's own format."),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Check a native checkpoint against the specification of the format, clause by clause.

    For those who write the format with a program of their own. Reads all of it; lists violations with the clause of
    specs/format.md, file and bytes, also of rules that readers do not depend on. Exit status 1 when there are any.
    """
    from ucformat.formats.native.validate import validate as check
    from ucformat.formats.source import locate

    if not is_leader():
        return
    result = check(locate(path).store)
    if json:
        say_json(result)
    else:
        for violation in result.violations:
            say(str(violation))
        verdict = "valid" if result.ok else f"INVALID: {count_text(len(result.violations), 'violation')}"
        say(f"{verdict}: {count_text(len(result.checkpoints), 'checkpoint')}")
    if not result.ok:
        raise typer.Exit(1)
