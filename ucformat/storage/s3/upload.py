"""One object on its way to S3: parts travel in parallel while the next is filled; the object appears when it is closed."""

from __future__ import annotations

import hashlib
import io
import threading
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ucformat.errors import StorageError
from ucformat.storage.s3 import client as s3_client
from ucformat.storage.s3.client import failure
from ucformat.storage.store import Bytes, Writer

PART_BYTES = 8 << 20  # of one request: S3 takes 5 MiB to 5 GiB
MAX_PARTS = 10_000  # S3's limit: larger objects have larger parts
UPLOADS = 8  # parts of one object in flight; memory is one more than that
_MIB = 1 << 20


class S3Writer(Writer):
    """A multipart upload; a file of one part is one request.

    Nothing but `close` ever completes it. Once a part has failed, or `abort` was called, nothing can: not a later `close`,
    the garbage collector or the end of the process. Memory: `UPLOADS` + 1 parts of 8 MiB, more above 80 GB.
    """

    ordered = True

    def __init__(self, bucket: str, key: str, url: str, size: int) -> None:
        self._bucket, self._key, self._url, self._size = bucket, key, url, size
        self._part_bytes = max(PART_BYTES, -(-size // (MAX_PARTS * _MIB)) * _MIB)
        self._client = s3_client.client()
        self._at = 0
        self._filling = io.BytesIO()
        self._upload: str | None = None
        self._sent: list[Future[str]] = []
        self._room = threading.BoundedSemaphore(UPLOADS)
        self._pool: ThreadPoolExecutor | None = None
        self._dead = False

    def write(self, start: int, data: Bytes) -> None:
        if start != self._at:
            raise StorageError(self._url, f"write at {start}, expected {self._at}: uploads are sequential")
        view = memoryview(data).cast("B")
        self._at += len(view)
        while len(view):
            room = self._part_bytes - self._filling.tell()
            self._filling.write(view[:room])
            view = view[room:]
            if self._filling.tell() == self._part_bytes and self._at - len(view) < self._size:
                self._send()

    def close(self) -> None:
        self._refuse_if_dead()
        if self._at != self._size:
            self.abort()
            raise StorageError(self._url, f"{self._at} bytes were written, {self._size} were announced")
        try:
            if self._upload is None:
                self._filling.seek(0)
                self._client.put_object(Bucket=self._bucket, Key=self._key, Body=self._filling)
            else:
                self._send()
                self._complete([sent.result() for sent in self._sent])
            self._dead, self._upload = True, None
        except StorageError:
            self.abort()
            raise
        except Exception as error:
            self.abort()
            raise failure(error, self._url) from error
        finally:
            self._end_pool()

    def abort(self) -> None:
        self._dead = True
        self._end_pool()  # a part that arrives after the abort would stay
        if self._upload is not None:
            try:
                s3_client.farewell_client().abort_multipart_upload(**self._names())
                self._upload = None
            except Exception:
                pass  # the storage is away: the next save or prune here does it (`S3Store.abort_uploads`)

    def _refuse_if_dead(self) -> None:
        if self._dead:
            raise StorageError(self._url, "this upload has ended or failed")

    def _names(self) -> dict[str, Any]:
        return {"Bucket": self._bucket, "Key": self._key, "UploadId": self._upload}

    def _end_pool(self) -> None:
        if self._pool is not None:
            self._pool.shutdown(wait=True, cancel_futures=True)
            self._pool = None
        self._filling = io.BytesIO()

    def _send(self) -> None:
        """Have the part that was filled uploaded by the next free thread. Raises what an earlier part failed with."""
        self._refuse_if_dead()
        if self._pool is None:
            self._begin()
        assert self._pool is not None
        self._room.acquire()
        self._refuse_if_failed()
        part, self._filling = self._filling, io.BytesIO()
        sent = self._pool.submit(self._send_part, len(self._sent) + 1, part)
        sent.add_done_callback(lambda _: self._room.release())
        self._sent.append(sent)

    def _begin(self) -> None:
        try:
            self._upload = self._client.create_multipart_upload(Bucket=self._bucket, Key=self._key)["UploadId"]
        except Exception as error:
            self._dead = True
            raise failure(error, self._url) from error
        self._pool = ThreadPoolExecutor(UPLOADS, thread_name_prefix="ucf-upload")

    def _refuse_if_failed(self) -> None:
        for sent in self._sent:
            if sent.done() and not sent.cancelled() and sent.exception() is not None:
                self._dead = True
                self._room.release()
                sent.result()

    def _send_part(self, number: int, part: io.BytesIO) -> str:
        start = (number - 1) * self._part_bytes
        stop = start + part.tell()
        if self._dead:
            raise StorageError(self._url, "this upload has failed", start, stop)
        part.seek(0)
        try:
            answer = self._client.upload_part(**self._names(), PartNumber=number, Body=part)
        except Exception as error:
            self._dead = True
            raise failure(error, self._url, start, stop) from error
        return str(answer["ETag"])

    def _complete(self, tags: list[str]) -> None:
        self._refuse_if_dead()
        parts = [{"PartNumber": number, "ETag": tag} for number, tag in enumerate(tags, 1)]
        try:
            self._client.complete_multipart_upload(**self._names(), MultipartUpload={"Parts": parts})
        except Exception as error:
            # the answer to an earlier attempt may have been lost, and the upload be complete
            if s3_client.code(error) != "NoSuchUpload" or not self._is_there(tags):
                raise

    def _is_there(self, tags: list[str]) -> bool:
        """Whether the object of that name is the one of these parts."""
        found = self._client.head_object(Bucket=self._bucket, Key=self._key)
        try:
            whole = hashlib.md5(b"".join(bytes.fromhex(tag.strip('"')) for tag in tags), usedforsecurity=False).hexdigest()
        except ValueError:  # tags of encrypted objects are no digests
            return False
        return bool(found["ContentLength"] == self._size and found["ETag"].strip('"') == f"{whole}-{len(tags)}")
