"""Who may remove what. A marker with a random token is written first; it vouches for everything that has the token in its name.

    step-00000100/.ucf.3f9c2a71d04b.json     the marker, there only while something is unfinished
    step-00000100/shards.3f9c2a71d04b/…      what belongs to it
    .out.3f9c2a71d04b.partial/               the same, for a directory that is written beside its place

Whoever writes holds the marker (see `Store.hold`) for as long as it lives. What is left of one that was killed is removed by
whoever writes to the same place next, or by `prune`. Nothing is ever removed because of how its name looks: names without a
marker are the user's own, whatever they are called.
"""

from __future__ import annotations

import functools
import logging
import os
import re
import secrets
import socket
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path

import msgspec

from ucformat.containers.envelope import seal, unseal
from ucformat.errors import MissingFileError, UcformatError
from ucformat.storage.store import Hold, Store

ELSEWHERE_S = 900.0  # without a sign of life on another machine, as not every network file system passes locks on
ABANDONED_S = 6 * 3600.0  # on stores without locks: longer than any save or conversion takes
_MARKER = re.compile(r"\.ucf\.([0-9A-Za-z_-]+)\.json")
_HALF_MARKER = re.compile(_MARKER.pattern + r"\.[0-9a-f]{12}\.part")
"""A marker whose writer was killed before it had its name, where files can't be written without one. Vouches for nothing, and is
in nobody's way."""
_LOG = logging.getLogger(__name__)


class Marker(msgspec.Struct, frozen=True, omit_defaults=True):
    """What a marker says; stored in the envelope of `ucf.json`."""

    token: str
    what: str
    """`save`, `convert`, `persist` or `remove`."""
    place: str = ""
    """Name beside the marker of what is being written or removed; empty: the directory that the marker is in."""
    replaces: tuple[str, ...] = ()
    """Files at the place that belong to the checkpoint which is replaced or removed."""
    identity: str = ""
    """Of the directory that is replaced, see `Store.identity`."""
    machine: str = ""
    process: str = ""
    """Who has written it, where the system can tell later whether that process still lives (see `this_process`)."""
    created: str = ""
    """UTC, ISO 8601; or when it was last renewed."""
    lease_s: float = 0.0
    """Above 0: its writer renews it more often than this, as long as it lives."""

    @property
    def path(self) -> str:
        return marker_path(self.token)

    @property
    def age_s(self) -> float:
        """Seconds since it was written; 0 where the clock says that this was in the future."""
        with suppress(ValueError):
            return max(0.0, (datetime.now(timezone.utc) - datetime.fromisoformat(self.created)).total_seconds())
        return ABANDONED_S

    def abandoned(self, store: Store) -> bool:
        """Whether it is old enough, if no living process is known to hold it."""
        if not store.holds:
            return self.age_s >= (self.lease_s or ABANDONED_S) or (self.machine == this_machine() and has_ended(self.process))
        return self.machine == this_machine() or self.age_s >= ELSEWHERE_S


def marker_path(token: str) -> str:
    return f".ucf.{token}.json"


def is_marker(name: str) -> bool:
    """Whether an entry of a directory is named like a marker."""
    return _MARKER.fullmatch(name) is not None


def new_token() -> str:
    return secrets.token_hex(6)


def carries(name: str, token: str) -> bool:
    """Whether an entry of a directory has the token between dots, or at an end of its name."""
    return token in name.rstrip("/").split(".")


@functools.cache
def this_machine() -> str:
    """The running kernel: the same for all containers on a machine, another one after each start."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
    except OSError:
        return socket.gethostname()


def this_process() -> str:
    """The number of this process, its start, and the namespace that numbers it. Empty where the system can't tell."""
    return _process(os.getpid())


def has_ended(process: str) -> bool:
    """Whether a process of this machine is known to have ended: one of another container may or may not."""
    number, _, rest = process.partition(" ")
    here = this_process()
    if not here or not number.isdigit() or rest.rpartition(" ")[2] != here.rpartition(" ")[2]:
        return False
    return _process(int(number)) != process


