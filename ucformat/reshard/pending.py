"""Saving without waiting: the state is copied to host memory at once, and written by a thread while training goes on.

The thread of each rank does what `save` does after it has agreed with the others, over connections of its own, so that nothing
of it comes between the collectives of training, and a script may destroy its process group while a save is under way. One save
is in flight at a time.

It is a thread, not a process, which costs a training loop of many tiny operations more (it shares the interpreter's lock, though
copying, hashing and writing release it): measured once, such a loop went on at 0.45 of its speed, and at 0.9 beside a process.
"""

from __future__ import annotations

import logging
import threading
import traceback
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import numpy as np
import torch

from ucformat.containers.file_image import ByteRequest
from ucformat.group import Group
from ucformat.process import share
from ucformat.reshard.private_group import private
from ucformat.reshard.save import Begun, write
from ucformat.storage.store import Bytes

_LOG = logging.getLogger("ucformat")
_ALIGN = 64  # bytes: pieces start at lines of the cache
_CHUNK_BYTES = 16 << 20  # copied at once by a thread


class PendingSave:
    """A save that is under way. Every rank has one; what becomes of it is the same on all."""

    def __init__(self, path: str, work: Callable[[], None]) -> None:
        self.path = path
        """Of the checkpoint, once it is committed."""
        self._error: BaseException | None = None
        self._raised = False
        self._thread = threading.Thread(target=self._run, args=(work,), name="ucf-save")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether it is committed, or has failed."""
        return not self._thread.is_alive()

    @property
    def error(self) -> BaseException | None:
        """Why nothing was committed; None as long as that is not known, or all went well."""
        return self._error if self.done else None

    def wait(self, timeout: float | None = None) -> str:
        """Wait until it is committed; the path of the checkpoint.

        Raises what `save` raises, the same on every rank, and TimeoutError when it is not done within `timeout` seconds.
        """
        self._thread.join(timeout)
        if self._thread.is_alive():
            raise TimeoutError(f"{self.path}: not saved within {timeout:g} s; it is still being written")
        if self._error is not None:
            self._raised = True
            raise self._error
        return self.path

    def _run(self, work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException as error:
            traceback.clear_frames(error.__traceback__)  # they refer to memory and the process group
            self._error = error
            _LOG.error("%s: not saved: %s: %s", self.path, type(error).__name__, error)

    def finish(self) -> None:
        """Before the next save: wait, and raise an error that nobody has been told of."""
        self._thread.join()
        if self._error is not None and not self._raised:
            self.wait()


class _Memory:
    """Host memory for one state, kept from one save to the next: pinned where the state lies on a CUDA device."""

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def take(self, nbytes: int, *, pinned: bool) -> Bytes:
        if self._buffer.nbytes < nbytes or (pinned and not self._buffer.is_pinned()):
            self._buffer = torch.empty(0, dtype=torch.uint8)  # let go first: never two of them
            self._buffer = torch.empty(nbytes, dtype=torch.uint8, pin_memory=pinned)
        return self._buffer.numpy()

    def free(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)


_memory = _Memory()
_in_flight: PendingSave | None = None


def _at_exit() -> None:
    if _in_flight is not None:
        _in_flight._thread.join()


# Python joins threads at its end, but lets no pool of threads begin anything by then. `concurrent.futures` uses this hook, which
# has no public name, to see to that, and what was registered after it is called before it.
threading._register_atexit(_at_exit)  # type: ignore[attr-defined]


def finish_before(group: Group) -> None:
    """Wait for the save in flight, if there is one; its error is raised on every rank of `group`, which all call this."""
    with group.together("finishing the save before this one"):
        if _in_flight is not None:
            _in_flight.finish()


def let_go() -> None:
    """Free the memory that states are copied to."""
    _memory.free()


def write_later(begun: Begun, group: Group, afterwards: Callable[[Group], None]) -> PendingSave:
    """Copy what this rank writes, and have it written by a thread, which then calls `afterwards`. Every rank calls it."""
    global _in_flight  # noqa: PLW0603  # one at a time, in the whole process
    try:
        own = private(group)
        with group.together(f"copying what {begun.store.url} is to hold"):
            begun = replace(begun, source=_copied(begun))
    except BaseException as error:
        begun.give_up(error, group)
        raise

    def work() -> None:
        write(begun, own)
        afterwards(own)

    _in_flight = PendingSave(begun.store.url, work)
    return _in_flight


def _copied(begun: Begun) -> Callable[[Sequence[ByteRequest]], None]:
    """The bytes of this moment, in host memory."""
    sizes = np.array([target.nbytes for target in begun.targets], dtype=np.int64)
    room = -(-sizes // _ALIGN) * _ALIGN
    starts = np.cumsum(room) - room
    memory = _memory.take(int(room.sum()), pinned=torch.cuda.is_available())
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # threads have streams of their own
    parts = [
        ByteRequest(piece, at, min(at + _CHUNK_BYTES, size), memory[first + at : first + min(at + _CHUNK_BYTES, size)])
        for piece, (first, size) in enumerate(zip(starts.tolist(), sizes.tolist(), strict=True))
        for at in range(0, size, _CHUNK_BYTES)
    ]
    with ThreadPoolExecutor(share(), thread_name_prefix="ucf-stage") as pool:
        list(pool.map(lambda part: begun.source([part]), parts))

    def fill(asked: Sequence[ByteRequest]) -> None:
        for part in asked:
            first = int(starts[part.piece])
            part.out[:] = memory[first + part.start : first + part.stop]

    return fill
