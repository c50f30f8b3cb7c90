"""Counts a process's file operations, and at the chosen one kills it, makes the call fail, or cuts it short."""

from __future__ import annotations

import errno
import os
import signal
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

WATCHED = (
    "open", "close", "write", "pwrite", "fsync", "fdatasync", "replace", "rename", "unlink", "rmdir", "mkdir", "makedirs", "link",
    "ftruncate", "truncate", "posix_fallocate", "copy_file_range", "sendfile", "utime", "symlink",
)  # fmt: skip
READS = ("pread", "preadv", "scandir", "listdir", "stat", "lstat", "read")
_FAILING = {
    "open": [errno.EIO, errno.ENOSPC, errno.EMFILE, errno.EACCES],
    "write": [errno.ENOSPC, errno.EIO, errno.EDQUOT],
    "pwrite": [errno.ENOSPC, errno.EIO, errno.EDQUOT],
    "posix_fallocate": [errno.ENOSPC],
}

Action = Literal["count", "before", "after", "fail", "short"]
"""Only count; die before the call, or right after it; raise OSError; write or read only a part."""


@dataclass
class Trap:
    """Watches calls of `os`, and acts at call number `at`."""

    action: Action = "count"
    at: int = -1
    which: int = 0
    """Picks the error."""
    under: str = ""
    """Only calls with a path below this, or on descriptors."""
    calls: int = 0
    hit: str = ""

    def install(self, *, reads: bool = False) -> None:
        """From now on, in this process, for good: call it in a child."""
        for name in (*WATCHED, *(READS if reads else ())):
            real = getattr(os, name, None)
            if real is not None:
                setattr(os, name, self._wrapped(name, real))

    def _wrapped(self, name: str, real: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            path = args[0] if args else ""
            named = isinstance(path, (str, bytes, os.PathLike)) and kwargs.get("dir_fd") is None
            if named and not os.fsdecode(path).startswith(self.under):
                return real(*args, **kwargs)
            self.calls += 1
            if self.calls != self.at:
                return real(*args, **kwargs)
            self.hit = name
            return self._act(name, real, args, kwargs)

        return call

    def _act(self, name: str, real: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if self.action == "before":
            os.kill(os.getpid(), signal.SIGKILL)
        if self.action == "short" and name in ("write", "pwrite") and len(args[1]) > 1:
            return real(args[0], memoryview(args[1])[: len(args[1]) // 2], *args[2:], **kwargs)
        if self.action == "fail" and name != "close":
            codes = _FAILING.get(name, [errno.EIO])
            code = codes[self.which % len(codes)]
            raise OSError(code, os.strerror(code))
        result = real(*args, **kwargs)
        if self.action == "after":
            os.kill(os.getpid(), signal.SIGKILL)
        return result
