"""Opening a file that a path is said to be: a FIFO, a socket or a device in its place is refused, and never waited for."""

from __future__ import annotations

import os
import stat

from ucformat.errors import FormatError

_KINDS = {stat.S_IFIFO: "a FIFO", stat.S_IFSOCK: "a socket", stat.S_IFCHR: "a device", stat.S_IFBLK: "a device"}


def open_regular(path: str, flags: int, mode: int = 0o644) -> int:
    """The descriptor of a regular file (or a directory, which reads refuse), close-on-exec.

    Raises FormatError for anything else, without waiting for it: opening a FIFO blocks until somebody writes, a terminal or a
    tape drive does things when it is opened. Raises OSError as `os.open`.
    """
    if not flags & os.O_CREAT:  # a look first, since opening a device may act on it; the look after it is the one that counts
        refuse_special(path, os.stat(path).st_mode)
    fd = os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY, mode)
    try:
        refuse_special(path, os.fstat(fd).st_mode)
    except BaseException:
        os.close(fd)
        raise
    return fd


def refuse_special(path: str, mode: int) -> None:
    """Raise FormatError when `mode` (of `os.stat`) is that of a FIFO, a socket or a device."""
    kind = _KINDS.get(stat.S_IFMT(mode))
    if kind is not None:
        raise FormatError(path, f"is {kind}, not a file")
