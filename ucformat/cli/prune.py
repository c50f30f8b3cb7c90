"""`ucconvert prune PATH`."""

from __future__ import annotations

import typer

from ucformat.cli.screen import bytes_text, count_text, is_leader, remark, say, say_json


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
    from ucformat.snapshot.slots.leftovers import prune_slots

    if not is_leader():
        return
    found = [*remove(path, keep=keep, dry_run=not yes), *prune_slots(path, dry_run=not yes)]
    if json:
        say_json(found)
        return
    free = [item for item in found if not item.in_use]
    for item in found:
        stays = " (in use or too young to tell: stays)" if item.in_use else ""
        say(f"{item.path}: {item.what}, {bytes_text(item.nbytes)}{stays}")
    done = "removed" if yes else "would remove"
    say(f"{done} {count_text(len(free), 'leftover')}, {bytes_text(sum(item.nbytes for item in free))}")
    if free and not yes:
        remark("nothing was changed: pass --yes to remove these")
