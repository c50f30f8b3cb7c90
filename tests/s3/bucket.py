"""A place of its own on the test run's S3 server, reached through a proxy that counts requests and can fail them."""

from __future__ import annotations

import os
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from tests.s3 import weed
from tests.s3.proxy import Proxy, Request
from ucformat.storage.open import open_store


class Server:
    """`bucket` is the URL of an empty place; requests of clients go through `proxy`."""

    def __init__(self) -> None:
        self.direct = weed.endpoint()
        self.proxy = Proxy(self.direct)
        self.url = self.proxy.url
        self.name = uuid.uuid4().hex
        self.bucket = f"s3://{weed.BUCKET}/{self.name}"
        self.writes = 0

    @contextmanager
    def after_writes(self, call: Callable[[Request], None]) -> Iterator[None]:
        """Count writes from 0, and have `call` called after each, before its client knows of it."""

        def answered(request: Request) -> None:
            if request.writes:
                self.writes += 1
                call(request)

        self.writes, self.proxy.answered = 0, answered
        try:
            yield
        finally:
            self.proxy.answered = lambda request: None

    @contextmanager
    def watched(self, look: Callable[[], None]) -> Iterator[None]:
        """Have `look` called after each write; what it raises is raised at the end."""
        errors: list[BaseException] = []

        def after(request: Request) -> None:
            try:
                look()
            except BaseException as error:
                errors.append(error)

        with self.after_writes(after):
            yield
        if errors:
            raise errors[0]

    def uploads(self, path: str = "") -> list[str]:
        """Keys of multipart uploads that nobody has completed or aborted."""
        found = self.client().list_multipart_uploads(Bucket=weed.BUCKET, Prefix=f"{self.name}/{path}")
        return [upload["Key"] for upload in found.get("Uploads", ())]

    def client(self) -> Any:  # botocore is untyped
        """A client that goes past the proxy and knows nothing of ucformat."""
        return weed.plain_client(self.direct)


def settings(endpoint: str) -> dict[str, str]:
    """Environment variables of a client."""
    return {
        "AWS_ACCESS_KEY_ID": weed.KEY,
        "AWS_SECRET_ACCESS_KEY": weed.SECRET,
        "AWS_DEFAULT_REGION": "us-east-1",
        "AWS_ENDPOINT_URL": endpoint,
    }


@contextmanager
def environment(**variables: str) -> Iterator[None]:
    """Set environment variables for a while."""
    before = {key: os.environ.get(key) for key in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for key, value in before.items():
            if value is None:
                del os.environ[key]
            else:
                os.environ[key] = value


@contextmanager
def serving() -> Iterator[Server]:
    """A place on the server that is this process' S3."""
    server = Server()
    with environment(**settings(server.url)):
        try:
            yield server
        finally:
            server.proxy.close()


def objects(url: str, folder: str = "") -> dict[str, bytes]:
    """Path → bytes of everything below a prefix."""
    store = open_store(url)
    found: dict[str, bytes] = {}
    for name in store.list(folder.rstrip("/")):
        path = folder + name
        found |= objects(url, path) if name.endswith("/") else {path: store.read(path)}
    return found
