"""`ucconvert reindex PATH`."""

from __future__ import annotations

import typer

from ucformat.cli.screen import count_text, is_leader, say


def reindex(path: str = typer.Argument(metavar="PATH", help="Native checkpoint whose index is lost or damaged.")) -> None:
    """Rebuild the index of a native checkpoint from its shards.

    The result has to be the index that was committed, byte for byte.
    """
    from ucformat.formats import native
    from ucformat.formats.source import locate

    if not is_leader():
        return
    store = native.find(locate(path))
    fragments = native.reindex(store)
    say(f"rebuilt the index of {store.url}: {count_text(fragments, 'fragment')}")
