"""`ucconvert fingerprint PATH`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import typer

from ucformat.cli.screen import bytes_text, count_text, is_leader, progress, say, say_json

if TYPE_CHECKING:
    from ucformat.reshard.fingerprint import Fingerprint

_SHOWN = 50


class _Saved(msgspec.Struct, frozen=True):
    """What `--json` printed."""

    version: int
    tensors: dict[str, str]


def fingerprint(
    path: str = typer.Argument(metavar="PATH", help="Checkpoint of any format."),
    against: Path | None = typer.Option(None, metavar="FILE", help="Compare with what --json printed of another checkpoint."),
    select: list[str] | None = typer.Option(None, help="Only names that match this glob. Repeatable."),
    exclude: list[str] | None = typer.Option(None, help="Not names that match this glob. Repeatable."),
    json: bool = typer.Option(False, "--json", help="Print the result as JSON."),
) -> None:
    """Print a digest of each tensor that does not depend on format or layout.

    Compare huge checkpoints, or copies that lie far apart, without bringing them together:
    `ucconvert fingerprint A --json > a.json` on one machine, `ucconvert fingerprint B --against a.json` on the other.
    Exit status 1 when they differ. specs/fingerprint.md defines it.
    """
    from ucformat.formats import open_catalog
    from ucformat.reshard.fingerprint import VERSION
    from ucformat.reshard.fingerprint import fingerprint as take
    from ucformat.reshard.selection.select import expect_matches, narrow

    if not is_leader():
        return
    saved = None if against is None else _read(against, VERSION)
    catalog = open_catalog(path)
    expect_matches([*(select or ()), *(exclude or ())], [catalog], path)
    catalog = narrow(catalog, select or (), exclude or ())
    done = 0
    with progress("fingerprint", catalog.nbytes) as advance:

        def count(nbytes: int) -> None:
            nonlocal done
            done += nbytes
            advance(done)

        found = take(catalog, on_bytes=count)
    if json:
        say_json({"version": VERSION, "digest": found.digest, "nbytes": found.nbytes, "tensors": dict(found.tensors)})
    else:
        _show(found, every=saved is None)
    if saved is not None and _tell_differences(found, saved, against):
        raise typer.Exit(1)


def _read(path: Path, version: int) -> dict[str, str]:
    try:
        saved = msgspec.json.decode(path.read_bytes(), type=_Saved)
    except OSError as error:
        raise typer.BadParameter(f"{path}: {error.strerror}", param_hint="--against") from error
    except msgspec.DecodeError as error:
        raise typer.BadParameter(
            f"{path}: not what `ucconvert fingerprint --json` prints: {error}", param_hint="--against"
        ) from error
    if saved.version != version:
        raise typer.BadParameter(f"{path}: version {saved.version}, this program knows {version}", param_hint="--against")
    return saved.tensors


def _show(found: Fingerprint, *, every: bool) -> None:
    for name, digest in found.tensors.items() if every else ():
        say(f"{digest}  {name}")
    say(f"{found.digest}: {count_text(len(found.tensors), 'tensor')}, {bytes_text(found.nbytes)}")


def _tell_differences(found: Fingerprint, saved: dict[str, str], against: Path | None) -> bool:
    names, common = found.differences(saved), found.tensors.keys() & saved.keys()
    for name in names[:_SHOWN]:
        what = "differs" if name in common else "only here" if name in found.tensors else f"only in {against}"
        say(f"{name}: {what}")
    if len(names) > _SHOWN:
        say(f"… and {len(names) - _SHOWN} more")
    say(f"{count_text(len(common.difference(names)), 'tensor')} equal, {len(names)} different")
    return bool(names) or not found.tensors
