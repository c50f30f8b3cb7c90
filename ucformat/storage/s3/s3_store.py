"""Objects under a prefix of an S3 bucket as a Store: AWS, and whatever else speaks its protocol.

Nothing is cached: S3 is consistent, and who has committed what is decided by what it says now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from ucformat.errors import FormatError, MissingFileError, StorageError
from ucformat.storage.s3 import client as s3_client
from ucformat.storage.s3.client import ATTEMPTS, failure, is_absent
from ucformat.storage.s3.upload import UPLOADS, S3Writer
from ucformat.storage.store import Bytes, Store, Writer, folders_of, safe_path

SCHEMES = ("s3://", "s3a://")
COPY_BYTES = 1 << 30  # what one request copies within the store: S3 takes up to 5 GiB, in parallel is faster
READ_BYTES = 1 << 20  # taken from the connection at a time
_DELETED = 1000  # objects that one request removes, S3's limit
_SEEN: set[tuple[str, str]] = set()
"""(endpoint, bucket) that were there: an object that is missing there is no missing bucket."""
_T = TypeVar("_T")
Keys = list[str]


class S3Store(Store):
    """A prefix of a bucket, which may be empty."""

    streams = 8  # requests in flight: each is answered slowly, many at once
    appears_whole = excludes = True

    def __init__(self, url: str) -> None:
        """`url`: s3://bucket/prefix. Raises StorageError for a URL without a bucket, and when botocore is not installed."""
        _, _, place = url.partition("://")
        self.bucket, _, prefix = place.partition("/")
        self.prefix = prefix.strip("/")
        self.url = f"s3://{self.bucket}/{self.prefix}".rstrip("/")
        if not self.bucket:
            raise StorageError(url, "names no bucket: s3://BUCKET/PATH")
        s3_client.client()

    def _key(self, path: str) -> str:
        inner = safe_path(path, self.url) if path else ""
        return f"{self.prefix}/{inner}".strip("/")

    def _url(self, path: str) -> str:
        return f"{self.url}/{path}" if path else self.url

    def _folder(self, path: str) -> str:
        """What the keys of everything below a path begin with."""
        key = self._key(path)
        return f"{key}/" if key else ""

    def _ask(self, path: str, operation: str, **arguments: Any) -> Any:
        """The answer to a request about `path`. Raises MissingFileError when no such object is there, StorageError."""
        try:
            return getattr(s3_client.client(), operation)(Bucket=self.bucket, **arguments)
        except Exception as error:
            if is_absent(error):
                self._look_at_bucket(path)
                raise MissingFileError(self._url(path)) from None
            if operation == "head_object" and s3_client.code(error).isdigit():
                _SEEN.discard((s3_client.client().meta.endpoint_url, self.bucket))
                self._look_at_bucket(path)  # HEAD's answers have no text that says what is wrong, GET's do
            raise failure(error, self._url(path)) from error

    def _look_at_bucket(self, path: str) -> None:
        """Raises StorageError when it is the bucket that is missing, or nothing in it may be looked at."""
        client = s3_client.client()
        place = client.meta.endpoint_url, self.bucket
        if place in _SEEN:
            return
        try:
            client.list_objects_v2(Bucket=self.bucket, Prefix=self._key(path), MaxKeys=1)
        except Exception as error:
            raise failure(error, self._url(path)) from error
        _SEEN.add(place)

    # -- reading -------------------------------------------------------------------------------------------------------

    def size(self, path: str) -> int:
        return int(self._ask(path, "head_object", Key=self._key(path))["ContentLength"])

    def exists(self, path: str) -> bool:
        if self._is_file(path):
            return True
        return bool(self._ask(path, "list_objects_v2", Prefix=self._folder(path), MaxKeys=1).get("KeyCount"))

    def _is_file(self, path: str) -> bool:
        if not self._key(path):
            return False
        try:
            self.size(path)
        except MissingFileError:
            return False
        return True

    def list(self, path: str = "") -> Sequence[str]:
        folder = self._folder(path)
        names: set[str] = set()
        for page in self._pages(path, "list_objects_v2", Prefix=folder, Delimiter="/"):
            names.update(found["Key"].removeprefix(folder) for found in page.get("Contents", ()))
            names.update(found["Prefix"].removeprefix(folder) for found in page.get("CommonPrefixes", ()))
        return sorted(names - {"", "/"})

    def _pages(self, path: str, operation: str, **arguments: Any) -> Iterator[Any]:
        try:
            yield from s3_client.client().get_paginator(operation).paginate(Bucket=self.bucket, **arguments)
        except Exception as error:
            raise failure(error, self._url(path)) from error

    def read(self, path: str, start: int = 0, stop: int | None = None) -> bytes:
        return self._whole(path)[0] if (start, stop) == (0, None) else super().read(path, start, stop)

    def _whole(self, path: str) -> tuple[bytes, str]:
        """The content of a small object and its tag, in one request."""
        for attempt in range(1, ATTEMPTS + 1):
            answer = self._ask(path, "get_object", Key=self._key(path))
            try:
                return answer["Body"].read(), str(answer["ETag"])
            except Exception as error:
                if attempt == ATTEMPTS:
                    raise failure(error, self._url(path)) from error
            finally:
                answer["Body"].close()
        raise AssertionError("unreachable")

    def read_into(self, path: str, start: int, out: Bytes) -> None:
        view, stop = memoryview(out).cast("B"), start + out.nbytes
        done, tag, attempt = 0, "", 1
        while done < len(view):
            asked = {"Range": f"bytes={start + done}-{stop - 1}"} | ({"IfMatch": tag} if tag else {})
            answer = self._ask_range(path, start, stop, asked)
            tag = answer["ETag"]
            try:
                while done < len(view) and (got := answer["Body"].readinto(view[done : done + READ_BYTES])):
                    done += got
                if done < len(view):
                    raise FormatError(self._url(path), f"the file ends at byte {start + done}", start, stop)
            except FormatError:
                raise
            except Exception as error:  # the connection broke, or nothing came any more: go on from here
                if attempt == ATTEMPTS:
                    raise failure(error, self._url(path), start, stop) from error
                attempt += 1
            finally:
                answer["Body"].close()

    def _ask_range(self, path: str, start: int, stop: int, asked: dict[str, str]) -> Any:
        try:
            return self._ask(path, "get_object", Key=self._key(path), **asked)
        except StorageError as error:
            if error.__cause__ is None or s3_client.code(error.__cause__) != "InvalidRange":
                raise
        raise FormatError(self._url(path), f"the file ends at byte {self.size(path)}", start, stop)

    # -- writing -------------------------------------------------------------------------------------------------------

    def put(self, path: str, data: bytes) -> None:
        self._ask(path, "put_object", Key=self._key(path), Body=data)

    def put_if_absent(self, path: str, data: bytes, part: str = "") -> bool:
        """As the contract says. The server decides (If-None-Match), where it knows conditions."""
        return not self._is_file(path) and self._put_if(path, data, IfNoneMatch="*")

    def put_if_unchanged(self, path: str, data: bytes, known: bytes, part: str = "") -> bool:
        """As the contract says. The server decides (If-Match), where it knows conditions."""
        try:
            found, tag = self._whole(path)
        except MissingFileError:
            return False
        return found == known and self._put_if(path, data, IfMatch=tag)

    def _put_if(self, path: str, data: bytes, **condition: str) -> bool:
        for _ in range(ATTEMPTS):
            try:
                self._ask(path, "put_object", Key=self._key(path), Body=data, **condition)
            except MissingFileError:
                return False  # what was to be replaced is gone
            except StorageError as error:
                said = s3_client.code(error.__cause__)
                if said == "ConditionalRequestConflict":  # somebody else's request for this object was under way: see how it ends
                    continue
                if said != "PreconditionFailed":
                    raise
                # the answer to an earlier attempt may have been lost: then it is ours that is there
                return s3_client.was_repeated(error.__cause__) and self._is(path, data)
            return True
        raise StorageError(self._url(path), "other writers keep writing to it")

    def _is(self, path: str, data: bytes) -> bool:
        try:
            return self._whole(path)[0] == data
        except MissingFileError:
            return False

    def writer(self, path: str, size: int) -> Writer:
        return S3Writer(self.bucket, self._key(path), self._url(path), size)

    def copy(self, path: str, to: str) -> None:
        """Copy an object within the store; its bytes don't come here. Raises MissingFileError, StorageError."""
        size, source = self.size(path), {"Bucket": self.bucket, "Key": self._key(path)}
        if size <= COPY_BYTES:
            self._ask(to, "copy_object", Key=self._key(to), CopySource=source)
            return
        upload = self._ask(to, "create_multipart_upload", Key=self._key(to))["UploadId"]
        try:
            names = {"Key": self._key(to), "UploadId": upload}

            def part(number: int) -> dict[str, Any]:
                start = (number - 1) * COPY_BYTES
                bytes_ = f"bytes={start}-{min(start + COPY_BYTES, size) - 1}"
                done = self._ask(to, "upload_part_copy", **names, PartNumber=number, CopySource=source, CopySourceRange=bytes_)
                return {"PartNumber": number, "ETag": done["CopyPartResult"]["ETag"]}

            parts = _side_by_side(part, range(1, -(-size // COPY_BYTES) + 1))
            self._ask(to, "complete_multipart_upload", **names, MultipartUpload={"Parts": parts})
        except BaseException:
            self._abort(self._key(to), upload)
            raise

    def files(self, path: str = "") -> Iterator[str]:
        own = f"{self.prefix}/" if self.prefix else ""
        for page in self._pages(path, "list_objects_v2", Prefix=self._folder(path)):
            keys = (found["Key"] for found in page.get("Contents", ()))
            yield from (key.removeprefix(own) for key in keys if not key.endswith("/"))

    def remove(self, path: str = "") -> None:
        folder = self._folder(path)
        below: Keys = []
        for page in self._pages(path, "list_objects_v2", Prefix=folder):
            below += [found["Key"] for found in page.get("Contents", ())]
        folders = [found for found in folders_of(below) if found.startswith(folder)]
        self._delete(path, [*below, *folders, *self._itself(path)])

    def remove_files(self, paths: Sequence[str]) -> None:
        self._delete("", [self._key(path) for path in (*paths, *folders_of(paths))])

    def remove_folder(self, path: str = "") -> None:
        """Nothing, but on servers that lie on a file system: there, folders stay when they are empty."""
        if not self._ask(path, "list_objects_v2", Prefix=self._folder(path), MaxKeys=1).get("KeyCount"):
            self._delete(path, self._itself(path))

    def _itself(self, path: str) -> Keys:
        """The key of a path that is to be removed; nothing where that is an object beside this store, of the same name."""
        key = self._key(path)
        return [key] if key and (path or not self._is_file(path)) else []

    def _delete(self, path: str, keys: Sequence[str]) -> None:
        """Delete objects. Keys of folders, children first, make servers that lie on a file system remove those that are empty."""
        for first in range(0, len(keys), _DELETED):
            objects = [{"Key": key} for key in keys[first : first + _DELETED]]
            answer = self._ask(path, "delete_objects", Delete={"Objects": objects, "Quiet": True})
            for error in answer.get("Errors", ()):
                why = f"was not removed: {error.get('Message', '')} ({error['Code']})"
                raise StorageError(f"s3://{self.bucket}/{error['Key']}", why)

    def abort_uploads(self, token: str = "") -> None:
        found = self._pages("", "list_multipart_uploads", Prefix=self._folder(""))
        uploads = [upload for page in found for upload in page.get("Uploads", ()) if token in upload["Key"]]
        _side_by_side(lambda upload: self._abort(upload["Key"], upload["UploadId"]), uploads)

    def _abort(self, key: str, upload: str) -> None:
        try:
            s3_client.farewell_client().abort_multipart_upload(Bucket=self.bucket, Key=key, UploadId=upload)
        except Exception:
            pass  # it has ended meanwhile, or the storage is away: the next one tries again

    def sub(self, path: str) -> S3Store:
        return S3Store(self._url(safe_path(path, self.url)))


def _side_by_side(call: Callable[[Any], _T], items: Sequence[Any]) -> list[_T]:
    """`call` of every item, several at a time."""
    if len(items) < 2:
        return [call(item) for item in items]
    with ThreadPoolExecutor(UPLOADS, thread_name_prefix="ucf-s3") as pool:
        return list(pool.map(call, items))
