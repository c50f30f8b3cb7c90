"""What tells a local file from another that has its name later, and whether it was written to."""

from __future__ import annotations

import os
import stat

from ucformat.errors import MissingFileError, StorageError


def identity(path: str) -> str | None:
    """See `Store.identity`."""
    try:
        status = os.lstat(path)
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise StorageError(path, error) from error
    changed = "" if stat.S_ISDIR(status.st_mode) else f".{status.st_size}.{status.st_mtime_ns}"
    return f"{status.st_dev}.{status.st_ino}{changed}"


def stamp(path: str) -> str:
    """See `Store.stamp`: the time of the last change, in ns."""
    try:
        return str(os.stat(path).st_mtime_ns)
    except (FileNotFoundError, NotADirectoryError):
        raise MissingFileError(path) from None
    except OSError as error:
        raise StorageError(path, error) from error
