"""`ucconvert prune PATH`."""

from __future__ import annotations

import typer

from ucformat.cli.screen import is_leader, say_json
from ucformat.cli.slots import print_leftovers


def prune(
    path: str = typer.Argument(metavar="PATH", help="Run directory, checkpoint, or snapshot directory."),
    keep: int | None = typer.Option(None, min=1, help="Remove old steps, too: all but the newest so many."),
    yes: bool = typer.Option(False, "--yes", help="Remove what is listed. Without it, nothing is changed."),
    json: bool = typer.Option(False, "--json", help="Print the list as JSON."),
) -> None:
    """List, and with --yes remove, what killed saves and conversions left, old steps, and slots of jobs that have ended.

    Only what ucformat has written is ever removed, and nothing that a running job is still writing.
    """
    from ucformat.reshard.prune import prune as remove
    from ucformat.snapshot.recovery.leftovers import prune_slots

    if not is_leader():
        return
    found = [*remove(path, keep=keep, dry_run=not yes), *prune_slots(path, dry_run=not yes)]
    if json:
        say_json(found)
        return
    print_leftovers(found, removed=yes)
