"""A store that remembers small reads: many small tensors of one open checkpoint lie in few blocks of its files.

An open checkpoint (`reading.lazy.Checkpoint`) reads through one where every request costs a round trip. What is remembered is
verified again each time, as what was read is. Never used to decide what is committed.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

from ucformat.storage.store import Bytes, Store, Writer

READ_BYTES = 1 << 20  # of one read: longer ones cost more than a round trip anyway
HELD_BYTES = 16 << 20  # in all; the oldest go first


class RecentReads(Store):
    """Reads of `store`, the last small ones from memory. Thread-safe."""

    def __init__(self, store: Store) -> None:
        self.store = store
        self.url, self.alignment, self.streams, self.appears_whole = (
            store.url,
            store.alignment,
            store.streams,
            store.appears_whole,
        )
        self._sizes: dict[str, int] = {}
        self._held: OrderedDict[tuple[str, int, int], Bytes] = OrderedDict()
        self._nbytes = 0
        self._lock = threading.Lock()

    def size(self, path: str) -> int:
        if path not in self._sizes:
            self._sizes[path] = self.store.size(path)
        return self._sizes[path]

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        stop = start + out.nbytes
        known = self._find(path, start, stop)
        if known is not None:
            out[:] = known
            return
        self.store.read_into(path, start, out)
        if out.nbytes <= READ_BYTES:
            self._hold((path, start, stop), out.copy())

    def _find(self, path: str, start: int, stop: int) -> Bytes | None:
        with self._lock:
            for key, data in reversed(self._held.items()):
                if key[0] == path and key[1] <= start and stop <= key[2]:
                    self._held.move_to_end(key)
                    return data[start - key[1] : stop - key[1]]
        return None

    def _hold(self, key: tuple[str, int, int], data: Bytes) -> None:
        with self._lock:
            if key not in self._held:
                self._held[key] = data
                self._nbytes += data.nbytes
            while self._nbytes > HELD_BYTES:
                self._nbytes -= self._held.popitem(last=False)[1].nbytes

    def exists(self, path: str) -> bool:
        return self.store.exists(path)

    def list(self, path: str = "") -> Sequence[str]:
        return self.store.list(path)

    def put(self, path: str, data: bytes) -> None:
        self.store.put(path, data)

    def writer(self, path: str, size: int) -> Writer:
        return self.store.writer(path, size)

    def remove(self, path: str = "") -> None:
        self.store.remove(path)

    def sub(self, path: str) -> Store:
        return self.store.sub(path)