def _process(number: int) -> str:
    try:
        started = Path(f"/proc/{number}/stat").read_text(encoding="utf-8", errors="replace").rpartition(")")[2].split()[19]
        return f"{number} {started} {os.readlink('/proc/self/ns/pid')}"
    except (OSError, IndexError):
        return ""


@dataclass(frozen=True, slots=True)
class Claim:
    """A marker of ours, held."""

    store: Store
    marker: Marker
    hold: Hold

    @property
    def token(self) -> str:
        return self.marker.token

    def intact(self) -> bool:
        """Whether nobody has taken it for abandoned. Raises StorageError."""
        return self.hold.intact()

    def discard(self) -> None:
        """Remove all that carries the token, and the marker. Never raises UcformatError: that is not the news."""
        try:
            remove_all(self.store, self.token, keep_folder=bool(self.marker.place))
        except UcformatError as error:
            _LOG.warning("%s: what was written could not be removed (`ucconvert prune` does it later): %s", self.store.url, error)
        self.hold.release()

    def done(self) -> None:
        """Remove the marker alone: what it vouched for is committed. Raises StorageError."""
        self.hold.release()
        self.store.remove_files([self.marker.path])


def begin(
    store: Store,
    what: str,
    *,
    place: str = "",
    replaces: Sequence[str] = (),
    identity: str = "",
    token: str = "",
    lease_s: float = 0.0,
) -> Claim:
    """Put a marker there, and hold it. With a `token` that several processes share, each calls it. Raises StorageError."""
    who = (this_machine(), this_process(), now())
    marker = Marker(token or new_token(), what, place, tuple(replaces), identity, *who, lease_s)
    while True:
        store.put_if_absent(marker.path, seal(msgspec.json.encode(marker)))
        try:
            hold = store.hold(marker.path)
        except MissingFileError:
            continue
        try:
            intact = hold.intact()
        except BaseException:
            hold.release()
            raise
        if intact:
            return Claim(store, marker, hold)
        hold.release()  # somebody took it for abandoned before it was held


def join(store: Store, token: str) -> Hold:
    """Hold the marker of another rank of the same job, for as long as this one writes."""
    try:
        return store.hold(marker_path(token))
    except MissingFileError:
        return Hold()  # another host may see the file only later


def markers(store: Store, names: Iterable[str] | None = None) -> list[Marker]:
    """The markers in a directory. One that is damaged vouches for nothing. Raises StorageError."""
    found: list[Marker] = []
    for name in store.list() if names is None else names:
        match = _MARKER.fullmatch(name)
        if match is None:
            continue
        where = f"{store.url}/{name}"
        try:
            marker = msgspec.json.decode(unseal(store.read(name), where), type=Marker)
        except MissingFileError:
            continue  # finished meanwhile
        except (UcformatError, msgspec.DecodeError, RecursionError) as error:
            _LOG.warning("%s: ignored, as it can't be read: %s", where, error)
            continue
        if marker.token == match[1]:
            found.append(marker)
    return found


def claim(store: Store, marker: Marker, *, lost: bool = False) -> Hold | None:
    """Hold a marker alone, to remove what it vouches for; None where its owner may be alive. Raises StorageError.

    `lost`: it can't be committed any more, so that its age is of no matter.
    """
    if not (lost and not store.holds) and not marker.abandoned(store):
        return None
    try:
        return store.claim(marker.path)
    except MissingFileError:
        return None


def unknown(store: Store, names: Sequence[str]) -> list[str]:
    """Those entries of a directory that no marker there vouches for. Markers that were never finished do not count."""
    tokens = [match[1] for name in names if (match := _MARKER.fullmatch(name))]
    others = [name for name in names if not _HALF_MARKER.fullmatch(name)]
    return [name for name in others if not any(carries(name, token) for token in tokens)]


def remove_all(store: Store, token: str, *, keep_folder: bool = False) -> None:
    """Remove all entries of a directory that carry a token, its marker last, and the directory if it is empty then."""
    for name in store.list():
        if carries(name, token) and not is_marker(name):
            store.remove(name.rstrip("/"))
    store.abort_uploads(token)
    store.remove(marker_path(token))
    if not keep_folder:
        store.remove_folder()


def now() -> str:
    """As markers say it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")
