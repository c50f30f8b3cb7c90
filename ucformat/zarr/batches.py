"""Reads that zarr asks for at the same time, carried out as one: planning a read costs more than a chunk's bytes do."""

from __future__ import annotations

import asyncio
from weakref import WeakKeyDictionary

from ucformat.catalog import Catalog
from ucformat.zarr.chunk_read import ChunkRead, read_all

Waiting = list[tuple[ChunkRead, "asyncio.Future[memoryview]"]]


class Batches:
    """Collects what coroutines of one event loop ask for until none of them can go on, then reads it on another thread."""

    def __init__(self, catalog: Catalog) -> None:
        self._catalog = catalog
        self._waiting: WeakKeyDictionary[asyncio.AbstractEventLoop, Waiting] = WeakKeyDictionary()

    async def read(self, read: ChunkRead) -> memoryview:
        """Its bytes. Raises what reading them alone raises."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[memoryview] = loop.create_future()
        waiting = self._waiting.setdefault(loop, [])
        waiting.append((read, future))
        if len(waiting) == 1:
            loop.call_soon(self._start, loop)  # after all that are ready now
        return await future

    def _start(self, loop: asyncio.AbstractEventLoop) -> None:
        batch = self._waiting.pop(loop)
        work = loop.run_in_executor(None, read_all, self._catalog, [read for read, _ in batch])

        def done(work: asyncio.Future[list[memoryview | Exception]]) -> None:
            failure = asyncio.CancelledError() if work.cancelled() else work.exception()
            outcomes = work.result() if failure is None else [failure] * len(batch)
            for (_, future), outcome in zip(batch, outcomes, strict=True):
                if future.done():  # cancelled meanwhile
                    continue
                if isinstance(outcome, BaseException):
                    future.set_exception(outcome)
                else:
                    future.set_result(outcome)

        work.add_done_callback(done)
